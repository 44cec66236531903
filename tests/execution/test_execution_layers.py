"""Steps on adapters that are on their way: each layer is waited for, and a failed load ends its own sequences only."""

from __future__ import annotations

import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from live_executor import (
    READER_PROCESS,
    clock,
    executor_of,
    finish,
    folders,
    load,
    pages_for,
    parts,
    run,
    save_head_adapter,
    sequence,
)
from msgspec import structs
from safetensors.torch import load_file, save_file

from manylora.core.costs.arriving import WaitBudget
from manylora.core.plan import ARRIVING, AdapterLoad, LoadResult, PlannedSequence, PromptRows, StepPlan, StepResult
from manylora.core.ports import EngineParts
from manylora.core.types import AdapterVersion, SamplingParams, Tier
from manylora.execution.lora.kernels import LORA_KERNELS
from manylora.execution.storage.arrival import Arrival
from manylora.execution.storage.page_tensor import Link, PageTensor

__all__ = ["clock", "folders", "parts"]

PROMPTS = ([5, 6, 7], [8, 9], [5, 6, 7])


class GatedLink(Link):
    """Copies one page for each permit; breaks instead once ``error`` is set."""

    def __init__(self, pages: PageTensor) -> None:
        super().__init__(pages)
        self.permits = threading.Semaphore(0)
        self.error: str | None = None

    def copy(self, pages: Sequence[int], image: torch.Tensor, announce: Callable[[int], None]) -> None:
        for index in range(len(pages)):
            self.permits.acquire()
            if self.error is not None:
                raise OSError(self.error)
            self.pages.write(pages[index : index + 1], image[index : index + 1])
            announce(index + 1)

    def break_with(self, error: str) -> None:
        self.error = error
        self.permits.release()

    def close(self) -> None:
        self.permits.release(10_000)


@pytest.fixture
def link(parts: EngineParts) -> Iterator[GatedLink]:
    """The executor's link, gated; pages hold NaN before, so that no step may read one too early."""
    executor_of(parts)._step_wait_s = math.inf
    copies = executor_of(parts)._copies
    copies.link = link = GatedLink(copies.pages)
    copies.pages.flat[40:] = float("nan")
    yield link
    link.close()


def start(version: AdapterVersion, tier: Tier, parts: EngineParts) -> Callable[[], LoadResult]:
    pages = pages_for(version) if tier is Tier.DEVICE else ()
    work = parts.executor.load_adapter(AdapterLoad(version=version, tier=tier, pages=pages), 0.0)

    def result() -> LoadResult:
        found = finish(work)
        assert isinstance(found, LoadResult)
        return found

    return result


def batch(version: AdapterVersion | None, other: AdapterVersion) -> list[PlannedSequence]:
    """A sequence of ``version`` on its way, one of the base, and one of an adapter that is on the device."""
    first = sequence(PROMPTS[0], 0, 3, 0, version.key if version else None, 0)
    return [
        structs.replace(first, placement=ARRIVING) if version else first,
        sequence(PROMPTS[1], 0, 2, 8, None, 1),
        sequence(PROMPTS[2], 0, 3, 16, other.key, 2),
    ]


class Launched:
    """A step in flight, and its logits."""

    def __init__(
        self,
        parts: EngineParts,
        plan: Sequence[PlannedSequence],
        step_id: int = 1,
        prompt_rows: tuple[PromptRows, ...] = (),
    ) -> None:
        executor = executor_of(parts)
        self.rows: dict[int, torch.Tensor] = {}

        def note(plan: StepPlan, logits: torch.Tensor) -> None:
            sampled = [part.seq_id for part in plan.sequences if part.is_sampled]
            self.rows = dict(zip(sampled, logits, strict=True))

        executor.runner.logits_hook = note
        step = StepPlan(step_id=step_id, sequences=tuple(plan), prompt_rows=prompt_rows)
        self.work = executor.launch(step, 0.0)

    def result(self) -> StepResult:
        found = finish(self.work)
        assert isinstance(found, StepResult)
        return found


@pytest.fixture
def versions(parts: EngineParts, folders: dict[str, Path], tmp_path: Path) -> tuple[AdapterVersion, AdapterVersion]:
    """An adapter in a folder of its own, in host memory, and another one on the device."""
    one = parts.reader.read("one", str(shutil.copytree(folders["one"], tmp_path / "one")))
    two = parts.reader.read("two", str(folders["two"]))
    assert load(parts, two, Tier.DEVICE, tuple(range(30, 30 + two.num_pages))) is None
    return one, two


Versions = tuple[AdapterVersion, AdapterVersion]


@pytest.fixture
def expected(parts: EngineParts, versions: Versions) -> dict[int, torch.Tensor]:
    """Logits of ``batch`` by sequence, with both adapters on the device."""
    one, two = versions
    assert load(parts, one, Tier.DEVICE, pages_for(one)) is None
    plan = batch(one, two)
    plan[0] = sequence(PROMPTS[0], 0, 3, 0, one.key, 0)
    rows = dict(enumerate(run(parts, *plan)))
    parts.executor.drop_adapter(one.key, Tier.DEVICE)
    return rows


@pytest.mark.parametrize("kernel", ["grouped", "naive", "reference"])
def test_a_step_waits_for_each_layer(
    kernel: str,
    parts: EngineParts,
    versions: Versions,
    expected: dict[int, torch.Tensor],
    link: GatedLink,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor_of(parts).runner._step, "kernel", LORA_KERNELS[kernel])
    one, two = versions
    loaded = start(one, Tier.DEVICE, parts)
    step = Launched(parts, batch(one, two))
    for _ in range(one.num_pages):
        assert step.work.poll(0.0) is None
        link.permits.release()
    assert set(step.result().tokens) == {0, 1, 2} and not step.result().failed
    assert loaded().error is None
    for seq_id, row in expected.items():
        torch.testing.assert_close(step.rows[seq_id], row, atol=1e-5, rtol=1e-5)
    # The step after it needs no waiting, and gives the same.
    again = Launched(parts, batch(one, two), 2)
    assert not again.result().failed
    torch.testing.assert_close(again.rows[0], step.rows[0], atol=0, rtol=0)


def test_the_image_may_leave_the_host_tier_while_a_step_waits(
    parts: EngineParts, versions: Versions, expected: dict[int, torch.Tensor], link: GatedLink
) -> None:
    one, two = versions
    loaded = start(one, Tier.DEVICE, parts)
    step = Launched(parts, batch(one, two))
    link.permits.release()
    parts.executor.drop_adapter(one.key, Tier.HOST)
    assert step.work.poll(0.0) is None
    link.close()
    assert not step.result().failed and loaded().error is None
    torch.testing.assert_close(step.rows[0], expected[0], atol=0, rtol=0)


@pytest.mark.parametrize("at_page", [0, 1])
def test_an_adapter_that_leaves_after_such_a_step_is_loaded_anew(
    at_page: int, parts: EngineParts, versions: Versions, expected: dict[int, torch.Tensor], link: GatedLink
) -> None:
    """The views of the step before are not used again: its pages may have had another owner meanwhile."""
    one, two = versions
    loaded = start(one, Tier.DEVICE, parts)
    step = Launched(parts, batch(one, two))
    for _ in range(at_page):
        link.permits.release()
    assert step.work.poll(0.0) is None
    link.close()
    assert not step.result().failed and loaded().error is None
    parts.executor.drop_adapter(one.key, Tier.DEVICE)
    executor_of(parts)._copies.pages.flat[list(pages_for(one))] = float("nan")
    assert start(one, Tier.DEVICE, parts)().error is None
    again = Launched(parts, batch(one, two), 2)
    assert not again.result().failed
    torch.testing.assert_close(again.rows[0], expected[0], atol=0, rtol=0)


def test_steps_of_others_do_not_wait(parts: EngineParts, versions: Versions, link: GatedLink) -> None:
    one, two = versions
    loaded = start(one, Tier.DEVICE, parts)
    assert set(Launched(parts, batch(None, two)).result().tokens) == {0, 1, 2}
    link.close()
    assert loaded().error is None


def test_tables_are_written_before_the_weights_are_there(folders: dict[str, Path]) -> None:
    pytest.importorskip("triton")
    from test_triton_engine import build

    parts = build(folders, "graphs")
    try:
        one, two = (parts.reader.read(name, str(folders[name])) for name in ("one", "two"))
        assert load(parts, two, Tier.DEVICE, tuple(range(30, 30 + two.num_pages))) is None
        assert load(parts, one, Tier.DEVICE, pages_for(one)) is None
        plan = [sequence([5], 0, 1, 0, one.key, 0), sequence([8], 0, 1, 16, two.key, 1)]
        rows = run(parts, *plan)
        parts.executor.drop_adapter(one.key, Tier.DEVICE)
        copies = executor_of(parts)._copies
        copies.link = link = GatedLink(copies.pages)
        copies.pages.flat[40:] = float("nan")
        loaded = start(one, Tier.DEVICE, parts)
        step = Launched(parts, [structs.replace(plan[0], placement=ARRIVING), plan[1]])
        link.close()
        assert not step.result().failed and loaded().error is None
        for seq_id in (0, 1):
            torch.testing.assert_close(step.rows[seq_id], rows[seq_id], atol=1e-5, rtol=1e-5)
    finally:
        parts.close()


def test_both_loads_and_the_step_may_begin_at_once(
    parts: EngineParts, versions: Versions, expected: dict[int, torch.Tensor], link: GatedLink
) -> None:
    """From disk: the copy follows the reader, and the step the copy."""
    one, two = versions
    parts.executor.drop_adapter(one.key, Tier.HOST)
    read, copied = start(one, Tier.HOST, parts), start(one, Tier.DEVICE, parts)
    step = Launched(parts, batch(one, two))
    link.close()
    assert not step.result().failed
    assert read().error is None and copied().error is None
    torch.testing.assert_close(step.rows[0], expected[0], atol=0, rtol=0)


def test_a_lost_image_is_read_on_the_way(
    parts: EngineParts, versions: Versions, expected: dict[int, torch.Tensor], link: GatedLink
) -> None:
    one, two = versions
    executor_of(parts)._host.drop(one.key)  # behind the executor's back
    copied = start(one, Tier.DEVICE, parts)
    step = Launched(parts, batch(one, two))
    link.close()
    assert not step.result().failed and copied().error is None
    torch.testing.assert_close(step.rows[0], expected[0], atol=0, rtol=0)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_step_goes_on_without_the_sequences_of_an_adapter_that_is_late(
    has_begun: bool, parts: EngineParts, versions: Versions, expected: dict[int, torch.Tensor], link: GatedLink
) -> None:
    """Its layout is not known yet (a slow registry), or a page of it does not come; the load goes on."""
    one, two = versions
    executor = executor_of(parts)
    executor._step_wait_s = 0.0
    release = threading.Event()
    if not has_begun:
        read_again = executor._reader.read_again
        executor._reader.read_again = lambda *args, **options: release.wait() and read_again(*args, **options)
        parts.executor.drop_adapter(one.key, Tier.HOST)
        start(one, Tier.HOST, parts)
    loaded = start(one, Tier.DEVICE, parts)
    if has_begun:
        executor._arriving[one.key]._views.result()
    plan = batch(one, two)
    step = Launched(parts, plan)
    ahead = [structs.replace(part, start=len(part.tokens), num_tokens=1, awaits_token=True) for part in plan]
    after = executor.launch(StepPlan(step_id=2, sequences=tuple(ahead)), 0.0)
    result = step.result()
    assert result.late == {0} and not result.failed and set(result.tokens) == {1, 2}
    found = finish(after)
    assert isinstance(found, StepResult) and set(found.tokens) == {1, 2} and not found.failed
    release.set()
    link.close()
    assert loaded().error is None
    plan[0] = structs.replace(plan[0], pages=[*plan[0].pages])  # as of a sequence that was sent back
    again = Launched(parts, plan, 3)
    assert not again.result().late
    for seq_id, row in expected.items():
        torch.testing.assert_close(again.rows[seq_id], row, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("others", [[1], [1, 2]])
def test_a_step_planned_behind_one_that_left_out_all_of_an_adapter_neither_has_it_nor_waits_for_it(
    others: list[int], parts: EngineParts, versions: Versions, link: GatedLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = versions
    executor = executor_of(parts)
    patience = iter((0.0, math.inf))  # of the two steps
    monkeypatch.setattr("manylora.execution.executor.WaitBudget", lambda wait_s: WaitBudget(next(patience)))
    loaded = start(one, Tier.DEVICE, parts)
    executor._arriving[one.key]._views.result()
    plan = [batch(one, two)[place] for place in (0, *others)]
    step = Launched(parts, plan)
    ahead = [structs.replace(part, start=len(part.tokens), num_tokens=1, awaits_token=True) for part in plan]
    after = executor.launch(StepPlan(step_id=2, sequences=tuple(ahead)), 0.0)
    assert step.result().late == {0}
    found = finish(after)
    assert isinstance(found, StepResult) and set(found.tokens) == {*others} and not found.failed
    link.close()
    assert loaded().error is None


def check_only_the_first_failed(
    step: Launched, expected: dict[int, torch.Tensor], reason: str, parts: EngineParts, version: AdapterVersion
) -> None:
    result = step.result()
    assert set(result.failed) == {0} and reason in result.failed[0], result
    assert set(result.tokens) == set(step.rows) == {1, 2}
    for seq_id in (1, 2):
        torch.testing.assert_close(step.rows[seq_id], expected[seq_id], atol=1e-5, rtol=1e-5)
    assert executor_of(parts)._copies.pages.flat[list(pages_for(version))].isfinite().all()


def test_a_copy_that_fails_ends_its_own_sequences(
    parts: EngineParts, versions: Versions, expected: dict[int, torch.Tensor], link: GatedLink
) -> None:
    one, two = versions
    loaded = start(one, Tier.DEVICE, parts)
    step = Launched(parts, batch(one, two))
    # Planned ahead: one more token of each, which the first sequence will not have.
    ahead = [structs.replace(part, start=len(part.tokens), num_tokens=1, awaits_token=True) for part in batch(one, two)]
    after = executor_of(parts).launch(StepPlan(step_id=2, sequences=tuple(ahead)), 0.0)
    link.permits.release(2)
    link.break_with("the link broke")
    assert loaded().error == "the link broke"
    found = finish(after)
    assert isinstance(found, StepResult) and set(found.tokens) == {1, 2}
    assert set(step.result().failed) == {0}
    # A step launched later fails as well, without waiting; and so does the last sequence of a step.
    late = Launched(parts, batch(one, two), 3)
    check_only_the_first_failed(late, expected, "the link broke", parts, one)
    alone = Launched(parts, [structs.replace(batch(one, two)[0], seq_id=7)], 4)
    assert set(alone.result().failed) == {7} and not alone.result().tokens
    # The pages may be tried again.
    link.error = None
    link.close()
    assert start(one, Tier.DEVICE, parts)().error is None
    assert not Launched(parts, batch(one, two), 5).result().failed


def test_other_weights_in_the_last_layer_are_never_used(
    parts: EngineParts, versions: Versions, expected: dict[int, torch.Tensor], link: GatedLink
) -> None:
    one, two = versions
    file = Path(one.source) / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"][0, 0] += 1
    save_file(tensors, file)
    parts.executor.drop_adapter(one.key, Tier.HOST)
    read, copied = start(one, Tier.HOST, parts), start(one, Tier.DEVICE, parts)
    step = Launched(parts, batch(one, two))
    link.close()
    check_only_the_first_failed(step, expected, "changed since it was registered", parts, one)
    assert "changed" in (read().error or "") and "changed" in (copied().error or "")
    assert executor_of(parts)._host.get(one.key) is None


@READER_PROCESS
def test_a_reader_that_dies_releases_the_step(
    parts: EngineParts, versions: Versions, expected: dict[int, torch.Tensor], link: GatedLink
) -> None:
    one, two = versions
    link.close()
    process = executor_of(parts)._reader._readers[0]._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    parts.executor.drop_adapter(one.key, Tier.HOST)
    start(one, Tier.HOST, parts)
    start(one, Tier.DEVICE, parts)
    step = Launched(parts, batch(one, two))
    process.kill()
    result = step.result()
    assert set(result.failed) == {0} and "died" in result.failed[0]
    torch.testing.assert_close(step.rows[2], expected[2], atol=1e-5, rtol=1e-5)


@READER_PROCESS
@pytest.mark.parametrize("has_begun", [False, True])
def test_closing_releases_a_step_that_waits(has_begun: bool, parts: EngineParts, versions: Versions) -> None:
    one, two = versions
    executor = executor_of(parts)
    executor._step_wait_s = math.inf
    process = executor._reader._readers[0]._process
    assert process is not None
    if has_begun:
        # The image has begun, and no page of it comes.
        adapter = executor._host.drop(one.key)
        assert adapter is not None
        adapter.arrival = Arrival(one.num_pages)
        executor._host._adapters[one.key] = adapter
    else:
        os.kill(process.pid, signal.SIGSTOP)
        parts.executor.drop_adapter(one.key, Tier.HOST)
        start(one, Tier.HOST, parts)
    start(one, Tier.DEVICE, parts)
    step = Launched(parts, batch(one, two))
    while executor._steps._work_queue.qsize():  # the step has begun
        time.sleep(0.001)
    executor.close()
    assert set(step.result().failed) == {0}


def test_a_sampled_row_that_failed_reaches_no_sampler(
    parts: EngineParts, versions: Versions, link: GatedLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logits mean nothing; a sampler may raise over them."""
    one, two = versions
    seen: list[int] = []
    sampler = executor_of(parts).runner.sampler
    sample = sampler.sample

    def note(logits: torch.Tensor, sequences: Sequence[PlannedSequence]) -> object:
        seen.extend(part.seq_id for part in sequences)
        return sample(logits, sequences)

    monkeypatch.setattr(sampler, "sample", note)
    plan = [structs.replace(part, sampling=SamplingParams(temperature=1.0)) for part in batch(one, two)]
    start(one, Tier.DEVICE, parts)
    step = Launched(parts, plan)
    link.break_with("the link broke")
    assert set(step.result().failed) == {0} and sorted(seen) == [1, 2]


@pytest.mark.parametrize("end", ["comes", "breaks", "is late"])
def test_log_probabilities_of_a_chunk_wait_for_the_head(
    end: str, parts: EngineParts, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row of the chunk is sampled, so its step does not wait for them. A page comes when it is waited for."""
    version = parts.reader.read("head", str(save_head_adapter(folders["base"], tmp_path)))
    chunk = structs.replace(sequence([5, 6, 7, 8, 9], 0, 4, 0, version.key), is_sampled=False)
    plan = [chunk, sequence([8, 9], 0, 2, 8, None, 1)]
    rows = (PromptRows(seq_id=0, start=0, stop=4, num_top=2), PromptRows(seq_id=1, start=0, stop=1, num_top=2))
    assert load(parts, version, Tier.DEVICE, pages_for(version)) is None
    expected = Launched(parts, plan, 1, rows).result().prompt_logprobs
    parts.executor.drop_adapter(version.key, Tier.DEVICE)

    copies = executor_of(parts)._copies
    copies.link = link = GatedLink(copies.pages)
    copies.pages.flat[40:] = float("nan")
    asked, wait = [0], Arrival.wait

    def let_through(arrival: Arrival, num_pages: int, limit_s: float | None = None) -> object:
        if end == "is late" and num_pages == version.num_pages:
            raise TimeoutError
        if end == "breaks" and num_pages == version.num_pages:
            link.break_with("the link broke")
        for _ in range(max(asked), num_pages):
            link.permits.release()
        asked.append(num_pages)
        return wait(arrival, num_pages, limit_s)

    monkeypatch.setattr(Arrival, "wait", let_through)
    try:
        loaded = start(version, Tier.DEVICE, parts)
        result = Launched(parts, [structs.replace(chunk, placement=ARRIVING), plan[1]], 2, rows).result()
    finally:
        link.close()
    assert (loaded().error is not None) == (end == "breaks")
    assert result.tokens.keys() == {1}
    assert result.failed == ({0: "the link broke"} if end == "breaks" else {})
    assert result.late == ({0} if end == "is late" else set())
    assert result.prompt_logprobs == (expected if end == "comes" else {1: expected[1]})
