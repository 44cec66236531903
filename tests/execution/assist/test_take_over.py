"""Assisted steps whose adapters arrive meanwhile, in every order that hypothesis thinks of.

Pages arrive while workers compute: an exchange lets some through, and goes on once they are there. So each group's
decision follows from the draw, and is compared with it. Either load may break at any page.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

sys.path.append(str(Path(__file__).parents[2] / "support"))

pytest.importorskip("numba")
from live_executor import BLOCK, executor_of, finish, folders, sequence
from staged_link import BROKEN, Stage, StagedLink
from thread_stream import ThreadStream

from manylora.core.adapters.shape import BaseShape
from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig
from manylora.core.plan import IN_HOST, AdapterLoad, LoadResult, PlannedSequence, StepPlan, StepResult
from manylora.core.types import AdapterVersion, Tier
from manylora.execution.assist.exchange import Assistant
from manylora.execution.build import build_parts

__all__ = ["folders"]

NUMBERS = count(2)


class Rig:
    """An engine with one worker, two adapters in host memory, and the logits of both on the device."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.stage = Stage()

        def start(device: torch.device, base: BaseShape) -> Assistant:
            return Assistant(ThreadStream(), base, num_workers=1, serve=self.stage.source, exchange_limit_s=600.0)

        config = EngineConfig(
            model=ModelConfig(model=str(folders["base"]), device="cpu"),
            memory=MemoryConfig(block_size=BLOCK, num_pages=64),
        )
        self.parts = build_parts(config, WallClock(), open_assistant=start)
        self.executor = executor_of(self.parts)
        self.versions = [self.parts.reader.read(name, str(folders[name])) for name in ("one", "two")]
        for version in self.versions:
            assert self.finish_load(self.load(version)) is None
        self.expected, result = self.run(self.plan(is_cold=False))
        assert not result.failed
        self.executor._copies.link = StagedLink(self.executor._copies.pages, self.stage)

    def pages_of(self, version: AdapterVersion) -> tuple[int, ...]:
        first = 40 + 10 * self.versions.index(version)
        return tuple(range(first, first + version.num_pages))

    def load(self, version: AdapterVersion) -> object:
        load = AdapterLoad(version=version, tier=Tier.DEVICE, pages=self.pages_of(version))
        return self.executor.load_adapter(load, 0.0)

    @staticmethod
    def finish_load(work: object) -> str | None:
        result = finish(work)  # type: ignore[arg-type]
        assert isinstance(result, LoadResult)
        return result.error

    def plan(self, *, is_cold: bool = True) -> list[PlannedSequence]:
        one, two = (version.key for version in self.versions)
        plan = [
            sequence([5, 6, 7], 0, 3, 0, one, 0),
            sequence([8, 9], 0, 2, 8, two, 1),
            sequence([3], 0, 1, 16, None, 2),
        ]
        return [structs.replace(part, placement=IN_HOST) if is_cold and part.adapter else part for part in plan]

    def run(self, plan: Sequence[PlannedSequence]) -> tuple[dict[int, torch.Tensor], StepResult]:
        rows: dict[int, torch.Tensor] = {}
        step_id = next(NUMBERS)

        def note(run: StepPlan, logits: torch.Tensor) -> None:
            if run.step_id == step_id:
                rows.update(zip([part.seq_id % 10 for part in run.sequences], logits, strict=True))

        self.executor.runner.logits_hook = note
        # No sequence comes twice, as in an engine.
        parts = tuple([structs.replace(part, seq_id=part.seq_id + 10 * step_id) for part in plan])
        result = finish(self.executor.launch(StepPlan(step_id=step_id, sequences=parts), 0.0))
        assert isinstance(result, StepResult)
        return rows, result

    def check(self, rows: dict[int, torch.Tensor]) -> None:
        assert set(rows) == {0, 1, 2}
        for seq_id in rows:
            torch.testing.assert_close(rows[seq_id], self.expected[seq_id], atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def rig(folders: dict[str, Path]) -> Iterator[Rig]:
    rig = Rig(folders)
    yield rig
    rig.stage.let_all_through()
    rig.parts.close()


def count_exchanges(rig: Rig, order: Sequence[int], before: int, through: Sequence[int]) -> int:
    """Return the exchanges of a step with these pages before it and within each: those of groups with rows left."""
    needed = {}
    for number in order:
        image = rig.executor._host.get(rig.versions[number].key)
        assert image is not None
        needed[number] = [group.num_pages_needed for group in image.layout.groups.values()]
    num_there, num_exchanges = before, 0
    for group in range(len(needed[0])):
        first, second = order
        first_there = min(num_there, rig.versions[first].num_pages)
        there = {first: first_there, second: num_there - first_there}
        if any(there[number] < needed[number][group] for number in order):
            num_there += through[num_exchanges] if num_exchanges < len(through) else 0
            num_exchanges += 1
    return num_exchanges


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_device_takes_over_what_has_arrived_and_rows_stay_right(data: st.DataObject, rig: Rig) -> None:
    stage, executor = rig.stage, rig.executor
    num_pages = [version.num_pages for version in rig.versions]
    order = data.draw(st.permutations((0, 1)), label="order of the loads")
    before = data.draw(st.integers(0, sum(num_pages)), label="pages there before the step")
    through = data.draw(st.lists(st.integers(0, 3), max_size=8), label="pages by exchange")
    breaks_at = data.draw(st.none() | st.integers(0, sum(num_pages) - 1), label="page that breaks")
    pages = [page for number in order for page in rig.pages_of(rig.versions[number])]
    for version in rig.versions:
        executor.drop_adapter(version.key, Tier.DEVICE)
    executor._copies.pages.flat[40:60] = float("nan")
    # A page that breaks ends its adapter's load; those behind it are the other adapter's, if it comes second.
    stage.breaks_at = set() if breaks_at is None else {pages[breaks_at]}
    broken = None if breaks_at is None else order[breaks_at >= num_pages[order[0]]]
    handled = [page for page in pages if broken is None or page not in rig.pages_of(rig.versions[broken])]
    if broken is not None:
        own = rig.pages_of(rig.versions[broken])
        handled = sorted([*handled, *own[: own.index(pages[breaks_at]) + 1]], key=pages.index)  # type: ignore[index]
    before = min(before, len(handled))
    left = len(handled) - before
    for wanted in through:
        stage.num_let_through.append(min(wanted, left))
        left -= stage.num_let_through[-1]
    in_step = list(stage.num_let_through)
    stage.source.num_served = 0

    works = {number: rig.load(rig.versions[number]) for number in order}
    for _ in range(before):
        stage.permits.release()
        stage.handled.acquire()
    try:
        rows, result = rig.run(rig.plan())
    finally:
        stage.let_all_through()
        errors = {number: rig.finish_load(work) for number, work in works.items()}
        stage.clear()
    assert not result.failed
    rig.check(rows)
    if broken is None:
        assert stage.source.num_served == count_exchanges(rig, order, before, in_step)
    assert errors == {number: BROKEN if number == broken else None for number in works}
    # The step after it takes from the pages all that is there, and from the image what has failed.
    stage.source.num_served = 0
    rows, result = rig.run(rig.plan())
    rig.check(rows)
    assert (stage.source.num_served == 0) == (broken is None)


def test_an_adapter_that_arrives_between_the_plan_and_the_step_is_read_from_its_pages(rig: Rig) -> None:
    """As with plan-ahead: the step is launched while another one runs."""
    may_begin = threading.Event()
    for version in rig.versions:
        rig.executor.drop_adapter(version.key, Tier.DEVICE)
    works = [rig.load(version) for version in rig.versions]
    rig.executor._steps.submit(may_begin.wait)
    launched: Future[tuple[dict[int, torch.Tensor], StepResult]] = Future()
    thread = threading.Thread(target=lambda: launched.set_result(rig.run(rig.plan())))
    rig.stage.source.num_served = 0
    thread.start()
    rig.stage.let_all_through()
    assert [rig.finish_load(work) for work in works] == [None, None]
    may_begin.set()
    rows, result = launched.result(timeout=60)
    thread.join()
    rig.stage.clear()
    assert not result.failed and rig.stage.source.num_served == 0
    rig.check(rows)


def test_pages_of_a_failed_load_are_given_back_behind_the_step_that_has_taken_over_from_them(rig: Rig) -> None:
    stage, (one, two) = rig.stage, rig.versions
    for version in rig.versions:
        rig.executor.drop_adapter(version.key, Tier.DEVICE)
    stage.breaks_at = {rig.pages_of(one)[-1]}
    stage.num_let_through = [one.num_pages]  # while the first exchange is computed
    stage.source.num_served = 0
    works: list[Any] = [rig.load(one), rig.load(two)]
    polled: list[object] = []
    stage.during = lambda number: polled.append(works[0].poll(0.0))
    rows, result = rig.run(rig.plan())
    stage.during = lambda number: None
    assert len(polled) == stage.source.num_served > 1 and not any(polled)
    assert rig.finish_load(works[0]) == BROKEN
    rig.check(rows)
    stage.let_all_through()
    assert rig.finish_load(works[1]) is None and not result.failed
    stage.clear()
