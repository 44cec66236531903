"""Do functions serve as before while one of them attacks? Time to first token and per token of the others.

    python bench/functions_attack.py [--quick] [--rounds 5] [--memory-mib 4096]

`manylora functions serve` on the CPU over a random Llama of about 300 MB in float32. One function is compromised: it
goes on serving, and runs an attack of `compromised/starve_others.py` from inside while its orders say so. In each round
every case has a turn: the others, one after another, answer a request each, undisturbed or under an attack. Ratios are
taken within a round:

* to *undisturbed*, where the attacking function has no requests;
* to *a busy neighbour*, which serves as many requests as it can, where the attacking function has requests as well: a
  function with requests has a right to its share of the processors.

Goal: within 1.1 of it, both times. Writes `results/functions_attack.json` and `.md`. As root, on a quiet machine; a
quarter of an hour.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from functions_rig import MIB, PATIENCE_S, Asked, Service, ask, in_folder, make_platform, serving
from publishing import Others, arguments, publish, reason_to_refuse, table
from ratios import Ratio, ratio_by_round

from manylora.lab.bench.rounds import in_turns, machine

HERE = Path(__file__).resolve().parent
COMPROMISED = (HERE / "compromised", HERE.parent / "tests" / "support")
sys.path[:0] = map(str, COMPROMISED)
from starve_others import ATTACKS, ORDERS  # noqa: E402

GOAL = 1.1
SETTLE_S = 1.0
NUM_OTHERS = 2
NUM_BUSY, NUM_FLOOD = 4, 64
PAUSE_S = 0.2


class Case(NamedTuple):
    """What the compromised function does while the others are timed.

    Args:
        attack: One of ``ATTACKS``; empty for none.
        num_requests: Requests that it always has.
    """

    attack: str
    num_requests: int


CALM, BUSY = "undisturbed", "a busy neighbour"
CASES = {
    CALM: Case("", 0),
    BUSY: Case("", NUM_BUSY),
    **{name: Case(name, 0) for name in ATTACKS},
    "spinning, with requests": Case("spinning", NUM_BUSY),
    "a bomb of forks and threads, with requests": Case("a bomb of forks and threads", NUM_BUSY),
    "a flood of messages, with requests": Case("a flood of messages", NUM_BUSY),
    f"a flood of requests ({NUM_FLOOD} at once)": Case("", NUM_FLOOD),
}


class Platform:
    """The service, its compromised function, and the others."""

    def __init__(self, folder: Path, service: Service, client: httpx.AsyncClient, names: list[str]) -> None:
        self.service = service
        self.hostile, *self.others = names
        self._client = client
        self._orders = folder / self.hostile / ORDERS

    async def ask(self, name: str) -> Asked:
        """Stream an answer."""
        return await ask(self._client, self.service.url, name)

    async def wake(self, name: str) -> None:
        """Wait until a function answers."""
        deadline = time.monotonic() + PATIENCE_S
        while (asked := await self.ask(name)).error or asked.broken:
            if time.monotonic() > deadline:
                raise SystemExit(f"{name}: {asked.error or asked.broken}")
            await asyncio.sleep(PAUSE_S)

    async def states(self) -> dict[str, dict[str, Any]]:
        """Return the states of functions, as of the last report."""
        while (seen := await self.service.overview()) is None:
            await asyncio.sleep(PAUSE_S)
        return {row["name"]: row["state"] for row in seen["functions"]}

    async def processes(self) -> dict[str, psutil.Process]:
        """Return the processes of the compromised function and of the agent."""
        while True:
            seen = await self.service.overview()
            for row in [] if seen is None else seen["functions"]:
                if row["name"] == self.hostile and row["state"].get("pid") is not None:
                    assert seen is not None
                    pids = {"attacker": row["state"]["pid"], "agent": seen["nodes"][0]["pid"]}
                    with contextlib.suppress(psutil.NoSuchProcess):  # as of the last report; it may have died since
                        return {name: psutil.Process(pid) for name, pid in pids.items()}
            await asyncio.sleep(PAUSE_S)

    @contextlib.asynccontextmanager
    async def disturbed(self, case: Case) -> AsyncIterator[None]:
        """Keep up a case's attack and requests."""

        async def ask_again() -> None:
            while True:
                if (asked := await self.ask(self.hostile)).error or asked.broken:
                    await asyncio.sleep(PAUSE_S)

        self._orders.write_text(case.attack)
        asking = [asyncio.create_task(ask_again()) for _ in range(case.num_requests)]
        try:
            await asyncio.sleep(SETTLE_S)
            yield
        finally:
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            self._orders.write_text("")


async def turn(platform: Platform, case: Case) -> dict[str, Any]:
    """Return the figures of one turn of a case."""
    for name in (platform.hostile, *platform.others):
        await platform.wake(name)
    seen = await platform.processes()
    async with platform.disturbed(case):
        began, before = time.monotonic(), {name: cpu_s(one) for name, one in seen.items()}
        answers = [await platform.ask(name) for name in platform.others]
        took_s = time.monotonic() - began
        cores = {name: (cpu_s(one) - before[name]) / took_s for name, one in seen.items()}
        peak = memory_of(seen["attacker"])
    for one in answers:
        if one.error or one.broken or one.ttft_s is None:
            raise SystemExit(f"{one.name}, under attack by {case}: {one.error or one.broken}")
    return {
        "ttft_s": statistics.mean(one.ttft_s for one in answers if one.ttft_s is not None),
        "token_s": statistics.mean(
            (one.took_s - one.ttft_s) / (len(one.tokens) - 1) for one in answers if one.ttft_s is not None
        ),
        "attacker_cores": max(0.0, cores["attacker"]),
        "agent_cores": max(0.0, cores["agent"]),
        "attacker_mib": peak,
        "answers": [one.tokens for one in answers],
    }


def cpu_s(process: psutil.Process) -> float:
    """Return the processor time that a process has used; 0 if it has ended."""
    with contextlib.suppress(psutil.Error):
        return float(sum(process.cpu_times()[:2]))
    return 0.0


def memory_of(process: psutil.Process) -> float:
    """Return the resident memory of a process, in MiB; 0 if it has ended."""
    with contextlib.suppress(psutil.Error):
        return float(process.memory_info().rss / MIB)
    return 0.0


def ratio(rounds: dict[str, list[dict[str, Any]]], key: str, name: str, baseline: str) -> Ratio:
    """Return the ratio of a figure of two cases."""
    one, other = ([turn[key] for turn in rounds[case]] for case in (name, baseline))
    return ratio_by_round(one, other)


def summary(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the figures of each case, with its ratios."""
    expected = rounds[CALM][0]["answers"]
    found: dict[str, Any] = {}
    for name, turns in rounds.items():
        baseline = CALM if not CASES[name].num_requests else BUSY
        found[name] = {
            "against": baseline,
            "wrong_answers": sum(one["answers"] != expected for one in turns),
            **{key: [one[key] for one in turns] for key in turns[0] if key != "answers"},
            **{f"{key}_ratio": asdict(ratio(rounds, key, name, baseline)) for key in ("ttft_s", "token_s")},
        }
    return found


def text(figures: dict[str, Any], num_rounds: int) -> str:
    """Return the table."""
    rows = []
    num_missed = num_attacks = 0
    for name, one in figures["cases"].items():
        ratios = {key: one[f"{key}_ratio"] for key in ("token_s", "ttft_s")}
        is_met = all(ratio["median"] <= GOAL for ratio in ratios.values())
        num_attacks += name != one["against"]
        num_missed += not is_met
        shown = [f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" for ratio in ratios.values()]
        rows.append(
            [
                name,
                "" if name == one["against"] else one["against"],
                f"{1e3 * statistics.median(one['token_s']):.1f}",
                f"{1e3 * statistics.median(one['ttft_s']):.0f}",
                *(["", "", ""] if name == one["against"] else [*shown, "met" if is_met else "**missed**"]),
                f"{statistics.median(one['attacker_cores']):.2f}",
                f"{statistics.median(one['agent_cores']):.2f}",
                f"{statistics.median(one['attacker_mib']):.0f}",
            ]
        )
    wrong = sum(one["wrong_answers"] for one in figures["cases"].values())
    heads = ["the compromised function", "against", "ms per token", "first token, ms", "per token", "first token"]
    heads += [f"goal: {GOAL:g}", "its cores", "agent's cores", "its memory, MiB"]
    return "\n".join(
        [
            "# Other functions while one attacks",
            "",
            f"{num_rounds} rounds; in each, {NUM_OTHERS} other functions answer one after another. Ratios are those of "
            f"a round, with the median and its interval. {wrong} turns had other answers than undisturbed. Deaths of "
            f"the others' processes: {figures['deaths_of_others']}.",
            "",
            *table(heads, rows, left=2),
            "",
            "All goals are met." if not num_missed else f"Missed: {num_missed} of {num_attacks} attacks.",
        ]
    )


async def measure(options: Any, folder: Path) -> dict[str, Any]:
    """Return all figures."""
    limits = f"keep-alive-s = {PATIENCE_S * 10}\npreload = false\n"
    names = make_platform(folder, 1 + NUM_OTHERS, node=limits, function=f"memory-bytes = {options.memory_mib * MIB}\n")
    (folder / names[0] / ORDERS).write_text("")
    (folder / names[0] / ORDERS).chmod(0o644)
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, COMPROMISED), *filter(None, sys.path)])
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    http = httpx.Limits(max_connections=None)
    async with serving(folder) as service, httpx.AsyncClient(timeout=PATIENCE_S, limits=http) as client:
        platform = Platform(folder, service, client, names)
        for number, name in in_turns(list(CASES), options.rounds, num_warm_up=0 if options.quick else 1):
            seen = await turn(platform, CASES[name])
            if number >= 0:
                rounds[name].append(seen)
            shown = {key: round(value, 4) for key, value in seen.items() if key != "answers"}
            print(number, name, shown, flush=True)
        states = await platform.states()
        await service.stop()
    return {
        "machine": machine(),
        "is_root": os.geteuid() == 0,
        "missing": states[names[0]].get("missing", []),
        "deaths_of_attacker": states[names[0]].get("num_deaths", 0),
        "deaths_of_others": sum(states[name].get("num_deaths", 0) for name in names[1:]),
        "cases": summary(rounds),
    }


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__, quick="one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-mib", type=int, default=4096, help="of address space for each function")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    others = Others()
    figures = in_folder(partial(measure, options))
    refused = reason_to_refuse(options.rounds, others.share())
    publish("functions_attack", figures, text(figures, options.rounds), is_kept=not options.quick, refused=refused)


if __name__ == "__main__":
    main()
