"""The number of pages, and the longest context that they hold."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from manylora.adapters.shape import BaseShape
from manylora.config import GIB, EngineConfig
from manylora.errors import ConfigError
from manylora.execution.model.load import LoadedModel
from manylora.execution.model.probe import measure_activations
from manylora.scheduling import make_step_composition

__all__ = ["count_pages", "fit_context"]

logger = logging.getLogger(__name__)

DEFAULT_CPU_BYTES = GIB


def count_pages(config: EngineConfig, base: BaseShape, loaded: LoadedModel) -> int:
    """Return the configured number of pages, or the number that fit beside weights and activations.

    Raises:
        ConfigError: There is no room for two pages.
    """
    memory = config.memory
    if memory.num_pages is not None:
        return memory.num_pages
    num_bytes = memory.memory_bytes
    if num_bytes is None and loaded.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(loaded.device)
        scheduler = config.scheduler
        composition = make_step_composition(scheduler.step_composition)
        activations = measure_activations(
            loaded.model,
            num_tokens=composition.most_tokens(scheduler.max_num_batched_tokens, base.max_model_len),
            num_sampled=min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens),
        )
        num_bytes = int(total * memory.gpu_memory_utilization) - (total - free) - activations
    if num_bytes is None:
        num_bytes = DEFAULT_CPU_BYTES
    num_pages = num_bytes // base.page.num_bytes
    if num_pages < 2:
        raise ConfigError(
            f"Got room for {max(num_bytes, 0)} bytes of pages, expected at least two pages of "
            f"{base.page.num_bytes} bytes: raise memory_bytes or gpu_memory_utilization, or lower block_size"
        )
    return num_pages


def fit_context(base: BaseShape, num_pages: int, *, is_asked: bool) -> BaseShape:
    """Return ``base`` with a context that the pages can hold.

    Raises:
        ConfigError: The context does not fit, and the configuration names it (``is_asked``).
    """
    room = num_pages * base.page.block_size
    if base.max_model_len <= room:
        return base
    if is_asked:
        raise ConfigError(
            f"Got max_model_len = {base.max_model_len}, but {num_pages} pages hold {room} tokens: "
            "lower it or raise the memory for pages"
        )
    logger.warning("context_limited num_pages=%d max_model_len=%d model_limit=%d", num_pages, room, base.max_model_len)
    return replace(base, max_model_len=room)
