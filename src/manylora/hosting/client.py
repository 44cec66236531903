"""The client of one engine: requests become streams of outputs, admin calls become awaitable answers.

A client has one link. When the engine ends, every stream and every call in flight raises ``EngineDead`` at once, and
``engine_keeper`` creates a new client.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeAlias

from manylora.engine.status import AdapterStatus, EngineStats
from manylora.errors import EngineDead, ManyloraError
from manylora.hosting.link import EngineLink
from manylora.hosting.protocol import (
    AddRequests,
    Cancel,
    Command,
    EngineInfo,
    LoadAdapter,
    LoadAdapters,
    Message,
    Observations,
    PinAdapter,
    Ready,
    Refused,
    Reply,
    TakeSnapshot,
    Turn,
    UnloadAdapter,
    WarmAdapter,
)
from manylora.types import Output, Request

__all__ = ["Consume", "EngineClient", "Flush", "OutputStream"]

Flush: TypeAlias = Callable[[], Awaitable[None]]
"""The part of a consumer's work that must be awaited: a slow socket, room in a queue."""

Consume: TypeAlias = Callable[[list[Output]], Flush | None]
"""Consumes outputs; returns the work, if any, that must be awaited before the next call."""


class OutputStream:
    """The outputs of requests that were submitted together, until each has finished or been cancelled.

    The consumer is called in the callback that received the outputs: waking a task for every token costs more than
    writing the token, and all streams of a step wait for each other.
    """

    def __init__(self) -> None:
        self._waiting: list[Output] = []
        self._error: ManyloraError | None = None
        self._is_closed = False
        self._consume: Consume | None = None  # set while outputs can be delivered as they arrive ...
        self._interrupted: asyncio.Future[Flush | None] | None = None  # ... and the task that sleeps meanwhile

    async def deliver(self, consume: Consume) -> None:
        """Deliver outputs to ``consume`` as they arrive, until ``close``.

        While the work that ``consume`` returned is awaited, outputs are collected: a slow reader gets more tokens at a
        time, not a longer queue.

        Args:
            consume: Called with one or more outputs, on the event loop but not in this task. Its errors are raised
                here.

        Raises:
            EngineDead: The engine died; its undelivered outputs are lost.
        """
        while not self._is_closed:
            if self._waiting:
                outputs, self._waiting = self._waiting, []
                flush = consume(outputs)
            elif self._error is not None:
                raise self._error
            else:
                self._interrupted = asyncio.get_running_loop().create_future()
                self._consume = consume
                try:
                    flush = await self._interrupted
                finally:
                    self._consume = self._interrupted = None
            if flush is not None:
                await flush()

    def push(self, output: Output) -> None:
        """Add an output, for the next ``wake``."""
        self._waiting.append(output)

    def wake(self) -> None:
        """Deliver the outputs that were pushed, if they can be consumed now."""
        consume, interrupted = self._consume, self._interrupted
        if consume is None or interrupted is None or interrupted.done():
            return
        flush = None
        if self._waiting:
            outputs, self._waiting = self._waiting, []
            try:
                flush = consume(outputs)
            except Exception as error:  # raised in this stream's task, and in no other
                interrupted.set_exception(error)
                return
        if flush is not None or self._is_closed or self._error is not None:
            interrupted.set_result(flush)

    def close(self) -> None:
        """End the stream: ``deliver`` returns. Called by the consumer."""
        self._is_closed = True

    def fail(self, error: ManyloraError) -> None:
        """End the stream: ``deliver`` raises ``error`` after the outputs that have arrived."""
        self._error = error
        self.wake()


class EngineClient:
    """One engine, seen from the event loop.

    Args:
        link: Link to the engine, not yet started.
        observe: Called with the engine's observations, message by message.
        on_started: Called with the id of every request whose first output has arrived.
        on_ended: Called with the id of every request that has ended, for any reason.
    """

    def __init__(
        self,
        link: EngineLink,
        *,
        observe: Callable[[Observations], None],
        on_started: Callable[[str], object] | None = None,
        on_ended: Callable[[str], object] | None = None,
    ) -> None:
        self._link = link
        self._observe = observe
        self._on_started = on_started
        self._on_ended = on_ended
        self._unstarted: set[str] = set()  # empty without ``on_started``
        self._streams: dict[str, OutputStream] = {}
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._call_numbers = itertools.count(1)
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._watcher: asyncio.Task[str] | None = None
        self._dead: EngineDead | None = None

    @property
    def pid(self) -> int | None:
        """Return the id of the engine's process."""
        return self._link.pid

    async def start(self) -> EngineInfo:
        """Start the engine and wait until it serves.

        Raises:
            ManyloraError: The engine refused its configuration.
            EngineDead: The engine ended before it was ready.
        """
        await self._link.start(self._deliver)
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
        """Wait until the engine has ended and all in flight has failed; return the reason, in words."""
        assert self._watcher is not None
        return await asyncio.shield(self._watcher)

    async def stop(self) -> None:
        """End the engine; all that is in flight fails."""
        self.fail_all(EngineDead("The engine was stopped."))
        await self._link.stop()
        if self._watcher is not None:
            await self._watcher

    def fail_all(self, error: EngineDead) -> None:
        """Fail every stream and call in flight, and every later one."""
        self._dead = self._dead or error
        streams = dict.fromkeys(self._streams.values())
        self._forget(list(self._streams))
        for stream in streams:
            stream.fail(error)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)
        self._calls.clear()

    def submit(
        self, requests: Sequence[Request], stream: OutputStream, *, each: bool = False
    ) -> Awaitable[dict[str, ManyloraError]]:
        """Submit requests whose outputs go to ``stream``; await the result for the engine's answer.

        The requests can be cancelled from the call on.

        Args:
            requests: The requests.
            stream: Receives their outputs.
            each: Whether valid requests are added although others fail, whose errors are returned by request id;
                otherwise all are added or none.

        Raises:
            RequestError: A request is invalid.
            CapacityError: The queue is full.
            EngineDead: The engine died.
        """
        request_ids = [request.request_id for request in requests]
        for request_id in request_ids:
            self._streams[request_id] = stream
        if self._on_started is not None:
            self._unstarted.update(request_ids)
        return self._consent(requests, request_ids, each)

    def cancel(self, request_ids: Sequence[str], *, stopped: bool = False) -> None:
        """Cancel requests; no output of them arrives any more.

        Args:
            request_ids: Requests; those that have ended, or belong to other engines, are ignored.
            stopped: Whether their text reached a stop string, which counts as a normal end.
        """
        in_flight = [request_id for request_id in request_ids if request_id in self._streams]
        if in_flight:
            self._forget(in_flight)
            self._link.send(Cancel(in_flight, stopped))

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> AdapterStatus:
        """Read and register an adapter; errors as of ``AdapterCatalog.register``."""
        return (await self._call(lambda call: LoadAdapter(call, name, path, replace))).statuses[0]

    async def load_adapters(
        self, adapters: Sequence[tuple[str, str, bool]]
    ) -> tuple[dict[str, int], dict[str, ManyloraError]]:
        """Check adapters without their weights and register those that pass.

        Args:
            adapters: Name and path of each, and whether it may replace one of that name.

        Returns:
            The rank of each that is registered, and the error of each that is not, by name.
        """
        reply = await self._call(lambda call: LoadAdapters(call, list(adapters)))
        return reply.ranks, {name: fault.to_error() for name, fault in reply.refused.items()}

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter's name."""
        await self._call(lambda call: UnloadAdapter(call, name))

    async def pin_adapter(self, name: str, pinned: bool) -> AdapterStatus:
        """Pin or unpin an adapter: a pinned one is not evicted."""
        return (await self._call(lambda call: PinAdapter(call, name, pinned))).statuses[0]

    async def warm_adapter(self, name: str) -> AdapterStatus:
        """Start to copy an adapter to the device."""
        return (await self._call(lambda call: WarmAdapter(call, name))).statuses[0]

    async def snapshot(
        self, num_adapters: int | None = None, *, only_in_use: bool = False, name: str | None = None
    ) -> tuple[EngineStats, tuple[AdapterStatus, ...]]:
        """Return the engine's counters and the state of every adapter, or of some as of ``TakeSnapshot``."""
        reply = await self._call(lambda call: TakeSnapshot(call, num_adapters, only_in_use, name))
        assert reply.stats is not None
        return reply.stats, reply.statuses

    async def _consent(
        self, requests: Sequence[Request], request_ids: Sequence[str], each: bool
    ) -> dict[str, ManyloraError]:
        try:
            reply = await self._call(lambda call: AddRequests(call, list(requests), each))
        except asyncio.CancelledError:
            self.cancel(request_ids)
            raise
        except ManyloraError:
            self._forget(request_ids)
            raise
        self._forget(reply.refused)
        return {request_id: fault.to_error() for request_id, fault in reply.refused.items()}

    async def _call(self, make: Callable[[int], Command]) -> Reply:
        if self._dead is not None:
            raise self._dead
        call = next(self._call_numbers)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[call] = answer
        try:
            self._link.send(make(call))
            reply = await answer
        finally:
            self._calls.pop(call, None)
        if reply.fault is not None:
            raise reply.fault.to_error()
        return reply

    async def _watch(self) -> str:
        how = await self._link.closed()
        self.fail_all(EngineDead(f"The engine died while it worked on this request ({how}); please try again."))
        return how

    def _deliver(self, messages: Sequence[Message]) -> None:
        news: dict[OutputStream, None] = {}  # in order
        observed: list[Observations] = []
        for message in messages:
            match message:
                case Turn(outputs, observations):
                    if self._unstarted:
                        self._note_started(outputs)
                    for output in outputs:
                        stream = self._streams.get(output.request_id)
                        if stream is not None:
                            if output.finish is not None:
                                self._forget((output.request_id,))
                            stream.push(output)
                            news[stream] = None
                    observed.append(observations)
                case Reply():
                    answer = self._calls.get(message.call)
                    if answer is not None and not answer.done():
                        answer.set_result(message)
                    if message.observations is not None:
                        observed.append(message.observations)
                case Ready(info):
                    if not self._ready.done():
                        self._ready.set_result(info)
                case Refused(fault):
                    if not self._ready.done():
                        self._ready.set_exception(fault.to_error())
        for stream in news:
            stream.wake()
        for observations in observed:  # after the tokens, which clients wait for
            self._observe(observations)

    def _note_started(self, outputs: Sequence[Output]) -> None:
        assert self._on_started is not None
        for output in outputs:
            if output.request_id in self._unstarted:
                self._unstarted.discard(output.request_id)
                self._on_started(output.request_id)

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._unstarted.discard(request_id)
            if self._streams.pop(request_id, None) is not None and self._on_ended is not None:
                self._on_ended(request_id)
