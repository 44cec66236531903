"""The parts of the live page: sessions, and one snapshot for all viewers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

import pytest
from serving import until
from starlette.requests import Request

from manylora.core.errors import CapacityError
from manylora.serving.http.auth import Gate
from manylora.serving.http.errors import HttpError
from manylora.serving.http.page import LivePage
from manylora.serving.http.page.session import IDLE_S, LIFE_S, MAX_CLIENTS, WRONG_KEYS_A_MINUTE, PageSessions
from manylora.serving.http.page.viewers import MOST_MISSED, Viewers


def caller(address: str = "192.0.2.1") -> Request:
    return Request({"type": "http", "headers": [], "client": (address, 1)})


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def sessions_of(gate: Gate, clock: Clock) -> PageSessions:
    return PageSessions(gate, epoch_s=clock, monotonic_s=clock)


def test_a_session_is_of_its_key_ends_idle_and_ends_for_good() -> None:
    async def run() -> None:
        clock, gate = Clock(), Gate(admin_key="root")
        sessions = sessions_of(gate, clock)
        cookie = await sessions.sign_in(caller(), "root")
        assert await sessions_of(Gate(admin_key="root"), clock).renewed(cookie) is not None  # another worker
        assert await sessions_of(Gate(admin_key="other"), clock).renewed(cookie) is None
        began, renewed, mac = cookie.split(".")
        for forged in (
            "",
            "..",
            "a.b.c",
            f"{began}.{int(renewed, 16) + 9:x}.{mac}",
            f"{began}.{renewed}.{mac[:-1]}x",
            "é",
        ):
            assert await sessions.renewed(forged) is None
        clock.now += IDLE_S + 1
        assert await sessions.renewed(cookie) is None
        kept: str | None = await sessions.sign_in(caller(), "root")
        for _ in range(LIFE_S // IDLE_S - 1):
            clock.now += IDLE_S
            assert kept is not None
            kept = await sessions.renewed(kept)
        assert kept is not None
        clock.now += IDLE_S - 1
        assert await sessions.renewed(kept) is not None
        clock.now += 2
        assert await sessions.renewed(kept) is None

    asyncio.run(run())


def test_wrong_keys_are_bounded_for_each_client_and_so_is_their_memory() -> None:
    async def run() -> None:
        clock = Clock()
        sessions = sessions_of(Gate(admin_key="root"), clock)
        for _ in range(WRONG_KEYS_A_MINUTE):
            with pytest.raises(HttpError) as refused:
                await sessions.sign_in(caller(), "guess")
            assert refused.value.status == 401
        with pytest.raises(CapacityError, match="10 wrong keys a minute") as full:
            await sessions.sign_in(caller(), "root")
        assert full.value.status == 429 and full.value.retry_after_s == pytest.approx(6.0)
        assert await sessions.sign_in(caller("192.0.2.2"), "root")
        for number in range(MAX_CLIENTS + 5):
            with pytest.raises(HttpError):
                await sessions.sign_in(caller(f"2001:db8:0:{number:x}::1"), "guess")
        assert len(sessions._wrong) == MAX_CLIENTS
        clock.now += 6.1
        assert await sessions.sign_in(caller(), "root")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("gate", "opens"),
    [
        (Gate(("one",)), True),
        (Gate(("one",), "root"), False),
        (Gate(("one", "two")), False),
    ],
    ids=["the only key", "an inference key", "one of several"],
)
def test_no_key_but_the_administrators_opens_the_page(gate: Gate, opens: bool) -> None:
    signing_in = PageSessions(gate).sign_in(caller(), "one")
    if opens:
        assert asyncio.run(signing_in)
    else:
        with pytest.raises(HttpError):
            asyncio.run(signing_in)


def test_a_client_that_leaves_while_it_signs_in_is_no_bug() -> None:
    async def take() -> bytes:
        raise AssertionError

    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    page = LivePage(Gate(admin_key="root"), take, lambda: False)
    sign_in = next(route.endpoint for route in page.routes() if route.path == "/ui/session")
    headers = [(b"content-type", b"application/json"), (b"sec-fetch-site", b"same-origin")]
    request = Request({"type": "http", "method": "POST", "path": "/ui/session", "headers": headers}, gone)
    with pytest.raises(HttpError, match="ended early"):
        asyncio.run(sign_in(request))


class Client:
    """A client of a stream: takes what is sent while it reads, and leaves when told."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.is_ended = False
        self.broken = 0
        self.reads = asyncio.Event()
        self.reads.set()
        self.left = asyncio.Event()
        self.scope: dict[str, Any] = {"extensions": {"manylora.write_chunk": {"write": None, "break": self._break}}}

    async def send(self, message: dict[str, Any]) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.body":
            self.is_ended = not message["more_body"]
            if message["body"].startswith(b"data: "):
                self.taken.append(message["body"])

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    def watch(self, viewers: Viewers) -> asyncio.Task[None]:
        viewers.check_room()
        return asyncio.create_task(viewers.send_to(self.scope, self.receive, self.send, []))  # type: ignore[arg-type]

    def _break(self) -> None:
        self.broken += 1


def counted(ending: Callable[[], bool] = lambda: False, **options: float) -> tuple[Viewers, list[int]]:
    taken = [0]

    async def take() -> bytes:
        taken[0] += 1
        return b"%d" % taken[0]

    return Viewers(take, ending, every_s=0.001, **options), taken  # type: ignore[arg-type]


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


def test_viewers_share_one_snapshot_and_none_is_taken_without_them() -> None:
    async def main() -> None:
        viewers, taken = counted(most=2)
        await asyncio.sleep(0.01)
        assert taken == [0]
        clients = [Client(), Client()]
        tasks = [client.watch(viewers) for client in clients]
        await until(lambda: all(len(client.taken) >= 5 for client in clients))
        with pytest.raises(CapacityError, match="2 pages are open, of 2") as full:
            Client().watch(viewers)
        assert full.value.status == 503
        for client in clients:
            client.left.set()
        await asyncio.gather(*tasks)
        assert len(set(clients[0].taken) & set(clients[1].taken)) >= 4
        await until(lambda: viewers._running is not None and viewers._running.done())
        before = taken[0]
        await asyncio.sleep(0.01)
        assert taken == [before] and not any(client.broken for client in clients)
        late = Client()
        watching = late.watch(viewers)
        await until(lambda: bool(late.taken))  # never one of before
        assert int(late.taken[0].split()[1]) > before
        late.left.set()
        await watching

    run(main)


def test_a_slow_viewer_is_dropped_and_the_others_miss_nothing() -> None:
    async def main() -> None:
        viewers, _ = counted()
        slow, quick = Client(), Client()
        tasks = [client.watch(viewers) for client in (slow, quick)]
        await until(lambda: bool(slow.taken and quick.taken))
        slow.reads.clear()
        await tasks[0]
        assert slow.broken == 1 and not slow.is_ended
        first = int(quick.taken[0].split()[1])
        await until(lambda: len(quick.taken) > 2 * MOST_MISSED)
        numbers = [int(event.split()[1]) for event in quick.taken]
        assert numbers == list(range(first, first + len(numbers)))
        quick.left.set()
        await tasks[1]

    run(main)


def test_streams_end_with_the_server_and_with_a_snapshot_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        viewers, _ = counted(lambda: True)
        client = Client()
        await client.watch(viewers)
        assert client.is_ended and len(client.taken) == 1

        async def fail() -> bytes:
            raise KeyError("a bug")

        other = Client()
        await other.watch(Viewers(fail, lambda: False))
        assert other.is_ended and not other.taken
        assert "page_snapshot_failed" in caplog.text

    run(main)


def test_the_files_have_nothing_inline_and_nothing_from_elsewhere() -> None:
    assets = files("manylora.serving.http.page") / "assets"
    html, script, style = ((assets / name).read_text() for name in ("page.html", "page.js", "page.css"))
    assert re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?! src=)", html) is None
    assert re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", script) is None
    for name, text in {"html": html, "script": script, "style": style}.items():
        assert set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", re.sub(r"^\s*//.*$", "", text, flags=re.M))) <= {
            "http://www.w3.org"
        }, name
    identifiers = re.findall(r'\sid="([^"]+)"', html)
    assert len(identifiers) == len(set(identifiers))
    asked = set(re.findall(r'\$\("([\w-]+)"\)', script))
    assert asked <= set(identifiers)
