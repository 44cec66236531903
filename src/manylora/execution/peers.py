"""Workers that share a model: the first decides with the core, and the others do what it announces.

::

    worker 0, in the engine's process      core -> SharedExecutor -> TorchExecutor -> step
                                                        |  pipe: steps, loads, drops           } collectives
    workers 1 .. N-1, each a process                    v                                      }
                                            Follower -> TorchExecutor -> the same step         }

A step is announced when it begins on worker 0: by then its tokens are known, and no clock has a say in it any more. A
load is over when it is over on every worker. Nothing is answered about steps, since worker 0 has the logits.

Once a worker is lost (``worker_group``), all work raises, and the engine ends.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

from manylora.core.clock import Clock
from manylora.core.errors import AdapterError, EngineDead
from manylora.core.plan import AdapterLoad, LoadResult, PlannedSequence, PromptRows, StepPlan, StepResult
from manylora.core.ports import AdapterReader, EngineParts
from manylora.core.types import AdapterKey, AdapterVersion, SamplingParams, Tier
from manylora.execution.executor import FutureWork, TorchExecutor

__all__ = ["Answer", "Failed", "Follower", "Here", "Loaded", "Message", "Peer", "SharedExecutor"]

_GREEDY = SamplingParams(temperature=0.0)


class AnnouncedPart(NamedTuple):
    """A sequence's part of a step, without what only worker 0 needs."""

    seq_id: int
    start: int
    num_tokens: int
    tokens: Sequence[int]  # from ``start`` on
    first_page: int  # the pages before it were announced with an earlier step
    pages: Sequence[int]
    adapter: AdapterKey | None
    is_sampled: bool


class AnnouncedStep(NamedTuple):
    """A step that begins."""

    step_id: int
    parts: Sequence[AnnouncedPart]
    released: tuple[int, ...]
    prompt_rows: tuple[PromptRows, ...]


class Load(NamedTuple):
    """A load to begin; its result is answered under its number."""

    number: int
    load: AdapterLoad


class Drop(NamedTuple):
    """State of an adapter to drop."""

    key: AdapterKey
    tier: Tier


Message: TypeAlias = AnnouncedStep | Load | Drop


class Loaded(NamedTuple):
    """The answer to a load."""

    number: int
    result: LoadResult


class Failed(NamedTuple):
    """The end of a worker, in words; ``is_refusal`` before it served if its configuration is at fault."""

    reason: str
    is_refusal: bool = False


class Here(NamedTuple):
    """A sign of life; the first with ``is_loaded`` says that the worker has its weights, and waits for the others."""

    is_loaded: bool = False


Answer: TypeAlias = Loaded | Failed | Here


class Peer(Protocol):
    """Another worker."""

    def send(self, message: Message) -> None:
        """Send a message; on any thread."""


class _Window:
    """The tokens of a sequence from ``start`` on."""

    def __init__(self, start: int, tokens: Sequence[int]) -> None:
        self._start = start
        self._tokens = tokens

    def __len__(self) -> int:
        return self._start + len(self._tokens)

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return self._tokens[index.start - self._start : index.stop - self._start]
        return self._tokens[index - self._start]


class Follower:
    """Does on one worker what the first announces; answers are given on any thread."""

    def __init__(self, executor: TorchExecutor, answer: Callable[[Answer], None]) -> None:
        self._executor = executor
        self._answer = answer
        self._pages: dict[int, list[int]] = {}

    def handle(self, message: Message) -> None:
        """Begin what a message asks for."""
        match message:
            case AnnouncedStep():
                work = self._executor.launch(self._plan(message), 0.0)
                work.future.add_done_callback(self._stepped)
            case Load(number, load):
                loading = self._executor.load_adapter(load, 0.0)
                loading.future.add_done_callback(lambda done: self._answer(Loaded(number, done.result())))
            case Drop(key, tier):
                self._executor.drop_adapter(key, tier)

    def _plan(self, step: AnnouncedStep) -> StepPlan:
        for seq_id in step.released:
            self._pages.pop(seq_id, None)
        sequences = []
        for part in step.parts:
            pages = [*self._pages.get(part.seq_id, ())[: part.first_page], *part.pages]
            self._pages[part.seq_id] = pages
            sequences.append(
                PlannedSequence(
                    seq_id=part.seq_id,
                    tokens=_Window(part.start, part.tokens),  # type: ignore[arg-type]
                    num_prompt_tokens=part.start + part.num_tokens,
                    start=part.start,
                    num_tokens=part.num_tokens,
                    pages=pages,
                    adapter=part.adapter,
                    rank=0,
                    sampling=_GREEDY,
                    is_sampled=part.is_sampled,
                    seed=0,
                )
            )
        return StepPlan(
            step_id=step.step_id, sequences=tuple(sequences), released=step.released, prompt_rows=step.prompt_rows
        )

    def _stepped(self, done: Future[StepResult]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            self._answer(Failed(f"its step failed: {error!r}"))


class SharedExecutor:
    """The executor of worker 0: every call goes to all workers. The end of a load, or a loss, wakes the clock."""

    def __init__(self, own: TorchExecutor, peers: Sequence[Peer], clock: Clock) -> None:
        self.runner = own.runner
        self._own = own
        self._peers = peers
        self._clock = clock
        self._lost: str | None = None
        self._numbers = count()
        self._lock = threading.Lock()  # of the loads, which threads of the peers end
        self._loads: dict[int, tuple[Future[LoadResult], list[LoadResult]]] = {}  # with the results of peers so far
        self._pages: dict[int, tuple[Sequence[int], int]] = {}  # of each sequence, and how many were announced
        own.runner.announce = self._announce

    def join(self, parts: EngineParts, close: Callable[[], None]) -> EngineParts:
        """Return the parts of all workers, which ``close`` ends, from those of worker 0."""
        return replace(
            parts,
            executor=self,
            reader=_SharedReader(parts.reader, self),
            close=close,
            reads_host=False,  # adapters are copied to every device before a step, so that no step waits by a clock
            waits_by_layer=False,
            shared=None,
        )

    def launch(self, plan: StepPlan, now: float) -> _SharedStep:
        """Start a step on all workers; as ``Executor.launch``."""
        self.check()
        return _SharedStep(self._own.launch(plan, now), self)

    def load_adapter(self, load: AdapterLoad, now: float) -> _SharedLoad:
        """Start a load on all workers."""
        return _SharedLoad(self, load, self._own.load_adapter(load, now), self.load_on_peers(load))

    def load_on_peers(self, load: AdapterLoad) -> Future[LoadResult]:
        """Start a load on the other workers alone."""
        number, ended = next(self._numbers), Future[LoadResult]()
        with self._lock:
            if self._lost is not None:  # no worker will answer
                ended.set_exception(EngineDead(self._lost))
                return ended
            self._loads[number] = ended, []
        self._send(Load(number, load))
        return ended

    def drop_adapter(self, key: AdapterKey, tier: Tier) -> None:
        """Drop an adapter on all workers."""
        self._send(Drop(key, tier))
        self._own.drop_adapter(key, tier)

    def answered(self, answer: Loaded) -> None:
        """Note that a peer has ended a load; on any thread."""
        with self._lock:
            if answer.number not in self._loads:  # another worker is lost
                return
            ended, results = self._loads[answer.number]
            results.append(answer.result)
            if len(results) < len(self._peers):
                return
            del self._loads[answer.number]
        ended.set_result(_worst(results))
        self._clock.wake()

    def lose(self, reason: str) -> None:
        """Fail all work from now on: a worker is lost; on any thread."""
        self._lost = self._lost or reason
        with self._lock:
            pending = [ended for ended, _ in self._loads.values()]
            self._loads.clear()
        for ended in pending:
            ended.set_exception(EngineDead(reason))
        self._clock.wake()

    def check(self) -> None:
        """Raise ``EngineDead`` if a worker is lost."""
        if self._lost is not None:
            raise EngineDead(self._lost)

    def close(self) -> None:
        """As ``TorchExecutor.close``."""
        self._own.close()

    def _announce(self, plan: StepPlan) -> None:
        """Tell the peers of a step that begins; of pages, those that they do not know yet."""
        parts = []
        for sequence in plan.sequences:
            pages, known = self._pages.get(sequence.seq_id, (None, 0))
            known = known if pages is sequence.pages else 0
            more = sequence.pages[known:]
            self._pages[sequence.seq_id] = sequence.pages, known + len(more)
            stop = sequence.start + sequence.num_tokens + bool(plan.prompt_rows)  # a report's target is one further on
            tokens = sequence.tokens[sequence.start : stop]
            parts.append(
                AnnouncedPart(
                    *(sequence.seq_id, sequence.start, sequence.num_tokens, tokens, known, more),
                    *(sequence.adapter, sequence.is_sampled),
                )
            )
        for seq_id in plan.released:
            self._pages.pop(seq_id, None)
        self._send(AnnouncedStep(plan.step_id, parts, plan.released, plan.prompt_rows))

    def _send(self, message: Message) -> None:
        for peer in self._peers:
            peer.send(message)


@dataclass(frozen=True, slots=True)
class _SharedStep:
    """A step of all workers: done when it is on the first, which has the tokens."""

    ready_at: ClassVar[float] = math.inf

    own: FutureWork[StepResult]
    executor: SharedExecutor

    def poll(self, now: float) -> StepResult | None:
        self.executor.check()
        return self.own.poll(now)


@dataclass(frozen=True, slots=True)
class _SharedLoad:
    """A load of all workers."""

    ready_at: ClassVar[float] = math.inf

    executor: SharedExecutor
    load: AdapterLoad
    own: FutureWork[LoadResult]
    others: Future[LoadResult]

    def poll(self, now: float) -> LoadResult | None:
        self.executor.check()
        if (own := self.own.poll(now)) is None or not self.others.done():
            return None
        worst = _worst([own, self.others.result()])
        if worst.error is not None:  # what one worker could not load, the others forget
            self.executor.drop_adapter(self.load.version.key, self.load.tier)
        return replace(worst, layer_digests=own.layer_digests)


class _SharedReader:
    """Reads adapters on all workers, into the host tier of each."""

    def __init__(self, own: AdapterReader, executor: SharedExecutor) -> None:
        self._own = own
        self._executor = executor

    def read(self, name: str, path: str) -> AdapterVersion:
        """As ``AdapterReader.read``."""
        version = self._own.read(name, path)
        if error := self._executor.load_on_peers(AdapterLoad(version=version, tier=Tier.HOST)).result().error:
            self._executor.drop_adapter(version.key, Tier.HOST)
            raise AdapterError(name, error)
        return version

    def check(self, adapters: Sequence[tuple[str, str]]) -> list[AdapterVersion | AdapterError]:
        """As ``AdapterReader.check``: all workers see the same files."""
        return self._own.check(adapters)


def _worst(results: Sequence[LoadResult]) -> LoadResult:
    """Return the result of a load over several workers: the first failure, or the longest duration."""
    failed = next((result for result in results if result.error is not None), None)
    return failed or max(results, key=lambda result: result.device_s or 0.0)
