"""Adapters that no one has loaded: what is remembered of a name that no registry has, and of whom."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from manylora.core.errors import AdapterError, AdapterNotFound
from manylora.serving.api.on_demand import REFUSED_S, OnDemand


def test_a_name_that_was_refused_is_looked_for_again_for_another_caller_alone() -> None:
    """A quick refusal would tell a tenant which names another has asked for."""
    asked: list[str] = []
    now = 0.0

    async def load(name: str, url: str, *, by_header: bool) -> None:
        asked.append(url)
        if name == "broken":
            raise AdapterError(name, "is broken")
        raise AdapterNotFound(name, "is not there")

    adapters = SimpleNamespace(loaded={}, unavailable={}, find=lambda model: None, load=load)
    fleet = SimpleNamespace(served_name="base", adapters=adapters)

    async def play() -> None:
        nonlocal now
        made = OnDemand(fleet, ["https://one/a", "https://two"], lambda: now)  # type: ignore[arg-type]
        for caller in ("acme", "acme", "beta", "beta"):
            await made.find("none", caller)
            with pytest.raises(AdapterError, match="is broken"):
                await made.find("broken", caller)
        assert asked == ["https://one/a/none", "https://two/none", "https://one/a/broken"] * 2
        now = REFUSED_S
        await made.find("none", "acme")
        assert len(asked) == 8

    asyncio.run(play())
