"""The client of one engine: requests become streams of outputs, admin calls become awaitable answers.

A client has one link. When the engine ends, it gives its requests up at once (``on_lost``), every call in flight raises
``EngineDead``, and the engine's keeper creates a new client.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from manylora.core.engine.status import AdapterStatus, EngineStats
from manylora.core.errors import EngineDead, ManyloraError
from manylora.core.types import Output
from manylora.serving.hosting.links.in_flight import EngineLoss, InFlightRequest, OutputStream
from manylora.serving.hosting.links.link import EngineLink
from manylora.serving.hosting.protocol import (
    AdapterIdentity,
    AddRequests,
    Cancel,
    ChangeAdapter,
    Command,
    EngineInfo,
    EngineRoom,
    LoadAdapter,
    LoadAdapters,
    Message,
    Observations,
    Ready,
    Reply,
    StartRefused,
    TakeSnapshot,
    Turn,
)

__all__ = ["EngineClient"]


@dataclass(slots=True, eq=False)
class _Calls:
    """The calls of an engine that it has not replied to: each has a number, which its reply repeats."""

    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _replies: dict[int, asyncio.Future[Reply]] = field(default_factory=dict)

    def begin(self) -> tuple[int, asyncio.Future[Reply]]:
        """Return the number of a new call, and its future reply."""
        call = next(self._numbers)
        reply = self._replies[call] = asyncio.get_running_loop().create_future()
        return call, reply

    async def result(self, call: int, reply: asyncio.Future[Reply]) -> Reply:
        """Wait for a reply; raise its error, if it has one."""
        try:
            made = await reply
        finally:
            self._replies.pop(call, None)
        if made.fault is not None:
            raise made.fault.to_error()
        return made

    def reply(self, reply: Reply) -> None:
        """Give a reply to its call, if that still waits."""
        waiting = self._replies.get(reply.call)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def fail(self, error: ManyloraError) -> None:
        """End every call with an error."""
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)
        self._replies.clear()


@dataclass(eq=False)
class EngineClient:
    """One engine, seen from the event loop, on which it is made."""

    link: EngineLink  # to the engine, not yet started
    _: KW_ONLY
    observe: Callable[[Observations], None]  # called with the engine's observations, message by message
    on_started: Callable[[str], object] | None = None  # called with the id of every request that has its first output
    on_ended: Callable[[str], object] | None = None  # called with the id of every request that has ended, somehow
    # Called with the accepted requests of an engine that is lost, which are no longer its own; without it their streams
    # fail.
    on_lost: Callable[[list[InFlightRequest], EngineLoss], None] | None = None
    loss: EngineLoss | None = None  # the reason why the engine was lost
    _unstarted: set[str] = field(default_factory=set)  # empty without ``on_started``
    _in_flight: dict[str, InFlightRequest] = field(default_factory=dict)
    _submitted: dict[int, Sequence[InFlightRequest]] = field(default_factory=dict)  # by call, until the engine answers
    _idle: asyncio.Future[None] | None = None
    _heard_at: float = 0.0  # time of its last message
    _calls: _Calls = field(default_factory=_Calls)
    _watcher: asyncio.Task[str] | None = None
    _has_answered: bool = False
    _room: EngineRoom | None = None  # by its last turn
    _num_since: int = 0  # requests that it had not seen then

    def __post_init__(self) -> None:
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()

    @property
    def refusal(self) -> ManyloraError | None:
        """The error of a new request if the room that the engine had at its last turn is taken.

        A full engine has requests, so the next turn, which may say otherwise, is a step away.
        """
        room = self._room
        is_full = room is not None and self._num_since >= room.num and self._in_flight
        return room.beyond.to_error() if room is not None and is_full else None

    @property
    def num_requests(self) -> int:
        """Requests that the engine works on."""
        return len(self._in_flight)

    async def start(self) -> EngineInfo:
        """Start the engine and wait until it serves.

        ``EngineDead`` if it ended before it was ready; another error if it refused its configuration.
        """
        await self.link.start(self._deliver)
        self._watcher = asyncio.create_task(self._watch())
        try:
            waiting: list[asyncio.Future[Any]] = [self._ready, self._watcher]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not self._ready.done():
                raise EngineDead(f"{self._watcher.result()} before it was ready")
            return self._ready.result()
        finally:
            self._ready.cancel()

    async def closed(self) -> str:
        """Wait until the engine has ended and given its requests up; return the reason, in words."""
        assert self._watcher is not None
        return await asyncio.shield(self._watcher)

    async def stop(self) -> None:
        """End the engine; all that is in flight fails."""
        self.lose(EngineLoss(EngineDead("The engine was stopped."), is_counted=False), is_final=True)
        await self.link.stop()
        if self._watcher is not None:
            await self._watcher

    def lose(self, loss: EngineLoss, *, is_final: bool = False) -> None:
        """Give up the engine: its requests go to ``on_lost``, calls in flight and later ones fail.

        A submission in flight fails as well, with its requests.

        ``is_final``: the requests cannot go on elsewhere, so their streams fail.
        """
        loss.has_answered = self._has_answered
        self.loss = self.loss or loss
        requests = [one for one in self._in_flight.values() if one.is_accepted]
        self._forget(list(self._in_flight))
        self._submitted.clear()
        for one in requests:
            if one.on_next_output is None:  # else its pause began earlier
                one.lost_at = self._heard_at
        if self.on_lost is not None and not is_final:
            if requests:
                self.on_lost(requests, loss)
        else:
            for one in requests:
                one.fail(loss.error)
        self._calls.fail(loss.error)

    async def idle(self) -> None:
        """Wait until the engine works on no request."""
        while self._in_flight:
            if self._idle is None:
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    def submit(self, requests: Sequence[InFlightRequest], *, each: bool = False) -> Awaitable[dict[str, ManyloraError]]:
        """Submit requests; await the result for the engine's answer. They can be cancelled from the call on.

        With ``each`` valid requests are added although others fail, whose errors are returned by request id; otherwise
        all are added or none.

        ``RequestError`` if one is invalid, ``CapacityError`` if the queue is full, ``EngineDead`` if the engine was
        lost before it had answered.
        """
        for one in requests:
            one.is_accepted = False
            self._in_flight[one.request_id] = one
        if self.on_started is not None:
            self._unstarted.update(one.request_id for one in requests)
        added = [one.next_request() for one in requests]
        call, answer = self._begin(lambda call: AddRequests(call, added, each))
        self._submitted[call] = requests
        self._num_since += len(requests)
        return self._consent(call, answer, [one.request_id for one in requests])

    def cancel(self, request_ids: Sequence[str], *, stopped: bool = False, refused: bool = False) -> None:
        """Cancel requests; no output of them arrives any more.

        Those that have ended, or belong to other engines, are ignored. ``stopped`` and ``refused``: see ``Cancel``.
        """
        in_flight = [request_id for request_id in request_ids if request_id in self._in_flight]
        if in_flight:
            self._forget(in_flight)
            self.link.send(Cancel(in_flight, stopped, refused))

    async def load_adapter(
        self, name: str, path: str, *, replace: bool = False, by_header: bool = False
    ) -> AdapterStatus:
        """Read and register an adapter; errors are as for ``AdapterCatalog.register``."""
        return (await self._call(lambda call: LoadAdapter(call, name, path, replace, by_header))).statuses[0]

    async def load_adapters(
        self, adapters: Sequence[tuple[str, str, bool, AdapterIdentity | None]]
    ) -> tuple[dict[str, AdapterIdentity], dict[str, ManyloraError]]:
        """Check adapters without their weights and register those that pass.

        Return each that is registered, and the error of each that is not, by name.
        """
        reply = await self._call(lambda call: LoadAdapters(call, list(adapters)))
        return reply.registered, {name: fault.to_error() for name, fault in reply.refused.items()}

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter's name."""
        await self._call(lambda call: ChangeAdapter(call, name, "unload"))

    async def pin_adapter(self, name: str, pinned: bool) -> AdapterStatus:
        """Pin or unpin an adapter: a pinned one is not evicted."""
        change: Literal["pin", "unpin"] = "pin" if pinned else "unpin"
        return (await self._call(lambda call: ChangeAdapter(call, name, change))).statuses[0]

    async def warm_adapter(self, name: str) -> AdapterStatus:
        """Start to copy an adapter to the device."""
        return (await self._call(lambda call: ChangeAdapter(call, name, "warm"))).statuses[0]

    async def point_adapter(self, name: str, to: str) -> AdapterStatus:
        """Point a name, which may be new, to the version of another one."""
        return (await self._call(lambda call: ChangeAdapter(call, name, "point", to))).statuses[0]

    async def snapshot(
        self, num_adapters: int | None = None, *, only_in_use: bool = False, name: str | None = None
    ) -> tuple[EngineStats, tuple[AdapterStatus, ...]]:
        """Return the engine's counters and the state of every adapter, or of those selected, as in ``TakeSnapshot``."""
        reply = await self._call(lambda call: TakeSnapshot(call, num_adapters, only_in_use, name))
        if reply.stats is None:
            raise EngineDead("The engine answered without its counters.")
        return reply.stats, reply.statuses

    async def _consent(
        self, call: int, answer: asyncio.Future[Reply], request_ids: Sequence[str]
    ) -> dict[str, ManyloraError]:
        try:
            reply = await self._calls.result(call, answer)
        except asyncio.CancelledError:
            self.cancel(request_ids)
            raise
        except ManyloraError:
            self._forget(request_ids)
            raise
        self._forget(reply.refused)
        return {request_id: fault.to_error() for request_id, fault in reply.refused.items()}

    async def _call(self, make: Callable[[int], Command]) -> Reply:
        return await self._calls.result(*self._begin(make))

    def _begin(self, make: Callable[[int], Command]) -> tuple[int, asyncio.Future[Reply]]:
        """Send the command that ``make`` returns for a call number; return the number and the future reply."""
        if self.loss is not None:
            raise self.loss.error
        call, answer = self._calls.begin()
        self.link.send(make(call))
        return call, answer

    async def _watch(self) -> str:
        how = await self.link.closed()
        error = EngineDead(f"The engine died while it worked on this request ({how.reason}); please try again.")
        self.lose(EngineLoss(error, is_suspicious=not how.is_external))
        return how.reason

    def _deliver(self, messages: Sequence[Message]) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        in_flight = self._in_flight
        news: dict[OutputStream, None] = {}  # in order
        observed: list[Observations] = []
        for message in messages:
            match message:
                case Turn(outputs, observations, room):
                    self._room = room
                    self._num_since = sum(map(len, self._submitted.values()))
                    if self._unstarted:
                        self._note_started(outputs)
                    for output in outputs:
                        one = in_flight.get(output.request_id)
                        if one is not None:
                            if output.finish is not None:
                                self._forget((output.request_id,))
                            for token in output.tokens:
                                one.answered.append(token.token_id)
                            one.last = output
                            stream = one.stream
                            stream.push(output)
                            news[stream] = None
                            if one.on_next_output is not None:
                                one.note_output()
                    observed.append(observations)
                case Reply():
                    for one in self._submitted.pop(message.call, ()):
                        one.is_accepted = message.fault is None and one.request_id not in message.refused
                        self._num_since -= not one.is_accepted
                    self._calls.reply(message)
                    if message.observations is not None:
                        observed.append(message.observations)
                case Ready(info):
                    if not self._ready.done():
                        self._ready.set_result(info)
                case StartRefused(fault):
                    if not self._ready.done():
                        self._ready.set_exception(fault.to_error())
        if news:
            self._has_answered = True
        for stream in news:
            stream.wake()
        for observations in observed:  # after the tokens, which clients wait for
            self.observe(observations)

    def _note_started(self, outputs: Sequence[Output]) -> None:
        assert self.on_started is not None
        for output in outputs:
            if output.request_id in self._unstarted:
                self._unstarted.discard(output.request_id)
                self.on_started(output.request_id)

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._unstarted.discard(request_id)
            if self._in_flight.pop(request_id, None) is not None and self.on_ended is not None:
                self.on_ended(request_id)
        if self._idle is not None and not self._in_flight:
            self._idle.set_result(None)
            self._idle = None
