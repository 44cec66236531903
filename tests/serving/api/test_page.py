"""The live page of a busy server: over HTTP what it opens and to whom, and in a real browser what a person does.

The browser tests need Chromium (Debian's ``chromium``, or the one that ``CHROMIUM`` names). With ``SCREENSHOTS=1`` they
write the pictures of ``docs/ui.md``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from serving import PATIENCE_S, wait_for

from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig, ServerConfig
from manylora.serving.server import BackgroundServer, LoraModule

PICTURES = Path(__file__).parents[3] / "docs" / "img" if os.environ.get("SCREENSHOTS") else None
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
NAMES = [
    f"{team}-{task}"
    for team in ("acme", "globex", "initech")
    for task in ("billing", "code", "legal", "mail", "sales", "search", "support", "voice")
]
KEY = "the administrator's"

pytestmark = pytest.mark.slow


def write_adapters(folder: Path) -> list[LoraModule]:
    modules = []
    for number, name in enumerate(NAMES):
        place = Path("adapters") / name
        (folder / place).mkdir(parents=True)
        config = {
            "peft_type": "LORA",
            "r": (64, 128, 256)[number % 3],
            "target_modules": ["q_proj", "v_proj"],
            "number": number,
        }
        (folder / place / "adapter_config.json").write_text(json.dumps(config))
        modules.append(LoraModule(name, str(place)))
    return modules


class Traffic:
    """Requests for adapters, a few favourites and many others, until it is stopped."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.num_answers = 0
        self._is_over = False
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(3)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        rng = random.Random(number)
        keys = [{"Authorization": f"Bearer {tenant}"} for tenant in ("acme", "globex", "initech")]
        with httpx.Client(base_url=self.url, timeout=PATIENCE_S) as http:
            while not self._is_over:
                name = NAMES[(int(rng.paretovariate(0.6)) - 1) % (len(NAMES) - 2)]  # the last two rest
                body = {"model": name, "prompt": "hello " * rng.randint(2, 30), "max_tokens": rng.randint(1, 12)}
                answer = http.post("/v1/completions", json=body, headers=keys[NAMES.index(name) // 8])
                assert answer.status_code == 200, answer.text
                self.num_answers += 1


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A simulated server with keys, tenants and a ledger, whose device has room for some of its adapters."""
    folder = tmp_path_factory.mktemp("page")
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("acme", "globex", "initech")}
    tenants = folder / "tenants.toml"
    tenants.write_text(
        "".join(
            f'[tenants.{name}]\nkeys = [{{ sha256 = "{digest}" }}]\nmodels = ["{name}-*"]\nweight = {weight}.0\n'
            f"requests_per_minute = 3000\nconcurrent_requests = 8\nadapters = 8\n"
            for weight, (name, digest) in enumerate(digests.items(), 1)
        )
    )
    config = ServerConfig(port=0, in_process=True, admin_key=KEY, tenants=str(tenants), usage=str(folder / "usage.db"))
    engine = EngineConfig(
        model=ModelConfig(model="demo"),
        simulate="h100:llama-7b",
        memory=MemoryConfig(num_pages=320),
        scheduler=SchedulerConfig(policy="fair"),
    )
    modules = write_adapters(folder)
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(folder),
        BackgroundServer(engine, config, modules) as server,
    ):
        patch.setattr("manylora.serving.api.page.READ_USAGE_S", 0.1)
        traffic = Traffic(server.url)
        wait_for(lambda: traffic.num_answers > 20)
        try:
            yield SimpleNamespace(url=server.url, traffic=traffic)
        finally:
            traffic.stop()


@pytest.fixture
def http(busy: SimpleNamespace) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=busy.url, timeout=PATIENCE_S) as opened:
        yield opened


OWN = {"Sec-Fetch-Site": "same-origin"}


def sign_in(http: httpx.Client, key: str = KEY, **headers: str) -> httpx.Response:
    return http.post("/ui/session", json={"key": key}, headers=OWN | headers)


def snapshot(http: httpx.Client) -> dict[str, Any]:
    """Return the next snapshot of a stream."""
    with http.stream("GET", "/ui/events", headers=OWN) as stream:
        assert stream.status_code == 200 and stream.headers["cache-control"] == "no-store"
        line = next(line for line in stream.iter_lines() if line.startswith("data: "))
    found = json.loads(line.removeprefix("data: "))
    assert isinstance(found, dict)
    return found


def test_the_files_are_open_and_bounded_by_a_strict_policy(http: httpx.Client) -> None:
    for path in ("/ui", "/ui/page.css", "/ui/page.js", "/ui/icon.svg"):
        answer = http.get(path)
        assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert answer.headers["x-frame-options"] == "DENY" and answer.headers["x-content-type-options"] == "nosniff"
    assert "/ui" not in http.get("/openapi.json").text


def test_the_cookie_is_of_the_page_alone_and_opens_no_other_route(http: httpx.Client) -> None:
    assert sign_in(http, "wrong").status_code == 401
    answer = sign_in(http, Origin="https://llm.example")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "Path=/ui", "SameSite=strict", "Secure"} <= {part.strip() for part in cookie.split(";")}
    assert KEY not in answer.text + cookie
    value = cookie.split(";")[0]
    assert "Secure" not in sign_in(http).headers["set-cookie"]
    for method, path in (
        ("GET", "/status"), ("GET", "/adapters"), ("GET", "/server_info"), ("GET", "/v1/models"),
        ("POST", "/adapters/acme-code/pin"), ("DELETE", "/adapters/acme-code"), ("POST", "/v1/completions"),
    ):  # fmt: skip
        assert http.request(method, path, headers=OWN | {"Cookie": value}).status_code == 401, path
    http.cookies.clear()
    assert http.get("/ui/session", headers=OWN).json()["needs_key"]
    for method, path in (
        ("GET", "/ui/events"), ("PUT", "/ui/session"), ("GET", "/ui/adapters/acme-code"),
        ("POST", "/ui/adapters/acme-code/pin"), ("DELETE", "/ui/adapters/acme-code"),
    ):  # fmt: skip
        for headers in ({}, {"Authorization": f"Bearer {KEY}"}, {"Cookie": value + "0"}):
            assert http.request(method, path, headers=OWN | headers).status_code == 401, path
    for tenant in ("acme", "globex"):
        assert sign_in(http, tenant).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://other.example"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {},
    ],
    ids=str,
)
def test_no_other_site_can_use_the_session(http: httpx.Client, headers: dict[str, str]) -> None:
    sign_in(http)
    for method, path in (
        ("POST", "/ui/adapters/acme-voice/pin"), ("DELETE", "/ui/adapters/acme-voice"), ("POST", "/ui/session"),
        ("DELETE", "/ui/session"), ("PUT", "/ui/session"),
    ):  # fmt: skip
        assert http.request(method, path, headers=headers).status_code == 403
    if headers:
        assert http.get("/ui/events", headers=headers).status_code == 403
    own_origin = {"Origin": str(http.base_url).rstrip("/")}  # of a browser that sends no Sec-Fetch-Site
    assert http.post("/ui/adapters/acme-voice/warm", headers=own_origin).status_code == 200


def test_a_sign_in_is_bounded_before_it_is_parsed(http: httpx.Client) -> None:
    assert (
        http.post("/ui/session", content=b"x" * 5000, headers=OWN | {"Content-Type": "application/json"}).status_code
        == 413
    )
    assert http.post("/ui/session", content=b"key=secret", headers=OWN).status_code == 415
    for body in (b'{"key": 5, "secret": 1}', b"[" * 4000, b"\xff"):
        answer = http.post("/ui/session", content=body, headers=OWN | {"Content-Type": "application/json"})
        assert answer.status_code == 400 and "secret" not in answer.text


def test_a_snapshot_has_what_the_page_shows(busy: SimpleNamespace, http: httpx.Client) -> None:
    sign_in(http)
    found: dict[str, Any] = {}

    def is_charged() -> bool:
        found.update(snapshot(http))
        return sum(found["engine_s"]["tenant"].values()) > 0

    wait_for(is_charged)  # the ledger is written every second
    report, adapters = found["report"], {one["name"]: one for one in found["adapters"]}
    assert adapters.keys() <= set(NAMES) and len(adapters) > 20
    assert {"base", "kv", "adapters", "host", "free"} <= found["memory_bytes"].keys()
    assert found["memory_bytes"]["base"] > 13e9
    assert report["latency"]["ttft_s"]["p99"] > 0 and report["engine"]["resident_adapters"] == []
    tenants = {one["name"]: one for one in found["tenants"]}
    assert tenants["acme"]["limits"] == {"requests": 3000, "tokens": None, "num_answers": 8, "num_adapters": 8}
    assert tenants["acme"]["requests"] is not None and found["weights"] == {"acme": 1.0, "globex": 2.0, "initech": 3.0}
    moved = next(one for one in adapters.values() if one["num_requests"])
    life = http.get(f"/ui/adapters/{moved['name']}", headers=OWN).json()
    assert {("loaded", "device"), ("loaded", "host")} <= {(one["kind"], one["tier"]) for one in life["moves"]}
    assert life["moves"] == sorted(life["moves"], key=lambda one: -one["at"])
    assert http.get("/ui/adapters/none", headers=OWN).status_code == 404


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A running Chromium."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium, or name one in CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield running
        running.close()


@pytest.fixture
def page(chromium: Any, busy: SimpleNamespace) -> Iterator[Any]:
    """The page, before the sign-in; afterwards nothing was blocked by the policy, and no script has failed."""
    context = chromium.new_context(viewport={"width": 1100, "height": 760}, reduced_motion="reduce")
    opened = context.new_page()
    opened.set_default_timeout(1000 * PATIENCE_S)
    said: list[str] = []
    opened.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    opened.on("pageerror", lambda error: said.append(f"error: {error}"))
    asked: list[str] = []
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(f"{busy.url}/ui")
    yield opened
    assert [line for line in said if "status of 401" not in line] == []
    assert all(url.startswith(busy.url) for url in asked)
    context.close()


def enter(page: Any) -> None:
    page.get_by_label("Administrator's key").fill(KEY)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("button", name="acme-billing", exact=True).wait_for()


def picture(shown: Any, name: str) -> None:
    if PICTURES is not None:
        shown.screenshot(path=PICTURES / name)
        assert (PICTURES / name).stat().st_size < 150_000


def tab_to(page: Any, name: str) -> None:
    """Press Tab until the element with this text has the focus."""
    for _ in range(200):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == name:
            return
    raise AssertionError(f"{name} cannot be reached")


def test_a_person_signs_in_watches_pins_and_unloads(page: Any, busy: SimpleNamespace) -> None:
    page.get_by_label("Administrator's key").fill("a guess")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("alert").filter(has_text="not the administrator's key").wait_for()
    assert not page.locator("#panels").is_visible()
    enter(page)
    cell = (
        page.get_by_role("row")
        .filter(has=page.get_by_role("button", name="acme-billing", exact=True))
        .get_by_role("cell")
    )
    before = page.locator("#tiles").inner_text(), cell.nth(5).inner_text()
    page.wait_for_function("([tiles, num]) => tiles !== document.querySelector('#tiles').innerText", arg=before)
    for title in ("Memory by owner", "Latency", "Replicas", "Tenants against their limits", "Adapters"):
        assert page.get_by_role("heading", name=title, exact=True).is_visible()
    assert page.get_by_role("meter", name="answers").count() == 3
    assert "base 1" in page.locator("#chart title").text_content() and page.locator("#chart path.base").get_attribute(
        "d"
    )
    if PICTURES is not None:
        page.set_viewport_size({"width": 1100, "height": 1020})
        page.wait_for_timeout(20_000)  # for a chart with a past
    picture(page, "ui.png")
    if PICTURES is not None:
        page.get_by_role("button", name="globex-mail").click()
        page.wait_for_timeout(25_000)
        picture(page.get_by_role("dialog", name="globex-mail"), "ui-life.png")
        page.keyboard.press("Escape")

    page.get_by_label("Find").fill("voice")
    page.get_by_role("button", name="initech-voice").click()
    dialog = page.get_by_role("dialog", name="initech-voice")
    dialog.get_by_role("button", name="Load to the device").click()
    dialog.get_by_text("loaded to device").first.wait_for()
    dialog.get_by_role("button", name="Pin", exact=True).click()
    dialog.get_by_role("button", name="Unpin", pressed=True).wait_for()
    with httpx.Client(base_url=busy.url, headers={"Authorization": f"Bearer {KEY}"}) as http:
        assert http.get("/adapters/initech-voice").json()["pinned"] is True
        dialog.get_by_role("button", name="Unload").click()
        confirm = page.get_by_role("alertdialog", name="Unload the adapter?")
        confirm.get_by_role("button", name="Cancel").click()
        assert http.get("/adapters/initech-voice").status_code == 200
        dialog.get_by_role("button", name="Unload").click()
        confirm.get_by_role("button", name="Unload").click()
        page.get_by_role("status").filter(has_text="initech-voice was unloaded").wait_for()
        assert http.get("/adapters/initech-voice").status_code == 404
    page.get_by_role("button", name="initech-voice").wait_for(state="detached")
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Administrator's key").wait_for()
    assert page.evaluate("fetch('ui/events').then((answer) => answer.status)") == 401


def test_the_keyboard_is_enough_on_a_phone_and_foreign_names_are_text(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function("document.activeElement.id === 'key'")
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="acme-code", exact=True).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    if PICTURES is not None:
        page.wait_for_timeout(10_000)
    picture(page, "ui-phone.png")
    tab_to(page, "acme-code")
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="acme-code")
    dialog.get_by_text("eviction price").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    tab_to(page, "Pin")
    page.keyboard.press("Space")
    dialog.get_by_role("button", name="Unpin", pressed=True).wait_for()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.textContent") == "acme-code"

    hostile = '<img src=x onerror="window.hacked=1">'
    page.evaluate(
        """(name) => {
          source.close();
          const made = structuredClone(latest);
          made.report.model = made.report.replicas[0].node = made.tenants[0].name = name;
          Object.assign(made.adapters[0], { name, error: name, state: name });
          made.report.functions = [{ name, state: name, error: name, missing: [{ name, note: name }] }];
          made.route = { version: name, models: 1, router: name, backends: [{ url: name, kind: name, state: name,
            reason: name,
            adapters_in_flight: { [name]: 1, __proto__: 1 }, reported: {}, in_flight: 1, load: 1, models: 1 }] };
          render(made);
          openLife(name, null);
        }""",
        hostile,
    )
    assert page.evaluate("document.body.innerText").count(hostile) >= 5
    assert page.locator("img").count() == 0 and page.evaluate("window.hacked") is None
