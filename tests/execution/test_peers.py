"""The executor of workers that share a model, when one of them is lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from harness import version

from manylora.core.clock import WallClock
from manylora.core.errors import EngineDead
from manylora.core.plan import AdapterLoad
from manylora.core.ports import LoadResult
from manylora.core.types import Tier
from manylora.execution.peers import Load, Loaded, SharedExecutor


class SilentPeer:
    """Takes messages and answers none."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def test_a_load_ends_whether_a_worker_is_lost_before_or_after_it_began() -> None:
    """The thread that reads adapters waits for it, and with it every later read."""
    peers = [SilentPeer(), SilentPeer()]
    own: Any = SimpleNamespace(runner=SimpleNamespace())
    shared = SharedExecutor(own, peers, WallClock())
    load = AdapterLoad(version=version("a"), tier=Tier.HOST)
    before = shared.load_on_peers(load)
    (sent,) = peers[0].sent
    assert isinstance(sent, Load) and not before.done()
    shared.answered(Loaded(sent.number, LoadResult()))
    shared.lose("worker 1 died")
    shared.answered(Loaded(sent.number, LoadResult()))  # of the other worker, which knows of nothing
    for load_ended in (before, shared.load_on_peers(load)):
        with pytest.raises(EngineDead, match="worker 1 died"):
            load_ended.result(60)
