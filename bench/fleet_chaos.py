"""Half an hour of chaos around replicas, servers and their router; no answer is lost without an error, none is wrong.

    python bench/fleet_chaos.py [--quick] [--minutes 30] [--every 6]

Two `manylora serve` with simulated engines, one of three replicas and one that scales from one to three, and
`manylora route` in front of both. Clients stream from the router and from the servers: twelve adapters and the base,
greedy and seeded; one in eight leaves in the middle. Adapters are loaded, replaced in place and unloaded meanwhile, on
the servers and through the router, which places adapters as well; some are unloaded under their streams just before an
engine is killed. Every report (`/metrics`, `/status`, `/v1/models`, `/health` and others) is read all the time.
Every ``--every`` seconds on average there is a fault:

* an engine is killed; stopped and continued; stopped for good, so that the watchdog ends it;
* a server is killed and started again (no engine may outlive it), or ended by SIGTERM and started again;
* the router is killed and started again, or replaced under load by another on its port;
* the way from the router to a server is slow, silent, refuses, ends in the middle of a piece, or sends noise;
* the disk of the step log is full (a small one as root, else `/dev/full` all the time);
* the wall clock of all these processes jumps by hours, there and back.

Invariants: every request ends, and is *whole* (all its tokens), *refused* (a status and an error that says why), ended
by an *error* in its stream, *left* by the client, or *cut*: its connection broke because the very process at its other
end was killed or replaced, or because the answer that the router passed on ended within an event. All tokens that came
before an end are those of an undisturbed run, of one version of the adapter: of an adapter that was changed through the
router, the version that it had when the request was sent, or a later one. No engine ends that was neither killed nor
stopped, and no report fails but for lack of an engine. At the end, all servers run whole, on no
page of KV and no request, with the pins of the book; the router counts no request; and no process is left behind.
Writes `results/fleet_chaos.json` and `.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import tempfile
import time
from collections import Counter
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import psutil
from fleet_account import Asked, Chaos, RoutedAdapters, ask
from fleet_faults import HANG_S, disturb, send
from fleet_reports import STRANDED, ask_lone, check_ends, read, strand
from fleet_rig import Clock, Command, Disk, Link, disk_at, set_content, write_adapters
from publishing import arguments, publish, table

from manylora.lab.bench.rounds import machine

BASE, CONTENTS = "demo", [f"adapter-{index}" for index in range(12)]
CHURNED = [f"churn-{index}" for index in range(4)]
VERSIONS = CONTENTS[2:5]
"""Contents of the adapters that are changed through the router."""
SEEDS = (None, 1, 2)
"""Greedy, and two seeds."""

MOST_TOKENS = 120
SILENCE_S = 90.0
"""Longest silence in an answer; a longer one is a request that hangs."""

HEAL_S = 180.0
SIMULATED = ("demo", "--simulate", "a40:llama-7b", "--memory", "4GiB", "--max-model-len", "1024")


# -- requests ---------------------------------------------------------------------------------------------------------


async def learn(chaos: Chaos, session: aiohttp.ClientSession) -> None:
    """Learn the undisturbed answers."""
    keys = list(product((BASE, *CONTENTS), SEEDS))
    now = time.monotonic()
    calm = [Asked(chaos.servers[0], [content], seed, MOST_TOKENS, now) for content, seed in keys]
    await asyncio.gather(*(ask(session, one, one.contents[0]) for one in calm))
    lone = Asked(chaos.servers[0], [STRANDED], None, MOST_TOKENS, now)
    await ask_lone(chaos, session, lone)
    for key, one in zip([*keys, (STRANDED, None)], [*calm, lone], strict=True):
        assert one.is_whole and one.usage == MOST_TOKENS, one
        chaos.expected[key] = one.text
    assert len(set(chaos.expected.values())) > len(CONTENTS), "answers do not depend on the adapter"


async def client(chaos: Chaos, session: aiohttp.ClientSession, way: Command, rng: Random) -> None:
    """Ask one request after another."""
    while not chaos.is_over:
        model = rng.choice([BASE, *CONTENTS, *CHURNED, *(chaos.routed.names if way is chaos.router else ())])
        is_routed = model in chaos.routed.names
        contents = chaos.routed.versions_of(model) if is_routed else CONTENTS[:2] if model in CHURNED else [model]
        asked = Asked(way, contents, rng.choice(SEEDS), rng.randint(10, MOST_TOKENS), time.monotonic())
        chaos.asked.append(asked)
        await ask(session, asked, model, leaves_after=rng.randint(1, 60) if rng.random() < 1 / 8 else None)
        if not asked.is_whole:
            await asyncio.sleep(0.2)


async def churn(chaos: Chaos, session: aiohttp.ClientSession, rng: Random) -> None:
    """Load, replace and unload adapters on the servers; each alternates between two contents."""
    while not chaos.is_over:
        server, name, verb = rng.choice(chaos.servers), rng.choice(CHURNED), rng.choice(("load", "replace", "unload"))
        path = chaos.folder / "churn" / name
        set_content(path, rng.choice(CONTENTS[:2]))
        load = {"lora_name": name, "lora_path": str(path), "load_inplace": verb == "replace"}
        way, body = ("unload", {"lora_name": name}) if verb == "unload" else ("load", load)
        began = time.monotonic()
        try:
            async with session.post(f"{server.url}/v1/{way}_lora_adapter", json=body) as answer:
                chaos.admin[f"{verb} {answer.status}"] += 1
                text = await answer.text()
                chaos.check(answer.status != 500 or "engine" in text, f"{verb}: {answer.status} {text[:200]}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            chaos.admin[f"{verb} cut"] += 1
            await asyncio.sleep(1.0)  # the gap is noted when the server is back
            is_due = not server.is_running or server.was_away(began - 1.0, time.monotonic()) or chaos.is_over
            chaos.check(is_due or not isinstance(error, TimeoutError), f"{verb}: {error!r}")
        await asyncio.sleep(rng.expovariate(1.0))


# -- invariants -------------------------------------------------------------------------------------------------------


def outcome_of(chaos: Chaos, asked: Asked) -> str:
    """Return the outcome of a request, and note what must not be."""
    undisturbed = [chaos.expected[content, asked.seed] for content in asked.contents if content]
    at = f"{asked.way.name}, {asked.began - chaos.began:.1f} s"
    is_right = not asked.text or any(text.startswith(asked.text) for text in undisturbed)
    chaos.check(is_right, f"{at}: wrong tokens {asked.text!r} of {asked.contents}")
    if asked.has_left:
        return "left"
    if asked.is_whole:
        is_full = asked.usage == asked.num_tokens and not asked.broken
        chaos.check(is_full, f"{at}: {asked.usage} of {asked.num_tokens} tokens in a whole answer {asked.broken}")
        return "whole"
    if asked.broken:
        is_due = asked.way.was_away(asked.began - 1.0, asked.ended + 1.0)
        chaos.check(is_due, f"{at}: lost after {asked.ended - asked.began:.1f} s: {asked.status} {asked.broken}")
        return "cut"
    if not asked.error:
        chaos.check(False, f"{at}: an answer without an end: {asked.text!r}")
    return "error in its stream" if asked.status == 200 else f"refused {asked.status}"


async def get(session: aiohttp.ClientSession, way: Command, path: str) -> dict[str, Any]:
    async with session.get(way.url + path) as answer:
        found: dict[str, Any] = await answer.json()
        return found


def faults_of_server(status: dict[str, Any]) -> str:
    """Return what is wrong with an idle server, in words."""
    engine, rows = status["engine"], status["replicas"]
    if engine is None or any(row["state"] != "serving" or row["num_running"] is None for row in rows):
        return f"engines do not serve: {[row['state'] for row in rows]}"
    under_way = {"in flight": status["num_in_flight"], "between engines": status["resumes"]["num_waiting"]}
    under_way |= {key: engine[key] for key in ("num_running", "num_waiting", "num_kv_pages", "num_loading")}
    if any(under_way.values()):
        return f"it is not idle: {under_way}"
    num_known = engine["num_free_pages"] + engine["num_prefix_pages"] + engine["num_adapter_pages"]
    if num_known != engine["num_pages"]:
        return f"pages leaked: {num_known} of {engine['num_pages']} are accounted for"
    unpinned = [row["index"] for row in rows if CONTENTS[0] not in row["pinned"]]
    return f"engines without the pin: {unpinned}" if unpinned else ""


async def settled(chaos: Chaos, session: aiohttp.ClientSession) -> list[str]:
    """Wait until all is whole and idle; return what is not."""
    deadline = time.monotonic() + HEAL_S
    while True:
        wrong = []
        for server in chaos.servers:
            if fault := faults_of_server(await get(session, server, "/status")):
                wrong.append(f"{server.name}: {fault}")
        for row in (await get(session, chaos.router, "/status"))["backends"]:
            if row["state"] != "up" or row["in_flight"] or row["adapters_in_flight"]:
                wrong.append(f"router: {row}")
        if not wrong or time.monotonic() > deadline:
            return wrong
        await asyncio.sleep(0.5)


async def end(chaos: Chaos, session: aiohttp.ClientSession) -> None:
    """Heal all, and check the invariants of the end."""
    for link in chaos.links:
        link.fault = ""
    for server in chaos.servers:
        async with session.post(f"{server.url}/adapters/{CONTENTS[0]}/pin") as answer:
            chaos.check(answer.status == 200, f"{server.name}: a pin was answered with {answer.status}")
    send(chaos, signal.SIGKILL)  # its successor gets the pins of the book
    for wrong in await settled(chaos, session):
        chaos.check(False, wrong)
    for way in (*chaos.servers, chaos.router):
        for content, seed in product((BASE, *CONTENTS), SEEDS):
            asked = await ask(session, Asked(way, [content], seed, 20, time.monotonic()), content)
            chaos.check(asked.is_whole, f"{way.name} after all: {asked}")
            outcome_of(chaos, asked)
    for name, version in zip(chaos.routed.names, VERSIONS, strict=True):
        for last in (version, None):
            status = await chaos.routed.change(session, name, last)
            asked = Asked(chaos.router, [last or ""], None, 20, time.monotonic())
            await ask(session, asked, name)
            is_right = asked.is_whole if last else asked.status == 404
            chaos.check(status == 200 and is_right, f"{name} as {last} after all: {status}, {asked}")
            outcome_of(chaos, asked)
    for way in (chaos.router, *chaos.servers):
        chaos.check((code := await way.stop()) == 0, f"{way.name} ended with {code} at last")
    check_ends(chaos)
    seen = set().union(*(one.seen for one in (chaos.router, *chaos.servers)))
    left = [one for one in psutil.process_iter(["cmdline"]) if one.pid in seen and "manylora" in str(one.info)]
    chaos.check(not left, f"processes left behind: {left}")


async def run(chaos: Chaos, options: argparse.Namespace) -> None:
    """Run the chaos from start to end."""
    links = [await link.start() for link in chaos.links]
    await asyncio.gather(*(server.start() for server in chaos.servers))
    await chaos.router.start()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await learn(chaos, session)
        chaos.began = time.monotonic()
        chaos.ends_at = chaos.began + 60.0 * options.minutes
        ways = [chaos.router] * 8 + chaos.servers * 2
        churns = [churn(chaos, session, Random(0)), chaos.routed.churn(session, Random(1), lambda: chaos.is_over)]
        churns.append(strand(chaos, session, options.every, Random(2)))
        reads = [read(chaos, session, way, Random(way.port)) for way in (chaos.router, *chaos.servers)]
        clients = [client(chaos, session, way, Random(seed)) for seed, way in enumerate(ways)]
        await asyncio.gather(disturb(chaos, options.every), *churns, *reads, *clients)
        await end(chaos, session)
    for link in links:
        link.close()


def build(folder: Path, disk: Disk) -> Chaos:
    """Return the parts, which are not yet started."""
    write_adapters(folder / "adapters", CONTENTS)
    write_adapters(folder / "churn", [*CHURNED, STRANDED])
    clock = Clock(folder / "clock")
    common = ["--hang-timeout", str(HANG_S), "--drain-timeout", "10", "--max-waiting", "64", "--cache-dir", "off"]
    common += ["--lora-dir", str(folder / "adapters"), "--allowed-lora-path", str(folder / "churn")]
    servers = []
    for name, replicas in {
        "fixed": ["--replicas", "3", "--router", "least-loaded"],  # the streams of an adapter run on all of them
        "scaled": ["--min-replicas", "1", "--max-replicas", "3"],
    }.items():
        log = ["--step-log", disk.log(f"{name}.steps.jsonl")]
        command = ["serve", *SIMULATED, *common, *replicas, *log]
        servers.append(Command(f"server {name}", command, folder, clock.environment))
    links = [Link(server.port) for server in servers]
    backends = [flag for link in links for flag in ("--backend", f"http://127.0.0.1:{link.at}")]
    route = ["route", *backends, "--reuse-port", "--drain-timeout", "10", "--manage-adapters", "--max-placed", "2"]
    router = Command("router", route, folder, clock.environment)
    routed = RoutedAdapters(router, folder / "adapters", VERSIONS)
    return Chaos(servers, router, routed, links, disk, clock, folder, Random(0))


def text_of(chaos: Chaos, figures: dict[str, Any]) -> str:
    """Return the tables."""
    errors = Counter(one.error.split(";")[0][:160] for one in chaos.asked if one.error)
    lines = [
        "# Chaos around a fleet",
        "",
        f"{figures['minutes']:g} minutes, {len(chaos.asked)} requests, {sum(chaos.faults.values())} faults. "
        f"Invariants violated: {len(chaos.violations)}. `python bench/fleet_chaos.py --minutes {figures['minutes']:g} "
        f"--every {figures['every_s']:g}`. *Cut*: the connection ended before the answer did, by a killed server or "
        "router or by a link; the client sees that.",
        "",
        *table(["fault", "times"], chaos.faults.items()),
        *(f"| link: {name} | {num} pieces |" for name, num in sorted(figures["hits"].items())),
        "",
        *table(["outcome", "requests"], sorted(figures["outcomes"].items())),
        "",
        *table(["change of an adapter, and its status", "times"], sorted(figures["admin"].items())),
        "",
        *table(["error, the most frequent ones", "requests"], errors.most_common(12)),
        "",
        *(f"* {violation}" for violation in chaos.violations[:20]),
    ]
    return "\n".join(lines)


def main() -> None:
    """Run, and publish the figures."""
    parser = arguments(__doc__, quick="a minute")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=6.0, help="seconds between two faults, on average")
    options = parser.parse_args()
    if options.quick:
        options.minutes = 1.0
    with tempfile.TemporaryDirectory(prefix="manylora-") as name, disk_at(Path(name, "disk")) as disk:
        chaos = build(Path(name), disk)
        try:
            asyncio.run(run(chaos, options))
        finally:
            for command in (chaos.router, *chaos.servers):
                with contextlib.suppress(psutil.Error, AssertionError):
                    psutil.Process(command.pid).kill()
    figures = {
        "machine": machine(),
        "minutes": options.minutes,
        "every_s": options.every,
        "faults": chaos.faults,
        "hits": dict(sum((link.hits for link in chaos.links), Counter())),
        "outcomes": Counter(outcome_of(chaos, one) for one in chaos.asked),
        "admin": chaos.admin + chaos.routed.answers,
        "longest_s": max(one.ended - one.began for one in chaos.asked),
        "violations": chaos.violations,
    }
    publish("fleet_chaos", figures, text_of(chaos, figures), is_kept=not options.quick)
    if chaos.violations:
        raise SystemExit(f"{len(chaos.violations)} invariants were violated")


if __name__ == "__main__":
    main()
