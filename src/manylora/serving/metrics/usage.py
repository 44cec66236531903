"""The ledger of usage: requests, tokens and engine seconds of each tenant and adapter, by day, in a SQLite file.

The seconds of a step are divided among its sequences by their tokens in it, so those of all requests add up to the
seconds in which engines ran steps. A request is entered when it ends, by the engine that ended it. Entries are gathered
in memory and written together every ``FLUSH_S``, on a thread: a process that is killed loses those of the last second
and of its requests in flight, and the file stays whole (a write-ahead log).
"""

from __future__ import annotations

import asyncio
import logging
import operator
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from manylora.core.errors import ConfigError

if TYPE_CHECKING:  # a router counts usage too, and has no engines
    from manylora.serving.hosting.protocol import Observations

__all__ = ["COLUMNS", "KEYS", "UsageLedger", "read_usage"]

FLUSH_S = 1.0
MOST_PENDING = 1_000_000
"""Sums that are kept while the file cannot be written; beyond them, usage of further tenants and adapters is lost."""

KEYS = ("day", "tenant", "adapter")
COLUMNS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "engine_s")

_TABLE = f"""CREATE TABLE IF NOT EXISTS usage (
    day TEXT, tenant TEXT, adapter TEXT, requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL, engine_s REAL NOT NULL,
    PRIMARY KEY ({", ".join(KEYS)})
) WITHOUT ROWID"""
_ADD = f"""INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET {", ".join(f"{one} = {one} + excluded.{one}" for one in COLUMNS)}"""

logger = logging.getLogger(__name__)


class _TenantUsage(NamedTuple):
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    engine_s: float = 0.0

    def plus(self, other: _TenantUsage) -> _TenantUsage:
        return _TenantUsage(*map(operator.add, self, other))


class UsageLedger:
    """Gathers the usage of ended requests, and writes it to a file, which is made if there is none.

    A request's day (UTC) is that of ``epoch_s``. ``ConfigError`` if the file cannot be opened, or is no ledger.
    """

    def __init__(self, path: Path, *, epoch_s: Callable[[], float] = time.time) -> None:
        self._epoch_s = epoch_s
        self._pending: dict[tuple[str, str, str], _TenantUsage] = {}
        self._flushing: asyncio.Task[None] | None = None
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level="IMMEDIATE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute(_TABLE)
        except sqlite3.Error as error:
            raise ConfigError(f"Got usage = {str(path)!r}, which cannot be opened: {error}") from None

    def observe(self, observed: Observations) -> None:
        """Add the requests that ended since an engine's last message."""
        for request in observed.finished:
            self.add(
                request.tenant,
                request.adapter,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=request.num_cached_tokens,
                num_output_tokens=request.num_output_tokens,
                engine_s=request.engine_s,
            )

    def add(
        self,
        tenant: str,
        adapter: str,
        *,
        num_prompt_tokens: int,
        num_output_tokens: int,
        num_cached_tokens: int = 0,
        engine_s: float = 0.0,
    ) -> None:
        """Add a request that ended."""
        key = (datetime.fromtimestamp(self._epoch_s(), UTC).date().isoformat(), tenant, adapter)
        if key in self._pending or len(self._pending) < MOST_PENDING:
            request = _TenantUsage(1, num_prompt_tokens, num_cached_tokens, num_output_tokens, engine_s)
            self._pending[key] = self._pending.get(key, _TenantUsage()).plus(request)

    async def run(self) -> None:
        """Write what was gathered, every ``FLUSH_S``."""
        while True:
            await asyncio.sleep(FLUSH_S)
            self._flushing = asyncio.create_task(self._flush())
            await asyncio.shield(self._flushing)

    async def close(self) -> None:
        """Write the rest, and close the file."""
        if self._flushing is not None:  # that ``run`` has left behind
            await self._flushing
        await self._flush()
        self._db.close()

    async def _flush(self) -> None:
        pending, self._pending = self._pending, {}
        if not pending:
            return
        try:
            await asyncio.to_thread(self._write, pending)
        except sqlite3.Error as error:  # a full disk: they are written once there is room
            logger.error("usage_not_written num=%d error=%r", len(pending), str(error))
            for key, sums in self._pending.items():
                pending[key] = pending.get(key, _TenantUsage()).plus(sums)
            self._pending = pending

    def _write(self, pending: dict[tuple[str, str, str], _TenantUsage]) -> None:
        with self._db:
            self._db.executemany(_ADD, [(*key, *sums) for key, sums in pending.items()])


def read_usage(path: Path, by: Sequence[str], since: str = "") -> list[tuple[object, ...]]:
    """Return the sums of a ledger, a row for each value of the keys ``by``, then ``COLUMNS``; most seconds first.

    The first day is ``since``, as 2026-01-31; empty for all. A server may be writing the file. ``ConfigError`` if it
    cannot be read, a key is unknown, or ``since`` is no day.
    """
    if not by or (unknown := sorted(set(by) - set(KEYS))):
        raise ConfigError(f"Got by = {','.join(unknown if by else by)!r}, expected some of {', '.join(KEYS)}")
    try:
        first = since and date.fromisoformat(since).isoformat()
    except ValueError:
        raise ConfigError(f"Got since = {since!r}, expected a day as 2026-01-31") from None
    if not path.is_file():
        raise ConfigError(f"Got the ledger {str(path)!r}, and there is no such file")
    keys = ", ".join(by)
    query = f"SELECT {keys}, {', '.join(f'SUM({one})' for one in COLUMNS)} FROM usage WHERE day >= ? GROUP BY {keys}"
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            return db.execute(f"{query} ORDER BY SUM(engine_s) DESC", (first,)).fetchall()
    except sqlite3.Error as error:
        raise ConfigError(f"Got the ledger {str(path)!r}, which cannot be read: {error}") from None
