"""Whether this machine can assist: compiled kernels, and a device whose stream can wait for the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from manylora.core.adapters.shape import BaseShape
from manylora.execution.kernels.cpu.support import find_compiled

if TYPE_CHECKING:
    from manylora.execution.assist.exchange import Assistant

__all__ = ["OpenAssistant", "open_assistant"]

logger = logging.getLogger(__name__)

OpenAssistant = Callable[[torch.device, BaseShape], "Assistant | None"]
"""Starts an assistant for a device and a base, where there can be one."""


def open_assistant(device: torch.device, base: BaseShape, *, num_engines: int = 1) -> Assistant | None:
    """Start workers for adapters that are not on the device, ``None`` where none can be used: requests then wait.

    A CPU needs none: its kernels read images where they lie. ``num_engines`` engines share the cores.
    """
    if device.type != "cuda" or find_compiled() is None:
        return None
    from manylora.execution.assist.cores import count_workers
    from manylora.execution.assist.cuda import open_stream
    from manylora.execution.assist.exchange import Assistant

    stream = open_stream(device)
    if stream is None:
        return None
    assistant = Assistant(stream, base, num_workers=count_workers(num_engines))
    logger.info("assistant_started stream=%s workers=%d", type(stream).__name__, assistant.num_workers)
    return assistant
