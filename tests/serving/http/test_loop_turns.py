"""Turns on the event loop: pieces of many requests leave room for others in every pass, and callers take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from manylora.serving.http.turns import SHARE_S, LoopTurns, next_turn

PIECE_S = SHARE_S
NUM_PIECES = 3


class World:
    """Requests that work in pieces, on a clock that moves with them alone, beside a neighbour that counts passes."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.done: list[str] = []
        self.longest_s = 0.0
        self.turns = LoopTurns(lambda: self.now_s)

    async def request(self, caller: str, piece_s: float = PIECE_S) -> None:
        self.turns.enter(lambda: caller)
        for _ in range(NUM_PIECES):
            await next_turn()
            self.now_s += piece_s
            self.done.append(caller)

    async def neighbour(self) -> None:
        """Note the time between two looks at the loop, as a stream or a health check would feel it."""
        while True:
            before_s = self.now_s
            await asyncio.sleep(0)
            self.longest_s = max(self.longest_s, self.now_s - before_s)

    def run(self, *make: Callable[[], object]) -> World:
        async def main() -> None:
            beside = asyncio.create_task(self.neighbour())
            await asyncio.gather(*(asyncio.ensure_future(one()) for one in make))  # type: ignore[call-overload]
            beside.cancel()

        asyncio.run(main())
        return self


def test_many_requests_at_once_take_a_share_of_each_pass() -> None:
    world = World()
    world.run(*[lambda: world.request("a")] * 200)
    assert len(world.done) == 200 * NUM_PIECES
    assert world.longest_s <= 2 * PIECE_S


def test_short_pieces_share_a_pass() -> None:
    world = World()
    world.run(*[lambda: world.request("a", SHARE_S / 20)] * 200)
    assert SHARE_S / 2 <= world.longest_s <= 2 * SHARE_S


def test_callers_take_turns() -> None:
    world = World()
    world.run(*[lambda: world.request("flood")] * 100, lambda: world.request("other"))
    last = len(world.done) - 1 - world.done[::-1].index("other")
    assert last <= 2 * NUM_PIECES + 1, "it waits for one piece of the flood at most before each of its own"


def test_a_request_alone_waits_for_the_next_pass_after_each_piece_that_fills_one() -> None:
    world = World()
    world.run(lambda: world.request("a"))
    assert world.done == ["a"] * NUM_PIECES
    assert world.longest_s <= PIECE_S


def test_a_request_that_ends_in_line_leaves_its_turn() -> None:
    world = World()

    async def cancelled() -> None:
        tasks = [asyncio.create_task(world.request("a")) for _ in range(5)]
        await asyncio.sleep(0)
        for task in tasks[1:4]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    world.run(cancelled)
    assert len(world.done) == 2 * NUM_PIECES


def test_outside_of_requests_others_run_once() -> None:
    async def main() -> list[str]:
        order: list[str] = []
        asyncio.get_running_loop().call_soon(order.append, "other")
        await next_turn()
        return [*order, "this"]

    assert asyncio.run(main()) == ["other", "this"]


def test_a_long_piece_is_followed_by_passes_for_others() -> None:
    world, num_shares = World(), 6
    passes: list[int] = []

    async def count() -> None:
        while len(world.done) < 4 * NUM_PIECES:
            passes.append(len(world.done))
            await asyncio.sleep(0)

    world.run(count, *[lambda: world.request("a", num_shares * SHARE_S)] * 4)
    counts = [passes.count(num_done) for num_done in range(2, 4 * NUM_PIECES - 1)]
    assert min(counts) >= num_shares
