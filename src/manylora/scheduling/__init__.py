"""Scheduling: the order in which waiting sequences are tried, one file per policy."""

from __future__ import annotations

from collections.abc import Callable

from manylora.errors import ConfigError
from manylora.scheduling.fifo import FifoPolicy
from manylora.scheduling.policy import Outcome, Policy
from manylora.scheduling.sequence import Sequence, SequenceStatus

__all__ = ["POLICIES", "FifoPolicy", "Outcome", "Policy", "Sequence", "SequenceStatus", "make_policy"]

POLICIES: dict[str, Callable[[], Policy]] = {"fifo": FifoPolicy}


def make_policy(name: str) -> Policy:
    """Make a scheduling policy by name.

    Raises:
        ConfigError: No policy has that name.
    """
    if name not in POLICIES:
        raise ConfigError(f"Got policy = {name!r}, expected one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
