"""Adapters on their way and steps on them, in every order that hypothesis thinks of.

Pages come one by one, steps begin in between, and either load may break at any page, from host memory or from disk.
A step never hangs, a sequence whose adapter arrived has its exact logits, and the others fail with the reason.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

sys.path.append(str(Path(__file__).parents[2] / "support"))

from live_executor import BLOCK, executor_of, finish, folders, sequence

from manylora.core.adapters.layout import GroupLayout
from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig
from manylora.core.costs.arriving import WaitBudget
from manylora.core.plan import ARRIVING, AdapterLoad, LoadResult, PlannedSequence, StepPlan, StepResult
from manylora.core.ports import EngineParts
from manylora.core.types import AdapterVersion, Tier
from manylora.execution.build import build_parts
from manylora.execution.storage.arrival import Arrival, ArrivingAdapter
from manylora.execution.storage.page_tensor import Link, PageTensor
from manylora.execution.storage.resident import ResidentAdapter

__all__ = ["folders"]

BROKEN = "the link broke"
NUMBERS = count(2)


class ScriptedLink(Link):
    """Copies a page for each permit; the load of an image breaks at its page."""

    def __init__(self, pages: PageTensor) -> None:
        super().__init__(pages)
        self.permits = threading.Semaphore(0)
        self.breaks_at: dict[int, int] = {}  # by number of the load's first device page

    def copy(self, pages: Sequence[int], image: torch.Tensor, announce: Callable[[int], None]) -> None:
        for index, page in enumerate(pages):
            self.permits.acquire()
            if self.breaks_at.get(page) is not None:
                raise OSError(BROKEN)
            self.pages.write([page], image[index : index + 1])
            announce(index + 1)


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path]) -> Iterator[tuple[EngineParts, list[AdapterVersion], list[torch.Tensor]]]:
    """An engine, two adapters, and the logits of ``plan_of`` with both on the device."""
    config = EngineConfig(
        model=ModelConfig(model=str(folders["base"]), device="cpu"),
        memory=MemoryConfig(block_size=BLOCK, num_pages=64),
    )
    parts = build_parts(config, WallClock())
    executor_of(parts)._step_wait_s = math.inf
    versions = [parts.reader.read(name, str(folders[name])) for name in ("one", "two")]
    for number, version in enumerate(versions):
        finish(parts.executor.load_adapter(load_of(version, number), 0.0))
    rows = step(parts, plan_of(versions, is_arriving=False), 1)
    result = finish(rows.work)
    assert isinstance(result, StepResult) and not result.failed
    yield parts, versions, [rows.rows[seq_id] for seq_id in range(3)]
    parts.close()


def load_of(version: AdapterVersion, number: int) -> AdapterLoad:
    first = 40 + 10 * number
    return AdapterLoad(version=version, tier=Tier.DEVICE, pages=tuple(range(first, first + version.num_pages)))


def plan_of(versions: Sequence[AdapterVersion], *, is_arriving: bool = True) -> list[PlannedSequence]:
    plan = [
        sequence([5, 6, 7], 0, 3, 0, versions[0].key, 0),
        sequence([8, 9], 0, 2, 8, versions[1].key, 1),
        sequence([3], 0, 1, 16, None, 2),
    ]
    return [structs.replace(p, placement=ARRIVING) if is_arriving and p.adapter else p for p in plan]


class step:
    """A step in flight and its logits by sequence."""

    def __init__(self, parts: EngineParts, plan: Sequence[PlannedSequence], step_id: int) -> None:
        self.rows: dict[int, torch.Tensor] = {}
        executor = executor_of(parts)
        before = executor.runner.logits_hook

        def note(run: StepPlan, logits: torch.Tensor) -> None:
            if run.step_id == step_id:
                self.rows = dict(zip([part.seq_id % 10 for part in run.sequences], logits, strict=True))
            elif before is not None:
                before(run, logits)

        executor.runner.logits_hook = note
        self.work = executor.launch(StepPlan(step_id=step_id, sequences=tuple(plan)), 0.0)


@given(data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_interleaving_of_pages_and_steps(
    data: st.DataObject, engine: tuple[EngineParts, list[AdapterVersion], list[torch.Tensor]]
) -> None:
    parts, versions, expected = engine
    executor = executor_of(parts)
    executor.runner.logits_hook = None
    copies = executor._copies
    copies.link = link = ScriptedLink(copies.pages)
    for number, version in enumerate(versions):
        executor.drop_adapter(version.key, Tier.DEVICE)
        if data.draw(st.booleans(), label=f"is {number} on disk"):
            executor.drop_adapter(version.key, Tier.HOST)
        breaks_at = data.draw(st.none() | st.integers(0, version.num_pages - 1), label=f"{number} breaks at")
        if breaks_at is not None:
            link.breaks_at[load_of(version, number).pages[breaks_at]] = number
    copies.pages.flat[40:60] = float("nan")
    order = data.draw(st.permutations((0, 1)), label="order of the loads")
    # Drawn before the loads begin: hypothesis may end an example at any draw, and a copy would wait for ever.
    turns = data.draw(st.lists(st.booleans(), max_size=14), label="steps among pages")
    loads = {
        number: executor.load_adapter(load_of(versions[number], number), 0.0)  # from disk where there is no image
        for number in order
    }
    steps: list[step] = []
    for is_step in turns:
        if is_step and len(steps) < 3:
            step_id = next(NUMBERS)  # no sequence comes twice, as in an engine
            plan = [structs.replace(part, seq_id=part.seq_id + 10 * step_id) for part in plan_of(versions)]
            steps.append(step(parts, plan, step_id))
        elif not is_step:
            link.permits.release()
    link.permits.release(1000)

    broken = set(link.breaks_at.values())
    for number, work in loads.items():
        result = finish(work)
        assert isinstance(result, LoadResult)
        assert result.error == (BROKEN if number in broken else None)
    for launched in steps:
        result = finish(launched.work)
        assert isinstance(result, StepResult)
        assert {seq_id % 10 for seq_id in result.failed} == broken
        assert all(BROKEN in reason for reason in result.failed.values())
        assert {seq_id % 10 for seq_id in result.tokens} == {0, 1, 2} - broken == set(launched.rows)
        for seq_id, row in launched.rows.items():
            torch.testing.assert_close(row, expected[seq_id], atol=1e-5, rtol=1e-5)
    # What has failed left no number behind that is none.
    assert copies.pages.flat[[page for n in broken for page in load_of(versions[n], n).pages]].isfinite().all()


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_an_arrival_lets_every_thread_go_on(data: st.DataObject) -> None:
    """Whatever ends it first; a thread that waited for pages that came sees no failure before them."""
    num_pages = data.draw(st.integers(1, 6))
    steps = data.draw(st.lists(st.integers(0, num_pages), max_size=6).map(sorted), label="counts")
    fails = data.draw(st.booleans(), label="fails") or not steps or steps[-1] < num_pages
    arrival = Arrival(num_pages)
    seen: list[tuple[int, str | None]] = []
    changes: list[int] = []
    arrival.watch(lambda: changes.append(arrival.num_arrived))
    threads = [
        threading.Thread(target=lambda n=n: (arrival.wait(n), seen.append((n, arrival.error))), daemon=True)
        for n in data.draw(st.lists(st.integers(0, num_pages), max_size=4), label="waits")
    ]
    for thread in threads:
        thread.start()
    for num_arrived in steps:
        arrival.advance(num_arrived, f"event {num_arrived}")
    if fails:
        arrival.fail("gone")
        arrival.advance(num_pages)  # too late, unless all were there
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    last = steps[-1] if steps else 0
    assert arrival.num_arrived == last and arrival.is_complete == (last == num_pages)
    assert arrival.error == (None if last == num_pages else "gone")
    assert changes[0] == 0 and changes == sorted(changes) and changes[-1] == last
    for wanted in range(last + 1):
        first = next((n for n in steps if n >= wanted), None)
        assert arrival.wait(wanted) == (None if first is None else f"event {first}")


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_waits_for_the_table_of_an_adapter_that_is_late_or_gone(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels find weights by the table: before that was copied, it holds addresses of anything."""
    awaited: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_event=awaited.append))
    arrival = Arrival(2)
    arrival.advance(0, "table")
    if fails:
        arrival.fail("gone")
    weights, groups = cast(ResidentAdapter, None), {"q": cast(GroupLayout, SimpleNamespace(num_pages_needed=1))}
    adapter = ArrivingAdapter(weights, groups, arrival, WaitBudget(0.0))
    adapter.wait("q")
    assert awaited == ["table"]
    assert adapter.is_late == (not fails)


class _Event:
    """A copy's event, as a GPU has it."""

    def __init__(self) -> None:
        self.has_happened = False

    def query(self) -> bool:
        return self.has_happened


def test_the_time_of_a_copy_in_the_stream_is_extrapolated_and_a_failed_one_never_ends() -> None:
    arrival, events = Arrival(4), [_Event() for _ in range(3)]
    assert arrival.arrives_in_s(0) == math.inf  # it has not begun
    for num_pages, event in zip((0, 2, 3), events, strict=True):
        arrival.advance(num_pages, event)
    assert arrival.arrives_in_s(1) == math.inf  # of no page it is known how long it takes
    events[0].has_happened = events[1].has_happened = True
    assert arrival.arrives_in_s(0) == arrival.arrives_in_s(2) == 0.0
    assert 0.0 < arrival.arrives_in_s(3) < math.inf
    assert arrival.arrives_in_s(4) == math.inf
    events[2].has_happened = True
    assert arrival.arrives_in_s(3) == 0.0
    arrival.fail("gone")
    assert arrival.arrives_in_s(2) == math.inf  # its pages will have another owner
