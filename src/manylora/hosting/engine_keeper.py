"""Keeps an engine alive: starts it, notices its death, starts the next one and gives it the adapters back.

What must survive an engine is here and nowhere else: which names were loaded from where, and which are pinned.
An engine that dies again and again is given longer and longer pauses, and in the end up: a server that cannot
serve should say so and leave, for whoever supervises *it* to see.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from weakref import WeakValueDictionary

from manylora.engine.status import AdapterStatus
from manylora.errors import (
    AdapterError,
    AdapterExists,
    AdapterNotFound,
    CapacityError,
    ConfigError,
    EngineDead,
    ManyloraError,
)
from manylora.hosting.client import EngineClient
from manylora.hosting.link import EngineLink
from manylora.hosting.protocol import EngineInfo, Observations
from manylora.hosting.watchdog import wait_until_hung

__all__ = ["EngineKeeper", "LoadedAdapter", "LoraModule", "RestartPolicy", "State"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter to load at start: vLLM's ``--lora-modules name=path``.

    Args:
        name: What requests will call it.
        path: Its directory.
        is_required: Whether the server may not start without it. One that was merely found in a folder is left out
            when it is bad, with a line in the log: one tenant's broken upload must not keep the others from starting.
    """

    name: str
    path: str
    is_required: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """What it takes to load an adapter again.

    Args:
        path: Its directory.
        is_pinned: Whether it was pinned.
        loaded_at: When it was first loaded, in seconds since the epoch: its ``created`` in ``/v1/models``.
    """

    path: str
    is_pinned: bool = False
    loaded_at: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When to restart a dead engine, and when to stop trying.

    Args:
        max_deaths: Deaths in a row that end it all.
        first_pause_s: Pause before the second restart in a row (the first is immediate); doubles from there.
        max_pause_s: Longest pause.
        healthy_after_s: An engine that served this long starts a new row.
    """

    max_deaths: int = 6
    first_pause_s: float = 0.5
    max_pause_s: float = 15.0
    healthy_after_s: float = 60.0

    def pause_s(self, deaths: int) -> float:
        """Return the pause after the ``deaths``-th death in a row, in seconds."""
        return 0.0 if deaths <= 1 else min(self.max_pause_s, self.first_pause_s * 2.0 ** (deaths - 2))


class State(Enum):
    """What a health check should know."""

    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"
    DRAINING = "draining"
    STOPPED = "stopped"


class EngineKeeper:
    """The engine the routes talk to, whichever one that is just now.

    Args:
        make_link: Makes the link to a new engine.
        served_name: The base model's name, which no adapter may take.
        restarts: When to restart and when to give up.
        observe: Takes what engines observe.
        epoch_s: Tells the time for people, in seconds since the epoch.
        hang_timeout_s: Seconds without a sign of life after which an engine counts as dead; ``None`` for never.
    """

    def __init__(
        self,
        make_link: Callable[[], EngineLink],
        *,
        served_name: str,
        restarts: RestartPolicy,
        observe: Callable[[Observations], None],
        epoch_s: Callable[[], float],
        hang_timeout_s: float | None = None,
    ) -> None:
        self.state = State.STARTING
        self.served_name = served_name
        self.adapters: dict[str, LoadedAdapter] = {}
        self.num_restarts = 0
        self._make_link = make_link
        self._restarts = restarts
        self._observe = observe
        self._epoch_s = epoch_s
        self._hang_timeout_s = hang_timeout_s
        self._client: EngineClient | None = None
        self._info: EngineInfo | None = None
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def info(self) -> EngineInfo:
        """Return the engine's limits and sizes; the same for every engine of one configuration."""
        if self._info is None:
            raise CapacityError("The server is starting; please try again.", retry_after_s=5, status=503)
        return self._info

    @property
    def engine(self) -> EngineClient:
        """Return the engine that serves.

        Raises:
            CapacityError: There is none just now; the message says why, and when to try again.
        """
        if self.state is State.SERVING and self._client is not None:
            return self._client
        match self.state:
            case State.DRAINING | State.STOPPED:
                reason, retry_after_s = "The server is shutting down and takes no new requests.", 10
            case State.RESTARTING:
                reason, retry_after_s = "The engine died and is being restarted; please try again.", 5
            case _:
                reason, retry_after_s = "The server is starting; please try again.", 5
        raise CapacityError(reason, retry_after_s=retry_after_s, status=503)

    @property
    def num_in_flight(self) -> int:
        """Return how many HTTP requests are being answered."""
        return self._num_in_flight

    @property
    def engine_pid(self) -> int | None:
        """Return the engine's process id, if there is an engine."""
        return None if self._client is None else self._client.pid

    async def start(self, modules: Sequence[LoraModule]) -> None:
        """Start the first engine and load the adapters given at start.

        Raises:
            ManyloraError: The engine refused its configuration, or a required adapter is bad: the message names it.
        """
        for module in modules:
            if module.name in self.adapters or module.name == self.served_name:
                raise ConfigError(f"Got the name {module.name!r} twice, expected every model to have its own")
            if module.is_required and not os.path.isdir(module.path):  # better known before a model is loaded
                raise AdapterNotFound(module.name, f"there is no directory {module.path!r}")
            self.adapters[module.name] = LoadedAdapter(path=module.path, loaded_at=int(self._epoch_s()))
        client = self._client = self._new_client()
        self._info = await client.start()
        required = {module.name for module in modules if module.is_required}
        for error in await self._load_all(client):
            if error.adapter in required:
                raise error
            logger.error("adapter_left_out name=%s reason=%s", error.adapter, error.reason)
            self.adapters.pop(error.adapter, None)
        if self.state is State.STARTING:
            self.state = State.SERVING

    async def run(self) -> None:
        """Watch the engine and restart it, until drained or stopped.

        Raises:
            EngineDead: It died too often in a row.
        """
        now = asyncio.get_running_loop().time
        deaths = 0
        while True:
            assert self._client is not None
            serving_since = now()
            how = await self._end_of(self._client)
            if self.state in (State.DRAINING, State.STOPPED):
                return
            self.state = State.RESTARTING
            deaths = 1 if now() - serving_since >= self._restarts.healthy_after_s else deaths + 1
            while not await self._restart(how, deaths):
                deaths += 1
                how = "it did not come up again"

    def drain(self) -> None:
        """Take no new requests from now on."""
        if self.state is not State.STOPPED:
            self.state = State.DRAINING

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        while self._num_in_flight:
            await self._idle.wait()

    @contextlib.contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count a request as in flight while inside."""
        self._num_in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self._idle.set()

    async def stop(self) -> None:
        """End the engine; what is in flight fails."""
        self.state = State.STOPPED
        if self._client is not None:
            await self._client.stop()

    async def load_adapter(self, name: str, path: str, *, replace_existing: bool) -> AdapterStatus:
        """Load an adapter and remember it for the next engine.

        Requests that arrive after this returns use the new weights, those that arrived before finish on the old.

        Raises:
            AdapterExists: The name is taken.
            AdapterError: It cannot be served.
            CapacityError: No engine, or no room.
        """
        if name == self.served_name:
            raise AdapterExists(name, "this is the name of the base model")
        async with self._lock(name):
            before = self.adapters.get(name)
            if before is not None and not replace_existing:
                raise AdapterExists(name, "it is loaded already")
            status = await self.engine.load_adapter(name, path, replace=replace_existing)
            loaded_at = int(self._epoch_s()) if before is None else before.loaded_at
            is_pinned = before is not None and before.is_pinned
            self.adapters[name] = LoadedAdapter(path=path, is_pinned=is_pinned, loaded_at=loaded_at)
            if is_pinned and not status.is_pinned:
                status = await self.engine.pin_adapter(name, True)
            logger.info("adapter_loaded name=%s path=%s generation=%d", name, path, status.generation)
            return status

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter and forget it; requests in flight finish on it.

        Raises:
            AdapterNotFound: No such name.
            CapacityError: No engine.
        """
        async with self._known(name):
            await self.engine.unload_adapter(name)
            del self.adapters[name]
            logger.info("adapter_unloaded name=%s", name)

    async def pin_adapter(self, name: str, pinned: bool) -> AdapterStatus:
        """Keep an adapter on the device, or no longer; the next engine will do the same.

        Raises:
            AdapterNotFound: No such name.
            CapacityError: No engine, or no room to pin.
        """
        async with self._known(name):
            status = await self.engine.pin_adapter(name, pinned)
            self.adapters[name] = replace(self.adapters[name], is_pinned=pinned)
            return status

    async def warm_adapter(self, name: str) -> AdapterStatus:
        """Begin to copy an adapter to the device before anybody asks for it.

        Raises:
            AdapterNotFound: No such name.
            CapacityError: No engine, or no room.
        """
        async with self._known(name):
            return await self.engine.warm_adapter(name)

    async def _end_of(self, client: EngineClient) -> str:
        """Wait until an engine is gone, or as good as gone; by then everything in flight has failed."""
        if self._hang_timeout_s is None:
            return await client.closed()
        closed = asyncio.create_task(client.closed())
        hung = asyncio.create_task(wait_until_hung(client, self._hang_timeout_s))
        try:
            await asyncio.wait({closed, hung}, return_when=asyncio.FIRST_COMPLETED)
            if closed.done() or hung.exception() is not None:
                return await closed
            how = hung.result()
            logger.error("engine_hangs pid=%s how=%r", client.pid, how)
            client.fail_all(EngineDead(f"The engine was stopped while it worked on this request ({how})."))
            return how
        finally:
            closed.cancel()
            hung.cancel()
            await asyncio.gather(closed, hung, return_exceptions=True)

    def _lock(self, name: str) -> asyncio.Lock:
        """Return the lock that puts the admin calls for one name in a row."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    @contextlib.asynccontextmanager
    async def _known(self, name: str) -> AsyncIterator[None]:
        async with self._lock(name):
            if name not in self.adapters:
                raise AdapterNotFound(name, "no adapter of this name is loaded")
            yield

    def _new_client(self) -> EngineClient:
        return EngineClient(self._make_link(), observe=self._observe)

    async def _restart(self, how: str, deaths: int) -> bool:
        """Start the next engine; return whether it serves."""
        assert self._client is not None
        await self._client.stop()
        if deaths >= self._restarts.max_deaths:
            raise EngineDead(f"The engine died {deaths} times in a row (last: {how}); giving up.")
        pause_s = self._restarts.pause_s(deaths)
        logger.error("engine_died how=%r deaths_in_a_row=%d restart_in_s=%.1f", how, deaths, pause_s)
        await asyncio.sleep(pause_s)
        if self.state is not State.RESTARTING:
            return True
        self.num_restarts += 1
        client = self._client = self._new_client()
        try:
            self._info = await client.start()
            for error in await self._load_all(client):
                # The others should not suffer for it; requests for this one say 404 from now on.
                logger.error("adapter_lost name=%s reason=%s", error.adapter, error.reason)
                self.adapters.pop(error.adapter, None)
        except ManyloraError as error:
            logger.error("engine_restart_failed error=%s", error)
            return False
        if self.state is State.RESTARTING:
            self.state = State.SERVING
            logger.warning("engine_restarted pid=%s num_adapters=%d", client.pid, len(self.adapters))
        return True

    async def _load_all(self, client: EngineClient) -> list[AdapterError]:
        """Load and pin every remembered adapter; return what went wrong, adapter by adapter.

        Raises:
            ManyloraError: Something that is no adapter's fault.
        """

        async def load(name: str, adapter: LoadedAdapter) -> AdapterError | None:
            try:
                await client.load_adapter(name, adapter.path)
                if adapter.is_pinned:
                    await client.pin_adapter(name, True)
            except AdapterError as error:
                return error
            except CapacityError as error:
                return AdapterError(name, str(error))
            return None

        results = await asyncio.gather(*(load(name, adapter) for name, adapter in self.adapters.items()))
        return [error for error in results if error is not None]
