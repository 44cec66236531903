"""The base's weights, loaded once per device: the first engine exports them, the others and all restarts map them.

The API process holds the memory's file, which engines inherit. So the weights outlive the engine that loaded them, and
an engine that starts again maps them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from dataclasses import replace

from manylora.core.isolation.system import take_file
from manylora.core.ports import SharedBase

__all__ = ["BaseShare"]

logger = logging.getLogger(__name__)


class BaseShare:
    """Decides which of the engines on one device loads the base, and hands the weights to the others.

    For the event loop's thread alone.
    """

    def __init__(self) -> None:
        self._base: SharedBase | None = None
        self._is_private = False  # the weights cannot be mapped: those of a simulation, and where a driver refuses
        self._loading: asyncio.Future[None] | None = None

    async def take(self) -> SharedBase | None:
        """Return the weights; ``None`` if the caller is to load them and then to call ``give``.

        While another engine loads them, wait for its weights.
        """
        while self._base is None and not self._is_private:
            if self._loading is None:
                self._loading = asyncio.get_running_loop().create_future()
                return None
            await asyncio.shield(self._loading)
        return self._base

    def give(self, base: SharedBase | None, pid: int) -> None:
        """Take over the weights that the engine process ``pid`` has loaded; ``None`` if they cannot be mapped."""
        if self._base is not None:
            return
        if base is not None:
            try:
                file = _take(base, pid)
            except OSError as error:
                logger.warning("base_not_shared reason=%s", error)
                base = None
            else:
                self._base = replace(base, file=file)
        self._is_private = base is None
        self.end_turn()

    def end_turn(self) -> None:
        """End the turn of the engine that loads the weights; another may try."""
        loading, self._loading = self._loading, None
        if loading is not None and not loading.done():
            loading.set_result(None)

    def close(self) -> None:
        """Release the memory, once no engine maps it."""
        base, self._base = self._base, None
        if base is not None:
            with contextlib.suppress(OSError):
                os.close(base.file)


def _take(base: SharedBase, pid: int) -> int:
    """Return a descriptor of the memory that process ``pid`` has made. Raises ``OSError``."""
    if base.gpu:  # a driver's file is none that can be opened by its path
        return take_file(pid, base.file)
    return os.open(f"/proc/{pid}/fd/{base.file}", os.O_RDONLY | os.O_CLOEXEC)
