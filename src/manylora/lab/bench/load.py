"""The load: an open loop that sends every request when it is due, also while earlier ones are running.

Users do not wait for each other; a closed loop would hide the waiting to be measured. So the generator must keep up:
the delays of its sends and of its event loop are part of the result, and large ones cause a warning.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from manylora.core.errors import ConfigError
from manylora.lab.bench.ask import LoadAnswer, LoadRequest, ask
from manylora.lab.bench.target import Target, aiohttp_or_fail

__all__ = ["LoadRun", "Progress", "run_load"]

TICK_S = 0.01
READ_BUFFER_BYTES = 1 << 18


@dataclass(slots=True)
class Progress:
    """How far a run is; updated in place."""

    num_sent: int = 0
    num_done: int = 0
    num_failed: int = 0


@dataclass(slots=True, kw_only=True)
class LoadRun:
    """The outcome of a load."""

    answers: list[LoadAnswer] = field(default_factory=list)  # answers of the requests that ended, in order of their end
    num_unsent: int = 0  # requests that were due after the run was stopped
    num_unfinished: int = 0  # requests that were in flight then; they are in no figure
    lag_s: list[float] = field(default_factory=list)  # delay of each request at its sending, in seconds
    # How late the event loop was when it was asked to wake, every ten milliseconds: chunks were noticed that much too
    # late.
    loop_lag_s: list[float] = field(default_factory=list)


async def run_load(
    target: Target,
    questions: Sequence[LoadRequest],
    *,
    warm_up: Sequence[LoadRequest] = (),
    retries: int = 0,
    timeout_s: float = 600.0,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> LoadRun:
    """Send every question when it is due and wait for the last answer; SIGINT ends it early, with what there is.

    Args:
        target: The server.
        questions: The requests, in order of their time.
        warm_up: Sent first, one after the other, and not counted.
        retries: Times that a question is sent again after a 429 or 503.
        timeout_s: Longest silence of a server, in seconds.
        on_progress: Called after every change.

    ``ConfigError`` if the first warm-up request failed; the message has the server's reason.
    """
    aiohttp = aiohttp_or_fail()
    run, progress = LoadRun(), Progress()
    # Neither a bound on connections nor a second look at names: both would make requests wait for each other.
    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=None)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s)
    async with (
        aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=target.headers, read_bufsize=READ_BUFFER_BYTES
        ) as session,
        _stopped_by_sigint() as stopped,
    ):
        for question in warm_up:
            answer = await ask(session, target.path, question, retries=retries)
            if answer.record.error is not None:
                raise ConfigError(f"The server does not answer the first request: {answer.record.error}")

        async def one(question: LoadRequest) -> None:
            answer = await ask(session, target.path, question, retries=retries)
            run.answers.append(answer)
            progress.num_done += 1
            progress.num_failed += answer.record.error is not None
            on_progress(progress)

        tasks: list[asyncio.Task[None]] = []
        watch = asyncio.create_task(_watch_loop(run.loop_lag_s))
        async for question, late_s in _when_due(questions, stopped):
            run.lag_s.append(late_s)
            tasks.append(asyncio.create_task(one(question)))
            progress.num_sent += 1
            on_progress(progress)
        run.num_unsent = len(questions) - len(tasks)
        run.num_unfinished = await _end(tasks, stopped)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    return run


async def _when_due(
    questions: Sequence[LoadRequest], stopped: asyncio.Event
) -> AsyncIterator[tuple[LoadRequest, float]]:
    """Yield each question when it is due, and the delay in seconds, until the run is stopped."""
    started_at = time.monotonic()
    for question in questions:
        due_at = started_at + question.at_s
        if not await _sleep_until(due_at, stopped):
            return
        yield question, time.monotonic() - due_at


async def _end(tasks: Sequence[asyncio.Task[None]], stopped: asyncio.Event) -> int:
    """Wait until all requests have ended or the run is stopped; return the number of those cancelled in flight."""
    stopping = asyncio.create_task(stopped.wait())
    ending = asyncio.gather(*tasks)
    waiting: set[asyncio.Future[Any]] = {ending, stopping}
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if ending.done():
        ending.result()  # raises what no request should
    num_unfinished = sum(not task.done() for task in tasks)
    for pending in (ending, stopping):
        pending.cancel()
    await asyncio.gather(ending, *tasks, stopping, return_exceptions=True)
    return num_unfinished


async def _sleep_until(due_at: float, stopped: asyncio.Event) -> bool:
    """Wait until it is time; return False when the run was stopped instead."""
    # Always at least one turn of the loop, so that a burst of requests does not keep answers from being read.
    delay_s = due_at - time.monotonic()
    if delay_s <= 0:
        await asyncio.sleep(0)
    else:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), delay_s)
    return not stopped.is_set()


async def _watch_loop(lags_s: list[float]) -> None:
    while True:
        asked_at = time.monotonic()
        await asyncio.sleep(TICK_S)
        lags_s.append(max(0.0, time.monotonic() - asked_at - TICK_S))


@contextlib.asynccontextmanager
async def _stopped_by_sigint() -> AsyncIterator[asyncio.Event]:
    """Give an event that the first Ctrl-C sets; the second is Python's own."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        stopped.set()
        loop.remove_signal_handler(signal.SIGINT)

    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # no main thread, or no signals here
        loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
            loop.remove_signal_handler(signal.SIGINT)
