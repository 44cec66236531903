"""Setups: what people write down becomes what the simulator runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sim_profiles import make_profile

from manylora.core.clock import VirtualClock
from manylora.core.config import EngineConfig, ModelConfig, SchedulerConfig
from manylora.core.errors import ConfigError
from manylora.core.plan import AdapterLoad
from manylora.core.types import Tier
from manylora.lab.costs.roofline import RooflineCost
from manylora.lab.costs.workers import CpuWorkers
from manylora.lab.sim.build import build_simulated_parts
from manylora.lab.sim.run.contents import adapter_versions
from manylora.lab.sim.setup import Setup, make_config, read_dims
from manylora.lab.tables import TableReader
from manylora.lab.workloads import AdapterSpec

CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "vocab_size": 1000,
}


def test_a_setup_is_read_and_built() -> None:
    table = {"model": "llama-2-7b", "hardware": "a40", "scheduler": {"policy": "chameleon", "max-num-seqs": 64}}
    setup = TableReader({}).read(Setup, table, "setup")
    assert setup.scheduler == SchedulerConfig(policy="chameleon", max_num_seqs=64)
    config = make_config(setup)
    assert isinstance(config.cost, RooflineCost) and config.cost.dims.name == "llama-2-7b"
    # 45 GiB x 0.9, less 13.5 GB of weights and activations, in pages of 8 MiB.
    assert 3200 < config.num_pages < 3600
    assert make_config(Setup(model="llama-2-7b", num_pages=99)).num_pages == 99


def test_steps_read_the_host_where_a_profile_or_a_setup_says_so(tmp_path: Path) -> None:
    assert not make_config(Setup()).reads_host
    assert make_config(Setup(reads_host=True)).reads_host
    path = str(tmp_path / "cpu.json")
    for reads_host in (True, False):
        make_profile(reads_host=reads_host).write(path)
        assert make_config(Setup(profile=path)).reads_host is reads_host
        assert make_config(Setup(profile=path, reads_host=False)).reads_host is False
        engine = EngineConfig(model=ModelConfig(model="none"), simulate=path)
        assert build_simulated_parts(engine, VirtualClock()).reads_host is reads_host


def test_a_setup_names_cpu_workers() -> None:
    table = {"hardware": "a10", "model": "llama-2-7b", "workers": {"cores": 24, "prompts_only": True}}
    config = make_config(TableReader({}).read(Setup, table, "setup"), targets=("q_proj",))
    assert config.reads_host and config.assist is not None
    assert config.assist.workers == CpuWorkers(cores=24, prompts_only=True)
    assert make_config(Setup(waits_by_layer=True)).waits_by_layer
    assert make_config(Setup()).assist is None
    with pytest.raises(ConfigError, match="cores = 0"):
        CpuWorkers(cores=0)
    with pytest.raises(ConfigError, match="workers beside a model and hardware"):
        Setup(profile="cpu.json", workers=CpuWorkers())


def test_a_config_json_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for name in (tmp_path, tmp_path / "config.json"):
        dims = read_dims(str(name))
        assert dims.num_kv_heads == 2 and dims.name == tmp_path.name
    assert make_config(Setup(model=str(tmp_path))).base.num_layers == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not JSON"), ("[]", "holds no JSON object"), ("{}", "no number"), (None, "cannot be read")],
)
def test_a_wrong_config_json_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_dims(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        (Setup(model="llama-9000b"), "Got model = 'llama-9000b'"),
        (Setup(model="llama-2-70b"), "llama-2-70b on 1 x a40 needs"),
        (Setup(hardware="abacus"), "Got hardware = 'abacus'"),
        (Setup(tensor_parallel_size=3), "tensor_parallel_size = 3"),
        (Setup(profile="nowhere.json"), r"nowhere\.json"),
    ],
    ids=str,
)
def test_what_cannot_serve_is_named(setup: Setup, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(setup)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("utilization", 0.0),
        ("host_s", float("nan")),
        ("max_model_len", 1),
        ("block_size", 0),
        ("weight_bits", 0),
        ("link_share", 0.0),
    ],
)
def test_a_value_that_makes_no_sense_is_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"Got {name} = "):
        Setup(**{name: value})  # type: ignore[arg-type]


def test_a_share_of_the_link_changes_nothing_else_about_copies() -> None:
    """The kernels' own way of copying stays: a full link is no reason to copy by pages."""
    as_published, faster = (make_config(Setup(lora_kernel="s-lora-mbgmm", link_share=share)) for share in (0.35, 1.0))
    (version,) = adapter_versions((AdapterSpec(name="one", rank=32),), as_published.base).values()
    load = AdapterLoad(version=version, tier=Tier.DEVICE)
    plain = make_config(Setup(lora_kernel="s-lora-mbgmm"))
    assert as_published.cost.load_time_s(load) == plain.cost.load_time_s(load)
    by_pages = make_config(Setup(link_share=1.0))
    assert by_pages.cost.load_time_s(load) < faster.cost.load_time_s(load) < plain.cost.load_time_s(load)
