"""The options of the plug-in: ``kv_connector_extra_config`` in vLLM's ``--kv-transfer-config``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from manylora.core.config import AdapterConfig, SchedulerConfig
from manylora.core.options import require

__all__ = ["GateLimits", "PluginOptions", "read_options"]

SCHEDULER = ("policy", "policy_options", "predictor", "predictor_options")
ADAPTERS = ("eviction", "eviction_options", "look_ahead", "forecast")
OWN = ("pin", "blocking_loads")


class GateLimits(NamedTuple):
    """The limits of a vLLM engine, named as its flags; ``num_slots`` is ``--max-loras``."""

    num_slots: int
    max_cpu_loras: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_workers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginOptions:
    """Order, eviction, prefetching and loads of adapters in a vLLM engine.

    Args:
        scheduler: The order of requests, as in manylora's own engine.
        adapters: Eviction and prefetching, likewise.
        pin: Names of adapters that keep their slot once they have one.
        blocking_loads: Whether steps wait for loads, as in vLLM; for comparison.
    """

    scheduler: SchedulerConfig
    adapters: AdapterConfig
    pin: Collection[str] = ()
    blocking_loads: bool = False


def read_options(table: Mapping[str, Any], limits: GateLimits) -> PluginOptions:
    """Make the options of a table, for an engine with these limits.

    Raises:
        ConfigError: A key is unknown, or a value is not allowed.
    """
    given = {"policy": "adapter-aware", **table}
    for key in given:
        known = SCHEDULER + ADAPTERS + OWN
        require(key in known, "kv_connector_extra_config", key, ", ".join(known))
    need_pages = ("chameleon", "static-queues")  # they count KV in the adapters' pool, and pre-empt running requests
    require(given["policy"] not in need_pages, "policy", given["policy"], "a policy that needs no pool of pages")

    def only(keys: Collection[str]) -> dict[str, Any]:
        return {key: given[key] for key in keys if key in given}

    tokens, hosted = limits.max_num_batched_tokens, limits.max_cpu_loras
    return PluginOptions(
        scheduler=SchedulerConfig(max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=tokens, **only(SCHEDULER)),
        adapters=AdapterConfig(max_cpu_loras=hosted, host_bytes=1 << 62, **only(ADAPTERS)),  # vLLM counts adapters
        **only(OWN),
    )
