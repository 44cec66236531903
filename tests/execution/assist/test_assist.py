"""Exchanges with real workers on a stream that is a thread: the right rows, whatever fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live_executor import executor_of, finish, folders, load, save_head_adapter, sequence  # noqa: F401
from lora_cases import GROUP, IN, NAMES, SIZES, VOCAB, make_base
from lora_cases import load as load_random
from msgspec import structs

pytest.importorskip("numba")
from faulty_serve import DIE, STICK, FaultySource
from thread_stream import ThreadStream

from manylora.core.adapters.shape import BaseShape
from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig
from manylora.core.costs.shares import RowCost
from manylora.core.plan import ARRIVING, IN_HOST, PromptRows, StepPlan, StepResult
from manylora.core.ports import EngineParts
from manylora.core.types import AdapterVersion, Tier
from manylora.execution.assist import exchange, shares
from manylora.execution.assist.exchange import Assistant, AssistedStep, LostRows
from manylora.execution.assist.words import serve
from manylora.execution.assist.workers import Serve, Worker
from manylora.execution.build import build_parts
from manylora.execution.lora.batch import LoraBatch, LoraSegment
from manylora.execution.lora.kernels import LORA_KERNELS, add_embedding
from manylora.execution.runner import OffDevice
from manylora.execution.storage.adapter_files import InlineReader
from manylora.execution.storage.arrival import Arrival, ArrivingAdapter
from manylora.execution.storage.page_tensor import PageTensor
from manylora.execution.storage.resident import AdapterMemory, ResidentAdapter, make_resident

BASE = make_base(256)
NUM_EXCHANGES = 3


@pytest.fixture(scope="module", autouse=True)
def many_shares() -> Iterator[None]:
    """Split the rows of toy adapters as those of large ones: their arithmetic would not pay for a handoff."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("manylora.execution.assist.shares.HANDOFF_S", 0.0)
        yield


@dataclass
class Rig:
    """An assistant, and adapters of every stored type in host memory."""

    serve: Serve = serve
    num_workers: int = 3
    exchange_limit_s: float = 600.0
    adapters: list[ResidentAdapter] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        storage, page = PageTensor(BASE.page, 800, torch.device("cpu")), 0
        for ranks, dtype in (
            ({NAMES[0]: 5, NAMES[2]: 17}, "bfloat16"),
            ({**dict.fromkeys(NAMES, 3), "embed": 4}, "float32"),
            ({"embed": 2}, "float16"),
            ({NAMES[1]: 9}, "float16"),
        ):
            adapter, _, page = load_random(BASE, storage, page, ranks, dtype)
            self.adapters.append(adapter)
        self.assistant = Assistant(
            ThreadStream(), BASE, num_workers=self.num_workers, serve=self.serve, exchange_limit_s=self.exchange_limit_s
        )

    def segments(self, row_counts: list[int]) -> tuple[LoraSegment, ...]:
        """Return segments with a row of the base before each; the last row of each is sampled."""
        segments, row = [], 0
        for number, (adapter, num_rows) in enumerate(zip(self.adapters, row_counts, strict=True)):
            if num_rows:
                segments.append(LoraSegment(adapter, row + 1, row + 1 + num_rows, number, number + 1))
            row += num_rows + 1
        return tuple(segments)

    def step(self, row_counts: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[LostRows]]:
        """Run a step of three exchanges; return its outputs, those of the reference, and the rows lost."""
        num_rows, segments = sum(row_counts) + len(row_counts), self.segments(row_counts)
        tokens = torch.randint(0, VOCAB, (num_rows,))
        found, expected = [], []
        assisted, batch = self.assistant.begin(segments), LoraBatch(segments)
        for group, is_sampled in (("embed", False), (GROUP, False), (GROUP, True)):
            rows = len(row_counts) if is_sampled else num_rows
            x = tokens if group == "embed" else torch.randn(rows, IN)
            reply = assisted.send(group, x[None], is_sampled=is_sampled)
            out = torch.randn(rows, IN if group == "embed" else sum(SIZES))
            wanted = out.clone()
            parts = batch.parts(group, is_sampled=is_sampled)
            assert (parts is None) == (reply is None)
            if parts is not None and reply is not None:
                if group == "embed":
                    add_embedding(parts, x, wanted, 2.0)
                    reply.add_to(out, 2.0)
                else:
                    LORA_KERNELS["reference"](x, wanted, parts)
                    reply.add_to(out)
            found.append(out)
            expected.append(wanted)
        return found, expected, assisted.finish()

    def check(self, row_counts: list[int]) -> list[LostRows]:
        """Run a step; every row that is not lost is right. Return the rows lost."""
        found, expected, lost = self.step(row_counts)
        for out, wanted, is_sampled in zip(found, expected, (False, False, True), strict=True):
            for part in lost:
                if part.is_sampled == is_sampled:
                    out[part.start : part.stop] = wanted[part.start : part.stop]
            torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)
        return lost


@pytest.mark.parametrize("row_counts", [[12, 1, 3, 2], [1, 0, 0, 0], [0, 9, 40, 0], [0, 0, 5, 0]])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_exchanges_equal_the_reference(row_counts: list[int], num_workers: int) -> None:
    rig = Rig(num_workers=num_workers)
    try:
        for _ in range(3):
            assert rig.check(row_counts) == []
    finally:
        rig.assistant.close()


def test_cores_are_measured_when_an_adapter_is_prepared_and_never_within_a_step(monkeypatch) -> None:
    measured: list[tuple[int, int, int, str]] = []
    monkeypatch.setattr(shares, "_measured", {})
    may_end = threading.Event()
    monkeypatch.setattr(shares, "_measure", lambda *of: (may_end.wait() and measured.append(of)) or RowCost(1e-4, 1e-6))
    rig = Rig()
    try:
        rig.check([12, 1, 3, 2])
        assert not measured
        groups = [rig.adapters[1].memory.layout.groups[GROUP]] * 2
        assert 0.0 < shares.adapter_cost(groups, "float32").row_s < 1e-3
        for adapter in rig.adapters * 2:
            rig.assistant.prepare(adapter.memory)  # a load does not wait for it
        may_end.set()
        rig.assistant._measuring.submit(lambda: None).result()
        assert len(measured) == len(set(measured)) > 0
        assert {dtype for *_, dtype in measured} == {"bfloat16", "float32", "float16"}
        assert shares.adapter_cost(groups, "float32").row_s == pytest.approx(2e-6)
    finally:
        may_end.set()
        rig.assistant.close()


def test_a_measurement_reads_weights_as_they_are_stored_and_from_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[AdapterMemory] = []
    monkeypatch.setattr(shares, "_time", lambda memory, num_rows: found.append(memory) or 1e-6 * num_rows)
    assert shares._measure(64, 64, 8, "bfloat16").row_s == pytest.approx(1e-6)
    (weights,) = {one.flat.data_ptr(): one.flat for one in found}.values()
    assert weights.nbytes >= 0.99 * shares.PROBE_BYTES and weights.dtype is torch.bfloat16
    assert bool(weights.all()), "zeros that were never written are one page of the system, in every cache"
    assert [one.pages for one in found] == [(number,) for number in range(2 * shares.ROUNDS)]


def test_a_measurement_of_large_weights_takes_no_more_memory_than_no_cache_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An output head that was trained whole has gigabytes: its calls take turns on a few of them."""
    found: list[AdapterMemory] = []
    monkeypatch.setattr(shares, "_time", lambda memory, num_rows: found.append(memory) or 1e-6)
    for num_bytes, pages in ((4096, [0, 1, 0, 1]), (2000, [0] * 4), (0, [0] * 4)):
        found.clear()
        shares.time_rows(64, 64, 8, "bfloat16", [16] * 4, num_bytes)
        assert [one.pages for one in found] == [(page,) for page in pages]
        assert found[0].flat.nbytes == 2048 * (max(pages) + 1)


@settings(max_examples=25, deadline=None)
@given(
    row_counts=st.lists(st.integers(0, 20), min_size=4, max_size=4).filter(any),
    faults=st.dictionaries(st.integers(0, 3 * NUM_EXCHANGES), st.sampled_from([DIE, STICK]), max_size=3),
)
def test_a_failed_worker_costs_its_own_rows_alone(row_counts: list[int], faults: dict[int, str]) -> None:
    """It may die or stick at any exchange; a late result reaches no row."""
    source = FaultySource(faults)
    rig = Rig(serve=source, exchange_limit_s=0.02 if STICK in faults.values() else 600.0)
    try:
        lost = rig.check(row_counts)
        # With little patience, a busy machine may take any worker for stuck: it costs its rows, and no more.
        if STICK not in faults.values() and not any(number < source.num_served for number in faults):
            assert lost == []
        rig.assistant._supervisor._limit_s = 600.0
        source.faults = {}
        source.may_go.set()  # workers that stuck go on, in memory that no step uses any more
        assert rig.check(row_counts) == []
        assert rig.check(row_counts[::-1]) == []
    finally:
        source.may_go.set()
        rig.assistant.close()


def test_workers_of_a_step_on_a_device_that_failed_are_held_and_replaced(monkeypatch) -> None:
    def fail() -> None:
        raise RuntimeError("the device is gone")

    rig = Rig()
    try:
        step = rig.assistant.begin(rig.segments([12, 1, 3, 2]))
        step.send(GROUP, torch.randn(1, 22, IN))
        with monkeypatch.context() as patch:
            patch.setattr(rig.assistant._stream, "wait", fail)
            step.break_off()
        assert step.workers and not any(worker.is_sound for worker in step.workers)
        assert rig.check([12, 1, 3, 2]) == []
        assert not {*step.workers}.intersection(rig.assistant._workers)
    finally:
        rig.assistant.close()


def test_held_workers_are_released_after_the_next_step_has_begun(monkeypatch) -> None:
    """A step that begins before the supervisor has looked at the one before it leaves no stream waiting."""
    may_look, check = threading.Event(), Worker.check
    monkeypatch.setattr(Worker, "check", lambda *args: check(*args) if may_look.is_set() else None)
    rig = Rig(serve=lambda words, tasks, number: may_look.wait() and serve(words, tasks, number))
    try:
        held = rig.assistant.begin(rig.segments([12, 1, 3, 2]))
        reply = held.send(GROUP, torch.randn(1, 22, IN))
        assert reply is not None
        for worker in held.workers:
            worker.wait_for_all()
            worker.hold()
            worker.end()
        rig.assistant.begin(rig.segments([3, 2, 1, 1])).finish()
        may_look.set()
        deadline = time.monotonic() + 60
        while any(worker.is_busy for worker in held.workers):
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        rig.assistant.close()


def test_rows_of_other_workers_survive() -> None:
    source = FaultySource({1: DIE})
    rig = Rig(serve=source, num_workers=4)
    try:
        lost = rig.check([20, 20, 20, 20])
        rows = sum(part.stop - part.start for part in lost if not part.is_sampled)
        assert 0 < rows < 80
        assert rig.check([20, 20, 20, 20]) == []
    finally:
        rig.assistant.close()


@pytest.fixture
def source() -> FaultySource:
    return FaultySource({})


@pytest.fixture
def parts(folders: dict[str, Path], source: FaultySource) -> Iterator[EngineParts]:  # noqa: F811
    def start(device: torch.device, base: BaseShape) -> Assistant:
        return Assistant(ThreadStream(), base, num_workers=2, serve=source)

    config = EngineConfig(
        model=ModelConfig(model=str(folders["base"]), device="cpu"), memory=MemoryConfig(block_size=4, num_pages=64)
    )
    parts = build_parts(config, WallClock(), open_assistant=start, readers=[InlineReader()])
    assert parts.reads_host
    yield parts
    parts.close()


def versions_of(parts: EngineParts, folders: dict[str, Path]) -> list[AdapterVersion]:  # noqa: F811
    versions = [parts.reader.read(name, str(folders[name])) for name in ("one", "two")]
    for number in (0, 1):
        to_device(parts, versions, number)
    return versions


def to_device(parts: EngineParts, versions: list[AdapterVersion], number: int) -> None:
    first, version = (40, 50)[number], versions[number]
    assert load(parts, version, Tier.DEVICE, tuple(range(first, first + version.num_pages))) is None


def run(parts: EngineParts, *sequences: object) -> SimpleNamespace:
    executor, rows = executor_of(parts), []
    executor.runner.logits_hook = lambda plan, logits: rows.append(logits)
    result = finish(executor.launch(StepPlan(step_id=1, sequences=sequences), 0.0))  # type: ignore[arg-type]
    assert isinstance(result, StepResult)
    return SimpleNamespace(logits=rows[0], result=result)


def test_assisted_rows_have_the_logits_of_pages_and_fail_alone(
    parts: EngineParts,
    folders: dict[str, Path],  # noqa: F811
    source: FaultySource,
) -> None:
    first, second = versions = versions_of(parts, folders)
    plan = [
        sequence(list(range(5, 17)), 0, 12, 0, first.key, 0),
        sequence([8, 9], 0, 2, 8, second.key, 1),
        sequence([8, 9], 0, 2, 16, None, 2),
    ]
    warm = run(parts, *plan)
    for cold in ((0,), (1,), (0, 1)):
        for number in cold:
            parts.executor.drop_adapter(versions[number].key, Tier.DEVICE)
        placed = [structs.replace(part, placement=IN_HOST) if i in cold else part for i, part in enumerate(plan)]
        assisted = run(parts, *placed)
        torch.testing.assert_close(assisted.logits, warm.logits, atol=1e-5, rtol=1e-5)
        assert assisted.result.tokens.keys() == {0, 1, 2} and not assisted.result.failed
        for number in cold:
            to_device(parts, versions, number)

    parts.executor.drop_adapter(first.key, Tier.DEVICE)
    source.faults = {source.num_served + 1: DIE}
    placed = [structs.replace(plan[0], placement=IN_HOST), *plan[1:]]
    struck = run(parts, *placed)
    assert struck.result.failed.keys() == {0} and "worker" in struck.result.failed[0]
    assert struck.result.tokens.keys() == {1, 2}
    torch.testing.assert_close(struck.logits[1:], warm.logits[1:], atol=1e-5, rtol=1e-5)
    # A step that was planned ahead awaits the lost token: it runs without that sequence.
    ahead = structs.replace(plan[0], start=12, num_tokens=1, awaits_token=True, placement=IN_HOST)
    assert run(parts, ahead, plan[2]).result.tokens.keys() == {2}
    torch.testing.assert_close(run(parts, *placed).logits, warm.logits, atol=1e-5, rtol=1e-5)


def test_a_step_that_raises_ends_once_no_worker_reads_its_memory(
    parts: EngineParts,
    folders: dict[str, Path],  # noqa: F811
    source: FaultySource,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the forward pass broke")

    first, _ = versions_of(parts, folders)
    warm_part = sequence(list(range(5, 17)), 0, 12, 0, first.key, 0)
    warm = run(parts, warm_part)
    parts.executor.drop_adapter(first.key, Tier.DEVICE)
    cold_part = structs.replace(warm_part, placement=IN_HOST)
    plan = StepPlan(step_id=1, sequences=(cold_part,))
    with monkeypatch.context() as patch:
        patch.setattr(source, "_during", lambda number: time.sleep(0.2))
        patch.setattr(exchange._Reply, "add_to", fail)
        with pytest.raises(RuntimeError, match="the forward pass broke"):
            finish(parts.executor.launch(plan, 0.0))
        assert not any(worker.is_busy for worker in executor_of(parts).runner._assistant._workers)
    torch.testing.assert_close(run(parts, cold_part).logits, warm.logits, atol=1e-5, rtol=1e-5)


class LateCopies:
    """A GPU's copies of one adapter, announced: its pages are there for a stream that has waited for their events."""

    def __init__(self, parts: EngineParts, version: AdapterVersion, pages: list[int]) -> None:
        self._pool = executor_of(parts)._copies.pages
        self.host = executor_of(parts)._host.get(version.key)
        assert self.host is not None and version.num_pages > 1
        self._pages, self.num_there = pages, 0
        self._pool.flat[pages] = float("nan")
        arrival = Arrival(version.num_pages)
        for num_pages in range(version.num_pages + 1):
            arrival.advance(num_pages, LateEvent(self, num_pages))
        self.let_through(1)  # the time that a page takes is known
        layout = self.host.layout
        self.adapter = ArrivingAdapter(make_resident(layout, pages, self._pool), layout.groups, arrival)

    def let_through(self, num_pages: int) -> None:
        new = slice(self.num_there, max(self.num_there, num_pages))
        assert self.host is not None
        self._pool.write(self._pages[new], self.host.image[new])
        self.num_there = new.stop

    def if_begun(self) -> ArrivingAdapter:
        return self.adapter


@dataclass(frozen=True)
class LateEvent:
    copies: LateCopies
    num_pages: int

    def query(self) -> bool:
        return self.copies.num_there >= self.num_pages


def test_pages_taken_over_are_waited_for_beside_an_adapter_on_its_way(
    parts: EngineParts,
    folders: dict[str, Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device takes over pages whose copies are in the stream, and another adapter of the step is arriving."""
    stream = SimpleNamespace(wait_event=lambda event: event.copies.let_through(event.num_pages))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(AssistedStep, "lag_s", lambda self: 1e9)
    first, second = versions_of(parts, folders)
    plan = [
        sequence(list(range(5, 17)), 0, 12, 0, first.key, 0),
        sequence([8, 9], 0, 2, 8, second.key, 1),
        sequence([8, 9], 0, 2, 16, None, 2),
    ]
    warm = run(parts, *plan)
    for version in (first, second):
        parts.executor.drop_adapter(version.key, Tier.DEVICE)
    taken = LateCopies(parts, first, list(range(40, 40 + first.num_pages)))
    awaited = LateCopies(parts, second, list(range(50, 50 + second.num_pages)))
    placed = [structs.replace(plan[0], placement=IN_HOST), structs.replace(plan[1], placement=ARRIVING), plan[2]]
    runner, rows = executor_of(parts).runner, []
    runner.logits_hook = lambda plan, logits: rows.append(logits)
    assert taken.host is not None
    result = runner.run(
        StepPlan(step_id=2, sequences=tuple(placed)),
        OffDevice({first.key: taken.host.in_place()}, {second.key: awaited.adapter}, {first.key: taken}),
    )
    assert not result.failed and result.cpu_share == 0.0
    torch.testing.assert_close(rows[0], warm.logits, atol=1e-5, rtol=1e-5)


def test_a_worker_lost_among_log_probabilities_of_prompts_costs_its_own_rows(
    parts: EngineParts,
    folders: dict[str, Path],  # noqa: F811
    source: FaultySource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("manylora.execution.assist.exchange.split_rows", lambda costs, num_workers: [0, 4, 8])
    version = parts.reader.read("head", str(save_head_adapter(folders["base"], tmp_path)))
    chunks = [
        structs.replace(sequence([5, 6, 7, 8, 9], 0, 4, 8 * n, version.key, n), placement=IN_HOST, is_sampled=False)
        for n in range(2)
    ]
    rows = tuple([PromptRows(seq_id=n, start=0, stop=4, num_top=0) for n in range(2)])
    plan = StepPlan(step_id=1, sequences=tuple(chunks), prompt_rows=rows)
    sound = finish(parts.executor.launch(plan, 0.0))
    assert isinstance(sound, StepResult) and sound.prompt_logprobs.keys() == {0, 1}
    source.faults = {2 * source.num_served - 1: DIE}  # the last exchange of a step like that one
    struck = finish(parts.executor.launch(replace(plan, step_id=2), 0.0))
    assert isinstance(struck, StepResult)
    ((lost, reason),) = struck.failed.items()
    assert "worker" in reason and struck.prompt_logprobs == {1 - lost: sound.prompt_logprobs[1 - lost]}
