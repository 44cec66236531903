"""The controller's state in SQLite: functions, their nodes, and the ledger.

Every change is one transaction of one writer. A controller that is killed between any two writes finds the state of
the last whole transaction.

The ledger of a node is contiguous: it knows the end of the last recorded report, and a report must begin there. An
earlier begin is a report that was recorded already: its answer was lost. A later begin is a gap, in which an agent was
gone; its time belongs to the platform. So the accounts of a node add up to its time from its first report on, exactly.

Byte-nanoseconds exceed 64 bits, so amounts are text, and are added in Python within the transaction.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from manylora.core.errors import CapacityError, ConfigError, ManyloraError
from manylora.functions.decisions.billing import PLATFORM, PriceList, Usage
from manylora.functions.deployment import FunctionSpec
from manylora.functions.wire import Account, NodeReport
from manylora.serving.metrics.status_report import FunctionStart

__all__ = ["BUCKET_NS", "MachineUse", "NodeEnd", "Store", "read_ledger", "read_prices"]

BUCKET_NS = 60 * 10**9  # resolution of the ledger: usage of one account within a minute is one row

VERSION = 1
LOCKED_S = 5.0  # longest wait for another process that writes, or for the controller before this one to end
LOOK_S = 0.05

_SCHEMA = """
CREATE TABLE functions (name TEXT PRIMARY KEY, spec BLOB NOT NULL, is_configured INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE prices (only_row INTEGER PRIMARY KEY CHECK (only_row = 0), list BLOB NOT NULL);
CREATE TABLE nodes (
    name TEXT PRIMARY KEY, incarnation TEXT NOT NULL, until_ns INTEGER NOT NULL, num_devices INTEGER NOT NULL,
    num_cpus INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE placements (function TEXT PRIMARY KEY, node TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE starts (function TEXT PRIMARY KEY, start BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE accounts (
    bucket INTEGER, node TEXT, account TEXT, tenant TEXT, usage TEXT NOT NULL, num_requests INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL, PRIMARY KEY (bucket, node, account, tenant)
) WITHOUT ROWID;
CREATE TABLE machines (
    bucket INTEGER, node TEXT, amounts TEXT NOT NULL, lost_ns INTEGER NOT NULL, PRIMARY KEY (bucket, node)
) WITHOUT ROWID;
"""


class NodeEnd(NamedTuple):
    """The end of a node's ledger, and the run of the agent that wrote it."""

    incarnation: str
    until_ns: int


class MachineUse(NamedTuple):
    """The amounts of nodes, counted apart from the accounts."""

    device_ns: int  # time of all its devices
    cpu_ns: int  # time of all its processors
    host_byte_ns: int
    lost_ns: int  # the part of the recorded time in which no agent reported


class Store:
    """The database, made if there is none, for one writer: a second one waits, and then fails.

    ``ConfigError`` if the file is no database of this version, or another process has it; ``CapacityError`` if it
    cannot be written now, as on a full disk, here and in all that writes.
    """

    def __init__(self, path: Path) -> None:
        self._lock = _lock_beside(path)
        try:
            self._db = sqlite3.connect(path, timeout=LOCKED_S, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")  # whole after a kill; a power cut may lose the last seconds
            with self._transaction():
                (version,) = self._db.execute("PRAGMA user_version").fetchone()
                if version == 0:
                    for statement in _SCHEMA.split(";"):
                        if statement.strip():
                            self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version = {VERSION}")
                elif version != VERSION:
                    raise ConfigError(f"Got ledger = {str(path)!r} of version {version}, expected {VERSION}")
        except (sqlite3.Error, ManyloraError) as error:
            os.close(self._lock)
            if isinstance(error, ManyloraError):
                raise
            raise ConfigError(f"Got ledger = {str(path)!r}, which cannot be used: {error}") from error

    def close(self) -> None:
        """Close the database."""
        self._db.close()
        os.close(self._lock)

    # -- desired state -----------------------------------------------------------------------------------------------

    def configure(self, functions: Mapping[str, FunctionSpec], prices: PriceList) -> None:
        """Register the configured functions, and no formerly configured ones; those from REST stay. Keep the prices."""
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO prices VALUES (0, ?)", (msgspec.json.encode(prices),))
            for (name,) in self._db.execute("SELECT name FROM functions WHERE is_configured").fetchall():
                if name not in functions:
                    self._forget(name)
            self._db.executemany(
                "INSERT OR REPLACE INTO functions VALUES (?, ?, 1)",
                [(name, msgspec.json.encode(spec)) for name, spec in functions.items()],
            )

    def register(self, name: str, spec: FunctionSpec) -> None:
        """Add a function, or replace it."""
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO functions VALUES (?, ?, 0)", (name, msgspec.json.encode(spec)))

    def remove(self, name: str) -> bool:
        """Forget a function, whose bills remain; return whether it was there."""
        with self._transaction():
            return self._forget(name)

    def functions(self) -> dict[str, FunctionSpec]:
        """Return all functions, by name."""
        rows = self._db.execute("SELECT name, spec FROM functions ORDER BY name")
        return {name: msgspec.json.decode(spec, type=FunctionSpec) for name, spec in rows}

    def place(self, nodes: Mapping[str, str]) -> None:
        """Record the nodes of functions."""
        with self._transaction():
            self._db.executemany("INSERT OR REPLACE INTO placements VALUES (?, ?)", list(nodes.items()))

    def placements(self) -> dict[str, str]:
        """Return the node of each function that has one."""
        return dict(self._db.execute("SELECT function, node FROM placements").fetchall())

    def starts(self) -> dict[str, FunctionStart]:
        """Return the last start of each function."""
        rows = self._db.execute("SELECT function, start FROM starts")
        return {name: msgspec.json.decode(start, type=FunctionStart) for name, start in rows}

    def _forget(self, name: str) -> bool:
        found = self._db.execute("DELETE FROM functions WHERE name = ?", (name,)).rowcount > 0
        self._db.execute("DELETE FROM placements WHERE function = ?", (name,))
        self._db.execute("DELETE FROM starts WHERE function = ?", (name,))
        return found

    # -- the ledger --------------------------------------------------------------------------------------------------

    def end_of(self, node: str) -> NodeEnd | None:
        """Return the end of a node's ledger; ``None`` before its first report."""
        row = self._db.execute("SELECT incarnation, until_ns FROM nodes WHERE name = ?", (node,)).fetchone()
        return None if row is None else NodeEnd(*row)

    def record(self, node: str, report: NodeReport, starts: Mapping[str, FunctionStart]) -> int:
        """Record a report, unless it was recorded before; return the end of the node's ledger.

        A report whose amounts do not add up to its interval is an error of the agent, and nothing is recorded.
        ``ConfigError`` if the report overlaps the ledger in part, or does not add up.
        """
        _check_sums(report)
        with self._transaction():
            end = self.end_of(node)
            until_ns = report.since_ns if end is None else end.until_ns
            if report.since_ns < until_ns and not report.is_first:
                if report.until_ns > until_ns:
                    raise ConfigError(f"Got a report since {report.since_ns}, but the ledger ends at {until_ns}")
                return until_ns
            if (lost_ns := report.since_ns - until_ns) > 0:
                device_ns, cpu_ns = lost_ns * report.num_devices, lost_ns * report.num_cpus
                lost = Account(name=PLATFORM, usage=Usage(idle_device_ns=device_ns, cpu_ns=cpu_ns))
                self._add(node, report.since_ns, [lost], (device_ns, cpu_ns, 0), lost_ns)
            if report.until_ns > report.since_ns:
                amounts = (report.device_ns, report.cpu_ns, report.host_byte_ns)
                self._add(node, report.until_ns, report.accounts, amounts, 0)
            until_ns = max(until_ns, report.until_ns)
            self._db.execute(
                "INSERT OR REPLACE INTO nodes VALUES (?, ?, ?, ?, ?)",
                (node, report.incarnation, until_ns, report.num_devices, report.num_cpus),
            )
            self._db.executemany(
                "INSERT OR REPLACE INTO starts VALUES (?, ?)",
                [(name, msgspec.json.encode(start)) for name, start in starts.items()],
            )
            return until_ns

    def _add(
        self, node: str, until_ns: int, accounts: Sequence[Account], amounts: tuple[int, int, int], lost_ns: int
    ) -> None:
        """Add amounts to the bucket in which they end."""
        bucket = max(0, until_ns - 1) // BUCKET_NS
        for one in accounts:
            usage, num_requests, num_tokens = one.usage, one.num_requests, one.num_tokens
            key = (bucket, node, one.name, one.tenant)
            row = self._db.execute(
                "SELECT usage, num_requests, num_tokens FROM accounts"
                " WHERE bucket = ? AND node = ? AND account = ? AND tenant = ?",
                key,
            ).fetchone()
            if row is not None:
                usage = usage.plus(Usage(*_numbers(row[0])))
                num_requests, num_tokens = num_requests + row[1], num_tokens + row[2]
            self._db.execute(
                "INSERT OR REPLACE INTO accounts VALUES (?, ?, ?, ?, ?, ?, ?)",
                (*key, _text(usage), num_requests, num_tokens),
            )
        row = self._db.execute(
            "SELECT amounts, lost_ns FROM machines WHERE bucket = ? AND node = ?", (bucket, node)
        ).fetchone()
        before, lost_before = ((0, 0, 0), 0) if row is None else (_numbers(row[0]), row[1])
        added = [old + new for old, new in zip(before, amounts, strict=True)]
        self._db.execute(
            "INSERT OR REPLACE INTO machines VALUES (?, ?, ?, ?)", (bucket, node, _text(added), lost_before + lost_ns)
        )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")  # busy, it fails and leaves the transaction open
        except BaseException as error:
            if self._db.in_transaction:  # some errors have ended it
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise CapacityError(f"The ledger cannot be written: {error}", retry_after_s=5.0, status=503) from error
            raise


def _lock_beside(path: Path) -> int:
    """Return the descriptor of a file beside a database, locked until it is closed or this process ends.

    SQLite locks for a transaction alone: two controllers would forget each other's functions and take turns in giving
    orders.
    """
    got = f"Got ledger = {str(path)!r}"
    try:
        lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"{got}, which cannot be used: {error}") from error
    deadline = time.monotonic() + LOCKED_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError as error:
            if not isinstance(error, BlockingIOError) or time.monotonic() > deadline:
                os.close(lock)
                reason = (
                    "which another controller has" if isinstance(error, BlockingIOError) else f"not locked: {error}"
                )
                raise ConfigError(f"{got}, {reason}") from None
        time.sleep(LOOK_S)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a ledger for reading; the controller may write meanwhile. ``ConfigError`` if there is none."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", timeout=LOCKED_S, uri=True)) as db:
            yield db
    except sqlite3.Error as error:
        raise ConfigError(f"Got ledger = {str(path)!r}, which cannot be read: {error}") from None


def read_ledger(path: Path, since_ns: int, until_ns: int) -> tuple[list[Account], MachineUse]:
    """Return the use of each account, and of all nodes, in the minutes that begin within a time.

    It is added up row by row: a month of a thousand functions has forty million rows. ``ConfigError`` if there is no
    ledger.
    """
    within = (-(-since_ns // BUCKET_NS), -(-min(until_ns, 2**62) // BUCKET_NS))
    rows = "WHERE bucket >= ? AND bucket < ?"
    used: dict[tuple[str, str], tuple[Usage, int, int]] = {}
    machines = MachineUse(0, 0, 0, 0)
    with _reading(path) as db:
        db.execute("BEGIN")  # both tables at one moment
        accounts = db.execute(f"SELECT account, tenant, usage, num_requests, num_tokens FROM accounts {rows}", within)
        for name, tenant, text, num_requests, num_tokens in accounts:
            usage, requests_before, tokens_before = used.get((name, tenant), (Usage(), 0, 0))
            total = usage.plus(Usage(*_numbers(text)))
            used[name, tenant] = total, requests_before + num_requests, tokens_before + num_tokens
        for amounts, lost_ns in db.execute(f"SELECT amounts, lost_ns FROM machines {rows}", within):
            added = (*_numbers(amounts), lost_ns)
            machines = MachineUse(*[before + more for before, more in zip(machines, added, strict=True)])
    return [
        Account(name=name, tenant=tenant, usage=usage, num_requests=num_requests, num_tokens=num_tokens)
        for (name, tenant), (usage, num_requests, num_tokens) in used.items()
    ], machines


def read_prices(path: Path) -> PriceList:
    """Return the prices of the controller's configuration; ``ConfigError`` if there is no ledger."""
    with _reading(path) as db:
        row = db.execute("SELECT list FROM prices").fetchone()
    return PriceList() if row is None else msgspec.json.decode(row[0], type=PriceList)


def _check_sums(report: NodeReport) -> None:
    total = Usage()
    for one in report.accounts:
        if min(one.usage) < 0:
            raise ConfigError(f"Got a report with {one.usage} of {one.name!r}, expected no negative amount")
        total = total.plus(one.usage)
    duration_ns = report.until_ns - report.since_ns
    expected = (report.num_devices * duration_ns, report.num_cpus * duration_ns)
    if report.is_first and duration_ns:
        raise ConfigError(f"Got a first report of {duration_ns} ns, expected one without an interval")
    if duration_ns < 0 or (report.device_ns, report.cpu_ns) != expected:
        raise ConfigError(f"Got a report of {duration_ns} ns with {report.device_ns = } and {report.cpu_ns = }")
    sums = (total.active_device_ns + total.idle_device_ns, total.cpu_ns, total.host_byte_ns)
    if sums != (report.device_ns, report.cpu_ns, report.host_byte_ns):
        raise ConfigError(f"Got a report whose accounts sum to {sums}, expected {expected} and {report.host_byte_ns}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


def _text(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
