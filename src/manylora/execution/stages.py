"""Lines in the log while an engine is built: a start can take minutes, and the reader wants to know at what."""

from __future__ import annotations

import logging
import time

__all__ = ["StageLog"]

logger = logging.getLogger(__name__)


class StageLog:
    """Logs the end of each stage, its duration, and the stage that begins."""

    def __init__(self) -> None:
        self._began_at = time.perf_counter()

    def done(self, stage: str, *, then: str) -> None:
        """End a stage, and begin another."""
        now = time.perf_counter()
        logger.info("engine_start stage=%s took_s=%.2f next=%r", stage, now - self._began_at, then)
        self._began_at = now
