"""The controller's database, killed between any two writes: what it recorded is whole, and adds up."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.functions.controller.bill import make_bill
from manylora.functions.controller.store import Store, read_ledger
from manylora.functions.decisions.billing import PLATFORM, PriceList, Usage, split_evenly
from manylora.functions.deployment import FunctionSpec
from manylora.functions.wire import Account, NodeReport

SECOND = 10**9
NUM_CPUS = 2


class WatchedConnection(sqlite3.Connection):
    """Calls ``before`` ahead of every statement."""

    before: Callable[[], None]

    def execute(self, *arguments: object) -> sqlite3.Cursor:  # type: ignore[override]
        self.before()
        return super().execute(*arguments)  # type: ignore[arg-type]

    def executemany(self, *arguments: object) -> sqlite3.Cursor:  # type: ignore[override]
        self.before()
        return super().executemany(*arguments)  # type: ignore[arg-type]


def report(since_ns: int, until_ns: int, awake: list[str], *, incarnation: str, is_first: bool = False) -> NodeReport:
    duration_ns = until_ns - since_ns
    parts = split_evenly(duration_ns, awake)
    accounts = [
        Account(name=name, tenant=name[:1], usage=Usage(idle_device_ns=part, host_byte_ns=part << 40), num_requests=1)
        for name, part in parts.items()
    ]
    accounts.append(Account(name=PLATFORM, tenant="", usage=Usage(cpu_ns=NUM_CPUS * duration_ns)))
    return NodeReport(
        incarnation=incarnation,
        is_first=is_first,
        since_ns=since_ns,
        until_ns=until_ns,
        num_devices=1,
        num_cpus=NUM_CPUS,
        accounts=[] if is_first else accounts,
        device_ns=duration_ns,
        cpu_ns=NUM_CPUS * duration_ns,
        host_byte_ns=sum(part << 40 for part in parts.values()),
        address="",
        pid=1,
        generation=0,
        free_bytes=0,
        functions=[],
        backbones=[],
    )


durations = st.integers(1, 90 * SECOND)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("report"), durations, st.lists(st.sampled_from(["aa", "ab", "ba"]), unique=True)),
        st.tuples(st.just("repeat"), st.just(0), st.just([])),  # the answer to the last report was lost
        st.tuples(st.just("restart"), durations, st.just([])),  # the agent was killed, and comes back later
        st.tuples(st.just("register"), st.just(0), st.sampled_from([["aa"], ["ba"]])),
        st.tuples(st.just("remove"), st.just(0), st.sampled_from([["aa"], ["ba"]])),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=12, deadline=None)
@given(actions)
def test_a_kill_between_any_two_writes_leaves_a_ledger_that_adds_up_and_goes_on(
    steps: list[tuple[str, int, list[str]]],
) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        copies: list[tuple[Path, int, int]] = []  # the files as of each write, and the ends before and after the step
        ends = (0, 0)

        def copy() -> None:
            # The files of this moment are those that a process finds after kill -9: writes need no flush to be seen.
            at = folder / str(len(copies))
            at.mkdir()
            for file in folder.glob("ledger.db*"):
                if not file.name.endswith("-shm"):
                    shutil.copy(file, at / file.name)
            copies.append((at, *ends))

        class Watched(WatchedConnection):
            before = staticmethod(copy)

        with mock.patch.object(sqlite3, "connect", partial(sqlite3.connect, factory=Watched)):
            store = Store(folder / "ledger.db")
        at_ns, run = 0, 0
        last = report(0, 0, [], incarnation="0", is_first=True)
        store.record("node", last, {})
        for action, duration_ns, names in steps:
            ends = (at_ns, at_ns + duration_ns)
            if action == "register":
                store.register(names[0], FunctionSpec(backbone="base", adapter="/a"))
            elif action == "remove":
                store.remove(names[0])
            else:
                if action == "report":
                    last = report(at_ns, at_ns + duration_ns, names, incarnation=str(run))
                elif action == "restart":
                    run += 1
                    end_ns = at_ns + duration_ns
                    last = report(end_ns, end_ns, [], incarnation=str(run), is_first=True)
                assert store.record("node", last, {}) == at_ns + duration_ns
            at_ns += duration_ns
        copy()
        store.close()
        for at, before_ns, after_ns in copies:
            check_recovered(at / "ledger.db", {before_ns, after_ns})


def check_recovered(path: Path, possible_ends: set[int]) -> None:
    store = Store(path)
    end = store.end_of("node")
    end_ns = 0 if end is None else end.until_ns
    assert end_ns in possible_ends
    check_sums(path, end_ns)
    store.functions()
    # An agent that knows nothing of the crash goes on from the end that it is told.
    run = "0" if end is None else end.incarnation
    first = report(end_ns, end_ns, [], incarnation=run, is_first=True)
    assert store.record("node", first, {}) == end_ns
    new = report(end_ns, end_ns + SECOND, ["aa"], incarnation=run)
    assert store.record("node", new, {}) == end_ns + SECOND
    assert store.record("node", new, {}) == end_ns + SECOND  # told twice, counted once
    check_sums(path, end_ns + SECOND)
    store.close()


def check_sums(path: Path, end_ns: int) -> None:
    bill = make_bill(*read_ledger(path, 0, 2**62), PriceList(), by_tenant=False)
    assert bill.adds_up
    assert bill.machines.device_ns == end_ns
    assert bill.machines.cpu_ns == NUM_CPUS * end_ns
