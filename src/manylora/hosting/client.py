"""The handle on one engine: requests become streams of outputs, admin calls become awaitable answers.

Lives and dies with its link. When the engine ends, every stream and every call in flight raises ``EngineDead``
at once; ``engine_keeper`` then makes a new client.
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
"""The rest of a consumer's work, which has to wait for something: a slow socket, room in a queue."""

Consume: TypeAlias = Callable[[list[Output]], Flush | None]
"""Takes outputs; returns the work that is left before it can take more, if there is any."""


class OutputStream:
    """The outputs of requests that were submitted together, until each has finished or been cancelled.

    Outputs are handed to the consumer at once, in the callback that brought them. To wake a task for every token costs
    more than to write it, and all streams of a step wait for each other.
    """

    def __init__(self) -> None:
        self._waiting: list[Output] = []
        self._error: ManyloraError | None = None
        self._is_closed = False
        self._consume: Consume | None = None  # set while outputs can be handed over as they arrive ...
        self._interrupted: asyncio.Future[Flush | None] | None = None  # ... and the task that sleeps meanwhile

    async def deliver(self, consume: Consume) -> None:
        """Hand outputs to ``consume`` as they arrive, until ``close``.

        Where ``consume`` returns work that is left, nothing is delivered until that is done, and then all that came
        meanwhile: a slow reader gets more tokens at a time, not a longer queue.

        Args:
            consume: Called with one or more outputs, on the event loop but not in this task. Its errors are raised
                here.

        Raises:
            EngineDead: The engine is gone, and outputs that it had not delivered are lost.
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
            except Exception as error:  # the sleeping task's to deal with, and no other stream's
                interrupted.set_exception(error)
                return
        if flush is not None or self._is_closed or self._error is not None:
            interrupted.set_result(flush)

    def close(self) -> None:
        """End the stream: ``deliver`` returns; called by the consumer, which has all it wants."""
        self._is_closed = True

    def fail(self, error: ManyloraError) -> None:
        """End the stream: after the outputs that have arrived, ``deliver`` raises ``error``."""
        self._error = error
        self.wake()


class EngineClient:
    """One engine, seen from the event loop.

    Args:
        link: The engine's life, not yet started.
        observe: Takes the engine's observations, message by message.
        on_ended: Told the id of every request that has ended here, however that came about.
    """

    def __init__(
        self,
        link: EngineLink,
        *,
        observe: Callable[[Observations], None],
        on_ended: Callable[[str], object] | None = None,
    ) -> None:
        self._link = link
        self._observe = observe
        self._on_ended = on_ended
        self._streams: dict[str, OutputStream] = {}
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._call_numbers = itertools.count(1)
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._watcher: asyncio.Task[str] | None = None
        self._dead: EngineDead | None = None

    @property
    def pid(self) -> int | None:
        """Return the process the engine runs in."""
        return self._link.pid

    async def start(self) -> EngineInfo:
        """Start the engine and wait until it serves.

        Raises:
            ManyloraError: It refused its configuration, and says why.
            EngineDead: It ended before it was ready.
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
        """Wait until the engine is gone; by then everything in flight has failed. Return how it ended."""
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
        """Add requests whose outputs go to ``stream``; the result is awaited for the engine's consent.

        Until then they can be cancelled, as afterwards.

        Args:
            requests: The requests.
            stream: Gets their outputs.
            each: Whether those are added that can be, and the errors of the others are returned by request id;
                otherwise all are added or none.

        Raises:
            RequestError: One of them is wrong.
            CapacityError: No room now.
            EngineDead: The engine is gone.
        """
        request_ids = [request.request_id for request in requests]
        for request_id in request_ids:
            self._streams[request_id] = stream
        return self._consent(requests, request_ids, each)

    def cancel(self, request_ids: Sequence[str], *, stopped: bool = False) -> None:
        """Stop working on requests; nothing more arrives for them.

        Args:
            request_ids: Which; those that have ended already, and those of other engines, are ignored.
            stopped: Their text reached a stop string: a good end, not a client that left.
        """
        in_flight = [request_id for request_id in request_ids if request_id in self._streams]
        if in_flight:
            self._forget(in_flight)
            self._link.send(Cancel(in_flight, stopped))

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> AdapterStatus:
        """Read and register an adapter; see ``AdapterCatalog.register`` for its errors."""
        return (await self._call(lambda call: LoadAdapter(call, name, path, replace))).statuses[0]

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter's name."""
        await self._call(lambda call: UnloadAdapter(call, name))

    async def pin_adapter(self, name: str, pinned: bool) -> AdapterStatus:
        """Keep an adapter from being evicted, or no longer."""
        return (await self._call(lambda call: PinAdapter(call, name, pinned))).statuses[0]

    async def warm_adapter(self, name: str) -> AdapterStatus:
        """Begin to copy an adapter to the device."""
        return (await self._call(lambda call: WarmAdapter(call, name))).statuses[0]

    async def snapshot(self, num_adapters: int | None = None) -> tuple[EngineStats, tuple[AdapterStatus, ...]]:
        """Return the engine's counters and the state of every adapter, or of the busiest ``num_adapters``."""
        reply = await self._call(lambda call: TakeSnapshot(call, num_adapters))
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
        for observations in observed:  # clients wait for tokens, and for no statistics
            self._observe(observations)

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self._streams.pop(request_id, None) is not None and self._on_ended is not None:
                self._on_ended(request_id)
