"""The fake executor of tests: work completes on command, and every guarantee of the core is checked.

It models device memory: the adapter in each page and the token in each KV slot. A step that reads missing KV or
weights, or uses a page with two owners, fails at once.

Weights arrive with the completion of a step that waits for them, at the latest, though their load is reported later. A
load that fails takes down the sequences of steps that run on it. KV that they have written is *spoilt*, also that of
earlier steps on the same load: a step that reads it fails.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from manylora.core.engine.steps.plan_ahead import fill_in
from manylora.core.plan import ARRIVING, AdapterLoad, LoadResult, PlannedSequence, StepPlan, StepResult
from manylora.core.types import AdapterKey, SampledToken, Tier
from manylora.lab.sim.run.contents import synthetic_prompt_logprobs, synthetic_token

__all__ = ["FakeExecutor", "FakeWork"]

SPOILT = "spoilt"


class FakeWork:
    """Work that completes on command."""

    def __init__(self) -> None:
        self.result: StepResult | LoadResult | None = None

    @property
    def ready_at(self) -> float:
        """Infinite until it is done."""
        return -math.inf if self.result is not None else math.inf

    def poll(self, now: float) -> StepResult | LoadResult | None:
        """Return the result once it is done."""
        return self.result


@dataclass
class _Arrival:
    """A load to the device since its start, as steps see it; it outlives the load while they use its pages."""

    load: AdapterLoad
    has_arrived: bool = False
    error: str | None = None
    written: list[tuple[dict[int, object], int, object]] = field(default_factory=list)  # KV computed with it


class FakeExecutor:
    """Completes work on command and checks memory."""

    def __init__(self, *, vocab_size: int, block_size: int) -> None:
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._contents: dict[int, object] = {}  # page -> adapter key, or (adapter, tokens up to here) by slot
        self._adapter_pages: dict[AdapterKey, tuple[int, ...]] = {}
        self._arrivals: dict[AdapterKey, _Arrival] = {}  # the last load of each adapter to the device
        self._invocations: dict[AdapterKey, tuple[int, ...]] = {}  # of adapters that were loaded
        self.host: set[AdapterKey] = set()
        self._steps: deque[tuple[StepPlan, FakeWork]] = deque()
        self._last = StepResult()
        self._given_up: dict[int, Sequence[int]] = {}  # by the last step; with the pages of each
        self.loads: list[tuple[AdapterLoad, FakeWork]] = []
        self.released: list[int] = []

    @property
    def plan(self) -> StepPlan | None:
        """The plan to be completed next."""
        return self._steps[0][0] if self._steps else None

    @property
    def on_device(self) -> Collection[AdapterKey]:
        """Adapters on the device, on their way there, or whose load failed and was not dropped."""
        return self._arrivals.keys()

    @property
    def num_steps(self) -> int:
        """Steps in flight."""
        return len(self._steps)

    def launch(self, plan: StepPlan, now: float) -> FakeWork:
        """Start a step; its reads and writes are checked when it completes."""
        assert len(self._steps) < 2, "three steps in flight"
        assert plan.sequences
        assert len({part.seq_id for part in plan.sequences}) == len(plan.sequences)
        placements = {(part.adapter, part.placement) for part in plan.sequences if part.adapter is not None}
        assert len(dict(placements)) == len(placements), "an adapter is read from two places in a step"
        for part in plan.sequences:
            # From here on the step has the image, and the tier may drop it.
            if part.placement.tier is Tier.HOST:
                assert part.adapter in self.host, f"{part.adapter} is read from a host that has it not"
            assert not self._pages_of_arriving().intersection(part.pages), "KV in pages of an adapter in use"
        work = FakeWork()
        self._steps.append((plan, work))
        self.released += plan.released
        return work

    def load_adapter(self, load: AdapterLoad, now: float) -> FakeWork:
        """Start a load."""
        key = load.version.key
        self._invocations[key] = load.version.invocation
        if load.tier is Tier.DEVICE:
            assert key in self.host or self._is_read(key), "copied to the device but is not in the host tier"
            assert len(load.pages) == load.version.num_pages
            assert not self._pages_of_arriving().intersection(load.pages), "pages of an adapter in use"
            self._arrivals[key] = _Arrival(load)
        self.loads.append((load, work := FakeWork()))
        return work

    def drop_adapter(self, key: AdapterKey, tier: Tier) -> None:
        """Forget an adapter."""
        if tier is Tier.HOST:
            self.host.discard(key)
        if tier is not Tier.DEVICE:
            return
        parts = [part for plan, _ in self._steps for part in plan.sequences if part.placement.tier is tier]
        assert all(part.adapter != key for part in parts), f"{key} is dropped while it runs"
        arrival = self._arrivals.pop(key)
        assert arrival.error is not None or key in self._adapter_pages, f"{key} is dropped on its way"
        self._adapter_pages.pop(key, None)

    def complete_step(self, lost: Collection[AdapterKey] = (), late: Collection[AdapterKey] = ()) -> None:
        """Complete the oldest step in flight; the weights of ``lost`` that it waits for do not arrive.

        Those of ``late`` have not arrived yet, and it goes on without their sequences.
        """
        plan, step = self._steps.popleft()
        plan = fill_in(plan, self._last.tokens, self._last.failed, self._given_up)
        self._given_up = {}
        tokens: dict[int, SampledToken] = {}
        failed: dict[int, str] = {}
        for part in plan.sequences:
            if self._is_late(part, late):
                self._given_up[part.seq_id] = part.pages
                self._write(part, is_spoilt=True)
                continue
            arrival = self._arrive(part, part.adapter in lost)
            if arrival is not None and arrival.error is not None:
                failed[part.seq_id] = arrival.error
                self._write(part, is_spoilt=True)
                continue
            self._check_adapter(part)
            self._check_kv(part)
            written = self._write(part)
            if arrival is not None:
                arrival.written += written
            if part.is_sampled:
                assert part.start + part.num_tokens == len(part.tokens)
                tokens[part.seq_id] = synthetic_token(part, self._vocab_size)
        reported = synthetic_prompt_logprobs(plan, self._vocab_size)
        without = {*self._given_up, *failed}
        reported = {seq_id: rows for seq_id, rows in reported.items() if seq_id not in without}
        self._last = step.result = StepResult(
            tokens=tokens, failed=failed, late=frozenset(self._given_up), prompt_logprobs=reported
        )

    def complete_load(self, index: int = 0, error: str | None = None) -> None:
        """Complete a load in flight, or fail it with ``error``.

        A copy completes only once its read has; the read's own completion may be reported later.
        """
        load, work = self.loads.pop(index)
        key = load.version.key
        if load.tier is Tier.HOST:
            if error is None:
                self.host.add(key)
            elif (arrival := self._arrivals.get(key)) is not None and not arrival.has_arrived:
                arrival.error = arrival.error or error
        else:
            arrival = self._arrivals[key]
            error = arrival.error = arrival.error or error
            if error is None:
                self._deliver(arrival)
                self._adapter_pages[key] = load.pages
            for slots, slot, written in arrival.written if error is not None else ():
                if slots[slot] is written:
                    slots[slot] = SPOILT
        work.result = LoadResult(error=error)

    def _is_read(self, key: AdapterKey) -> bool:
        return any(load.version.key == key and load.tier is Tier.HOST for load, _ in self.loads)

    def _pages_of_arriving(self) -> set[int]:
        """Return the pages of adapters that steps in flight run on as they arrive, or were to."""
        parts = [part for plan, _ in self._steps for part in plan.sequences if part.placement is ARRIVING]
        return {page for part in parts if part.adapter for page in self._arrivals[part.adapter].load.pages}

    def _arrive(self, part: PlannedSequence, is_lost: bool) -> _Arrival | None:
        """Let the weights arrive that a sequence waits for, or not; return their load if it does."""
        if part.placement is not ARRIVING or part.adapter is None:
            return None
        arrival = self._arrivals[part.adapter]
        if is_lost and not arrival.has_arrived:
            arrival.error = arrival.error or "its layers did not arrive"
        if arrival.error is None:
            self._deliver(arrival)
        return arrival

    def _is_late(self, part: PlannedSequence, late: Collection[AdapterKey]) -> bool:
        """Whether a sequence waits for one of these, unless that has arrived, or will not."""
        if part.placement is not ARRIVING or part.adapter is None or part.adapter not in late:
            return False
        arrival = self._arrivals[part.adapter]
        return not arrival.has_arrived and arrival.error is None

    def _deliver(self, arrival: _Arrival) -> None:
        if not arrival.has_arrived:
            arrival.has_arrived = True
            for page in arrival.load.pages:
                self._contents[page] = arrival.load.version.key

    def _check_adapter(self, part: PlannedSequence) -> None:
        key = part.adapter
        if key is None or part.placement.tier is Tier.HOST:
            return
        if part.placement is ARRIVING:
            pages = self._arrivals[key].load.pages
        else:
            assert key in self._adapter_pages, f"{key} runs but is not on the device"
            pages = self._adapter_pages[key]
        assert all(self._contents[page] == key for page in pages), f"pages of {key} were overwritten"

    def _place(self, part: PlannedSequence, position: int) -> tuple[int, int]:
        return part.pages[position // self._block_size], position % self._block_size

    def _activated_at(self, part: PlannedSequence) -> int:
        """Return the first position that the adapter of a sequence applies to; the base's rows are all alike."""
        invocation = () if part.adapter is None else self._invocations[part.adapter]
        starts = range(part.num_prompt_tokens - len(invocation) + 1) if invocation else [0]
        return max(one for one in starts if tuple(part.tokens[one : one + len(invocation)]) == invocation)

    def _check_kv(self, part: PlannedSequence) -> None:
        activated_at = self._activated_at(part)
        assert part.start >= activated_at, f"{part} applies an adapter before it is activated"
        for position in range(part.start):
            page, slot = self._place(part, position)
            slots = self._contents[page]
            adapter = part.adapter if position >= activated_at else None
            expected = (adapter, tuple(part.tokens[: position + 1]))
            assert isinstance(slots, dict) and slots[slot] == expected, f"stale KV at {position} of {part}"

    def _write(self, part: PlannedSequence, *, is_spoilt: bool = False) -> list[tuple[dict[int, object], int, object]]:
        """Write the KV of a sequence's new tokens; return each slot with its content."""
        written = []
        for position in range(part.start, part.start + part.num_tokens):
            page, slot = self._place(part, position)
            slots = self._contents.get(page)
            if slot == 0 or not isinstance(slots, dict):
                slots = self._contents[page] = {}
            slots[slot] = SPOILT if is_spoilt else (part.adapter, tuple(part.tokens[: position + 1]))
            written.append((slots, slot, slots[slot]))
        return written
