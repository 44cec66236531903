"""The threads that load adapters: beside the engine's operations on tensors, and seen as soon as they are done."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from manylora.core.types import Tier
from manylora.vllm import threads
from manylora.vllm.messages import Order
from manylora.vllm.threads import LoadThreads
from manylora.vllm.versions import AdapterRef

READ, COPY = (Order(number, "load", tier, AdapterRef(1, "a")) for number, tier in enumerate((Tier.HOST, Tier.DEVICE)))


def test_loads_have_no_team_of_threads_and_others_keep_theirs() -> None:
    """A second team would make OpenMP's threads sleep between the operations of all steps to come."""
    before, found = torch.get_num_threads(), []
    try:
        torch.set_num_threads(3)
        loads = LoadThreads()
        for order in (READ, COPY):
            loads.submit(order, lambda order: found.append(torch.get_num_threads())).result()
        assert found == [1, 1]
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 3
        loads.shutdown()
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no cores of their own")
def test_loads_use_the_cores_that_are_free_where_the_engine_is_bound_to_one() -> None:
    cores, found = os.sched_getaffinity(0), []
    os.sched_setaffinity(0, {min(cores)})
    try:
        loads = LoadThreads()
        loads.submit(READ, lambda order: found.append(os.sched_getaffinity(0))).result()
        loads.shutdown()
        assert found == [os.sched_getaffinity(os.getppid())]
        assert os.sched_getaffinity(0) == {min(cores)}
    finally:
        os.sched_setaffinity(0, cores)


def test_a_step_without_requests_ends_with_the_next_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "EMPTY_STEP_S", 60.0)
    loads, may_end = LoadThreads(), threading.Event()

    def wait(order: Order) -> None:
        may_end.wait()

    assert not list(loads.done(waits=True)), "nothing is under way"
    loads.num_under_way += 2
    loads.submit(READ, lambda order: None)
    loads.submit(COPY, wait)
    assert list(loads.done(waits=True)) == [(READ, None)]
    assert not list(loads.done(waits=False))
    may_end.set()
    assert list(loads.done(waits=True)) == [(COPY, None)]
    loads.shutdown()


def test_a_load_that_fails_ends_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "EMPTY_STEP_S", 60.0)

    def fail(order: Order) -> None:
        raise OSError("no such disk")

    loads = LoadThreads()
    loads.num_under_way += 1
    loads.submit(READ, fail)
    assert list(loads.done(waits=True)) == [(READ, "OSError: no such disk")]
    loads.shutdown()
