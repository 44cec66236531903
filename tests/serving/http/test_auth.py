"""Who may call what."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from reciter import engine_config
from starlette.requests import Request

from manylora.core.config import ServerConfig, WebConfig
from manylora.serving.hosting.fleet.fleet import Fleet
from manylora.serving.http.auth import TENANT_HEADER, Gate, exposure
from manylora.serving.http.errors import HttpError
from manylora.serving.server import BackgroundServer

SAY = {"model": "base", "prompt": "say", "max_tokens": 1}


@contextmanager
def serving(tokenizer: Path, **config: object) -> Iterator[httpx.Client]:
    server = BackgroundServer(
        engine_config(tokenizer),
        ServerConfig(port=0, in_process=True, **config),  # type: ignore[arg-type]
        builder="reciter:reciter_parts",
    )
    with server, httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyed(tokenizer: Path) -> Iterator[httpx.Client]:
    with serving(
        tokenizer, api_keys=("tenant-1", "tenant-2"), admin_key="root", web=WebConfig(prompt_tokens_details=True)
    ) as http:
        yield http


@pytest.mark.parametrize(
    "headers", [{}, bearer("wrong"), {"Authorization": "Bearer"}, {"Authorization": "Basic tenant-1"}]
)
def test_inference_needs_a_key(keyed: httpx.Client, headers: dict[str, str]) -> None:
    for answer in (
        keyed.post("/v1/completions", json=SAY, headers=headers),
        keyed.get("/v1/models", headers=headers),
        keyed.post("/tokenize", json={"prompt": "x"}, headers=headers),
    ):
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "AuthenticationError"
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["tenant-1", "tenant-2", "root"])
def test_every_key_works_for_inference(keyed: httpx.Client, key: str) -> None:
    assert keyed.post("/v1/completions", json=SAY, headers=bearer(key)).status_code == 200


def test_models_that_do_not_exist_for_a_tenant_are_not_listed(
    tokenizer: Path, lora_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = "key-" + hashlib.sha256(b"tenant-1").hexdigest()[:12]
    monkeypatch.setattr(Fleet, "hidden_from", lambda fleet, tenant: frozenset({"p"} if tenant != owner else ()))
    with serving(tokenizer, api_keys=("tenant-1", "tenant-2"), lora_dirs=(str(lora_dir),)) as http:
        for name in ("p", "q"):
            load = {"lora_name": name, "lora_path": str(lora_dir / name)}
            assert http.post("/v1/load_lora_adapter", json=load, headers=bearer("tenant-1")).status_code == 200
        for key, is_listed in (("tenant-1", True), ("tenant-2", False), ("tenant-1", True)):
            models = http.get("/v1/models", headers=bearer(key)).json()["data"]
            assert ("p" in [one["id"] for one in models]) == is_listed
            assert http.get("/v1/models/q", headers=bearer(key)).status_code == 200
            assert http.get("/v1/models/p", headers=bearer(key)).status_code == (200 if is_listed else 404)


def test_a_tenants_key_shows_its_adapters_and_no_path(
    tokenizer: Path, lora_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = "key-" + hashlib.sha256(b"tenant-1").hexdigest()[:12]
    monkeypatch.setattr(Fleet, "hidden_from", lambda fleet, tenant: frozenset({"p"} if tenant != owner else ()))
    with serving(tokenizer, api_keys=("tenant-1", "tenant-2"), lora_dirs=(str(lora_dir),)) as http:
        for name in ("p", "q"):
            load = {"lora_name": name, "lora_path": str(lora_dir / name)}
            assert http.post("/v1/load_lora_adapter", json=load, headers=bearer("tenant-1")).status_code == 200
        for key, names in (("tenant-1", {"p", "q"}), ("tenant-2", {"q"})):
            answers = {
                path: http.get(path, headers=bearer(key))
                for path in ("/status", "/adapters", "/adapters/q", "/v1/models", "/v1/models/q")
            }
            assert all(answer.status_code == 200 for answer in answers.values())
            assert {one["name"] for one in answers["/status"].json()["adapters"]} == names
            assert {one["name"] for one in answers["/adapters"].json()["data"]} == names
            assert http.get("/adapters/p", headers=bearer(key)).status_code == (200 if "p" in names else 404)
            for path, answer in answers.items():
                assert str(lora_dir) not in answer.text and str(tokenizer) not in answer.text, path
                assert "p" in names or '"p"' not in answer.text, path
            assert http.get("/server_info", headers=bearer(key)).status_code == 403


def test_only_the_admins_key_works_for_adapters(keyed: httpx.Client) -> None:
    assert keyed.get("/adapters", headers=bearer("root")).status_code == 200
    for method, path in (
        ("GET", "/adapters"),
        ("GET", "/adapters/m"),
        ("POST", "/adapters"),
        ("DELETE", "/adapters/m"),
        ("POST", "/adapters/m/pin"),
        ("POST", "/adapters/m/warm"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
    ):
        assert keyed.request(method, path, headers=bearer("tenant-1")).status_code == 403, path
        assert keyed.request(method, path, headers=bearer("wrong")).status_code == 401, path
        assert keyed.request(method, path).status_code == 401, path


def test_probes_and_scrapers_need_no_key(keyed: httpx.Client) -> None:
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert keyed.get(path).status_code == 200


def test_the_openai_client_says_what_is_wrong(keyed: httpx.Client) -> None:
    url = str(keyed.base_url).rstrip("/") + "/v1"
    with (
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
    with openai.OpenAI(base_url=url, api_key="tenant-1", max_retries=0) as client:
        assert client.models.list().data
        with pytest.raises(openai.PermissionDeniedError):
            client.post("/load_lora_adapter", body={}, cast_to=object)


def test_keys_share_no_cached_prefix_and_see_no_path(keyed: httpx.Client) -> None:
    """The time of an answer would show a key that another has asked the same."""

    def cached(key: str) -> int:
        body = {"model": "base", "prompt": "a prompt of more than one block of tokens", "max_tokens": 1}
        usage = keyed.post("/v1/completions", json=body, headers=bearer(key)).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached("tenant-1"), cached("tenant-1") > 0, cached("tenant-2"), cached("tenant-2") > 0] == [
        0,
        True,
        0,
        True,
    ]
    roots = [
        [card["root"] for card in keyed.get("/v1/models", headers=bearer(key)).json()["data"]]
        for key in ("tenant-1", "root")
    ]
    assert not any("/" in root for root in roots[0]) and all("/" in root for root in roots[1])


def test_without_an_admin_key_the_api_keys_do(tokenizer: Path) -> None:
    with serving(tokenizer, api_keys=("tenant-1",)) as http:
        assert http.get("/adapters", headers=bearer("tenant-1")).status_code == 200
        assert http.get("/adapters").status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Forwarded-For": "127.0.0.1"},
        {"Forwarded": "for=127.0.0.1"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:80"},
        {"Host": "["},
    ],
)
def test_without_keys_adapters_are_for_this_machine_and_no_web_page(
    http: httpx.Client, headers: dict[str, str]
) -> None:
    assert http.get("/adapters").status_code == 200
    assert http.get("/adapters", headers={"Origin": str(http.base_url).rstrip("/")}).status_code == 200
    answer = http.get("/adapters", headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (403, "PermissionDeniedError")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:8000"}, 403),
        ({"Host": "127.0.0.1.evil.example:80"}, 403),
        ({"Host": "10.1.2.3"}, 403),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "http://localhost.evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "127.0.0.2"}, 200),
        ({"Host": "workstation:8000"}, 200),
        ({"Host": "host.docker.internal"}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Host": "llm.example:443"}, 200),
        ({"Origin": "https://page.example"}, 200),
    ],
)
def test_without_keys_a_local_server_answers_no_foreign_page(
    open_to_one: httpx.Client, headers: dict[str, str], status: int
) -> None:
    for answer in (
        open_to_one.post("/v1/completions", json=SAY, headers=headers),
        open_to_one.get("/v1/models", headers=headers),
    ):
        assert answer.status_code == status
        if status == 403:
            assert "--allowed-" in answer.json()["error"]["message"]
    if "page.example" in headers.get("Origin", ""):
        assert answer.headers["access-control-allow-origin"] == headers["Origin"]


@pytest.fixture(scope="module")
def open_to_one(tokenizer: Path) -> Iterator[httpx.Client]:
    web = WebConfig(allowed_hosts=("llm.example",), allowed_origins=("https://page.example",))
    with serving(tokenizer, web=web) as http:
        yield http


def test_with_keys_any_host_may_be_named(keyed: httpx.Client) -> None:
    headers = {"Host": "llm.example", "Origin": "https://page.example", **bearer("tenant-1")}
    assert keyed.post("/v1/completions", json=SAY, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("api_keys", "admin_key", "has_address", "part"),
    [
        ((), None, True, "reverse proxy"),
        ((), None, False, None),
        ((), "root", True, None),
        (("one",), None, True, None),
        (("one", "two"), None, False, "each of the 2 API keys"),
        (("one", "two"), "root", True, None),
    ],
)
def test_open_admin_routes_are_named(
    api_keys: tuple[str, ...], admin_key: str | None, has_address: bool, part: str | None
) -> None:
    note = exposure(api_keys, admin_key, has_address=has_address)
    assert note is None if part is None else part in str(note)


def test_a_backend_believes_the_name_of_a_tenant_from_its_router_alone() -> None:
    gate = Gate(["api"], "root", router_key="router")

    def caller(key: str, named: str | None) -> str:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        headers += [] if named is None else [(TENANT_HEADER.encode(), named.encode())]
        return gate.check_inference(Request({"type": "http", "headers": headers}))

    assert caller("router", "acme;2.5") == "acme"
    tenant = gate.tenant("acme")
    assert tenant is not None and tenant.weight == 2.5 and gate.limits_of("acme").requests is None
    assert caller("api", "acme;2.5").startswith("key-") and caller("root", "acme;2.5").startswith("key-")
    assert caller("router", None).startswith("key-")
    for wrong in ("", "acme", "a b;1", "acme;0", "acme;nan", f"{'a' * 129};1"):
        with pytest.raises(HttpError, match=r"expected a tenant's name"):
            caller("router", wrong)
    with pytest.raises(HttpError) as raised:
        caller("wrong", "acme;1")
    assert raised.value.status == 401


@pytest.mark.parametrize(
    ("keys", "statuses"),
    [
        ({}, {None: 200, "wrong": 200}),
        ({"metrics_key": "scrape", "api_keys": ("api",)}, {None: 401, "api": 403, "wrong": 401, "scrape": 200}),
        ({"router_key": "router"}, {None: 401, "router": 200}),
        ({"router_key": "router", "admin_key": "root"}, {"router": 200, "root": 200}),
    ],
)
def test_metrics_of_tenants_need_a_key(keys: dict[str, Any], statuses: dict[str | None, int]) -> None:
    gate = Gate(**keys)
    for key, status in statuses.items():
        headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        request = Request({"type": "http", "headers": headers, "client": ("10.0.0.1", 1)})
        found = 200
        try:
            gate.check_metrics(request)
        except HttpError as error:
            found = error.status
        assert found == status, key
