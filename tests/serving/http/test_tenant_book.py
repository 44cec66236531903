"""The file of tenants: its mistakes, keys and their ends, models, limits a minute and under way, and changes to it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from reciter import engine_config

from manylora.core.config import ServerConfig
from manylora.core.errors import CapacityError, ConfigError, ModelNotFound
from manylora.serving.api.request import Context
from manylora.serving.http.room import CallerLimits, CallerRoom
from manylora.serving.http.tenants import MAX_FILE_BYTES, Tenant, TenantBook
from manylora.serving.server import BackgroundServer

SAY = {"model": "base", "prompt": "say", "max_tokens": 1}


def key(text: str) -> str:
    return f'{{ sha256 = "{hashlib.sha256(text.encode()).hexdigest()}" }}'


def book(path: Path, text: str) -> TenantBook:
    (path / "tenants.toml").write_text(text)
    return TenantBook(path / "tenants.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tenants = 3", r"Expected `object`, got `int` - at `\$.tenants`"),
        ("[tenants.a]\nwait = 1", "unknown field `wait`"),
        ("[tenants.a]\nweight = 0", r"Expected `float` >= 0.001 - at `\$.tenants\[...\].weight`"),
        ("[tenants.a]\nrequests_per_minute = 0", "`int` >= 1"),
        ('[tenants.a]\nkeys = [{ sha256 = "abc" }]', "matching regex"),
        (f"[tenants.a]\nkeys = [{key('x')}]\n[tenants.b]\nkeys = [{key('x')}]", "a key of both 'a' and 'b'"),
        ('[tenants."a b"]', "the tenant 'a b', expected at most 128 letters"),
        ("[tenants.key-0123456789ab]", "not the name of an API key"),
        (f"[tenants.{'a' * 129}]", "expected at most 128 letters"),
        ('[tenants.a]\nname = "b"', "and no field name"),
        (f"[tenants.a]\nkeys = [{key('x')[:-2]}, expires = 2027-01-01T00:00:00 }}]", "expected a time zone"),
        ("[tenants", "tenants.toml': "),
        ("#" * (MAX_FILE_BYTES + 1), f"of {MAX_FILE_BYTES + 1} bytes, expected at most {MAX_FILE_BYTES}"),
    ],
    ids=lambda one: one[:20],
)
def test_a_mistake_is_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        book(tmp_path, text)


def test_a_key_ends_when_it_expires(tmp_path):
    made = book(tmp_path, f"[tenants.a]\nkeys = [{key('x')[:-2]}, expires = 1970-01-01T00:01:00Z }}, {key('y')}]")
    old, new = (hashlib.sha256(one).digest() for one in (b"x", b"y"))
    assert [made.find(old, now) is not None for now in (59.0, 60.0)] == [True, False]
    assert made.find(new, 1e12) is not None and made.find(b"\0" * 32, 0.0) is None


def test_a_change_counts_and_a_mistake_changes_nothing(tmp_path, caplog):
    made = book(tmp_path, "[tenants.a]\nweight = 2")
    file = tmp_path / "tenants.toml"
    file.write_text("[tenants.a]\nweight = 3.0\n[tenants.b]")
    made.reread()
    assert [made.by_name[name].weight for name in ("a", "b")] == [3.0, 1.0]
    for text in ("[tenants.a]\nweight = -100", None):
        file.write_text(text) if text is not None else file.unlink()
        made.reread()
        assert made.by_name["a"].weight == 3.0
    assert caplog.text.count("tenants_kept num=2") == 2


def test_models_are_patterns(tmp_path):
    made = book(tmp_path, '[tenants.a]\nmodels = ["base", "a/*"]\n[tenants.b]').by_name
    called = ("base", "a/sql", "a/", "b/sql", "xbase", "basex")
    assert [made["a"].may_call(name) for name in called] == [True, True, True, False, False, False]
    assert made["b"].may_call("anything")


class Room:
    """A room with one caller's limits and a clock."""

    def __init__(self, **limits: int) -> None:
        self.now = 0.0
        self.limits = CallerLimits(**limits)
        self.room = CallerRoom(100, lambda: 1, limits_of=lambda caller: self.limits, now=lambda: self.now)

    def refusal(self, num: int = 1, **ask: object) -> CapacityError:
        with pytest.raises(CapacityError) as raised:
            self.room.take("a", num, **ask)  # type: ignore[arg-type]
        return raised.value


def test_requests_a_minute_fill_up_evenly():
    made = Room(requests=60)
    for _ in range(60):
        made.room.take("a", 1).close()
    error = made.refusal()
    assert str(error).startswith("This caller may have 60 requests a minute") and error.retry_after_s == 1.0
    with pytest.raises(CapacityError):
        made.room.check("a")  # before the body is read
    assert dict(made.room.headers("a"))[b"x-ratelimit-remaining-requests"] == b"0"
    made.now = 2.0
    made.room.check("a")
    places = made.room.take("a", 1)
    assert dict(places.headers()) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"1",
        b"x-ratelimit-reset-requests": b"59.000s",
    }


def test_tokens_of_answers_are_owed():
    made = Room(tokens=600)
    made.room.take("a", 1, num_tokens=100).close(num_tokens=800)
    assert made.refusal(num_tokens=1).retry_after_s == pytest.approx(30.1)
    made.now = 31.0
    made.room.take("a", 1, num_tokens=1).close()
    made.now = 200.0
    made.room.take("a", 1, num_tokens=5000).close()  # more than the limit needs all of it, and is owed
    assert made.refusal(num_tokens=1).retry_after_s > 400


def test_a_limit_that_is_lowered_locks_no_tenant_out_for_hours():
    """What was taken of the former limit fills up in the same time as before, and sooner under one that is raised."""
    made = Room(tokens=1_000_000, requests=600)
    made.room.take("a", 1, num_tokens=800_000).close()
    made.limits = CallerLimits(tokens=1000, requests=6)
    made.room.take("a", 1, num_tokens=200).close()
    error = made.refusal(num_tokens=100)
    assert str(error).startswith("This caller may have 1000 tokens a minute") and error.retry_after_s == 6.0
    made.now = 60.0
    assert made.room.taken() == {}
    made.room.take("a", 1, num_tokens=10).close(3000)
    assert made.room.taken()["a"][1] == 3010.0  # an answer is owed whole
    made.limits = CallerLimits(tokens=100_000)
    assert made.room.taken()["a"][1] == 3010.0
    made.now = 62.0
    assert made.room.taken() == {}


def test_an_answer_that_took_long_is_not_forgiven_its_own_time():
    made = Room(tokens=600)
    places = made.room.take("a", 1, num_tokens=0)
    made.now = 59.0  # nothing was taken that could have filled up meanwhile
    places.close(num_tokens=900)
    assert made.refusal(num_tokens=1).retry_after_s == pytest.approx(30.1)
    counted = made.room.count("a", 1, num_tokens=60)  # let in by another process, whatever is left
    assert made.refusal(num_tokens=1).retry_after_s == pytest.approx(36.1)
    counted.close()


def test_answers_and_adapters_under_way():
    made = Room(num_answers=3, num_adapters=2)
    one, two = made.room.take("a", 1, adapter="x"), made.room.take("a", 1, adapter="y")
    assert "2 adapters under way, of 2 at most" in str(made.refusal(adapter="z"))
    three = made.room.take("a", 1, adapter="x")
    assert "3 answers under way and asks for 1 more, of 3" in str(made.refusal())
    for places in (one, three):
        places.close()
    made.room.take("a", 1, adapter="z").close()
    two.close()
    assert not made.room._callers, "a caller with nothing is forgotten"


@pytest.fixture(scope="module")
def served(
    tokenizer: Path, lora_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[httpx.Client, Path]]:
    file = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    file.write_text(
        f"[tenants.all]\nkeys = [{key('all')}]\nrequests_per_minute = 60\ntokens_per_minute = 6000\n"
        f'[tenants.none]\nkeys = [{key("none")}]\nmodels = ["p*"]\n'
        f"[tenants.one]\nkeys = [{key('one')}]\nrequests_per_minute = 1\n"
    )
    config = ServerConfig(port=0, in_process=True, tenants=str(file), admin_key="root", lora_dirs=(str(lora_dir),))
    server = BackgroundServer(engine_config(tokenizer), config, builder="reciter:reciter_parts")
    with server, httpx.Client(base_url=server.url, timeout=60) as http:
        load = {"lora_name": "p", "lora_path": str(lora_dir / "p")}
        assert http.post("/v1/load_lora_adapter", json=load, headers={"Authorization": "Bearer root"}).is_success
        yield http, file


def ask(http: httpx.Client, key: str, **fields: object) -> httpx.Response:
    return http.post("/v1/completions", json={**SAY, **fields}, headers={"Authorization": f"Bearer {key}"})


def test_a_server_tells_tenants_by_their_keys(served):
    http, _ = served
    answer = ask(http, "all")
    assert answer.status_code == 200
    assert answer.headers["x-ratelimit-limit-requests"] == "60"
    assert answer.headers["x-ratelimit-limit-tokens"] == "6000"
    assert ask(http, "wrong").status_code == 401
    assert http.get("/v1/models").status_code == 401
    for path in ("/adapters", "/status", "/metrics", "/load"):
        seen = {key: http.get(path, headers={"Authorization": f"Bearer {key}"}) for key in ("all", "wrong", "root")}
        assert [one.status_code for one in seen.values()] == [403, 401, 200], path
        assert http.get(path).status_code == 401
        assert '"p"' not in seen["all"].text and '"p"' not in seen["wrong"].text
    assert ask(http, "root").status_code == 200


def test_a_model_that_a_tenant_may_not_call_does_not_exist_for_it(served):
    http, _ = served
    hidden, unknown = ask(http, "none"), ask(http, "none", model="nonsense")
    assert hidden.status_code == unknown.status_code == 404
    assert hidden.json()["error"] == {
        **unknown.json()["error"],
        "message": unknown.json()["error"]["message"].replace("nonsense", "base"),
    }
    assert ask(http, "all", model="nonsense").json() == unknown.json()
    headers = {"Authorization": "Bearer none"}
    assert [one["id"] for one in http.get("/v1/models", headers=headers).json()["data"]] == ["p"]
    known = {name: http.get(f"/v1/models/{name}", headers=headers).status_code for name in ("p", "p@1", "base")}
    assert known == {"p": 200, "p@1": 200, "base": 404}
    assert ask(http, "none", model="p@1").status_code == 200
    asked = http.post("/tokenize", json={"prompt": "x", "model": "base"}, headers=headers)
    assert asked.status_code == 404
    everything = http.get("/v1/models", headers={"Authorization": "Bearer all"}).json()["data"]
    assert {"base", "p"} <= {one["id"] for one in everything}


def test_a_refusal_states_the_limit_and_when_to_try_again(served):
    http, _ = served
    assert ask(http, "one").status_code == 200
    refused = ask(http, "one")
    assert refused.status_code == 429 and 50 <= int(refused.headers["retry-after"]) <= 60
    assert "1 requests a minute" in refused.json()["error"]["message"]
    figures = http.get("/metrics", headers={"Authorization": "Bearer root"}).text
    counts = dict(re.findall(r'^vllm:admission_rejections_total\{.*reason="(\w+)"\} (\S+)', figures, re.MULTILINE))
    assert counts == {"caller_limit": "1.0", "max_num_queued_reqs": "0.0"}
    assert ask(http, "all").status_code == 200


def test_an_adapter_behind_the_bases_name_is_checked_by_its_own():
    """With ``--lora-on-demand`` it is loaded under its own name, so a pattern of the base's must not let it through."""
    looked_for: list[str] = []
    fleet = SimpleNamespace(served_name="base", adapters=SimpleNamespace(find=looked_for.append))
    made = {"a": Tenant(models=("b*", "p"))}
    context = SimpleNamespace(
        fleet=fleet, gate=SimpleNamespace(tenants=made), may_call=lambda name, model: made[name].may_call(model)
    )
    for model in ("base", "base:p", "p"):
        Context.check_model(context, "a", model)
    with pytest.raises(ModelNotFound):
        Context.check_model(context, "a", "base:secret")
    assert looked_for == ["base:p", "p"], "the time of a refusal does not tell whether there is such a model"
