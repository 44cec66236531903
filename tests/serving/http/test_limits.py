"""What happens when there is too much: back-pressure, clients that leave, draining."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from reciter import engine_config
from serving import PATIENCE_S, Gate, wait_for

from manylora.core.config import ServerConfig
from manylora.serving.api import models
from manylora.serving.http import auth
from manylora.serving.http.room import BodyRoom
from manylora.serving.server import BackgroundServer

LONG = {"model": "base", "prompt": "say", "max_tokens": 200}


@contextmanager
def serving(
    tokenizer: Path,
    *,
    builder: str = "reciter:held_parts",
    drain_timeout_s: float = PATIENCE_S,
    api_keys: tuple[str, ...] = (),
    **scheduler: int,
) -> Iterator[BackgroundServer]:
    server = BackgroundServer(
        engine_config(tokenizer, **scheduler),
        ServerConfig(port=0, in_process=True, drain_timeout_s=drain_timeout_s, api_keys=api_keys),
        builder=builder,
    )
    with server:
        yield server


def gauge(http: httpx.Client, name: str) -> float:
    for line in http.get("/metrics").text.splitlines():
        if line.startswith(name + "{"):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no metric {name}")


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_429_with_retry_after(tokenizer: Path, gate: Gate, stream: bool) -> None:
    async def scenario(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            body = {**LONG, "stream": stream, "max_tokens": 10}
            asked = [client.post("/v1/completions", json=body) for _ in range(12)]
            answers = []
            for answer in asyncio.as_completed(asked):
                answers.append(await answer)
                if len(answers) == 7:  # three wait, up to two run, all others are refused before anybody is answered
                    gate.open()
            return answers

    with serving(tokenizer, max_num_seqs=2, max_waiting=3) as server:
        answers = asyncio.run(scenario(server.url))
        refused = [answer for answer in answers if answer.status_code == 429]
        assert answers[:7] == refused[:7]
        assert 3 <= [answer.status_code for answer in answers].count(200) == 12 - len(refused) <= 5
        for answer in refused:
            assert answer.headers["retry-after"].isdigit()
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "RateLimitError"


def test_the_openai_client_sees_a_rate_limit(tokenizer: Path, gate: Gate) -> None:
    with (
        serving(tokenizer, max_num_seqs=1, max_waiting=1) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        streams = [client.completions.create(**LONG, stream=True)]  # type: ignore[call-overload]
        wait_for(lambda: gauge(http, "vllm:num_requests_running") == 1)
        streams.append(client.completions.create(**LONG, stream=True))  # type: ignore[call-overload]
        with pytest.raises(openai.RateLimitError):
            client.completions.create(**LONG)  # type: ignore[call-overload]
        for stream in streams:
            stream.close()


def test_all_answers_of_a_request_are_accepted_or_none(tokenizer: Path, gate: Gate) -> None:
    with (
        serving(tokenizer, max_num_seqs=1, max_waiting=4) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as first:
            next(first.iter_lines())
            with http.stream("POST", "/v1/completions", json={**LONG, "stream": True, "n": 2}) as second:
                assert second.status_code == 200
                answer = http.post("/v1/completions", json={**LONG, "n": 4})
                assert answer.status_code == 429
                wait_for(lambda: gauge(http, "vllm:num_requests_waiting") == 2)
        assert http.post("/v1/completions", json={**LONG, "n": 5}).status_code == 400


def test_a_tenant_leaves_room_in_the_queue_to_others(tokenizer: Path, gate: Gate) -> None:
    """Two run and two wait of each tenant at most; a place is free again when its answer ends or its client leaves."""
    with serving(tokenizer, api_keys=("one", "two"), max_num_seqs=2, max_waiting=4) as server:
        one, two = (
            httpx.Client(base_url=server.url, timeout=60, headers={"authorization": f"Bearer {key}"})
            for key in ("one", "two")
        )
        with one, two:
            body = {**LONG, "stream": True, "max_tokens": 5}
            with one.stream("POST", "/v1/completions", json={**body, "n": 3}) as first:
                assert first.status_code == 200
                assert one.post("/v1/completions", json={**body, "n": 5}).status_code == 400
                with one.stream("POST", "/v1/completions", json=body) as left:
                    assert left.status_code == 200
                    refused = one.post("/v1/completions", json=body)
                    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
                    assert "4 answers under way" in refused.json()["error"]["message"]
                    with two.stream("POST", "/v1/completions", json=body) as other:
                        assert other.status_code == 200

                def is_free() -> bool:
                    with one.stream("POST", "/v1/completions", json=body) as again:
                        return again.status_code == 200

                wait_for(is_free)
                gate.open()
                first.read()
            wait_for(lambda: one.post("/v1/completions", json={**body, "n": 4}).status_code == 200)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_cancels(tokenizer: Path, stream: bool) -> None:
    with (
        serving(tokenizer, builder="reciter:slow_reciter_parts", max_num_seqs=2) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        # One runs, so that leaving is seen while tokens flow, and one waits, where nothing would be written to it.
        async def scenario() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                body = {**LONG, "stream": stream}
                tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(3)]
                while True:
                    metrics = (await client.get("/metrics")).text
                    if 'num_requests_waiting{model_name="base"} 1' in metrics:
                        break
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(scenario())
        wait_for(lambda: gauge(http, "vllm:num_requests_running") == gauge(http, "vllm:num_requests_waiting") == 0)
        wait_for(lambda: 'request_success_total{finished_reason="cancelled",model_name="base"} 3' in metrics_of(http))


def metrics_of(http: httpx.Client) -> str:
    return http.get("/metrics").text


def ended(http: httpx.Client, reason: str) -> float:
    name = f'vllm:request_success_total{{finished_reason="{reason}",model_name="base"}} '
    return sum(float(line.rsplit(" ", 1)[1]) for line in metrics_of(http).splitlines() if line.startswith(name))


def test_a_stop_string_frees_the_engine_and_is_a_good_end(http: httpx.Client) -> None:
    before = ended(http, "stop"), ended(http, "cancelled")
    answer = http.post("/v1/completions", json={**LONG, "stop": "efg"})
    assert answer.json()["choices"][0]["text"] == "abcd"
    wait_for(lambda: ended(http, "stop") == before[0] + 1)
    assert ended(http, "cancelled") == before[1]


def events_of(text: str) -> list[Any]:
    lines = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.mark.parametrize(("patience_s", "is_whole"), [(PATIENCE_S, True), (0.3, False)])
def test_draining(tokenizer: Path, gate: Gate, patience_s: float, is_whole: bool) -> None:
    """Requests in flight finish, or are told, when patience ends; new ones are refused at once."""

    async def scenario(server: BackgroundServer) -> list[Any]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            body = {**LONG, "max_tokens": 15, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                pieces = answer.aiter_text()
                text = await anext(pieces)
                server.drain()
                if is_whole:
                    while (await client.get("/health")).status_code == 200:
                        pass
                    refused = await client.post("/v1/completions", json=LONG)
                    assert refused.status_code == 503
                    assert "shutting down" in refused.json()["error"]["message"]
                    gate.open()
                async for piece in pieces:
                    text += piece
            return events_of(text)

    with serving(tokenizer, drain_timeout_s=patience_s) as server:
        events = asyncio.run(scenario(server))
        assert events[-1] == "[DONE]"
        if is_whole:
            assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "abcdefghijklmno"
        else:
            assert "shutting down" in events[-2]["error"]["message"]
        server.wait(PATIENCE_S)


def test_many_tokens_at_once_travel_in_one_event(server: BackgroundServer) -> None:
    """A reader that lags gets larger pieces, not more of them."""
    body = {"model": "base", "prompt": "say", "max_tokens": 200, "stream": True, "n": 100}
    with httpx.Client(base_url=server.url, timeout=60) as http:
        before = ended(http, "length")
        with begun(server, "/v1/completions", body) as slow:
            wait_for(lambda: ended(http, "length") == before + 100)
            events = events_of(b"".join(chunks_of(rest_of(slow))).decode())[:-1]
    texts: dict[int, str] = {}
    for event in events:
        choice = event["choices"][0]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert len(texts) == 100
    assert {len(text) for text in texts.values()} == {200}
    assert len(events) < 100 * 200


def test_a_client_that_does_not_read_stops_nobody_and_misses_nothing(server: BackgroundServer) -> None:
    """Its chunks no longer fit into the socket: the rest of its answer waits, and comes whole when it reads."""
    body = {"model": "base", "messages": [{"role": "user", "content": "say"}], "max_tokens": 200, "n": 24}
    body |= {"stream": True, "logprobs": True, "top_logprobs": 20}
    with httpx.Client(base_url=server.url, timeout=60) as http:
        before = ended(http, "length")
        with begun(server, "/v1/chat/completions", body) as slow:
            wait_for(lambda: ended(http, "length") == before + 24)  # the engine waits for no reader
            say = {"model": "base", "prompt": "say", "max_tokens": 5, "stream": True}
            assert len(events_of(http.post("/v1/completions", json=say).text)) >= 2
            answer = rest_of(slow)
    texts: dict[int, str] = {}
    events = events_of(b"".join(chunks_of(answer)).decode())
    for event in events[:-1]:
        choice = event["choices"][0]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
    assert events[-1] == "[DONE]"
    assert len(texts) == 24
    assert {len(text) for text in texts.values()} == {200}
    assert len(answer) > 4_500_000  # more than the sockets of a connection hold


@contextmanager
def begun(server: BackgroundServer, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """Send a request on a connection with little room, and read nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        slow.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield slow


def rest_of(slow: socket.socket) -> bytes:
    """Read an answer to its end; return its body."""
    return b"".join(iter(lambda: slow.recv(1 << 16), b"")).partition(b"\r\n\r\n")[2]


def chunks_of(body: bytes) -> Iterator[bytes]:
    at = 0
    while size := int(body[at : (end := body.index(b"\r\n", at))], 16):
        yield body[end + 2 : end + 2 + size]
        at = end + 2 + size + 2


def test_a_request_without_room_is_refused_before_its_body_is_parsed(tokenizer: Path) -> None:
    """The engine says at every turn whether it would take another; a request that leaves makes room again."""
    body = {**LONG, "stream": True}

    def status(http: httpx.Client) -> int:
        answer = http.post("/v1/completions", content=b"no JSON", headers={"content-type": "application/json"})
        assert answer.status_code != 429 or answer.headers["retry-after"].isdigit()
        return answer.status_code

    with (
        serving(tokenizer, builder="reciter:slow_reciter_parts", max_num_seqs=1, max_waiting=1) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        assert status(http) == 400
        with http.stream("POST", "/v1/completions", json=body) as running:
            next(running.iter_lines())  # it waits no more: the next may
            with http.stream("POST", "/v1/completions", json=body) as waiting:
                assert waiting.status_code == 200
                wait_for(lambda: status(http) == 429)
                assert http.get("/v1/models").status_code == 200
        wait_for(lambda: status(http) == 400)
        assert http.post("/v1/completions", json={**LONG, "max_tokens": 1}).status_code == 200


def test_a_request_that_would_wait_for_too_long_is_429(tokenizer: Path) -> None:
    with (
        serving(tokenizer, builder="reciter:slow_reciter_parts", max_num_seqs=1, max_wait_s=1.0) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as running,
    ):
        next(running.iter_lines())  # the time of a step is known
        refused = http.post("/v1/completions", json={**LONG, "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "RateLimitError")
        assert "longer than 1 s" in refused.json()["error"]["message"]


def test_bodies_that_stall_leave_room_for_short_ones_and_give_theirs_back(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BodyRoom.__init__, "__defaults__", (200_000,))
    body = json.dumps({"model": "base", "prompt": "say", "max_tokens": 1, "user": "x" * 150_000}).encode()
    with (
        serving(tokenizer, builder="reciter:reciter_parts") as server,
        httpx.Client(base_url=server.url, headers={"content-type": "application/json"}, timeout=60) as http,
    ):
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as stalled:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            stalled.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:-1])
            wait_for(lambda: http.post("/v1/completions", content=body).status_code == 429)
            refused = http.post("/v1/completions", content=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            short = {"model": "base", "prompt": "say", "max_tokens": 1}
            assert http.post("/v1/completions", json=short).status_code == 200
            stalled.sendall(body[-1:])
            assert stalled.recv(12) == b"HTTP/1.1 200"
        for _ in range(3):
            assert http.post("/v1/completions", content=body).status_code == 200


LARGE = [1_200_000, 5_000_000, 30_000_000]


def post_with_urllib(url: str, body: bytes) -> int:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=PATIENCE_S)
    with caught.value as answer:
        assert answer.headers["connection"] == "close"
        assert b"larger than" in answer.read()
        return answer.code


def post_with_httpx(url: str, body: bytes) -> int:
    return httpx.post(url, content=body, headers={"content-type": "application/json"}, timeout=60).status_code


def post_chunked_with_httpx(url: str, body: bytes) -> int:
    parts = (body[at : at + 100_000] for at in range(0, len(body), 100_000))
    return httpx.post(url, content=parts, headers={"content-type": "application/json"}, timeout=60).status_code


def post_with_aiohttp(url: str, body: bytes) -> int:
    sockets: list[socket.socket] = []

    def connect(address: Any) -> socket.socket:
        sockets.append(socket.socket(*address[:3]))
        return sockets[-1]

    async def post() -> int:
        headers = {"content-type": "application/json"}
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=connect)) as client,
            client.post(url, data=io.BytesIO(body), headers=headers) as answer,
        ):
            assert "larger than" in await answer.text()
        while any(one.fileno() != -1 for one in sockets):  # the session ends while the rest of the body is sent
            await asyncio.sleep(0.001)
        return answer.status

    return asyncio.run(post())


def post_with_curl(url: str, body: bytes, *options: str) -> int:
    command = ["curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "-H", "content-type: application/json", *options]
    done = subprocess.run([*command, "--data-binary", "@-", url], input=body, capture_output=True, check=True)
    return int(done.stdout)


def post_with_curl_at_once(url: str, body: bytes) -> int:
    return post_with_curl(url, body, "-H", "Expect:")


@pytest.fixture(scope="module")
def small(tokenizer: Path) -> Iterator[BackgroundServer]:
    with serving(tokenizer, builder="reciter:reciter_parts") as server:
        yield server


@pytest.mark.parametrize("num_bytes", LARGE)
@pytest.mark.parametrize(
    "post",
    [
        post_with_urllib,
        post_with_httpx,
        post_chunked_with_httpx,
        post_with_aiohttp,
        post_with_curl,
        post_with_curl_at_once,
    ],
)
def test_clients_read_that_their_body_is_too_large(
    small: BackgroundServer, post: Callable[[str, bytes], int], num_bytes: int
) -> None:
    if "curl" in post.__name__ and shutil.which("curl") is None:
        pytest.skip("there is no curl")
    assert post(small.url + "/v1/completions", b"x" * num_bytes) == 413


def test_a_body_that_goes_on_after_its_refusal_is_cut_off(small: BackgroundServer) -> None:
    host, port = small.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as endless:
        endless.sendall(f"{head}Content-Length: {1 << 40}\r\n\r\n".encode())
        taken = 0
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while taken < 1 << 30:
                taken += endless.send(b"x" * (1 << 20))
        assert taken >= 60 << 20


def test_lists_of_models_that_are_asked_for_together_are_made_once(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_clients, num_made, num_asked = 8, 0, 0
    all_asked = asyncio.Event()
    make, is_admin = models._list, auth.Gate.is_admin

    async def made(*args: Any, **kwargs: Any) -> bytes:
        nonlocal num_made
        num_made += 1
        await all_asked.wait()
        return await make(*args, **kwargs)

    def asked(self: auth.Gate, request: Any) -> bool:
        nonlocal num_asked
        num_asked += 1
        if num_asked == num_clients:
            all_asked.set()
        return is_admin(self, request)

    monkeypatch.setattr(models, "_list", made)
    monkeypatch.setattr(auth.Gate, "is_admin", asked)
    with serving(tokenizer, builder="reciter:reciter_parts") as server, ThreadPoolExecutor(num_clients) as pool:
        lists = list(pool.map(lambda _: httpx.get(f"{server.url}/v1/models", timeout=60).json(), range(num_clients)))
    assert num_made == 1
    assert [one["id"] for one in lists[0]["data"]] == ["base"]
    assert all(one == lists[0] for one in lists)
