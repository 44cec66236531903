"""A core on the parts of a builder, live or simulated: options that depend on the parts are settled here."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from manylora.core.config import EngineConfig
from manylora.core.engine.core import EngineCore
from manylora.core.events import EventSink
from manylora.core.ports import EngineParts, Executor

__all__ = ["build_core"]


def build_core(
    parts: EngineParts,
    config: EngineConfig,
    *,
    served_name: str = "base",
    executor: Executor | None = None,
    sinks: Seq[EventSink] = (),
) -> EngineCore:
    """Return a core on parts that were built for ``config``.

    Args:
        parts: The parts, from a builder.
        config: The configuration that they were built for.
        served_name: Name of the base model in requests.
        executor: Replaces that of the parts, for example by one that logs.
        sinks: Receive every event, in order.

    Raises:
        ConfigError: As of ``EngineCore``.
    """
    scheduler = config.scheduler
    if scheduler.plan_ahead is None:
        scheduler = replace(scheduler, plan_ahead=parts.is_accelerated)
    host_bytes = parts.host_bytes if config.adapters.host_bytes is None else config.adapters.host_bytes
    return EngineCore(
        base=parts.base,
        num_pages=parts.num_pages,
        executor=executor or parts.executor,
        scheduler=scheduler,
        memory=config.memory,
        adapters=replace(config.adapters, host_bytes=host_bytes),
        served_name=served_name,
        seed=config.seed,
        sinks=sinks,
        reads_host=parts.reads_host,
        waits_by_layer=parts.waits_by_layer,
        is_accelerated=parts.is_accelerated,
    )
