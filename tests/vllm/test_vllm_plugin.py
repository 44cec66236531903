"""What the plug-in refuses, and how it registers, against stand-ins of vLLM's modules."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm_standin import make_folder

from manylora.cli.commands.check_vllm import check_vllm
from manylora.core.errors import ConfigError
from manylora.vllm.gate import RequestGate
from manylora.vllm.messages import Report
from manylora.vllm.plugin import CONNECTOR, MANAGER, check_engine, check_release, chosen_options, read_options


class Manager:
    """Has the methods that are needed."""

    def needed(self) -> None:
        """Do nothing."""

    _apply_adapters = _load_adapter = _create_merged_loras_inplace = _get_lora_layer_weights = needed


Replaced = type("Replaced", (), {"__module__": "manylora.vllm.worker"})


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the stand-ins by module."""
    contents: dict[str, dict[str, Any]] = {
        "vllm.version": {"__version__": "0.32.1"},
        "vllm.lora.worker_manager": {"LRUCacheWorkerLoRAManager": Manager},
        "vllm.lora.model_manager": {"LoRAModelManager": Manager},
        MANAGER[0]: {MANAGER[1]: Replaced},
    }
    made = {}
    for name, content in contents.items():
        parts = name.split(".")
        for number in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:number]), ModuleType(parts[number - 1]))
        made[name] = ModuleType(name)
        vars(made[name]).update(content)
        monkeypatch.setitem(sys.modules, name, made[name])
    return made


def make_config(**changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "runner": "generate",
        "stages": 1,
        "failures": "fail",
        "lora": SimpleNamespace(max_loras=8, max_cpu_loras=None, enable_mixed_moe_lora_format=False),
        **changes,
    }
    return SimpleNamespace(
        lora_config=fields["lora"],
        parallel_config=SimpleNamespace(pipeline_parallel_size=fields["stages"], world_size=2),
        scheduler_config=SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=2048),
        model_config=SimpleNamespace(runner_type=fields["runner"]),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy=fields["failures"], kv_connector_extra_config={}),
    )


@pytest.mark.usefixtures("vllm")
def test_an_engine_gives_its_limits() -> None:
    options = check_engine(make_config())
    engine = options.engine
    assert (options.num_slots, options.num_workers, engine.adapters.max_cpu_loras) == (8, 2, 8)
    assert (engine.scheduler.max_num_seqs, engine.scheduler.max_num_batched_tokens) == (16, 2048)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runner": "pooling"}, "--runner = 'pooling'"),
        ({"stages": 2}, "--pipeline-parallel-size = 2"),
        ({"failures": "recompute"}, "kv_load_failure_policy = 'recompute'"),
        ({"lora": None}, "needs --enable-lora"),
        ({"lora": SimpleNamespace(max_loras=8, enable_mixed_moe_lora_format=True)}, "--enable-mixed-moe-lora-format"),
    ],
)
@pytest.mark.usefixtures("vllm")
def test_engines_that_it_cannot_serve_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_engine(make_config(**changes))


@pytest.mark.parametrize("release", ["0.30.2", "0.34.0", "0.3", "1.0"])
def test_releases_that_it_does_not_know_are_refused(release: str, vllm: dict[str, Any]) -> None:
    assert check_release() == "0.32.1"
    vllm["vllm.version"].__version__ = release
    with pytest.raises(ConfigError, match=r"one of .*0\.32\.x"):
        check_release()


def test_a_known_release_that_lacks_a_method_is_refused(vllm: dict[str, Any]) -> None:
    vllm["vllm.lora.worker_manager"].LRUCacheWorkerLoRAManager = object
    with pytest.raises(ConfigError, match="_load_adapter"):
        check_release()


def test_an_engine_that_has_not_loaded_the_plug_in_is_refused(vllm: dict[str, Any]) -> None:
    setattr(vllm[MANAGER[0]], MANAGER[1], Manager)
    with pytest.raises(ConfigError, match="VLLM_PLUGINS"):
        check_engine(make_config())


def test_it_is_found_alone_and_beside_other_connectors() -> None:
    own = {"kv_connector": CONNECTOR, "kv_connector_extra_config": {"policy": "sjf"}}
    several = {"connectors": [{"kv_connector": "Other"}, own]}
    assert chosen_options(None) is None
    assert chosen_options(SimpleNamespace(kv_connector="Other", kv_connector_extra_config={})) is None
    assert chosen_options(SimpleNamespace(**own)) == {"policy": "sjf"}
    assert chosen_options(SimpleNamespace(**{**own, "kv_connector": "ManyloraConnector"})) == {"policy": "sjf"}
    both = SimpleNamespace(kv_connector="MultiConnector", kv_connector_extra_config=several)
    assert chosen_options(both) == {"policy": "sjf"}


def test_a_server_that_speaks_no_http_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-server\r\n\r\n")

        greeter = Thread(target=greet)
        greeter.start()
        with pytest.raises(SystemExit):
            check_vllm(url)
        greeter.join()
    assert f"error: no metrics at {url}: SSH-2.0-server" in capsys.readouterr().err


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a connector's scheduler side, over modules of vLLM that have the names it imports and nothing else."""
    names = {
        "vllm.distributed.kv_transfer.kv_connector.v1": ("base",),
        "vllm.distributed.kv_transfer.kv_connector.v1.base": (
            *("KVConnectorMetadata", "KVConnectorWorkerMetadata", "KVConnectorBase_V1", "SupportsHMA"),
            "KVConnectorTransferResults",
        ),
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics": ("KVConnectorPromMetrics", "KVConnectorStats"),
        "vllm.exceptions": ("LoRAAdapterNotFoundError",),
        "vllm.lora.peft_helper": ("PEFTHelper",),
        "vllm.lora.request": ("LoRARequest",),
        "vllm.lora.utils": ("get_adapter_absolute_path",),
        "vllm.lora.worker_manager": ("LRUCacheWorkerLoRAManager",),
        "vllm.v1.request": ("RequestStatus",),
    }
    for name in names:
        parts = name.split(".")
        for number in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:number]), ModuleType(".".join(parts[:number])))
    for name, classes in names.items():
        contents: dict[str, Any] = {one: type(one, (), {}) for one in classes}
        contents |= {"base": sys.modules[f"{name}.base"]} if "base" in classes else {}
        vars(sys.modules[name]).update(contents)
    for name in ("connector", "worker", "metrics"):
        monkeypatch.delitem(sys.modules, f"manylora.vllm.{name}", raising=False)
    kind = import_module("manylora.vllm.connector").ManyloraConnector
    made = kind.__new__(kind)  # without a whole configuration of vLLM
    made._held_back, made._waiting = set(), {}
    made._gate = RequestGate(read_options({}, max_loras=2, max_cpu_loras=2, max_num_seqs=4, max_num_batched_tokens=64))
    yield made
    for name in ("connector", "worker", "metrics"):
        sys.modules.pop(f"manylora.vllm.{name}", None)


def test_a_request_that_cannot_run_waits_for_no_slot(connector: Any, tmp_path: Path) -> None:
    """VLLM does not ask about a request whose adapter would be one too many beside those that run."""
    lora = SimpleNamespace(lora_name="gone", lora_path=str(tmp_path / "gone"), lora_int_id=7)
    request = SimpleNamespace(request_id="r", lora_request=lora, num_prompt_tokens=8, max_tokens=3, priority=0)
    request.skip_reading_prefix_cache = False
    connector.on_new_request(request)
    assert request.lora_request is None
    assert connector.get_num_new_matched_tokens(request, 0) == (1, True), "a transfer that will fail"


def test_a_request_whose_adapter_fails_to_load_waits_for_no_slot(
    connector: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manylora.vllm.connector.LoRARequest", lambda *args, **kwargs: SimpleNamespace())
    lora = SimpleNamespace(lora_name="a", lora_path=str(make_folder(tmp_path, "a")), is_3d_lora_weight=False)
    request = SimpleNamespace(request_id="r", lora_request=lora, num_prompt_tokens=8, max_tokens=3, priority=0)
    request.skip_reading_prefix_cache = False
    connector.on_new_request(request)
    while not connector._gate.doomed:
        assert connector.get_num_new_matched_tokens(request, 0) == (None, False)
        assert request.lora_request is not None
        done = {order.number: ("damaged",) for order in connector._gate.end_step(0.0).orders if order.work == "load"}
        connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=Report(done)))
    assert request.lora_request is None
    assert connector.get_num_new_matched_tokens(request, 0) == (1, True), "a transfer that will fail"
