"""The requests of a function that wait to leave as a batch (`manylora.functions.decisions.batching`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from manylora.core.errors import ManyloraError
from manylora.functions.decisions.batching import BatchTimes, deadline_margin_s

__all__ = ["BatchQueue"]


@dataclass(slots=True, eq=False)
class _QueuedRequests:
    """Requests that were submitted together."""

    go: asyncio.Future[None]  # done when they may leave, or with the error that refuses them
    since: float  # when they came, in seconds
    num_requests: int
    has_left: bool = False  # whether they are on their way to the engine


class BatchQueue:
    """The queue of one function. Only for the event loop's thread."""

    def __init__(self, objective_s: float, max_batch: int) -> None:
        self.times = BatchTimes(objective_s, max_batch)
        self.num_leaving = 0  # requests between the queue and the engine
        self._max_batch = max_batch
        self._entries: deque[_QueuedRequests] = deque()

    def __len__(self) -> int:
        return sum(entry.num_requests for entry in self._entries)

    @contextlib.contextmanager
    def join(self, now: float, num_requests: int) -> Iterator[asyncio.Future[None]]:
        """Add requests; yield the future that lets them go. After the context they are with the engine, or gone."""
        entry = _QueuedRequests(asyncio.get_running_loop().create_future(), now, num_requests)
        self._entries.append(entry)
        try:
            yield entry.go
        finally:
            if entry.has_left:
                self.num_leaving -= num_requests
            elif entry in self._entries:
                self._entries.remove(entry)

    def margin_s(self, now: float) -> float:
        """Return the seconds left until the requests of the queue, which is not empty, must start to be in time."""
        return deadline_margin_s(self.times.window, self._entries[0].since, len(self), now)

    def leaves_at(self, now: float, num_batches: int) -> float:
        """Return the time at which the batch leaves if it is not full before.

        The queue must not be empty. ``num_batches`` counts batches on the device, this one included.
        """
        return self.times.window.leaves_at(self._entries[0].since, len(self), now, num_batches)

    def leave(self, now: float, num_batches: int, *, is_alone: bool) -> int:
        """Let the oldest requests go, at most as many as a batch has; return their number.

        With this one there are ``num_batches`` on the device. Alone, without another request in the engine, it is
        timed.
        """
        size = 0
        while self._entries and (not size or size + self._entries[0].num_requests <= self._max_batch):
            entry = self._entries.popleft()
            if entry.go.done():
                continue  # its caller has gone
            size += entry.num_requests
            entry.has_left = True
            self.num_leaving += entry.num_requests
            entry.go.set_result(None)
        if size and is_alone:
            self.times.begin(now, size, num_batches)
        return size

    def refuse(self, error: ManyloraError) -> None:
        """Give all requests that wait an error."""
        for entry in self._entries:
            if not entry.go.done():
                entry.go.set_exception(error)
        self._entries.clear()
