"""The number of pages, and the longest context that they hold."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from manylora.core.adapters.shape import BaseShape
from manylora.core.config import GIB, EngineConfig
from manylora.core.errors import ConfigError
from manylora.core.machine import available_bytes, most_bytes
from manylora.core.scheduling import make_step_composition
from manylora.execution.model.device_memory import DeviceMemory
from manylora.execution.model.load import LoadedModel
from manylora.execution.model.probe import measure_activations

__all__ = ["bytes_for_pages", "count_pages", "fit_context"]

logger = logging.getLogger(__name__)

DEFAULT_CPU_BYTES = GIB

CONTEXT_BYTES = GIB // 2
"""Allowance for the CUDA context and the kernels of one process, which no call tells among several processes."""


def bytes_for_pages(
    *,
    total: int,
    free: int,
    reserved: int,
    base: int,
    is_base_shared: bool,
    activations: int,
    utilization: float,
    num_on_device: int,
) -> int:
    """Return the bytes for pages on a GPU, 0 or less if there is no room; all sizes are in bytes.

    The only engine on a device leaves the memory of other processes to them. One of several engines cannot tell the
    other engines, which come and go, from other processes: it counts its own memory, with its part of weights that all
    engines map, and takes no more than is free.

    Args:
        total: Memory of the device.
        free: Memory that no process uses.
        reserved: Memory of this process's tensors, weights of its own included.
        base: Weights in memory of the driver, beside ``reserved``.
        is_base_shared: Whether the other engines on the device map the same weights.
        activations: Memory that a step will need.
        utilization: This engine's part of the device.
        num_on_device: Engines on the device.
    """
    room = int(total * utilization) - activations
    if num_on_device == 1:
        return room - (total - free)
    own_base = base // num_on_device if is_base_shared else base
    return min(room - CONTEXT_BYTES - reserved - own_base, free - activations)


def count_pages(config: EngineConfig, base: BaseShape, loaded: LoadedModel, memory_of_base: DeviceMemory | None) -> int:
    """Return the configured number of pages, or the number that fit beside weights and activations.

    ``memory_of_base`` is the memory of the weights on a GPU, if it is the driver's. ``ConfigError`` if there is no room
    for two pages, or the pages are larger than the memory of the device.
    """
    memory = config.memory
    if memory.num_pages is not None:
        _check_room(f"num_pages = {memory.num_pages}", memory.num_pages * base.page.num_bytes, loaded.device)
        return memory.num_pages
    num_bytes = memory.memory_bytes
    if num_bytes is not None:
        _check_room(f"memory_bytes = {num_bytes}", num_bytes, loaded.device)
    if num_bytes is None and loaded.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(loaded.device)
        scheduler = config.scheduler
        composition = make_step_composition(scheduler.step_composition)
        activations = measure_activations(
            loaded.model,
            num_tokens=composition.most_tokens(scheduler.max_num_batched_tokens, base.max_model_len),
            num_sampled=min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens),
        )
        num_bytes = bytes_for_pages(
            total=total,
            free=free,
            reserved=torch.cuda.memory_reserved(loaded.device),
            base=0 if memory_of_base is None else memory_of_base.num_bytes,
            is_base_shared=memory_of_base is not None and memory_of_base.is_shared,
            activations=activations,
            utilization=memory.gpu_memory_utilization,
            num_on_device=config.num_on_device,
        )
    if num_bytes is None:
        num_bytes = DEFAULT_CPU_BYTES
    num_pages = num_bytes // base.page.num_bytes
    if num_pages < 2 + base.num_state_pages:
        raise ConfigError(
            f"Got room for {max(num_bytes, 0)} bytes of pages, expected at least {2 + base.num_state_pages} pages of "
            f"{base.page.num_bytes} bytes: raise memory_bytes or gpu_memory_utilization, or lower block_size"
        )
    return num_pages


def _check_room(asked: str, num_bytes: int, device: torch.device) -> None:
    """Refuse pages that no state of the machine has room for."""
    is_host = device.type == "cpu"
    most = most_bytes() if is_host else torch.cuda.get_device_properties(device).total_memory
    if most is None or num_bytes <= most:
        return
    free = available_bytes() if is_host else torch.cuda.mem_get_info(device)[0]
    raise ConfigError(
        f"Got {asked}, {num_bytes / GIB:.1f} GiB of pages, expected at most the {most / GIB:.1f} GiB of memory that "
        f"{'this process' if is_host else device} may take ({(free or 0) / GIB:.1f} GiB are available now)"
    )


def fit_context(base: BaseShape, num_pages: int, *, is_asked: bool) -> BaseShape:
    """Return ``base`` with a context that the pages can hold.

    ``ConfigError`` if the context does not fit, and the configuration names it (``is_asked``).
    """
    room = (num_pages - base.num_state_pages) * base.page.block_size
    if base.max_model_len <= room:
        return base
    if is_asked:
        raise ConfigError(
            f"Got max_model_len = {base.max_model_len}, but {num_pages} pages hold {room} tokens: "
            "lower it or raise the memory for pages"
        )
    logger.warning("context_limited num_pages=%d max_model_len=%d model_limit=%d", num_pages, room, base.max_model_len)
    return replace(base, max_model_len=room)
