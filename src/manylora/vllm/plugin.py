"""The entry point that vLLM calls in every process, and the releases and engines that the plug-in knows.

Beyond vLLM's public interfaces the plug-in replaces one class by name and uses attributes with a leading underscore,
which may change with any release. They are all named here, and it does not start on a release that it does not know.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from manylora.core.errors import ConfigError
from manylora.core.options import require
from manylora.vllm.options import GateLimits

__all__ = ["CONNECTOR", "KNOWN_RELEASES", "check_engine", "check_release", "chosen_options", "register"]

CONNECTOR = "Manylora"
"""The name in ``--kv-transfer-config``."""
KNOWN_RELEASES = ("0.31", "0.32")
MANAGER = "vllm.v1.worker.lora_model_runner_mixin", "LRUCacheWorkerLoRAManager"
"""The class that is replaced, in the only module that makes one."""
NEEDED = {
    ("vllm.lora.worker_manager", "LRUCacheWorkerLoRAManager"): ("_apply_adapters", "_load_adapter"),
    ("vllm.lora.model_manager", "LoRAModelManager"): ("_create_merged_loras_inplace", "_get_lora_layer_weights"),
}
"""Methods, by module and class."""


def register() -> None:
    """Make the plug-in known to vLLM; it does nothing unless ``--kv-transfer-config`` names it."""
    factory = import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    try:
        factory.register_connector(CONNECTOR, "manylora.vllm.connector", "ManyloraConnector")
    except ValueError:
        return  # called before in this process
    module = import_module(MANAGER[0])
    if hasattr(module, MANAGER[1]):  # else the connector refuses the release
        setattr(module, MANAGER[1], import_module("manylora.vllm.worker").make_manager)


def chosen_options(kv_transfer_config: Any) -> dict[str, Any] | None:
    """Return the plug-in's options in a configuration that has it, alone or in a multi connector, else ``None``."""
    if kv_transfer_config is None:
        return None
    own: dict[str, Any] = kv_transfer_config.kv_connector_extra_config
    if kv_transfer_config.kv_connector == CONNECTOR:
        return own
    several = (one for one in own.get("connectors", ()) if one.get("kv_connector") == CONNECTOR)
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


def check_engine(vllm_config: Any) -> GateLimits:
    """Return the limits of an engine.

    Raises:
        ConfigError: The release is not known, or the plug-in cannot serve such an engine.
    """
    check_release()
    lora, parallel, scheduler = vllm_config.lora_config, vllm_config.parallel_config, vllm_config.scheduler_config
    if getattr(getattr(import_module(MANAGER[0]), MANAGER[1]), "__module__", "") != "manylora.vllm.worker":
        raise ConfigError("vLLM has not loaded the plug-in 'manylora': name it in VLLM_PLUGINS, or leave that unset")
    if lora is None:
        raise ConfigError("manylora's plug-in needs --enable-lora")
    runner, failures = vllm_config.model_config.runner_type, vllm_config.kv_transfer_config.kv_load_failure_policy
    is_mixed = bool(getattr(lora, "enable_mixed_moe_lora_format", False))
    num_stages = parallel.pipeline_parallel_size
    require(runner != "pooling", "--runner", runner, "generate: pooling models have no queue that may be held")
    require(num_stages == 1, "--pipeline-parallel-size", num_stages, "1 with manylora's plug-in")
    require(not is_mixed, "--enable-mixed-moe-lora-format", is_mixed, "False with manylora's plug-in")
    require(failures == "fail", "kv_load_failure_policy", failures, "fail: a request whose adapter is gone must end")
    return GateLimits(
        num_slots=lora.max_loras,
        max_cpu_loras=lora.max_cpu_loras or lora.max_loras,
        max_num_seqs=getattr(scheduler, "max_num_active_seqs", None) or scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        num_workers=parallel.world_size,
    )
