"""What a simulated engine stands in for: its pool, its page, its words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sim_profiles import make_profile

from manylora.core.clock import VirtualClock
from manylora.core.config import GIB, EngineConfig, MemoryConfig, ModelConfig
from manylora.core.errors import ConfigError
from manylora.demo import demo_model_path
from manylora.lab.costs.fitted import FittedCost
from manylora.lab.costs.roofline import RooflineCost
from manylora.lab.sim.build import build_simulated_parts, find_target


def config(**memory: int) -> EngineConfig:
    return EngineConfig(model=ModelConfig(model="none"), memory=MemoryConfig(**memory))  # type: ignore[arg-type]


def test_a_profile_brings_the_pool_of_the_engine_that_was_measured(tmp_path: Path):
    path = tmp_path / "profile.json"
    make_profile().write(path)
    stand_in, machine = find_target(str(path), config())
    assert isinstance(stand_in.cost, FittedCost)
    assert (stand_in.num_pages, machine) == (600, "a machine")
    # Other pages, as many bytes; or as many as asked for.
    assert find_target(str(path), config(block_size=32))[0].num_pages == 300
    assert find_target(str(path), config(memory_bytes=GIB))[0].num_pages == GIB // stand_in.base.page.num_bytes
    assert find_target(str(path), config(num_pages=7))[0].num_pages == 7


def test_named_hardware_has_the_pool_that_its_memory_leaves():
    stand_in, _ = find_target("a40:llama-7b", config())
    assert isinstance(stand_in.cost, RooflineCost)
    # 48 GB, nine tenths of it, less 13.5 GB of weights and what activations take.
    assert 24e9 < stand_in.num_pages * stand_in.base.page.num_bytes < 30e9


def test_devices_that_share_a_model_are_simulated_by_their_data_sheets(tmp_path: Path):
    def shared(**memory: int) -> EngineConfig:
        return replace(config(**memory), model=ModelConfig(model="none", tensor_parallel_size=4))

    stand_in, machine = find_target("h100:llama-3-70b", shared())
    assert isinstance(stand_in.cost, RooflineCost)
    assert (stand_in.cost.tensor_parallel_size, machine) == (4, "4 x h100")
    # --memory is that of each device.
    page = stand_in.base.page.num_bytes
    assert find_target("h100:llama-3-70b", shared(memory_bytes=GIB))[0].num_pages == 4 * GIB // page
    path = tmp_path / "profile.json"
    make_profile().write(path)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size = 4, profile = .* is that of one device"):
        find_target(str(path), shared())


def test_a_model_s_folder_and_a_data_sheet_are_names_too(tmp_path: Path):
    sheet = tmp_path / "ours.toml"
    sheet.write_text('name = "ours"\nlike = "a40"\nmemory_bytes = 8e9\n')
    stand_in, _ = find_target(f"{sheet}:{demo_model_path()}", config())
    assert stand_in.base.hidden_size == 192
    assert stand_in.num_pages * stand_in.base.page.num_bytes < 8e9


def test_it_speaks_the_words_of_the_checkpoint_it_is_given():
    engine = EngineConfig(model=ModelConfig(model=str(demo_model_path()), max_model_len=99), simulate="a40:llama-7b")
    base = build_simulated_parts(engine, VirtualClock()).base
    assert (base.vocab_size, base.eos_token_ids, base.max_model_len, base.name) == (115, (3,), 99, "llama-7b")


def test_a_limit_and_a_type_of_kv_are_those_of_the_configuration(tmp_path: Path):
    """Also beside a folder with a tokenizer alone."""
    engine = EngineConfig(model=ModelConfig(model=str(tmp_path), max_model_len=99), simulate="a40:llama-7b")
    assert build_simulated_parts(engine, VirtualClock()).base.max_model_len == 99
    plain, narrow = (find_target("a40:llama-7b", config(kv_cache_dtype=name))[0] for name in ("auto", "int8"))
    assert narrow.base.page.dtype == "int8" and narrow.num_pages > 1.9 * plain.num_pages


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="needs"):
        find_target("a100-80:mixtral-8x7b", config())
