"""Streams that outlive their engines: one replica of three is killed, another stopped, and every token is compared.

    python bench/resume.py [--quick] [--rounds 20] [--streams 100]
    python bench/resume.py --ray [--quick] ...      # a node is lost in place of the kill

The demo model on three engine processes behind one API, over HTTP. 100 streams at once, over twelve adapters and the
base, half of them greedy and half sampled with a seed, some with penalties. First all run undisturbed. Then, in each
round, when every stream has its first token, the engine with the most requests gets SIGKILL, and a second later the
next one SIGSTOP, which the watchdog takes for a hang. A round counts the streams that ended early (*lost*) and
those whose text, token count or reason to finish is another (*changed*).

With ``--ray`` the engines are on a Ray cluster of four raylets on this machine. The raylet of the engine with the most
requests is killed, with all processes of its node, in place of the engine. After the round another node joins.

*Pause* is the longest gap between two chunks of a stream, seen by the client: over the time of the kill alone, and over
the time of the stop, which includes the watchdog's timeout and the streams that had just moved there. Writes
`results/resume.json` and `.md`, or `results/resume-ray`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
from local_ray import LocalRay
from publishing import Others, arguments, publish, table

from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, ServerConfig
from manylora.core.server_config import FleetConfig
from manylora.demo import demo_adapters
from manylora.lab.bench.rounds import machine
from manylora.serving.server import BackgroundServer, LoraModule

NUM_REPLICAS = 3
HANG_TIMEOUT_S = 3.0
STOP_AFTER_S = 2.0
"""From the first fault to the second: streams of the first go on before."""
PATIENCE_S = 300.0
MOST_CALM = 60
"""Undisturbed runs at most. Sums round by the batch that they are in, so that a draw between two tokens can fall to
either side. An answer counts as changed unless one of these runs has it as well; there are as many as that takes."""


Content = tuple[list[str], str | None]
"""Ids of an answer's tokens, and why it ended."""


@dataclass(slots=True)
class Answer:
    """One stream as the client saw it; times of its chunks are monotonic seconds."""

    tokens: list[str] = field(default_factory=list)  # their ids
    finish: str | None = None
    error: str | None = None
    chunks_at: list[float] = field(default_factory=list)

    @property
    def content(self) -> Content:
        """The part that a disturbance must not change."""
        return self.tokens, self.finish

    def pause(self, since: float, until: float = math.inf) -> float:
        """Return the longest time between two chunks of which the later came after ``since`` and up to ``until``.

        The earlier may have come after ``since`` as well: tokens that an engine had sent reach the client first.
        """
        pairs = zip(self.chunks_at, self.chunks_at[1:], strict=False)
        return max((later - earlier for earlier, later in pairs if since < later <= until), default=0.0)


def bodies(num_streams: int, num_tokens: int, models: list[str]) -> list[dict[str, Any]]:
    """Return the requests, a third of them with penalties."""
    made = []
    for index in range(num_streams):
        body = {"model": models[index % len(models)], "prompt": f"line {index}:", "max_tokens": num_tokens}
        sampling = {"temperature": 0.0} if index % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": index}
        penalties = {"frequency_penalty": 0.4, "repetition_penalty": 1.05} if index % 3 == 0 else {}
        stream = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        ids = {"logprobs": 0, "return_tokens_as_token_ids": True}
        made.append({**body, **sampling, **penalties, **stream, **ids})
    return made


async def stream(client: httpx.AsyncClient, body: dict[str, Any], answer: Answer, begun: asyncio.Event) -> None:
    """Read one stream to its end."""
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    answer.error = event["error"]["message"]
                elif event["choices"]:
                    (choice,) = event["choices"]
                    answer.tokens += (choice["logprobs"] or {"tokens": []})["tokens"]
                    answer.finish = choice["finish_reason"]
                    answer.chunks_at.append(time.monotonic())
                begun.set()
    except httpx.HTTPError as error:
        answer.error = repr(error)
    begun.set()


Disturb = Callable[[dict[str, Any]], None]
"""Does something to an engine, given its row of ``/status``."""


async def run(url: str, asked: list[dict[str, Any]], disturb: Sequence[Disturb]) -> tuple[list[Answer], list[float]]:
    """Run all streams, and disturb the busiest engine of each moment; return the answers and those moments."""
    answers, begun = [Answer() for _ in asked], [asyncio.Event() for _ in asked]
    at: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=httpx.Limits()) as client:
        streams = [asyncio.create_task(stream(client, *one)) for one in zip(asked, answers, begun, strict=True)]
        await asyncio.gather(*(one.wait() for one in begun))
        for work in disturb:
            if at:
                await asyncio.sleep(STOP_AFTER_S)
            rows = (await client.get("/status")).json()["replicas"]
            busiest = max(rows, key=lambda row: (row["state"] == "serving", row["num_in_flight"]))
            at.append(time.monotonic())
            await asyncio.to_thread(work, busiest)
        await asyncio.gather(*streams)
    return answers, at


def send(number: signal.Signals, row: dict[str, Any]) -> None:
    """Send a signal to an engine."""
    os.kill(row["pid"], number)


def wait_until_whole(url: str) -> dict[str, Any]:
    """Wait until every replica serves; return the counters of resumed requests."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        report: dict[str, Any] = httpx.get(f"{url}/status", timeout=PATIENCE_S).json()
        serving = [row for row in report["replicas"] if row["state"] == "serving" and row["num_running"] is not None]
        if len(serving) == NUM_REPLICAS:
            resumes: dict[str, Any] = report["resumes"]
            return resumes
        assert time.monotonic() < deadline, "a replica did not come back"
        time.sleep(0.2)


class Calm:
    """The answers of undisturbed runs.

    Args:
        url: The server.
        asked: The requests.
    """

    def __init__(self, url: str, asked: list[dict[str, Any]]) -> None:
        self.num_runs = 0
        self._url = url
        self._asked = asked
        self._seen: list[list[Content]] = [[] for _ in asked]

    def run(self) -> None:
        """Run all streams once more."""
        self.num_runs += 1
        answers, _ = asyncio.run(run(self._url, self._asked, ()))
        for one, body, contents in zip(answers, self._asked, self._seen, strict=True):
            assert one.error is None and len(one.tokens) == body["max_tokens"]
            if one.content not in contents:
                contents.append(one.content)

    @property
    def num_close(self) -> int:
        """Streams with more than one answer."""
        return sum(len(contents) > 1 for contents in self._seen)

    def num_changed(self, answers: Sequence[Answer]) -> int:
        """Return how many whole answers are none of those of their stream."""
        pairs = zip(answers, self._seen, strict=True)
        return sum(one.error is None and one.content not in contents for one, contents in pairs)


def main() -> None:
    """Run the rounds and publish their figures."""
    parser = arguments(__doc__, quick="one round of 12 short streams")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--ray", action="store_true", help="engines on a Ray cluster, of which a node is lost")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.streams, options.tokens = 1, 12, 60
    modules = [LoraModule(name, str(path)) for name, path in demo_adapters().items()]
    asked = bodies(options.streams, options.tokens, ["demo", *(module.name for module in modules)])
    engine = EngineConfig(model=ModelConfig(model="demo"), memory=MemoryConfig(num_pages=2000))
    rounds: list[dict[str, float]] = []
    others = Others()
    with contextlib.ExitStack() as stack:
        ray = stack.enter_context(LocalRay(NUM_REPLICAS + 1)) if options.ray else None
        fleet = FleetConfig(replicas=NUM_REPLICAS, ray=None if ray is None else ray.address)
        config = ServerConfig(port=0, hang_timeout_s=HANG_TIMEOUT_S, fleet=fleet)
        server = stack.enter_context(BackgroundServer(engine, config, modules))
        kill = partial(send, signal.SIGKILL) if ray is None else lambda row: ray.lose(row["node"])
        calm = Calm(server.url, asked)
        calm.run()
        ended: list[list[Answer]] = []  # by round
        before = wait_until_whole(server.url)
        for _ in range(options.rounds):
            began = time.monotonic()
            answers, (killed_at, stopped_at) = asyncio.run(
                run(server.url, asked, (kill, partial(send, signal.SIGSTOP)))
            )
            took_s = time.monotonic() - began
            if ray is not None:
                ray.add_node()
            after = wait_until_whole(server.url)
            ended.append(answers)
            rounds.append(
                {
                    "lost": sum(one.error is not None for one in answers),
                    "changed": calm.num_changed(answers),
                    "resumed": after["num_resumed"] - before["num_resumed"],
                    "pause_kill_s": max(one.pause(killed_at, stopped_at) for one in answers),
                    "pause_stop_s": max(one.pause(stopped_at) for one in answers),
                    "seconds": took_s,
                }
            )
            print(f"round {len(rounds)}: {rounds[-1]}", flush=True)
            before = after
        while calm.num_runs < MOST_CALM and any(calm.num_changed(answers) for answers in ended):
            calm.run()
        for one, answers in zip(rounds, ended, strict=True):
            one["changed"] = calm.num_changed(answers)
    share = others.share()
    figures = {
        "undisturbed_runs": calm.num_runs,
        "streams_with_several_answers": calm.num_close,
        "options": vars(options),
        "machine": machine(),
        "rounds": rounds,
        "resumes": before,
        "others": share,
    }
    fault = "the loss of a node" if options.ray else "SIGKILL"
    heads = ["round", "lost", "changed", "resumed", f"pause over {fault}, s", "pause over SIGSTOP, s", "seconds"]
    rows = [[number, *(round(value, 2) for value in one.values())] for number, one in enumerate(rounds, 1)]
    text = [
        f"# Streams that outlive their engines\n\n{options.streams} streams of {options.tokens} tokens, "
        f"{NUM_REPLICAS} replicas{' on four raylets' if options.ray else ''}, watchdog {HANG_TIMEOUT_S:g} s. "
        f"Other processes took {share:.0%} of the machine.",
        f"Lost: {sum(one['lost'] for one in rounds)}. Changed: {sum(one['changed'] for one in rounds)}. "
        f"Longest pause over {fault}: {max(one['pause_kill_s'] for one in rounds):.2f} s "
        f"(median {statistics.median(one['pause_kill_s'] for one in rounds):.2f}); over SIGSTOP: "
        f"{max(one['pause_stop_s'] for one in rounds):.2f} s "
        f"(median {statistics.median(one['pause_stop_s'] for one in rounds):.2f}); as the server counts: "
        f"{before['longest_pause_s']:.2f} s. Of the streams {calm.num_close} had more than one answer in "
        f"{calm.num_runs} undisturbed runs, as sums round by their batch; an answer is changed if it is none of these. "
        "A pause is the longest between two chunks of a stream of which the later came after the fault, over the first "
        "fault up to the SIGSTOP two seconds later.\n",
        *table(heads, rows, left=0),
    ]
    publish("resume-ray" if options.ray else "resume", figures, "\n".join(text), is_kept=not options.quick)


if __name__ == "__main__":
    main()
