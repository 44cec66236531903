"""What can one tenant of a server learn of another, by answers and by time?

    python bench/isolation.py [--quick] [--draws 1000]

A server of its own process with a tenants file: `acme` has adapters `acme/*`, `beta` has `beta/*`, both may call the
base and `both/*`. Its engine is simulated (an 8B model on an H100) and decides with the code of every engine, in real
time. The key of `beta` is the attacker's.

1. *By answers*: each attempt is a request of `beta`, and the answer says what it learns.
2. *By time*: in each draw a secret bit is drawn, `acme` acts on it (or its name exists or not), and `beta` takes
   times. A classifier learns the bit from four fifths of the draws and is tested on the others, in turn: the area
   under its curve (AUC) is 0.5 for a guess and 1 for certainty. Goal: at most 0.55.
   As a control the same probe is made with the key of `acme` itself, from which the secret is not kept: where its AUC
   is high, the probe works and the isolation is what stops it. Both take turns in random order.

Also what is *not* kept apart: adapters that both may call, and how busy the device is.

Writes `results/isolation.json` and `.md`. Seven minutes.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fleet_rig import free_port
from numpy.typing import NDArray
from publishing import arguments, publish, table
from scipy.optimize import minimize
from scipy.special import expit
from scipy.stats import rankdata

from manylora.demo import demo_model_path
from manylora.lab.bench.rounds import machine

GOAL = 0.55
ACME, BETA, ROOT = "key-of-acme", "key-of-beta", "key-of-root"
NUM_OWN, NUM_BOTH, NUM_PINNED = 12, 24, 2
NUM_PAGES = 800  # room for ten adapters
WORDS = ("red", "green", "blue", "small", "large", "old", "new", "quick", "slow", "near", "far", "warm", "cold", "wide")
PROMPT_WORDS = 70
NUM_FOLDS, NUM_SHUFFLES = 5, 60
REPEATS = 4
"""Times that a probe without traces of its own is made: an attacker takes the least and the mean."""


class Place(NamedTuple):
    """A running server."""

    host: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path


class Caller:
    """A tenant's connection, kept alive."""

    def __init__(self, place: Place, key: str | None) -> None:
        self._http = http.client.HTTPConnection(place.host, place.port, timeout=60)
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, bytes, dict[str, str]]:
        """Return the status, the body and the headers of an answer."""
        data = None if body is None else json.dumps(body).encode()
        given = {**self._headers, **headers, **({} if data is None else {"Content-Type": "application/json"})}
        self._http.request(method, path, data, given)
        answer = self._http.getresponse()
        return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}

    def complete(self, model: str, prompt: str, **fields: object) -> int:
        """Ask for one token; return the status."""
        body = {"model": model, "prompt": prompt, "max_tokens": 1, **fields}
        return self.ask("POST", "/v1/completions", body)[0]

    def timed(self, method: str, path: str, body: object = None) -> float:
        """Return the milliseconds of a request."""
        began = time.perf_counter()
        self.ask(method, path, body)
        return 1e3 * (time.perf_counter() - began)

    def timed_completion(self, model: str, prompt: str, **fields: object) -> float:
        """Return the milliseconds of one token."""
        return self.timed("POST", "/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 1, **fields})


@contextlib.contextmanager
def registry() -> Iterator[str]:
    """A registry that has nothing, on loopback."""

    class Nothing(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Nothing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/adapters"
    finally:
        server.shutdown()


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Place]:
    """Run the server."""
    tenants = []
    for name, key in (("acme", ACME), ("beta", BETA)):
        digest = hashlib.sha256(key.encode()).hexdigest()
        tenants.append(f'[tenants.{name}]\nkeys = [{{ sha256 = "{digest}" }}]\nmodels = ["demo", "{name}/*", "both/*"]')
    (folder / "tenants.toml").write_text("\n".join(tenants))
    names = [f"{one}/a{i}" for one in ("acme", "beta") for i in range(NUM_OWN)]
    for index, name in enumerate([*names, *(f"both/a{i}" for i in range(NUM_BOTH))]):
        (folder / "adapters" / name).mkdir(parents=True)
        settings = {
            "peft_type": "LORA",
            "r": 64,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            "note": str(index),
        }
        (folder / "adapters" / name / "adapter_config.json").write_text(json.dumps(settings))
    port, log = free_port(), folder / "log"
    with registry() as url, log.open("wb") as file:
        command = [sys.executable, "-m", "manylora", "serve", str(demo_model_path()), "--served-model-name", "demo"]
        command += ["--simulate", "h100:llama-3-8b", "--port", str(port), "--tenants", str(folder / "tenants.toml")]
        command += ["--lora-dir", str(folder / "adapters"), "--admin-key", ROOT, "--policy", "fair"]
        command += ["--enable-prompt-tokens-details"]
        command += ["--usage", str(folder / "usage.db"), "--lora-on-demand", "--lora-registry", url]
        command += ["--num-pages", str(NUM_PAGES)]
        process = subprocess.Popen(command, stdout=file, stderr=file)
        place = Place("127.0.0.1", port, process, log)
        try:
            _wait_until_up(place)
            yield place
        finally:
            process.terminate()
            process.wait(30)


def _wait_until_up(place: Place) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and place.process.poll() is None:
        with contextlib.suppress(OSError):
            if Caller(place, None).ask("GET", "/health")[0] == 200:
                return
        time.sleep(0.1)
    raise SystemExit(place.log.read_text()[-3000:])


# -- by answers --------------------------------------------------------------------------------------------------------


class Answered(NamedTuple):
    """An attempt by answers."""

    attempt: str
    result: str
    is_kept: bool


def by_answers(place: Place, folder: Path) -> list[Answered]:
    """Make every attempt by answers; each row says what the attacker saw."""
    acme, beta, root = Caller(place, ACME), Caller(place, BETA), Caller(place, ROOT)
    assert acme.complete("acme/a0", "the secret prompt of acme", user="u") == 200
    rows: list[Answered] = []

    def note(attempt: str, result: str, is_kept: bool) -> None:
        rows.append(Answered(attempt, result, is_kept))

    def alike(method: str, path: str, body: Callable[[str], object] | None = None) -> tuple[set[int], bool]:
        """Return the statuses for a hidden name and an unknown one, and whether nothing else tells them apart."""
        seen = []
        for name in ("acme/a0", "acme/zz"):
            status, text, headers = beta.ask(method, path.format(name), None if body is None else body(name))
            headers.pop("date", None)
            seen.append((status, text.replace(name.encode(), b"?"), headers))
        return {one[0] for one in seen}, seen[0] == seen[1]

    named: list[tuple[str, str, Callable[[str], object]]] = [
        ("/v1/completions", "{}", lambda name: {"model": name, "prompt": "x", "max_tokens": 1}),
        ("/v1/completions, `base:name`", "{}", lambda name: {"model": f"demo:{name}", "prompt": "x", "max_tokens": 1}),
        ("/v1/completions, `name@1`", "{}", lambda name: {"model": f"{name}@1", "prompt": "x", "max_tokens": 1}),
        ("/v1/completions, a prompt too long", "{}", lambda name: {"model": name, "prompt": "x " * 9000}),
        ("/v1/chat/completions", "{}", lambda name: {"model": name, "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", "{}", lambda name: {"model": name, "input": "x"}),
        ("/tokenize", "{}", lambda name: {"model": name, "prompt": "x"}),
    ]
    for title, _, body in named:
        statuses, is_same = alike("POST", title.partition(",")[0], body)
        note(
            f"call acme's adapter: POST {title}",
            f"{statuses}, same as of no adapter: {is_same}",
            is_same and statuses == {404},
        )
    statuses, is_same = alike("GET", "/v1/models/{}")
    note("GET /v1/models/acme/a0", f"{statuses}, same as of no adapter: {is_same}", is_same and statuses == {404})
    listed = beta.ask("GET", "/v1/models")[1]
    note(
        "GET /v1/models",
        f"{listed.count(b'beta/')} of its own, {listed.count(b'acme/')} of acme",
        b"acme/" not in listed,
    )
    note(
        "paths of the server in its list",
        "none" if str(folder).encode() not in listed else "shown",
        str(folder).encode() not in listed,
    )
    for method, path in (
        ("GET", "/status"),
        ("GET", "/server_info"),
        ("GET", "/ui/events"),
        ("GET", "/adapters"),
        ("GET", "/adapters/acme/a0"),
        ("GET", "/adapters/acme/a0/versions"),
        ("POST", "/adapters/acme/a0/pin"),
        ("POST", "/adapters/acme/a0/warm"),
        ("DELETE", "/adapters/acme/a0"),
        ("PUT", "/adapters/acme/a0"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/pause"),
        ("POST", "/replicas/0/drain"),
    ):
        statuses, is_same = alike(method, path.replace("acme/a0", "{}"))
        is_kept = is_same and statuses <= {401, 403}  # 401: a page, for people with a session
        note(f"{method} {path}", f"{statuses}, same as of no adapter: {is_same}", is_kept)
    for path in ("/metrics", "/load"):
        own, none, admin = beta.ask("GET", path), Caller(place, None).ask("GET", path), root.ask("GET", path)
        is_kept = own[0] == 403 and none[0] == 401 and admin[0] == 200 and b"acme" not in own[1] + none[1]
        note(f"GET {path}", f"{own[0]} with its key, {none[0]} without, {admin[0]} with the admin key", is_kept)
    for path in (
        "/usage",
        "/v1/usage",
        "/ledger",
        "/v1/files",
        "/v1/responses/resp_1",
        "/v1/conversations/c",
        "/v1/batches",
    ):
        status = beta.ask("GET", path)[0]
        note(f"GET {path}: what is stored", f"{status}: nothing is", status in (404, 405))
    for path in ("/v1/responses/resp_1/cancel", "/v1/chat/completions/x/cancel", "/abort_request"):
        status = beta.ask("POST", path, {})[0]
        note(f"POST {path}: end an answer of acme by its id", f"{status}: there is no such route", status == 404)
    stored = beta.ask("POST", "/v1/responses", {"model": "demo", "input": "x", "previous_response_id": "resp_1"})
    note("build on a response of acme by its id", f"{stored[0]}: none is kept", stored[0] == 400)
    # An answer under way, and another with its name.
    with contextlib.closing(http.client.HTTPConnection(place.host, place.port, timeout=60)) as long:
        asked: dict[str, object] = {
            "model": "acme/a0",
            "prompt": "x",
            "max_tokens": 200,
            "stream": True,
            "ignore_eos": True,
        }
        asked["stream_options"] = {"include_usage": True}
        headers = {"Authorization": f"Bearer {ACME}", "Content-Type": "application/json", "X-Request-Id": "mine"}
        long.request("POST", "/v1/completions", json.dumps(asked), headers)
        answer = long.getresponse()
        first = answer.readline()
        beta.ask(
            "POST", "/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 1}, **{"X-Request-Id": "mine"}
        )
        rest = first + answer.read()
    is_whole = b'"completion_tokens":200' in rest and rest.rstrip().endswith(b"[DONE]")
    note("take the X-Request-Id of an answer under way", "acme's answer is whole" if is_whole else "cut", is_whole)
    used = _usage_of(folder, "acme")
    status, _, headers = beta.ask(
        "POST",
        "/v1/completions",
        {"model": "demo", "prompt": "x", "max_tokens": 1},
        **{"X-Manylora-Tenant": "acme;1000"},
    )
    is_same = used == _usage_of(folder, "acme")
    note(
        "name acme in X-Manylora-Tenant", f"{status}, and acme's usage is {'as before' if is_same else 'more'}", is_same
    )
    told = [one for one in headers if one.startswith("x-ratelimit")]
    note("headers about limits", "none: it has no limit" if not told else str(told), not told)
    assert acme.complete("demo", "a prefix of acme " * 40) == 200
    usage = json.loads(
        beta.ask("POST", "/v1/completions", {"model": "demo", "prompt": "a prefix of acme " * 40, "max_tokens": 1})[1]
    )["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    note("cached tokens of acme's prompt in `usage`", f"{cached}", not cached)
    salted = {"model": "demo", "prompt": "a prefix of acme " * 40, "max_tokens": 1, "cache_salt": "acme "}
    note(
        "the salt of acme's prefixes as `cache_salt`",
        "timed below",
        beta.ask("POST", "/v1/completions", salted)[0] == 200,
    )
    beta.ask("GET", "/v1/models/x%0Alevel=error%20forged=1", **{"X-Request-Id": "a"})
    log = place.log.read_text(errors="replace")
    note("forge a line of the log", "none has it", "\nlevel=error forged" not in log)
    secret = "the secret prompt of acme"
    note(
        "prompts and keys in the log (which tenants cannot read)",
        "none",
        secret not in log and ACME not in log and BETA not in log,
    )
    return rows


def _usage_of(folder: Path, tenant: str) -> list[Any]:
    from manylora.serving.metrics.usage import read_usage

    time.sleep(1.5)  # it is written once a second
    return [row for row in read_usage(folder / "usage.db", ("tenant", "adapter")) if row[0] == tenant]


# -- by time -----------------------------------------------------------------------------------------------------------

Probe = Callable[[Caller, Caller, bool, random.Random], list[float]]
"""Acts as ``acme`` on a secret bit, and returns the attacker's times in milliseconds."""


def words(rng: random.Random, num: int) -> str:
    """Return a text that no draw has had before."""
    return " ".join(rng.choice(WORDS) for _ in range(num))


def prefix(acme: Caller, attacker: Caller, secret: bool, rng: random.Random) -> list[float]:
    """Did acme send this prompt?"""
    guess, other = words(rng, PROMPT_WORDS), words(rng, PROMPT_WORDS)
    acme.complete("demo", guess if secret else other)
    return [attacker.timed_completion("demo", guess), attacker.timed_completion("demo", words(rng, PROMPT_WORDS))]


def salted_prefix(acme: Caller, attacker: Caller, secret: bool, rng: random.Random) -> list[float]:
    """Likewise, with the salt that the server has for acme."""
    guess, other = words(rng, PROMPT_WORDS), words(rng, PROMPT_WORDS)
    acme.complete("demo", guess if secret else other, cache_salt="acme ")
    first = attacker.timed_completion("demo", guess, cache_salt="acme ")
    return [first, attacker.timed_completion("demo", words(rng, PROMPT_WORDS), cache_salt="acme ")]


def form(acme: Caller, attacker: Caller, secret: bool, rng: random.Random) -> list[float]:
    """Did acme ask for answers of this form?"""
    guess, other = ({"guided_choice": [f"{words(rng, 3)} {index}" for index in range(20)]} for _ in range(2))
    acme.complete("demo", "x", **(guess if secret else other))
    return [attacker.timed_completion("demo", "x", **guess), attacker.timed_completion("demo", "x")]


def looked_up(acme: Caller, attacker: Caller, secret: bool, rng: random.Random) -> list[float]:
    """Did acme ask for this adapter, which no registry has?"""
    guess, other = (f"both/{rng.getrandbits(60):x}" for _ in range(2))
    acme.complete(guess if secret else other, "x")
    return [attacker.timed_completion(guess, "x"), attacker.timed_completion(f"both/{rng.getrandbits(60):x}", "x")]


def name_by(kind: str) -> Probe:
    """Does acme have an adapter of this name?"""

    def probe(acme: Caller, attacker: Caller, secret: bool, rng: random.Random) -> list[float]:
        place = rng.randrange(NUM_OWN)
        name = f"acme/a{place}" if secret else f"acme/b{place}"
        body = {"model": name, "prompt": "x", "max_tokens": 1}
        if kind == "list":
            times = [attacker.timed("GET", f"/v1/models/{name}") for _ in range(REPEATS)]
        else:
            times = [attacker.timed("POST", kind, body) for _ in range(REPEATS)]
        return [min(times), float(np.median(times)), *times[:1]]

    return probe


def residency(acme: Caller, attacker: Caller, secret: bool, rng: random.Random) -> list[float]:
    """Has acme just used its adapter, so that it is on the device?"""
    place = rng.randrange(NUM_OWN)
    acme.complete(f"acme/a{place if secret else (place + 1) % NUM_OWN}", words(rng, 8))
    body = {"model": f"acme/a{place}", "prompt": "x", "max_tokens": 1}
    times = [attacker.timed("POST", "/v1/completions", body) for _ in range(REPEATS)]
    return [min(times), float(np.median(times)), *times[:1]]


def nothing(acme: Caller, attacker: Caller, secret: bool, rng: random.Random) -> list[float]:
    """Is the bit set, by which nothing is done? What a classifier tells here, chance and the machine told it."""
    return residency(acme, attacker, rng.random() < 0.5, rng)


def shared_by(kind: str) -> Probe:
    """Has acme just used an adapter that both may call?"""

    def probe(acme: Caller, attacker: Caller, secret: bool, rng: random.Random) -> list[float]:
        is_pinned = kind == "pinned"
        place, other = rng.sample(range(NUM_PINNED) if is_pinned else range(NUM_PINNED, NUM_BOTH), 2)
        rest = [one for one in range(NUM_PINNED, NUM_BOTH) if one not in (place, other)]
        for one in rng.sample(rest, 0 if is_pinned else 2):  # others use others: it may have left the device
            acme.complete(f"both/a{one}", words(rng, 8))
        acme.complete(f"both/a{place if secret else other}", words(rng, 8))
        return [attacker.timed_completion(f"both/a{place}", "x"), attacker.timed_completion("demo", "x")]

    return probe


def busy(acme: Caller, attacker: Caller, secret: bool, rng: random.Random) -> list[float]:
    """Is acme served just now?"""
    acting = threading.Thread(
        target=acme.complete,
        args=("demo", words(rng, PROMPT_WORDS)),
        kwargs={"max_tokens": 12, "ignore_eos": True, "n": 16},
    )
    if secret:
        acting.start()
        time.sleep(0.02)
    times = [attacker.timed_completion("demo", words(rng, 40)) for _ in range(2)]
    if secret:
        acting.join()
    return times


class Timed(NamedTuple):
    """An attempt by time.

    Args:
        title: The attacker's question.
        probe: The draw.
        is_kept: Whether it is to be kept apart.
    """

    title: str
    probe: Probe
    is_kept: bool = True


ATTEMPTS = {
    "prefix": Timed("did acme send this prompt?", prefix),
    "salted prefix": Timed("did acme send this prompt, with the salt that the server has for acme", salted_prefix),
    "form": Timed("did acme ask for answers of this form?", form),
    "looked up": Timed("did acme ask for this adapter, which no registry has?", looked_up),
    "name, completions": Timed(
        "does acme have an adapter of this name? POST /v1/completions", name_by("/v1/completions")
    ),
    "name, models": Timed("does acme have an adapter of this name? GET /v1/models/name", name_by("list")),
    "residency": Timed("is acme's own adapter on the device?", residency),
    "nothing": Timed("nothing: acme acts as in the row above, and not by the bit", nothing),
    "shared, pinned": Timed("has acme just used an adapter that both may call, which is pinned?", shared_by("pinned")),
    "shared": Timed("has acme just used an adapter that both may call?", shared_by("idle"), False),
    "busy": Timed("is acme served just now?", busy, False),
}


@dataclass(slots=True)
class Draws:
    """The draws of one attempt, with one key."""

    secrets: list[bool] = field(default_factory=list)
    times_ms: list[list[float]] = field(default_factory=list)


def make_draws(place: Place, attempt: Timed, num: int, seed: int) -> dict[str, Draws]:
    """Return draws with the attacker's key and with acme's own, in random turns."""
    rng = random.Random(seed)
    acme, keys = Caller(place, ACME), {"beta": Caller(place, BETA), "acme": Caller(place, ACME)}
    found = {name: Draws() for name in keys}
    order = ["beta"] * num + ["acme"] * (num // 3)
    rng.shuffle(order)
    for name in order:
        secret = rng.random() < 0.5
        found[name].times_ms.append(attempt.probe(acme, keys[name], secret, rng))
        found[name].secrets.append(secret)
    return found


class Auc(NamedTuple):
    """An area under the curve, with its 95 % interval."""

    value: float
    low: float
    high: float


def classify(draws: Draws) -> Auc:
    """Return the area of a classifier that learns the secrets by the times, on draws that it did not learn from.

    The interval is that of areas by chance: the same of bits that are shuffled.
    """
    labels, times = np.array(draws.secrets), np.array(draws.times_ms)
    value, rng = mean_area(times, labels), np.random.default_rng(0)
    width = 1.96 * float(np.std([mean_area(times, rng.permutation(labels)) for _ in range(NUM_SHUFFLES)]))
    return Auc(value, max(0.0, value - width), min(1.0, value + width))


def mean_area(times: NDArray[np.float64], labels: NDArray[np.bool_]) -> float:
    """Return the mean area of five classifiers, each on the fifth of the draws that it has not learnt from.

    A classifier is a logistic regression over the ranks of the times, their logarithms, squares and products, which
    sees a shift, a spread and a mixture of any single time, and differences of two.
    """
    folds = np.arange(len(labels)) * NUM_FOLDS // len(labels)
    areas = []
    for fold in range(NUM_FOLDS):
        learnt, left_out = folds != fold, folds == fold
        areas.append(area(scores_of(times[learnt], labels[learnt], times[left_out]), labels[left_out]))
    return float(np.mean(areas))


def scores_of(
    learnt: NDArray[np.float64], labels: NDArray[np.bool_], asked: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the scores of draws, by a classifier that has learnt from others."""

    def features(times: NDArray[np.float64]) -> NDArray[np.float64]:
        ranks = [np.searchsorted(np.sort(one), of) / len(one) - 0.5 for one, of in zip(learnt.T, times.T, strict=True)]
        logs = (np.log(times) - np.log(learnt).mean(axis=0)) / (np.log(learnt).std(axis=0) + 1e-9)
        base = np.column_stack([*ranks, np.clip(logs, -4, 4)])
        pairs = [base[:, i] * base[:, j] for i in range(base.shape[1]) for j in range(i, base.shape[1])]
        return np.column_stack([np.ones(len(times)), base, *pairs])

    known, signs = features(learnt), np.where(labels, 1.0, -1.0)

    def loss(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        margin = signs * (known @ weights)
        slope = 0.02 * weights - known.T @ (signs * expit(-margin)) / len(signs)
        return float(np.logaddexp(0, -margin).mean() + 0.01 * weights @ weights), slope

    weights = minimize(loss, np.zeros(known.shape[1]), jac=True, method="L-BFGS-B").x
    return features(asked) @ weights  # type: ignore[no-any-return]


def area(scores: NDArray[np.float64], labels: NDArray[np.bool_]) -> float:
    """Return the area under the curve, by ranks."""
    m, n = int(labels.sum()), int((~labels).sum())
    return float((rankdata(scores)[labels].sum() - m * (m + 1) / 2) / max(1, m * n))


# -- the result --------------------------------------------------------------------------------------------------------


def text_of(answers: Sequence[Answered], timed: Mapping[str, Mapping[str, Auc]], num: int, command: str) -> str:
    """Return the result as Markdown."""
    lines = [
        "# Isolation of tenants on one engine",
        "",
        f"`{command}` on {machine()['cpu']}. Attempts of a tenant, `beta`, to learn of another, `acme`: "
        "[what is kept apart](../../docs/tenants.md#what-others-see).",
        "",
        "## By time",
        "",
        f"AUC of a classifier for a secret bit: {num} draws with the key of `beta`, a third as many with acme's own, "
        "each classified by the others; in brackets, 1.96 standard deviations of areas by chance to either side. "
        f"0.5 is a guess. Goal: at most {GOAL}.",
        "",
    ]
    rows = []
    for name, aucs in timed.items():
        attempt = ATTEMPTS[name]
        verdict = ("met" if aucs["beta"].value <= GOAL else "missed") if attempt.is_kept else "not kept apart"
        cells = [f"{one.value:.3f} ({one.low:.3f} to {one.high:.3f})" for one in (aucs["beta"], aucs["acme"])]
        rows.append([attempt.title, *cells, verdict])
    lines += table(("attempt", "beta's key", "control: acme's key", "goal"), rows)
    lines += ["", "## By answers", ""]
    lines += table(
        ("attempt", "result", "kept apart"), [[a, r, "yes" if kept else "**no**"] for a, r, kept in answers], left=3
    )
    return "\n".join(lines)


def main() -> None:
    """Measure and publish."""
    parser = arguments(__doc__, quick="few draws")
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--only", nargs="*", choices=list(ATTEMPTS), help="some attempts by time; writes nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write every draw to a file of JSON")
    options = parser.parse_args()
    num = 60 if options.quick else options.draws
    timed: dict[str, dict[str, Auc]] = {}
    with tempfile.TemporaryDirectory() as made, serving(Path(made)) as place:
        answers = by_answers(place, Path(made))
        for index in range(NUM_PINNED):
            assert Caller(place, ROOT).ask("POST", f"/adapters/both/a{index}/pin", {})[0] == 200
        for seed, (name, attempt) in enumerate(ATTEMPTS.items(), options.seed):
            if options.only and name not in options.only:
                continue
            began = time.monotonic()
            found = make_draws(place, attempt, num if attempt.is_kept else max(60, num // 3), seed)
            timed[name] = {key: classify(draws) for key, draws in found.items()}
            if options.trace:
                options.trace.write_text(json.dumps({key: [one.secrets, one.times_ms] for key, one in found.items()}))
            print(name, timed[name], f"{time.monotonic() - began:.0f} s", flush=True)
    figures = {
        "answers": [one._asdict() for one in answers],
        "timed": {k: {n: a._asdict() for n, a in v.items()} for k, v in timed.items()},
    }
    is_kept = not (options.quick or options.only)
    publish("isolation", figures, text_of(answers, timed, num, "python bench/isolation.py"), is_kept=is_kept)


if __name__ == "__main__":
    main()
