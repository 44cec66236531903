"""The server towards its clients: names of requests, browsers, TLS, sockets, aliases, and its own description."""

from __future__ import annotations

import json
import logging
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from reciter import engine_config
from serving import wait_for

from manylora.core.config import ServerConfig
from manylora.core.errors import ConfigError
from manylora.core.server_config import TlsConfig, WebConfig
from manylora.serving.api.docs import BODIES
from manylora.serving.http import rereading
from manylora.serving.http.listening import bind_unix
from manylora.serving.server import BackgroundServer, LoraModule

ASK = {"model": "base", "prompt": "say", "max_tokens": 2}


@contextmanager
def serving(tokenizer: Path, lora_dir: Path, /, **web: Any) -> Iterator[BackgroundServer]:
    config = ServerConfig(port=0, in_process=True, api_keys=("secret",), web=WebConfig(**web))
    modules = [LoraModule("m", str(lora_dir / "m"))]
    with BackgroundServer(engine_config(tokenizer), config, modules, builder="reciter:reciter_parts") as server:
        yield server


def client(server: BackgroundServer, **options: Any) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"Authorization": "Bearer secret"}, timeout=60, **options)


@pytest.fixture(scope="module")
def web(tokenizer: Path, lora_dir: Path) -> Iterator[httpx.Client]:
    options = {
        "allowed_origins": ("https://page",),
        "aliases": ("also", "too"),
        "request_id_headers": True,
        "log_requests": True,
        "max_logprobs": 3,
        "chat_template": "{% for message in messages %}<{{ message.content }}>{% endfor %}",
    }
    with serving(tokenizer, lora_dir, **options) as server, client(server) as http:
        yield http


def test_a_client_s_name_of_its_request_is_sent_back(http: httpx.Client) -> None:
    for stream in (False, True):
        answer = http.post("/v1/completions", json={**ASK, "stream": stream}, headers={"X-Request-Id": "trace/7"})
        assert answer.headers.get_list("x-request-id") == ["trace/7"]
    assert http.post("/v1/completions", json={"model": 1}, headers={"X-Request-Id": "t"}).headers["x-request-id"] == "t"
    assert "x-request-id" not in http.post("/v1/completions", json=ASK).headers
    for forged in (b"two words", b"x" * 129, b"caf\xe9", b""):
        assert "x-request-id" not in http.get("/version", headers={b"X-Request-Id": forged}).headers


def test_every_response_is_named_and_logged_if_asked_for(web: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    answer = web.post("/v1/completions", json=ASK, headers={"X-Request-Id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    assert len(web.get("/v1/models/none").headers["x-request-id"]) == 32

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "manylora.serving.http.access"]

    wait_for(lambda: len(lines()) == 2)  # a line is written once the answer is sent
    assert [line.split(" took_s")[0] for line in lines()] == [
        "request method=POST route=/v1/completions status=200",
        "request method=GET route=/v1/models/{name:path} status=404",
    ]
    assert lines()[0].endswith("request_id=mine")


def test_responses_are_counted_by_route_and_never_by_path(web: httpx.Client) -> None:
    for path in ("/v1/models/a", "/v1/models/b", "/wp-login.php", "/health"):
        web.get(path)
    web.request("BREW", "/health")
    lines = [line for line in web.get("/metrics").text.splitlines() if line.startswith("http_requests_total")]
    assert 'http_requests_total{handler="/health",method="GET",status="2xx"} 1.0' in lines
    assert 'http_requests_total{handler="none",method="GET",status="4xx"} 1.0' in lines
    assert not any("wp-login" in line or "BREW" in line or '"/v1/models/a"' in line for line in lines)
    assert any('handler="/v1/models/{name:path}"' in line and line.endswith(" 3.0") for line in lines)


def test_web_pages_of_allowed_origins_may_call(web: httpx.Client, http: httpx.Client) -> None:
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    allowed = web.options("/v1/completions", headers={"Origin": "https://page", **preflight})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://page")
    assert web.options("/v1/completions", headers={"Origin": "https://other", **preflight}).status_code == 400
    answer = web.post("/v1/completions", json=ASK, headers={"Origin": "https://page"})
    assert answer.headers["access-control-allow-origin"] == "https://page"
    assert "access-control-allow-origin" not in http.get("/version", headers={"Origin": "https://page"}).headers


def test_aliases_are_the_base(web: httpx.Client) -> None:
    assert [card["id"] for card in web.get("/v1/models").json()["data"]] == ["base", "also", "too", "m"]
    assert web.get("/v1/models/also").json()["id"] == "also"
    named = web.post("/v1/completions", json=ASK).json()
    aliased = web.post("/v1/completions", json={**ASK, "model": "too"}).json()
    assert aliased["choices"] == named["choices"]
    assert aliased["model"] == "base"
    assert web.post("/v1/completions", json={**ASK, "model": "also:m"}).json()["model"] == "base:m"
    assert web.post("/v1/completions", json={**ASK, "model": "neither"}).status_code == 404


def test_most_logprobs(web: httpx.Client) -> None:
    for field in ("logprobs", "prompt_logprobs"):
        assert web.post("/v1/completions", json={**ASK, field: 3}).status_code == 200
        refused = web.post("/v1/completions", json={**ASK, field: 4})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


def test_the_server_s_chat_template(web: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "a b"}], "model": "base"}
    rendered = web.post("/tokenize", json=chat).json()["tokens"]
    assert rendered == web.post("/tokenize", json={"prompt": "<a b>", "model": "base"}).json()["tokens"]


def test_load_and_configuration(web: httpx.Client) -> None:
    assert web.get("/load").json() == {"server_load": 0}
    answer = web.get("/server_info")
    assert answer.json()["server"]["web"]["aliases"] == ["also", "too"]
    assert "secret" not in answer.text
    assert web.get("/server_info", headers={"Authorization": "Bearer wrong"}).status_code == 401


def test_the_description_has_every_route_and_body(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert {("GET", "/metrics"), ("GET", "/v1/models/{name}"), ("POST", "/adapters/{name}/pin"), *BODIES} <= described
    for (method, path), body in BODIES.items():
        schema = document["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]["schema"]
        properties = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]
        assert set(properties) == set(body.__struct_fields__)
    references = {part.split('"')[0] for part in json.dumps(document).split('"#/components/schemas/')[1:]}
    assert references <= set(document["components"]["schemas"])


def test_the_page_is_static(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "/v1/chat/completions" in page.text
    assert "temperature" in page.text
    assert "<script" not in page.text
    assert "http" not in page.text.replace("http-equiv", "")
    assert page.content == http.get("/docs").content


def test_the_tokenizers_settings_are_shown_if_asked_for(tokenizer: Path, lora_dir: Path) -> None:
    with serving(tokenizer, lora_dir, tokenizer_info=True) as server, client(server) as http:
        shown = http.get("/tokenizer_info")
        assert (shown.json()["tokenizer_class"], shown.json()["eos_token"]) == ("TokenizersBackend", "</s>")
        assert shown.json()["added_tokens_decoder"] == {"256": "</s>"}
        assert "raise_exception" in shown.json()["chat_template"] and str(tokenizer) not in shown.text
        assert httpx.get(f"{server.url}/tokenizer_info").status_code == 401
    with serving(tokenizer, lora_dir) as server, client(server) as http:
        assert http.get("/tokenizer_info").status_code == 404


def test_a_path_before_all_routes(tokenizer: Path, lora_dir: Path) -> None:
    with serving(tokenizer, lora_dir, root_path="/llm", disable_docs=True) as server, client(server) as http:
        assert http.get("/health").status_code == 200  # the proxy cuts the path off
        assert http.get("/openapi.json").status_code == 404
        assert http.get("/nothing").status_code == 404
    with serving(tokenizer, lora_dir, root_path="/llm") as server, client(server) as http:
        assert http.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]


def send_hello(server: BackgroundServer, name: bytes) -> None:
    """Begin a handshake with a name of six bytes, and return when the server has ended it."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    began = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="nobody")
    with pytest.raises(ssl.SSLWantReadError):
        began.do_handshake()
    host, _, port = server.url.removeprefix("https://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(outgoing.read().replace(b"nobody", name))
        connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):  # the server need not have read the end of ours
            while connection.recv(4096):
                pass


def test_tls_with_a_certificate_that_is_renewed_and_one_that_is_none(
    tokenizer: Path,
    lora_dir: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rereading, "REREAD_S", 0.02)
    authorities = trustme.CA(), trustme.CA()
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"

    def issue(authority: trustme.CA) -> None:
        issued = authority.issue_cert("127.0.0.1")
        key.write_bytes(issued.private_key_pem.bytes())
        chain.write_bytes(b"".join(one.bytes() for one in issued.cert_chain_pems))

    def trusting(authority: trustme.CA) -> ssl.SSLContext:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        return context

    issue(authorities[0])
    old, older, new = (trusting(one) for one in (authorities[0], *authorities))
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    web = {"tls": TlsConfig(ssl_keyfile=str(key), ssl_certfile=str(chain))}
    with serving(tokenizer, lora_dir, **web) as server, client(server, verify=old) as http:
        assert server.url.startswith("https://")
        assert http.post("/v1/completions", json={**ASK, "stream": True}).text.endswith("data: [DONE]\n\n")
        with client(server, verify=older) as old_http:
            assert old_http.get("/health").status_code == 200
        key.write_text("no key")
        wait_for(lambda: "certificate_kept" in caplog.text)
        with client(server, verify=old) as again:
            assert again.get("/health").status_code == 200
        caplog.set_level(logging.INFO)
        issue(authorities[1])
        wait_for(lambda: "certificate_read" in caplog.text)
        with client(server, verify=new) as renewed:
            assert renewed.get("/health").status_code == 200
        with client(server, verify=old) as again, pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            again.get("/health")
        assert http.get("/health").status_code == 200  # the connection that was there goes on
        with monkeypatch.context() as patched:
            unraisable: list[object] = []
            patched.setattr("sys.unraisablehook", unraisable.append)
            send_hello(server, b"n\x90body")
            assert not unraisable
    key.write_text("no key")
    with pytest.raises(ConfigError, match=r"chain\.pem"), serving(tokenizer, lora_dir, **web):
        raise AssertionError


def test_a_unix_socket_is_its_users_alone_from_the_first_moment_on(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for mode in (0o600, 0o660):
        umask = os.umask(0)
        try:
            with bind_unix(str(path), mode) as bound:  # in place of the last one's
                assert stat.S_IMODE(path.stat().st_mode) == mode
                bound.listen()
                with pytest.raises(ConfigError, match="another process listens"):
                    bind_unix(str(path), mode)
        finally:
            assert os.umask(umask) == 0
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be listened on"):
        bind_unix(str(tmp_path / "file"), 0o600)
    with pytest.raises(ConfigError, match="777"):
        WebConfig(uds_mode="888")


@pytest.mark.parametrize(("options", "mode"), [({}, 0o600), ({"uds_mode": "660"}, 0o660)])
def test_a_unix_socket(tokenizer: Path, lora_dir: Path, tmp_path: Path, options: dict[str, str], mode: int) -> None:
    path = str(tmp_path / "s")
    with serving(tokenizer, lora_dir, uds=path, **options) as server:
        assert server.url == f"unix:{path}"
        assert stat.S_IMODE(Path(path).stat().st_mode) == mode
        transport = httpx.HTTPTransport(uds=path)
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as http:
            keyed = {"Authorization": "Bearer secret"}
            assert http.post("/v1/completions", json=ASK, headers=keyed).status_code == 200
            assert http.get("/status").status_code == 401


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"root_path": "llm"}, "something like /llm"),
        ({"aliases": ("",)}, "not empty"),
        ({"allowed_origins": ("*",), "allow_credentials": True}, "origins by name"),
        ({"max_logprobs": 1025}, "-1 to 1024"),
    ],
)
def test_options_that_contradict(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        WebConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ssl_keyfile": "k"}, "ssl_keyfile without ssl_certfile"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 2}, "ssl_cert_reqs = 2 without ssl_ca_certs"),
    ],
)
def test_options_of_tls_that_contradict(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TlsConfig(**fields)
