"""Reads of adapters for one engine: registries that hang hold up neither the disk nor other hosts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from harness import make_rig, version

from manylora.core.clock import WallClock
from manylora.core.errors import AdapterError, AdapterUnavailable, CapacityError
from manylora.core.types import AdapterVersion
from manylora.serving.hosting.engine import adapter_reads
from manylora.serving.hosting.engine.adapter_reads import AdapterReads
from manylora.serving.hosting.protocol import LoadAdapter, LoadAdapters, Reply


class Reader:
    """Hangs on every URL of a host ``hangs-...`` until released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.read_from: list[str] = []

    def read(self, name: str, path: str) -> AdapterVersion:
        self.read_from.append(path)
        if "//hangs" in path:
            assert self.released.wait(60)
            raise AdapterUnavailable(name, "no answer")
        return version(path.replace("/", "-"))

    def check(self, adapters: Sequence[tuple[str, str]]) -> list[AdapterVersion | AdapterError]:
        found: list[AdapterVersion | AdapterError] = []
        for name, path in adapters:
            try:
                found.append(self.read(name, path))
            except AdapterError as error:
                found.append(error)
        return found


class Reads:
    """``AdapterReads`` over a core, and its answers by call."""

    def __init__(self) -> None:
        self.reader = Reader()
        self.replies: dict[int, Reply] = {}
        self._changed = threading.Condition()
        self._core = make_rig().core
        self.reads = AdapterReads(
            reader=self.reader, clock=WallClock(), post=self._post, send=self._send, observe=lambda event: None
        )

    def load(self, call: int, path: str, *, replace: bool = False) -> None:
        self.reads.load(LoadAdapter(call, f"a{call}", path, replace))

    def answer(self, call: int) -> Reply:
        with self._changed:
            assert self._changed.wait_for(lambda: call in self.replies, 20), f"no answer to {call}"
            return self.replies[call]

    def _post(self, run: Callable[[Any, float], None]) -> None:
        with self._changed:
            run(self._core, 0.0)

    def _send(self, message: Any) -> None:
        self.replies[message.call] = message
        self._changed.notify_all()


@pytest.fixture
def one() -> Iterator[Reads]:
    one = Reads()
    yield one
    one.reader.released.set()
    one.reads.close()


def test_hosts_that_hang_hold_up_neither_the_disk_nor_another_host(one: Reads) -> None:
    for call in range(6):
        one.load(call, f"https://hangs-{call % 2}/{call}")
    one.load(10, "/disk/a")
    one.load(11, "https://answers/a")
    assert one.answer(10).fault is None and one.answer(11).fault is None
    assert not set(range(6)) & set(one.replies)
    one.reader.released.set()
    for call in range(6):
        fault = one.answer(call).fault
        assert fault is not None and (fault.kind, fault.adapter) == ("AdapterUnavailable", f"a{call}")


def test_checks_of_a_command_are_apart_by_host(one: Reads) -> None:
    adapters = [("h", "https://hangs/h", False, None), ("d", "/disk/d", False, None)]
    one.reads.check(LoadAdapters(1, adapters))
    one.load(2, "/disk/a")
    one.load(3, "/disk/b")
    assert one.answer(2).fault is None and one.answer(3).fault is None
    one.reader.released.set()
    reply = one.answer(1)
    assert set(reply.refused) == {"h"} and set(reply.registered) == {"d"}


def test_loads_of_one_url_share_a_read_and_replacements_do_not(one: Reads) -> None:
    for call in range(5):
        one.load(call, "https://hangs/a", replace=call == 4)
    one.reader.released.set()
    for call in range(5):
        fault = one.answer(call).fault
        assert fault is not None and fault.adapter == f"a{call}"
    assert one.reader.read_from == ["https://hangs/a"] * 2


def test_too_many_loads_from_registries_are_refused_early(one: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_reads, "MAX_REMOTE", 2)
    for call in range(3):
        one.load(call, f"https://hangs/{call}")
    one.load(3, "https://hangs/0")
    one.load(4, "/disk/a")
    fault = one.answer(2).fault
    assert fault is not None and one.answer(4).fault is None and 3 not in one.replies
    error = fault.to_error()
    assert isinstance(error, CapacityError) and error.status == 503 and error.retry_after_s > 1
