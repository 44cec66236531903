"""One engine of a fleet: its first start, its restarts, and the deaths that count."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from harness import engine_info

from manylora.hosting.adapter_book import AdapterBook, LoadedAdapter
from manylora.hosting.client import EngineClient
from manylora.hosting.engine_keeper import EngineKeeper, RestartPolicy, State
from manylora.hosting.protocol import Command, Ending, Message, Ready


class Link:
    """A link to an engine that is ready at once, and takes no command."""

    pid = node = None

    def __init__(self) -> None:
        self.ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()

    async def start(self, deliver: Callable[[Sequence[Message]], None]) -> None:
        asyncio.get_running_loop().call_soon(deliver, [Ready(engine_info(vocab_size=100))])

    def send(self, command: Command) -> None:
        raise AssertionError("no command is due")

    async def closed(self) -> Ending:
        return await asyncio.shield(self.ending)

    async def stop(self) -> None:
        self.ending.cancel()


def test_no_change_of_the_book_falls_between_the_last_look_at_it_and_service() -> None:
    """A load reaches the engines that serve, and the book is read by those that do not yet: none must be neither."""

    class Book(AdapterBook):
        async def bring_up(self, client: EngineClient, held: dict[str, LoadedAdapter]) -> list[object]:  # type: ignore[override]
            asyncio.get_running_loop().call_soon(lambda: seen.append(keeper.state))
            return []

    async def main() -> None:
        nonlocal keeper
        keeper = EngineKeeper(
            lambda: EngineClient(Link(), observe=lambda observed: None),
            Book(served_name="base", epoch_s=lambda: 0.0),
            lose=lambda error: asyncio.sleep(0),
            restarts=RestartPolicy(),
            hang_timeout_s=None,
            start_timeout_s=60.0,
            on_change=lambda: None,
        )
        await keeper.start()
        await asyncio.sleep(0)

    keeper: EngineKeeper
    seen: list[State] = []
    asyncio.run(main())
    assert seen == [State.SERVING]
