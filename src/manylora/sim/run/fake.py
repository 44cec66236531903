"""The fake executor of tests: work completes on command, and every guarantee of the core is checked.

It models device memory: the adapter in each page and the token in each KV slot. A step that reads missing KV or
weights, or uses a page with two owners, fails at once.
"""

from __future__ import annotations

import math
from collections import deque

from manylora.engine.steps.plan_ahead import fill_in
from manylora.plan import AdapterLoad, LoadResult, PlannedSequence, StepPlan, StepResult
from manylora.sim.run.executor import synthetic_token
from manylora.types import AdapterKey, SampledToken, Tier

__all__ = ["FakeExecutor", "FakeWork"]


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


class FakeExecutor:
    """Completes work on command and checks memory."""

    def __init__(self, *, vocab_size: int, block_size: int) -> None:
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._contents: dict[int, object] = {}  # page -> adapter key, or list of (adapter, tokens up to here)
        self._adapter_pages: dict[AdapterKey, tuple[int, ...]] = {}
        self.host: set[AdapterKey] = set()
        self._steps: deque[tuple[StepPlan, FakeWork]] = deque()
        self._tokens: dict[int, SampledToken] = {}  # of the step completed last
        self.loads: list[tuple[AdapterLoad, FakeWork]] = []
        self.released: list[int] = []

    @property
    def plan(self) -> StepPlan | None:
        """The plan to be completed next."""
        return self._steps[0][0] if self._steps else None

    @property
    def num_steps(self) -> int:
        """Steps in flight."""
        return len(self._steps)

    def launch(self, plan: StepPlan, now: float) -> FakeWork:
        """Start a step; its reads and writes are checked when it completes."""
        assert len(self._steps) < 2, "three steps in flight"
        assert plan.sequences
        assert len({part.seq_id for part in plan.sequences}) == len(plan.sequences)
        for part in plan.sequences:
            # From here on the step has the image, and the tier may drop it.
            if part.placement.tier is Tier.HOST:
                assert part.adapter in self.host, f"{part.adapter} is read from a host that has it not"
        work = FakeWork()
        self._steps.append((plan, work))
        self.released += plan.released
        return work

    def load_adapter(self, load: AdapterLoad, now: float) -> FakeWork:
        """Start a load."""
        work = FakeWork()
        if load.tier is Tier.DEVICE:
            assert load.version.key in self.host, "copied to the device but is not in the host tier"
            assert len(load.pages) == load.version.num_pages
        self.loads.append((load, work))
        return work

    def drop_adapter(self, key: AdapterKey, tier: Tier) -> None:
        """Forget an adapter."""
        in_use = {part.adapter for plan, _ in self._steps for part in plan.sequences}
        assert key not in in_use or tier is Tier.HOST, f"{key} is dropped while it runs"
        if tier is Tier.HOST:
            self.host.discard(key)
        else:
            del self._adapter_pages[key]

    def complete_step(self) -> None:
        """Complete the oldest step in flight."""
        plan, step = self._steps.popleft()
        plan = fill_in(plan, self._tokens)
        tokens: dict[int, SampledToken] = {}
        for part in plan.sequences:
            self._check_adapter(part)
            for position in range(part.start + part.num_tokens):
                page, slot = part.pages[position // self._block_size], position % self._block_size
                expected = (part.adapter, tuple(part.tokens[: position + 1]))
                if position >= part.start:
                    slots = self._contents.get(page)
                    if slot == 0 or not isinstance(slots, dict):
                        slots = self._contents[page] = {}
                    slots[slot] = expected
                else:
                    slots = self._contents[page]
                    assert isinstance(slots, dict) and slots[slot] == expected, f"stale KV at {position} of {part}"
            if part.is_sampled:
                assert part.start + part.num_tokens == len(part.tokens)
                tokens[part.seq_id] = synthetic_token(part, self._vocab_size)
        step.result = StepResult(tokens=tokens)
        self._tokens = tokens

    def complete_load(self, index: int = 0, error: str | None = None) -> None:
        """Complete a load in flight, or fail it with ``error``."""
        load, work = self.loads.pop(index)
        key = load.version.key
        if error is None and load.tier is Tier.HOST:
            self.host.add(key)
        elif error is None:
            for page in load.pages:
                self._contents[page] = key
            self._adapter_pages[key] = load.pages
        work.result = LoadResult(error=error)

    def _check_adapter(self, part: PlannedSequence) -> None:
        key = part.adapter
        if key is None or part.placement.tier is Tier.HOST:
            return
        assert key in self._adapter_pages, f"{key} runs but is not on the device"
        assert all(self._contents[page] == key for page in self._adapter_pages[key]), f"pages of {key} were overwritten"
