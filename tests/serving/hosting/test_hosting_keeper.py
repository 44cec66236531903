"""One engine of a fleet: its first start, its restarts, and the deaths that count."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from harness import engine_info

from manylora.core.errors import EngineDead
from manylora.serving.hosting.fleet.adapter_book import AdapterBook, LoadedAdapter
from manylora.serving.hosting.fleet.keeper import EngineKeeper, EngineState, RestartPolicy
from manylora.serving.hosting.links.client import EngineClient
from manylora.serving.hosting.protocol import Command, Ending, Message, Ready

OWN = Ending("it fell over")
KILLED = Ending("killed", is_external=True)


class Link:
    """A link to an engine that is ready at once, and takes no command; or to one that does not start."""

    pid = node = None

    def __init__(self, error: Exception | None = None) -> None:
        self.ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._error = error

    async def start(self, deliver: Callable[[Sequence[Message]], None]) -> None:
        if self._error is not None:
            raise self._error
        asyncio.get_running_loop().call_soon(deliver, [Ready(engine_info(vocab_size=100))])

    def send(self, command: Command) -> None:
        raise AssertionError("no command is due")

    async def closed(self) -> Ending:
        return await asyncio.shield(self.ending)

    async def stop(self) -> None:
        self.die(Ending("stopped"))

    def die(self, ending: Ending) -> None:
        if not self.ending.done():
            self.ending.set_result(ending)


class Rig:
    """A keeper without adapters, its links, and whether another engine serves."""

    def __init__(self, book: AdapterBook | None = None) -> None:
        self.links: list[Link] = []
        self.errors: list[Exception] = []  # of the next starts
        self.others_may_serve = False
        self.keeper = EngineKeeper(
            make_client=self._make_client,
            book=book or AdapterBook(served_name="base", epoch_s=lambda: 0.0),
            lose=lambda error: asyncio.sleep(0),
            restarts=RestartPolicy(max_deaths=3, first_pause_s=0.0, max_pause_s=0.0, start_timeout_s=60.0),
            on_change=lambda: None,
        )

    def _make_client(self) -> EngineClient:
        self.links.append(Link(self.errors.pop() if self.errors else None))
        return EngineClient(self.links[-1], observe=lambda observed: None)

    async def die(self, *endings: Ending) -> None:
        """Let one engine after another die, each once it serves."""
        for ending in endings:
            self.links[-1].die(ending)
            await self.settle()

    async def settle(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)


def test_no_change_of_the_book_falls_between_the_last_look_at_it_and_service() -> None:
    """A load reaches the engines that serve, and the book is read by those that do not yet: none must be neither."""

    class Book(AdapterBook):
        async def bring_up(self, client: EngineClient, held: dict[str, LoadedAdapter]) -> list[object]:  # type: ignore[override]
            asyncio.get_running_loop().call_soon(lambda: seen.append(rig.keeper.state))
            return []

    async def main() -> None:
        nonlocal rig
        rig = Rig(Book(served_name="base", epoch_s=lambda: 0.0))
        await rig.keeper.start()
        await asyncio.sleep(0)

    rig: Rig
    seen: list[EngineState] = []
    asyncio.run(main())
    assert seen == [EngineState.SERVING]


def test_a_start_without_a_limit_fails_by_the_systems_own_timeout() -> None:
    async def main() -> None:
        rig = Rig()
        rig.keeper.restarts = RestartPolicy(start_timeout_s=None)
        rig.errors = [TimeoutError(110, "Connection timed out")]
        with pytest.raises(TimeoutError, match="Connection timed out"):
            await rig.keeper.start()

    asyncio.run(main())


def test_deaths_by_a_signal_or_for_lack_of_room_end_no_engine() -> None:
    async def main() -> None:
        rig = Rig()
        await rig.keeper.start()
        keeping = asyncio.create_task(rig.keeper.run(lambda: rig.others_may_serve))
        await rig.settle()
        await rig.die(OWN, OWN, *[KILLED] * 20)
        rig.errors = [OSError("no processes left")] * 20
        await rig.die(KILLED)
        await rig.settle()
        assert rig.keeper.state is EngineState.SERVING
        assert rig.keeper.num_restarts == len(rig.links) - 1 == 43
        await rig.die(OWN)
        with pytest.raises(EngineDead, match=r"died 3 times in a row \(last: it fell over\)"):
            await keeping
        assert rig.keeper.state is EngineState.STOPPED

    asyncio.run(main())


def test_an_engine_that_fails_is_given_up_only_where_no_other_serves() -> None:
    async def main() -> None:
        rig = Rig()
        rig.others_may_serve = True
        await rig.keeper.start()
        keeping = asyncio.create_task(rig.keeper.run(lambda: rig.others_may_serve))
        await rig.settle()
        await rig.die(*[OWN] * 10)
        assert rig.keeper.state is EngineState.SERVING
        assert rig.keeper.is_failing
        rig.others_may_serve = False
        await rig.die(OWN)
        with pytest.raises(EngineDead, match="died 3 times in a row"):
            await keeping

    asyncio.run(main())


def test_a_drain_while_starts_fail_ends_the_keeping() -> None:
    async def main() -> None:
        rig = Rig()
        rig.errors = [OSError("no processes left")] * 1000
        with pytest.raises(OSError, match="no processes"):
            await rig.keeper.start()
        keeping = asyncio.create_task(rig.keeper.run(lambda: rig.others_may_serve))
        await rig.settle()
        rig.keeper.drain()
        await keeping
        assert rig.keeper.state is EngineState.STOPPED

    asyncio.run(main())
