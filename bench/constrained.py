"""Tokens per second of streams of which three in four have a forced form, against streams without any.

    python bench/constrained.py [--quick] [--rounds 7] [--model demo] [--streams 100] [--tokens 128]

The same streams are sent at once to one `manylora serve`, in turn, round after round, in three ways:

* *free*: chats without a form;
* *forms*: equal parts of free chats, a JSON schema, a regular expression, and a required call of a tool, where the form
  of each kind is the same in all rounds, so that it is compiled once;
* *new forms*: the same parts, but every stream of every round has a form that the server has not seen.

Each form is longer than the answer may be, so every answer has the same number of tokens and each side the same work
for the model. The longest gap between two events of a free chat shows whether a compilation, or a mask, held up a step
or the event loop. The goal is a ratio of at least 0.9 to *free*. Writes `results/constrained.json` and `.md`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
from publishing import Others, arguments, publish, reason_to_refuse, table

from manylora.lab.bench.rounds import in_turns, machine, ratio_by_round

GOAL = 0.9
SIDES = ("free", "forms", "new forms")
CHARS_PER_TOKEN = 16
"""No token of usual vocabularies has more letters on average, so a text of so many is not at its end."""

_serial = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Turn:
    """One side of one round: tokens per second, and the longest gap between two events of a free chat, in seconds."""

    tokens_per_s: float
    gap_s: float


@contextmanager
def served(model: str, num_streams: int) -> Iterator[str]:
    """Run a server of the model; yield its address."""
    command = [sys.executable, "-m", "manylora", "serve", model, "--served-model-name", "base"]
    command += ["--port", "0", "--max-num-seqs", str(num_streams)]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            found = re.search(r"http://[\w.]+:\d+", process.stdout.readline())
            if found is None:
                log.seek(0)
                raise SystemExit(f"the server did not start: {log.read()[-2000:]}")
            yield found.group()
        finally:
            process.terminate()


def form(kind: str, num_tokens: int, *, is_new: bool) -> dict[str, Any]:
    """Return the fields that force an answer of a kind; new ones differ by a name that is in the answer."""
    name = f"f{next(_serial)}" if is_new else "f0"
    length = num_tokens * CHARS_PER_TOKEN
    text = {"type": "string", "pattern": f"^[a-z]{{{length}}}$"}
    schema = {"type": "object", "properties": {name: text}, "required": [name], "additionalProperties": False}
    if kind == "schema":
        return {"response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}}
    if kind == "regex":
        return {"structured_outputs": {"regex": f"{name}[a-z]{{{length}}}"}}
    if kind == "tool":
        tool = {"type": "function", "function": {"name": name, "parameters": schema}}
        return {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    return {"ignore_eos": True}


def kinds_of(side: str, num_streams: int) -> list[str]:
    """Return the kind of each stream of a side."""
    kinds = ("free",) if side == "free" else ("free", "schema", "regex", "tool")
    return [kinds[index % len(kinds)] for index in range(num_streams)]


async def ask(session: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[int, float]:
    """Send a chat; return the number of tokens of its answer, and its longest gap after the first event."""
    gap_s, last_at, num_tokens = 0.0, 0.0, 0
    async with session.post("/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            raise SystemExit(await answer.text())
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            gap_s = max(gap_s, now - last_at) if last_at else 0.0
            last_at = now
            if b'"usage":{' in line:
                num_tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    return num_tokens, gap_s


async def turn(url: str, side: str, num_streams: int, num_tokens: int) -> Turn:
    """Send all streams of a side at once and read them to their ends."""
    kinds = kinds_of(side, num_streams)
    bodies = [
        {
            "model": "base",
            "messages": [{"role": "user", "content": f"stream {index}"}],
            "max_tokens": num_tokens,
            "seed": index,
            "stream": True,
            "stream_options": {"include_usage": True},
            **form(kind, num_tokens, is_new=side == "new forms"),
        }
        for index, kind in enumerate(kinds)
    ]
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        began_at = time.perf_counter()
        answers = await asyncio.gather(*(ask(session, body) for body in bodies))
        took_s = time.perf_counter() - began_at
    if short := [kind for kind, (num, _) in zip(kinds, answers, strict=True) if num != num_tokens]:
        raise SystemExit(f"answers of the kind {short[0]} ended early, and the sides cannot be compared")
    free_gaps_s = [gap for kind, (_, gap) in zip(kinds, answers, strict=True) if kind == "free"]
    return Turn(num_streams * num_tokens / took_s, max(free_gaps_s))


def page(turns: dict[str, list[Turn]], num_streams: int, num_tokens: int, model: str) -> str:
    """Return the page of all sides."""
    free = [one.tokens_per_s for one in turns["free"]]
    rows = []
    for side, found in turns.items():
        speeds = [one.tokens_per_s for one in found]
        ratio = ratio_by_round(speeds, free)
        rows.append(
            [
                side,
                f"{statistics.median(speeds):,.0f}",
                "" if side == "free" else str(ratio),
                f"{statistics.median(one.gap_s for one in found) * 1e3:.0f}",
                "" if side == "free" else "yes" if ratio.median >= GOAL else "**no**",
            ]
        )
    lines = [
        "# Streams of a forced form",
        "",
        f"{num_streams} streams of {num_tokens} tokens at once, of `{model}`, {len(free)} rounds on "
        f"{machine()['cpu']}. `python bench/constrained.py`",
        "",
    ]
    heads = ["side", "tokens/s", "over free", "longest gap of a free chat, ms", f"at least {GOAL}"]
    return "\n".join([*lines, *table(heads, rows)])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all sides."""
    parser = arguments(__doc__, quick="one round of eight streams")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", default="demo", help="as for manylora serve")
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.streams, options.tokens = 1, 8, 16
    turns: dict[str, list[Turn]] = {side: [] for side in SIDES}
    others = Others()
    with served(options.model, options.streams) as url:
        for number, side in in_turns(SIDES, options.rounds):
            found = asyncio.run(turn(url, side, options.streams, options.tokens))
            print(f"round {number}, {side}: {found.tokens_per_s:,.0f} tokens/s", flush=True)
            if number >= 0:
                turns[side].append(found)
        busy = others.share()
    figures = {
        "machine": machine(),
        "busy_share": busy,
        "turns": {side: [asdict(one) for one in found] for side, found in turns.items()},
    }
    text = page(turns, options.streams, options.tokens, options.model)
    publish("constrained", figures, text, is_kept=not options.quick, refused=reason_to_refuse(options.rounds, busy))


if __name__ == "__main__":
    main()
