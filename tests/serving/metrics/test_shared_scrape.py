"""Scrapes that come together share one, and each has all that happened before it came."""

from __future__ import annotations

import asyncio

import pytest

from manylora.serving.metrics.scrape import SharedScrape


class Counting:
    """A scrape that returns the number of events when it began, and ends when it may."""

    def __init__(self) -> None:
        self.num_events = self.num_runs = 0
        self.may_end = asyncio.Event()

    async def __call__(self) -> bytes:
        self.num_runs += 1
        seen = self.num_events
        await self.may_end.wait()
        return b"%d" % seen


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_scrapes_that_come_together_share_one_that_began_after_them() -> None:
    async def main() -> None:
        shared, scrape = SharedScrape(), Counting()
        first = asyncio.create_task(shared.get(scrape))
        await settle()
        scrape.num_events = 1
        others = [asyncio.create_task(shared.get(scrape)) for _ in range(100)]
        await settle()
        assert scrape.num_runs == 1
        others[0].cancel()  # the others go on
        scrape.may_end.set()
        assert await first == b"0"
        assert set(await asyncio.gather(*others[1:])) == {b"1"}
        assert scrape.num_runs == 2
        scrape.num_events = 2
        assert await shared.get(scrape) == b"2"

    asyncio.run(main())


def test_a_scrape_that_fails_fails_for_its_own_and_not_for_the_next() -> None:
    async def main() -> None:
        shared, scrape = SharedScrape(), Counting()
        scrape.may_end.set()

        async def fail() -> bytes:
            await settle()
            raise ValueError("broken")

        first = asyncio.create_task(shared.get(fail))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        second = asyncio.create_task(shared.get(scrape))
        with pytest.raises(ValueError, match="broken"):
            await first
        assert await second == b"0"

    asyncio.run(main())
