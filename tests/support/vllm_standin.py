"""A stand-in of vLLM's scheduler and worker: its rules for waiting requests, as far as a connector meets them.

Rules, as in ``vllm/v1/core/sched/scheduler.py``: running requests first; then waiting ones by arrival, each of which is
skipped if it would exceed the limit of adapters, or if the connector says "later"; the first that lacks KV ends the
pass. A request that was pre-empted is the first to be asked again. A worker carries out orders in steps of time.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from manylora.core.events import Event
from manylora.core.types import Request, SamplingParams, Tier
from manylora.vllm.gate import RequestGate
from manylora.vllm.messages import Order, Report, SlotOrders
from manylora.vllm.plugin import read_options
from manylora.vllm.versions import AdapterRef

STEP_S = 0.01


def make_folder(parent: Path, name: str, content: bytes = b"weights", rank: int = 8) -> Path:
    """Write an adapter's folder, anew if it is there: by files that take the place of others, as tools do."""
    folder = parent / name
    folder.mkdir(exist_ok=True)
    for file, data in (
        ("adapter_config.json", json.dumps({"r": rank}).encode()),
        ("adapter_model.safetensors", content),
    ):
        made = folder / f".{file}"
        made.write_bytes(data)
        made.rename(folder / file)
    return folder


@dataclass(eq=False)
class StandInRequest:
    """A request in the stand-in."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    ref: AdapterRef | None
    num_output_tokens: int = 0
    end: str = ""


@dataclass
class StandInWorker:
    """Carries out orders: one read and one copy at a time, each in a number of steps.

    Attributes:
        slots: The number of the adapter in each slot.
        packed: Numbers in host memory, with their file keys.
        broken: Paths that cannot be read.
    """

    slots: list[int | None]
    read_steps: int = 3
    copy_steps: int = 1
    packed: dict[int, str] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    num_read: int = 0
    num_copied: int = 0
    _queues: dict[Tier, deque[list[object]]] = field(default_factory=lambda: {Tier.HOST: deque(), Tier.DEVICE: deque()})

    def begin(self, orders: SlotOrders, in_use: set[int]) -> None:
        """Take in the orders of a step; ``in_use`` are the numbers that its requests need."""
        for order in orders.orders:
            number = order.adapter.number
            if order.work == "load":
                if order.tier is Tier.DEVICE:
                    assert self.slots[order.slot] is None, "a load into a slot that was not freed"
                    assert order.slot not in [one[0].slot for one in self._queues[Tier.DEVICE]]  # type: ignore[attr-defined]
                self._queues[order.tier].append(
                    [order, self.read_steps if order.tier is Tier.HOST else self.copy_steps]
                )
            elif order.tier is Tier.HOST:
                self.packed.pop(number, None)  # a read that failed has left nothing
            elif number in self.slots:
                assert number not in in_use, "a slot was taken from a running request"
                self.slots[self.slots.index(number)] = None
        assert in_use <= {number for number in self.slots if number is not None}

    def end(self) -> Report | None:
        """End a step: the first order of each queue is a step nearer to its end."""
        report = Report()
        for queue in (self._queues[Tier.DEVICE], self._queues[Tier.HOST]):  # a copy begins in the step after its read
            ready = [one for one in queue if one[0].tier is Tier.HOST or not self._is_read_later(one[0])]  # type: ignore[attr-defined]
            if not ready:
                continue
            ready[0][1] -= 1  # type: ignore[operator]
            if ready[0][1] == 0:
                queue.remove(ready[0])
                order = ready[0][0]
                assert isinstance(order, Order)
                report.done[order.number] = (self._finish(order),)
        return report if report.done else None

    def _is_read_later(self, order: Order) -> bool:
        return any(one[0].adapter == order.adapter for one in self._queues[Tier.HOST])  # type: ignore[attr-defined]

    def _finish(self, order: Order) -> str | None:
        if order.tier is Tier.HOST:
            if order.adapter.path in self.broken:
                return "cannot be read"
            self.packed[order.adapter.number] = order.adapter.file_key
            self.num_read += 1
        elif order.adapter.number not in self.packed:
            return "its read failed"
        else:
            self.slots[order.slot] = order.adapter.number
            self.num_copied += 1
        return None


class StandInEngine:
    """A vLLM engine of made-up requests around a gate.

    Attributes:
        log: What each step ran: numbers of requests.
        kv_tokens: Tokens of KV that are left.
    """

    def __init__(
        self,
        folders: Path,
        *,
        num_slots: int = 2,
        max_cpu_loras: int = 4,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 64,
        kv_tokens: int = 10_000,
        **options: object,
    ) -> None:
        made = read_options(
            options,
            max_loras=num_slots,
            max_cpu_loras=max_cpu_loras,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self.folders = folders
        self.events: list[Event] = []
        self.gate = RequestGate(made, (self.events.append,))
        self.worker = StandInWorker([None] * num_slots)
        self.now = 0.0
        self.waiting: deque[StandInRequest] = deque()
        self.running: list[StandInRequest] = []
        self.failing: list[StandInRequest] = []
        self.ended: dict[str, StandInRequest] = {}
        self.log: list[list[str]] = []
        self.kv_tokens = kv_tokens
        self._max_num_seqs, self._max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self._num_requests = 0

    def add(self, adapter: str | None, *, num_prompt: int = 8, max_tokens: int = 3, path: str = "") -> StandInRequest:
        """Queue a request."""
        self._num_requests += 1
        name = f"{adapter or 'base'}-{self._num_requests}"
        request = Request(request_id=name, prompt=(0,) * num_prompt, sampling=SamplingParams(max_tokens=max_tokens))
        asked = None if adapter is None else (adapter, path or str(self.folders / adapter))
        ref = self.gate.add(request, asked, self.now)
        made = StandInRequest(name, num_prompt, max_tokens, ref)
        self.waiting.append(made)
        return made

    def cancel(self, request: StandInRequest) -> None:
        """Abort a request, wherever it is."""
        if request in self.failing:
            return  # vLLM keeps it until the transfer has failed
        if request in self.running:
            self.running.remove(request)
            self.kv_tokens += request.num_prompt_tokens + request.max_tokens
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            return
        self._end(request, "cancelled")

    def preempt(self) -> None:
        """Pre-empt the youngest running request."""
        if self.running:
            request = self.running.pop()
            self.kv_tokens += request.num_prompt_tokens + request.max_tokens
            self.waiting.appendleft(request)

    def step(self) -> list[str]:
        """Schedule and run a step; return the requests that ran."""
        self._schedule()
        orders = self.gate.end_step(self.now)
        self.worker.begin(orders, {request.ref.number for request in self.running if request.ref is not None})
        assert set(orders.failed) == {request.request_id for request in self.failing}
        self.now += STEP_S
        if (report := self.worker.end()) is not None:
            self.gate.learn(report, self.now)
        ran = [request.request_id for request in self.running]
        for request in list(self.running):
            request.num_output_tokens += 1
            if request.num_output_tokens >= request.max_tokens:
                self.running.remove(request)
                self.kv_tokens += request.num_prompt_tokens + request.max_tokens
                self._end(request, "whole")
        for request in self.failing:
            self._end(request, "failed")
        self.failing = []
        self.log.append(ran)
        return ran

    def run(self, most: int = 2000) -> None:
        """Run steps until no request is left."""
        for _ in range(most):
            if not (self.waiting or self.running):
                return
            self.step()
            self.gate.check_integrity()
        raise AssertionError(f"{len(self.waiting)} requests still wait after {most} steps")

    def _schedule(self) -> None:
        room = self._max_num_batched_tokens - len(self.running)
        adapters = {request.ref.number for request in self.running if request.ref is not None}
        skipped: list[StandInRequest] = []
        while self.waiting and room > 0 and len(self.running) < self._max_num_seqs:
            request = self.waiting.popleft()
            number = None if request.ref is None else request.ref.number
            if number is not None and number not in adapters and len(adapters) == len(self.worker.slots):
                skipped.append(request)
                continue
            may_run = self.gate.may_run(request.request_id, self.now)
            if request.request_id not in self.gate.doomed and not may_run:
                skipped.append(request)
                continue
            need = request.num_prompt_tokens + request.max_tokens
            if self.kv_tokens < need:
                self.waiting.appendleft(request)
                break
            self.gate.scheduled(request.request_id)
            if request.request_id in self.gate.doomed:
                self.failing.append(request)
                continue
            self.kv_tokens -= need
            room -= request.num_prompt_tokens
            self.running.append(request)
            adapters |= {number} - {None}
        self.waiting.extendleft(reversed(skipped))

    def _end(self, request: StandInRequest, how: str) -> None:
        request.end = how
        self.ended[request.request_id] = request
        self.gate.finish(request.request_id, request.num_output_tokens, self.now, is_whole=how == "whole")
