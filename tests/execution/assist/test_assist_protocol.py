"""Every interleaving of stream, worker, supervisor and launching thread: never a hang, never a stale row.

The explorer holds no copy of the protocol. The stream's operations are recorded from a ``Worker``. A worker's
decisions, a wait's condition and the supervisor's rules are the functions of ``assist.protocol``, which the
implementation compiles. Reads of single words are steps of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manylora.execution.assist import protocol
from manylora.execution.assist.protocol import FAR, MODULUS, RELEASED, SERVE, STEP

pytest.importorskip("numba")
from manylora.execution.assist.words import DONE, POSTED, TASK_FIELDS
from manylora.execution.assist.workers import DeviceStream, Worker, WorkerTask

Rules = SimpleNamespace


class RecordingStream:
    """Writes a worker's operations down, by name."""

    def __init__(self) -> None:
        self.operations: list[tuple[str, int]] = []

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def write_value(self, words: Any, index: int, value: int) -> None:
        assert index == POSTED
        self.operations.append(("write", value))

    def wait_value(self, words: Any, index: int, value: int) -> None:
        assert index == DONE
        self.operations.append(("wait", value))


def stream_program(num_exchanges: int, first: int) -> list[tuple[str, int]]:
    """Return the stream's operations of a step, as a worker enqueues them, with the copies around them."""
    stream = RecordingStream()
    worker = Worker(cast(DeviceStream, stream), 2 * num_exchanges, serve=lambda words, tasks, number: number)
    worker._number = first
    task = WorkerTask(torch.empty(0), (), None, (), (0,) * TASK_FIELDS)
    for _ in range(num_exchanges):
        number = (worker._number + STEP) % MODULUS
        stream.operations.append(("send", number))
        assert worker.post(task) == number
        worker.wait(number)
        stream.operations.append(("take", number))
    worker.close()
    return stream.operations


@dataclass(frozen=True, slots=True)
class State:
    """One worker and the step it is in. Memory holds the number of the exchange that it belongs to; -1 is zeros."""

    step: int = 0
    launched: int = 0  # operations that are enqueued
    executed: int = 0
    is_begun: bool = False
    is_ended: bool = False
    x: int = -2
    result: int = -2
    taken: tuple[tuple[int, int], ...] = ()
    posted: int = 0
    done: int = 0
    last: int = 0
    phase: str = "sleep"
    number: int = 0
    seen: tuple[int, ...] = ()
    health: str = "well"  # or "slow", which may end, or "dead"
    watch: str = "idle"
    watched: int = 0


class Explorer:
    """All states of a few steps; ``rules`` are those of the protocol, or wrong ones."""

    def __init__(self, rules: Rules, first: int, num_steps: int = 2, num_exchanges: int = 2) -> None:
        self.rules = rules
        self.first = first
        size = STEP * num_exchanges
        self.programs = [stream_program(num_exchanges, (first + size * step) % MODULUS) for step in range(num_steps)]
        self.ends = [(first + size * (step + 1)) % MODULUS for step in range(num_steps)]
        self.num_failed = self.num_clean = 0

    def explore(self) -> int:
        """Visit every reachable state and check it; return their number."""
        start = State(posted=self.first, done=self.first, last=self.first, number=self.first)
        seen, todo = {start}, [start]
        while todo:
            state = todo.pop()
            if state.step == len(self.programs):
                continue
            moves = list(self.moves(state))
            assert any(is_certain for is_certain, _ in moves), f"hang: {state}"
            for _, move in moves:
                if move not in seen:
                    seen.add(move)
                    todo.append(move)
        return len(seen)

    def moves(self, s: State) -> Iterator[tuple[bool, State]]:
        """Yield the next states, each with whether it is certain to come if nothing else happens."""
        yield from self.launching(s)
        yield from self.stream(s)
        for move in self.worker(s):
            yield s.health == "well", move
        if s.health == "well":
            yield False, replace(s, health="dead")
            yield False, replace(s, health="slow")
        if s.health == "slow":
            yield False, replace(s, health="recovered")
        yield from self.supervisor(s)

    def launching(self, s: State) -> Iterator[tuple[bool, State]]:
        program = self.programs[s.step]
        if not s.is_begun:
            number = self.ends[s.step - 1] if s.step else self.first
            yield True, replace(s, is_begun=True, last=(number + FAR) % MODULUS)
        elif s.launched < len(program):
            yield True, replace(s, launched=s.launched + 1)
        elif not s.is_ended:
            # The device executes the step, then the launching thread reads the outcome.
            if s.executed == len(program):
                yield True, replace(s, is_ended=True, last=self.ends[s.step])
        else:
            yield True, self.finish(s)

    def finish(self, s: State) -> State:
        end = self.ends[s.step]
        if self.rules.has_failed(s.done, end):
            self.num_failed += 1
            return replace(State(), step=len(self.programs))  # the worker is replaced, its memory with it
        self.num_clean += 1
        assert all(number == value for number, value in s.taken), f"stale row: {s}"
        if protocol.is_held(s.done) or s.health == "dead":
            return replace(State(), step=len(self.programs))
        return replace(s, step=s.step + 1, launched=0, executed=0, is_begun=False, is_ended=False, taken=())

    def stream(self, s: State) -> Iterator[tuple[bool, State]]:
        if s.executed == s.launched:
            return
        kind, number = self.programs[s.step][s.executed]
        after = replace(s, executed=s.executed + 1)
        if kind == "send":
            yield True, replace(after, x=number)
        elif kind == "write":
            yield True, replace(after, posted=number)
        elif kind == "take":
            yield True, replace(after, taken=(*s.taken, (number, s.result)))
        elif protocol.is_reached(s.done, number):
            yield True, after

    def worker(self, s: State) -> Iterator[State]:
        if s.health in ("dead", "slow") or s.phase == "left":
            return
        if s.phase == "sleep":
            if s.is_begun and not s.is_ended:
                yield replace(s, phase="look", seen=())
        elif s.phase == "look":
            word = (s.posted, s.last, s.done)[len(s.seen)]
            if len(s.seen) < 2:
                yield replace(s, seen=(*s.seen, word))
                return
            posted, last = s.seen
            action = self.rules.decide(posted, word, last, s.number)
            phase = {protocol.POLL: "look", SERVE: "compute", protocol.REST: "sleep", protocol.LEAVE: "left"}[action]
            after = replace(s, phase=phase, seen=())
            # A look that finds nothing is no move, unless another look would find something.
            if action != protocol.POLL or (posted, last) != (s.posted, s.last):
                yield after
        elif s.phase == "compute":
            yield replace(s, phase="write", seen=(s.x,))
        elif s.phase == "write":
            yield replace(s, phase="swap", result=s.seen[0], seen=())
        elif s.done == s.number:
            number = (s.number + STEP) % MODULUS
            yield replace(s, phase="look", done=number, number=number)
        else:
            yield replace(s, phase="left")

    def supervisor(self, s: State) -> Iterator[tuple[bool, State]]:
        is_dead = s.health == "dead" or s.phase == "left"
        if s.watch == "idle" and not protocol.is_held(s.done):
            is_owing = protocol.is_reached(s.posted, (s.done + STEP) % MODULUS)
            if s.is_begun and (is_dead or is_owing):
                yield is_dead or s.health != "well", replace(s, watch="hold", watched=s.done)
        elif s.watch == "hold":
            held = self.rules.hold(s.watched)
            yield True, replace(s, watch="idle", done=held if s.done == s.watched else s.done)
        elif s.watch == "idle" and self.rules.may_release(s.posted, s.done, s.last):
            yield True, replace(s, watch="release", result=-1)
        elif s.watch == "release":
            yield True, replace(s, watch="idle", done=(s.done + RELEASED) % MODULUS)


def right_rules(**others: Callable[..., Any]) -> Rules:
    return Rules(
        decide=others.get("decide", protocol.decide),
        hold=others.get("hold", lambda done: (done + 1) % MODULUS),
        may_release=others.get("may_release", protocol.may_release),
        has_failed=others.get("has_failed", protocol.has_failed),
    )


@pytest.mark.parametrize("first", [0, MODULUS - 2 * STEP])
def test_no_interleaving_hangs_or_takes_a_stale_row(first: int) -> None:
    explorer = Explorer(right_rules(), first)
    assert explorer.explore() > 1000
    assert explorer.num_failed > 10 and explorer.num_clean > 10


def release_early(posted: int, done: int, last: int) -> bool:
    """Zero the result of a held worker at once, be it that of an exchange that it completed."""
    owed = (protocol.completed(done, last) + STEP) % MODULUS
    return protocol.is_held(done) and not protocol.is_reached(done, owed)


@pytest.mark.parametrize(
    "wrong",
    [
        {"may_release": release_early},
        {"may_release": lambda posted, done, last: False},
        {"has_failed": lambda done, last: False},
        {"hold": lambda done: (done + 1 + MODULUS // 2) % MODULUS},  # a wait for a completed exchange does not pass
    ],
)
def test_explorer_finds_wrong_rules(wrong: dict[str, Callable[..., Any]]) -> None:
    with pytest.raises(AssertionError, match=r"hang|stale row"):
        Explorer(right_rules(**wrong), 0).explore()


@given(st.integers(0, MODULUS // STEP - 1), st.integers(0, 1000), st.integers(0, 1000))
def test_numbers_wrap(first: int, num_done: int, num_owed: int) -> None:
    done = (first + num_done) * STEP % MODULUS
    last = (first + num_done + num_owed) * STEP % MODULUS
    assert protocol.is_reached(last, done)
    assert protocol.is_reached(done, last) == (num_owed == 0)
    held, released = (done + 1) % MODULUS, (done + 1 + RELEASED) % MODULUS
    for word in (done, held, released):
        assert protocol.completed(word, last) == done
        assert protocol.has_failed(word, last) == (num_owed > 0)
        assert protocol.is_held(word) == (word != done)
        assert protocol.is_reached(word, done)
    assert protocol.is_reached(held, last) == (num_owed == 0)
    assert protocol.is_reached(released, last)
    assert protocol.may_release(last, held, last) == (num_owed > 0)
    assert not protocol.may_release(last, released, last)
    assert not protocol.may_release(done, held, (done + FAR) % MODULUS)


def test_implementation_compiles_these_rules() -> None:
    from manylora.execution.assist import words

    assert words.decide.py_func is protocol.decide
    assert words.is_reached.py_func is protocol.is_reached
    array = np.full(words.NUM_WORDS, MODULUS - 2, np.uint32)
    assert words.swap_word(array, DONE, MODULUS - 2, 0) and words.read_word(array, DONE) == 0
    assert not words.swap_word(array, DONE, MODULUS - 2, 2)
    assert words.is_reached(0, MODULUS - 2) and not words.is_reached(MODULUS - 2, 0)
