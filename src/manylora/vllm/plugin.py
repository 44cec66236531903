"""The entry point that vLLM calls in every process, the releases and engines that the plug-in knows, and its options.

Beyond vLLM's public interfaces it replaces one class and uses methods with a leading underscore, which may change with
any release. They are named here, and it does not start on a release that it does not know.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.errors import ConfigError
from manylora.core.options import require
from manylora.vllm.versions import UNLIMITED

__all__ = [
    "CONNECTOR",
    "KNOWN_RELEASES",
    "PluginOptions",
    "check_engine",
    "check_failures",
    "check_release",
    "chosen_options",
    "register",
]

CONNECTOR = "Manylora"
"""The name in ``--kv-transfer-config``."""
NAMES = CONNECTOR, "ManyloraConnector"
"""A multi connector finds the class of figures by its own name."""
KNOWN_RELEASES = ("0.31", "0.32", "0.33")
MANAGER = "vllm.v1.worker.lora_model_runner_mixin", "LRUCacheWorkerLoRAManager"
"""The class that is replaced, in the only module that makes one."""
NEEDED = {
    ("vllm.lora.worker_manager", "LRUCacheWorkerLoRAManager"): ("_apply_adapters", "_load_adapter"),
    ("vllm.lora.model_manager", "LoRAModelManager"): ("_create_merged_loras_inplace", "_get_lora_layer_weights"),
}
"""Methods, by module and class."""
SCHEDULER = ("policy", "policy_options", "predictor", "predictor_options")
ADAPTERS = ("eviction", "eviction_options", "look_ahead", "forecast", "forecast_by")
"""Options of these names are manylora's own."""
TYPES: dict[str, type] = {
    **dict.fromkeys(("policy", "predictor", "eviction", "forecast_by"), str),
    **dict.fromkeys(("policy_options", "predictor_options", "eviction_options"), dict),
    **dict.fromkeys(("forecast", "blocking_loads"), bool),
    "look_ahead": int,
    "pin": list,
}
"""The types of all options, as JSON has them: a ``"false"`` is a text, and true."""
WORDS = {str: "a text", dict: "an object", bool: "true or false", int: "a whole number", list: "a list"}


class PluginOptions(NamedTuple):
    """Order, eviction, prefetching and loads of adapters in a vLLM engine.

    Args:
        engine: The order of requests, eviction and prefetching, as in manylora's own engine.
        num_slots: vLLM's ``--max-loras``.
        num_workers: Workers, each with a copy of every slot.
        pin: Names of adapters that keep their slot once they have one.
        blocking_loads: Whether steps wait for loads, as in vLLM; for comparison.
    """

    engine: EngineConfig
    num_slots: int
    num_workers: int = 1
    pin: Collection[str] = ()
    blocking_loads: bool = False


def register() -> None:
    """Make the plug-in known to vLLM; it does nothing unless ``--kv-transfer-config`` or a registry is given."""
    factory = import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    try:
        for name in NAMES:
            factory.register_connector(name, "manylora.vllm.connector", "ManyloraConnector")
    except ValueError:
        return  # called before in this process
    module = import_module(MANAGER[0])
    if hasattr(module, MANAGER[1]):  # else the connector refuses the release
        setattr(module, MANAGER[1], import_module("manylora.vllm.worker").make_manager)
    if registries := os.environ.get("MANYLORA_LORA_REGISTRY", "").split():
        import_module("manylora.vllm.resolver").register_resolver(registries)


def chosen_options(kv_transfer_config: Any) -> dict[str, Any] | None:
    """Return the plug-in's options in a configuration that has it, alone or in a multi connector, else ``None``."""
    if kv_transfer_config is None:
        return None
    own: dict[str, Any] = kv_transfer_config.kv_connector_extra_config
    if kv_transfer_config.kv_connector in NAMES:
        return own
    several = (one for one in own.get("connectors", ()) if one.get("kv_connector") in NAMES)
    return next((one.get("kv_connector_extra_config", {}) for one in several), None)


def check_release() -> str:
    """Return vLLM's release.

    Raises:
        ConfigError: The plug-in does not know it, or it lacks an attribute that the plug-in needs.
    """
    release = str(import_module("vllm.version").__version__)
    expected = f"one of {', '.join(f'{known}.x' for known in KNOWN_RELEASES)}"
    require(release.startswith(tuple(f"{known}." for known in KNOWN_RELEASES)), "vllm.__version__", release, expected)
    for (module, name), methods in NEEDED.items():
        found = getattr(import_module(module), name, None)
        is_whole = all(callable(getattr(found, method, None)) for method in methods)
        require(is_whole, f"{module}.{name}", release, f"methods {', '.join(methods)}")
    return release


def check_failures(kv_transfer_config: Any) -> None:
    """Raise ``ConfigError`` if vLLM would run a request again, and for ever, whose adapter cannot be read."""
    policy = kv_transfer_config.kv_load_failure_policy
    require(policy == "fail", "kv_load_failure_policy", policy, "fail: a request whose adapter is gone must end")


def check_engine(vllm_config: Any) -> PluginOptions:
    """Return the options for an engine.

    Raises:
        ConfigError: The release is not known, an option is wrong, or the plug-in cannot serve such an engine.
    """
    check_release()
    lora, parallel, scheduler = vllm_config.lora_config, vllm_config.parallel_config, vllm_config.scheduler_config
    if getattr(getattr(import_module(MANAGER[0]), MANAGER[1]), "__module__", "") != "manylora.vllm.worker":
        raise ConfigError("vLLM has not loaded the plug-in 'manylora': name it in VLLM_PLUGINS, or leave that unset")
    if lora is None:
        raise ConfigError("manylora's plug-in needs --enable-lora")
    runner, num_stages = vllm_config.model_config.runner_type, parallel.pipeline_parallel_size
    is_mixed = bool(getattr(lora, "enable_mixed_moe_lora_format", False))
    require(runner != "pooling", "--runner", runner, "generate: pooling models have no queue that may be held")
    require(num_stages == 1, "--pipeline-parallel-size", num_stages, "1 with manylora's plug-in")
    require(not is_mixed, "--enable-mixed-moe-lora-format", is_mixed, "False with manylora's plug-in")
    check_failures(vllm_config.kv_transfer_config)
    return read_options(
        vllm_config.kv_transfer_config.kv_connector_extra_config,
        max_loras=lora.max_loras,
        max_cpu_loras=lora.max_cpu_loras or lora.max_loras,
        max_num_seqs=getattr(scheduler, "max_num_active_seqs", None) or scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        num_workers=parallel.world_size,
    )


def read_options(
    table: Mapping[str, Any],
    *,
    max_loras: int,
    max_cpu_loras: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_workers: int = 1,
) -> PluginOptions:
    """Make the options of a table, for an engine with limits that are named as vLLM's flags.

    Raises:
        ConfigError: A key is unknown, or a value is not allowed.
    """
    given = {"policy": "adapter-aware", "pin": [], "eviction": "price", **table}
    for key, value in given.items():
        require(key in TYPES, "kv_connector_extra_config", key, ", ".join(TYPES))
        require(type(value) is TYPES[key], key, value, WORDS[TYPES[key]])
    need_pages = ("chameleon", "static-queues")  # they count KV in the adapters' pool, and pre-empt running requests
    require(given["policy"] not in need_pages, "policy", given["policy"], "a policy that needs no pool of pages")
    pin, most = given["pin"], max_loras - 1
    is_right = len(pin) <= most and all(isinstance(name, str) for name in pin)
    require(is_right, "pin", pin, f"a list of at most {most} names")
    scheduler, adapters = ({key: given[key] for key in keys if key in given} for keys in (SCHEDULER, ADAPTERS))
    limits: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_waiting": UNLIMITED,
    }
    engine = EngineConfig(
        model=ModelConfig(model="vllm"),
        memory=MemoryConfig(prefix_caching=False),
        scheduler=SchedulerConfig(**limits, **scheduler),
        adapters=AdapterConfig(  # vLLM counts adapters in host memory, not bytes
            max_cpu_loras=max_cpu_loras,
            host_bytes=UNLIMITED,
            background_reads=False,
            host_eviction="price" if given["eviction"] == "price" else "lru",
            **adapters,
        ),
    )
    return PluginOptions(engine, max_loras, num_workers, frozenset(pin), given.get("blocking_loads", False))
