"""Adapters whose registry is down while an engine restarts: set aside, tried again, and back by themselves."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from harness import version

from manylora.core.errors import AdapterError, AdapterNotFound, AdapterUnavailable, CapacityError
from manylora.serving.hosting.fleet import adapter_book
from manylora.serving.hosting.fleet import adapters as fleet_adapters
from manylora.serving.hosting.fleet.adapter_book import AdapterBook, LoraModule
from manylora.serving.hosting.fleet.adapters import FleetAdapters
from manylora.serving.hosting.fleet.engines import FleetEngines

URL = "https://host.org/a"


class Status:
    generation, version, is_pinned = 1, version("a"), False


class Pinned(Status):
    is_pinned = True


class Client:
    """An engine whose loads fail with ``error`` while there is one."""

    def __init__(self) -> None:
        self.error: AdapterError | None = AdapterUnavailable("a", "no answer")
        self.calls: list[str] = []

    async def load_adapter(self, name: str, path: str, *, by_header: bool = False) -> Any:
        self.calls.append("load")
        if self.error is not None:
            raise self.error
        return Status

    async def unload_adapter(self, name: str) -> None:
        self.calls.append("unload")

    async def pin_adapter(self, name: str, pinned: bool) -> Any:
        self.calls.append("pin")
        return Pinned


def run_with(monkeypatch: pytest.MonkeyPatch, check: Any) -> None:
    """Run a check of adapters of which one, pinned, was set aside."""
    monkeypatch.setattr(fleet_adapters, "RETRY_CHECK_S", 0.01)
    monkeypatch.setattr(adapter_book, "FIRST_RETRY_S", 0.01)
    client = Client()
    monkeypatch.setattr(fleet_adapters, "EngineClient", Client)

    async def run() -> None:
        book = AdapterBook(served_name="base", epoch_s=lambda: 7.0)
        book.open([LoraModule("a", URL)])
        book.note_pin("a", True)
        engines = FleetEngines()
        engines.keepers.append(cast(Any, None))
        monkeypatch.setattr(engines, "serving", lambda: {0: client})
        adapters = FleetAdapters(book, engines, keeps_required=False)
        await adapters.lose(AdapterUnavailable("a", "no answer"))
        retrying = asyncio.create_task(adapters.retry())
        try:
            await asyncio.wait_for(check(adapters, client), 20)
        finally:
            retrying.cancel()

    asyncio.run(run())


def test_it_comes_back_with_its_pin_and_says_why_it_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(adapters: FleetAdapters, client: Client) -> None:
        assert "a" not in adapters.loaded
        while adapters.unavailable["a"].num_tries < 3:
            await asyncio.sleep(0.01)
        with pytest.raises(CapacityError, match="unavailable: no answer; next try in") as refused:
            adapters.check_available("a")
        assert refused.value.status == 503 and refused.value.retry_after_s >= 1
        client.error = None
        while "a" not in adapters.loaded:
            await asyncio.sleep(0.01)
        entry = adapters.loaded["a"]
        assert (entry.path, entry.is_pinned, entry.loaded_at) == (URL, True, 7) and client.calls[-2:] == ["load", "pin"]
        assert not adapters.unavailable
        adapters.check_available("a")

    run_with(monkeypatch, check)


def test_it_may_be_unloaded_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(adapters: FleetAdapters, client: Client) -> None:
        await adapters.unload("a")
        assert not adapters.unavailable and not adapters.loaded
        client.calls.clear()
        await asyncio.sleep(0.1)
        assert not client.calls

    run_with(monkeypatch, check)


def test_it_is_given_up_once_the_registry_says_that_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(adapters: FleetAdapters, client: Client) -> None:
        client.error = AdapterNotFound("a", "there is no adapter_config.json")
        while adapters.unavailable:
            await asyncio.sleep(0.01)
        assert "a" not in adapters.loaded

    run_with(monkeypatch, check)
