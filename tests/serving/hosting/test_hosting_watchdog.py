"""What counts as an engine that hangs, on a clock that jumps: minutes of waiting in no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from manylora.core.errors import SnapshotFailed
from manylora.serving.hosting.fleet.watchdog import wait_until_hung
from manylora.serving.hosting.links.client import EngineClient

TIMEOUT_S = 300.0

Look = Callable[[float], tuple[int, int] | None]
"""What the engine says at a time, in seconds: steps so far and requests running; ``None`` if it does not answer."""


class JumpingSelector(selectors.DefaultSelector):
    """Waits for nothing: time goes by at once."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += timeout or 0.0
        return super().select(0)


class Engine:
    """Answers the watchdog."""

    def __init__(self, look: Look, selector: JumpingSelector) -> None:
        self._look, self._selector = look, selector

    async def snapshot(self, num_adapters: int) -> tuple[SimpleNamespace, tuple[object, ...]]:
        seen = self._look(self._selector.now_s)
        if seen is None:
            await asyncio.Event().wait()
            raise AssertionError
        return SimpleNamespace(num_steps=seen[0], num_running=seen[1]), ()


def watch(look: Look, *, for_s: float = 7200.0, selector: JumpingSelector | None = None) -> tuple[str | None, float]:
    """Return what the watchdog says, and when, in seconds; ``None`` if it says nothing in so long."""
    selector = selector or JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now_s  # type: ignore[method-assign]
    engine = cast(EngineClient, Engine(look, selector))

    async def limited() -> str | None:
        try:
            return await asyncio.wait_for(wait_until_hung(engine, TIMEOUT_S), for_s)
        except TimeoutError:
            return None

    try:
        return loop.run_until_complete(limited()), selector.now_s
    finally:
        loop.close()


@pytest.mark.parametrize(
    "look",
    [
        pytest.param(lambda now: (7, 0), id="idle"),
        pytest.param(lambda now: (int(now / 250), 3), id="steps of minutes"),
        pytest.param(lambda now: (int(now / 1000), int(now % 1000 < 250)), id="work now and then"),
    ],
)
def test_what_moves_or_has_nothing_to_do_does_not_hang(look: Look) -> None:
    assert watch(look) == (None, 7200.0)


def test_an_engine_whose_state_cannot_be_read_does_not_hang_and_is_watched_on() -> None:
    def look(now: float) -> tuple[int, int] | None:
        if now < 3600.0:
            raise SnapshotFailed("it cannot be read")
        return None

    said, at_s = watch(look)
    assert said is not None and "made no turn" in said
    assert 3600.0 + TIMEOUT_S <= at_s <= 3600.0 + TIMEOUT_S + 30.0


def test_time_in_which_the_watchdog_could_not_listen_is_not_counted() -> None:
    """Its own loop is blocked for an hour, again and again, while a step of a minute runs: that is no hang."""

    def look(now: float) -> tuple[int, int]:
        selector.now_s += 3600.0  # asked at ``now``; the answer is seen an hour later
        return int(now / 7300), 1

    selector = JumpingSelector()
    assert watch(look, for_s=100_000.0, selector=selector)[0] is None


def test_a_loop_that_does_not_answer_hangs() -> None:
    how, at_s = watch(lambda now: (int(now), 1) if now < 1000 else None)
    assert how == "it hangs: its loop made no turn for 300 s"
    assert 1000 + TIMEOUT_S <= at_s <= 1000 + TIMEOUT_S + 10


def test_a_device_that_ends_no_step_hangs() -> None:
    how, at_s = watch(lambda now: (int(min(now, 1000)), 2))
    assert how == "it hangs: with 2 requests running, no step ended for 300 s"
    assert 1000 + TIMEOUT_S <= at_s <= 1000 + TIMEOUT_S + 10
