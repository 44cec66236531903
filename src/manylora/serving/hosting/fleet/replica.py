"""An engine of a fleet, as views of the fleet describe it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manylora.serving.hosting.fleet.keeper import EngineKeeper, EngineState

__all__ = ["Replica", "describe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One engine of a fleet, as the API process knows it.

    Args:
        index: Its number, from 0.
        pid: Its process; ``None`` before it has started.
        node: The node of a cluster that it runs on; ``None`` for this machine.
        num_restarts: Engines started in its place after the first.
        num_in_flight: Requests that it works on.
    """

    index: int
    state: EngineState
    pid: int | None
    node: str | None
    num_restarts: int
    num_in_flight: int


def describe(keepers: Sequence[EngineKeeper]) -> list[Replica]:
    """Return the engines in use; those that scaling has not started are left out."""
    return [
        Replica(
            index=index,
            state=keeper.state,
            pid=None if keeper.client is None else keeper.client.pid,
            node=None if keeper.client is None else keeper.client.node,
            num_restarts=keeper.num_restarts,
            num_in_flight=0 if keeper.client is None else keeper.client.num_flights,
        )
        for index, keeper in enumerate(keepers)
        if keeper.state is not EngineState.IDLE
    ]
