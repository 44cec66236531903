"""Rows have a budget of processor time: those over it are left behind, and the others come as if they were alone."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from manylora.execution.sampling import row_work
from manylora.execution.sampling.row_work import MAX_ROW_S, MAX_STEP_S, TOKEN_S, RowWork, TimeAccount

PATIENCE_S = 30.0


class Rows:
    """Rows whose processor time is told."""

    def __init__(self) -> None:
        self.spent_s: dict[threading.Thread, float] = {}
        self.work = RowWork(self._clock)
        self.ends = threading.Event()
        self.threads: list[threading.Thread] = []

    def _clock(self) -> Callable[[], float]:
        me = threading.current_thread()
        self.spent_s[me] = 0.0
        return lambda: self.spent_s[me]

    def row(self, cpu_s: float, *, returns: bool = True) -> Callable[[], None]:
        def run() -> None:
            me = threading.current_thread()
            self.threads.append(me)
            self.spent_s[me] += cpu_s
            if not returns:
                assert self.ends.wait(PATIENCE_S)

        return run

    def step(self, *rows: tuple[Callable[[], None], TimeAccount], num_tokens: int = 1) -> None:
        self.work.begin([(run, account, num_tokens) for run, account in rows])
        self.work.finish()


@pytest.fixture
def rows() -> Rows:
    return Rows()


def test_a_row_that_never_returns_is_left_behind_and_the_others_come(rows: Rows) -> None:
    hostile, *others = (TimeAccount() for _ in range(20))
    rows.step((rows.row(1.0, returns=False), hostile), *((rows.row(TOKEN_S), one) for one in others))
    assert hostile.is_over
    assert not any(one.is_over for one in others) and len(rows.threads) == 20
    left_behind = rows.threads[0]
    rows.threads.clear()
    rows.step(*((rows.row(TOKEN_S), one) for one in others))
    assert left_behind not in rows.threads and not any(one.is_over for one in others)
    rows.ends.set()
    left_behind.join(PATIENCE_S)
    assert not left_behind.is_alive()


def test_threads_end_without_rows_and_begin_again_with_them(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_work, "IDLE_S", 0.01)
    for _ in range(3):
        rows.step(*((rows.row(TOKEN_S), TimeAccount()) for _ in range(4)))
        assert len(rows.threads) == 4
        for thread in rows.threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        rows.threads.clear()


def test_a_row_that_is_slow_without_processor_time_goes_on(rows: Rows) -> None:
    account = TimeAccount()
    threading.Timer(0.05, rows.ends.set).start()
    rows.step((rows.row(0.0, returns=False), account))
    assert not account.is_over and rows.ends.is_set()


def test_a_row_above_its_time_per_token_ends_within_a_number_of_steps(rows: Rows) -> None:
    hostile, honest = TimeAccount(), TimeAccount()
    num_steps = 0
    while not hostile.is_over:
        rows.step((rows.row(1.4 * TOKEN_S), hostile), (rows.row(TOKEN_S / 2), honest))
        num_steps += 1
    assert num_steps == MAX_ROW_S // (0.4 * TOKEN_S) + 1  # no whole number of steps, where rounding would decide
    assert not honest.is_over and honest.left_s == MAX_ROW_S


def test_one_dear_token_among_cheap_ones_is_no_fault(rows: Rows) -> None:
    account = TimeAccount()
    for cpu_s in (0.8 * MAX_ROW_S, 0.0, 0.0, 0.0, 0.0, 0.8 * MAX_ROW_S):
        rows.step((rows.row(cpu_s), account))
    assert not account.is_over


def test_tokens_that_are_followed_again_have_their_time(rows: Rows) -> None:
    account = TimeAccount()
    rows.step((rows.row(100 * TOKEN_S), account), num_tokens=100)
    assert not account.is_over


def test_rows_together_have_a_budget(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    num = int(MAX_STEP_S // (0.5 * MAX_ROW_S)) + 2
    monkeypatch.setattr(row_work, "MAX_WORKERS", 64)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    dear = [TimeAccount() for _ in range(num)]
    rows.step(*((rows.row(TOKEN_S + 0.5 * MAX_ROW_S, returns=False), one) for one in dear))
    assert all(one.is_over for one in dear), "alone, none of them would be"
    rows.ends.set()
