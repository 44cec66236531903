"""An engine that writes the time into its tokens, so that a client can tell how long each was on its way.

The real core and loop, on an executor whose steps take exactly as long as the first token of a prompt says, in units
of 100 microseconds: one server can be measured at every speed. Every token of the vocabulary is a moment, ``~`` and
five digits, the tenths of milliseconds of the monotonic clock modulo ten seconds. A token is stamped when the loop
finds its step complete, before the core takes it in: everything after the device is in the latency that a client
reads off, the engine's own bookkeeping too.

``python bench/paced.py STREAMS`` is the floor of that latency: the same library and settings, and an application that
only writes. It waits until so many streams are open, then sends all of them a chunk per step from one loop, one stream
after another, no task woken for any. The chunks are as long as the server's and carry the moment the step ended, as
the server's do. There is no engine, no text and no JSON.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from manylora.core.clock import Clock
from manylora.core.config import EngineConfig
from manylora.core.plan import AdapterLoad, LoadResult, StepPlan, StepResult
from manylora.core.ports import EngineParts
from manylora.core.types import AdapterKey, SampledToken, Tier
from manylora.lab.catalog.models import base_shape
from manylora.lab.sim.build import SimulatedReader
from manylora.lab.sim.run.executor import SimulatedWork

TICK_S = 1e-4
NUM_TICKS = 100_000
"""Moments in the vocabulary: ten seconds, more than any token is on its way."""


@dataclass(frozen=True, slots=True)
class _Step:
    ready_at: float
    seq_ids: tuple[int, ...]

    def poll(self, now: float) -> StepResult | None:
        """Return the stamped tokens from ``ready_at`` on."""
        if now < self.ready_at:
            return None
        return StepResult(tokens=dict.fromkeys(self.seq_ids, SampledToken(token_id=int(now / TICK_S) % NUM_TICKS)))


class PacedExecutor:
    """Takes as long for a step as the prompts in it ask for, and stamps its tokens with the time."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def launch(self, plan: StepPlan, now: float) -> _Step:
        """Start a step."""
        step_s = max(part.tokens[0] for part in plan.sequences) * TICK_S
        self._free_at = max(now, self._free_at) + step_s
        return _Step(self._free_at, tuple(part.seq_id for part in plan.sequences if part.is_sampled))

    def load_adapter(self, load: AdapterLoad, now: float) -> SimulatedWork:
        """Start a load, which is done already."""
        return SimulatedWork(now, LoadResult())

    def drop_adapter(self, key: AdapterKey, tier: Tier) -> None:
        """Nothing is kept, so nothing is dropped."""


def build_paced_parts(config: EngineConfig, clock: Clock) -> EngineParts:
    """Build an engine's parts around a ``PacedExecutor``: Llama-3-8B's sizes, no weights, planned for as a GPU is."""
    base = base_shape("llama-3-8b", block_size=config.memory.block_size)
    return EngineParts(
        base=base,
        num_pages=config.memory.num_pages or 1 << 16,
        executor=PacedExecutor(),
        reader=SimulatedReader(base),
        close=lambda: None,
        is_accelerated=True,
    )


def write_paced_tokenizer(directory: Path) -> Path:
    """Write the tokenizer whose tokens are moments; it decodes byte by byte, as most models' tokenizers do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fast = Tokenizer(models.BPE({f"~{tick:05d}": tick for tick in range(NUM_TICKS)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=fast).save_pretrained(str(directory))
    return directory


_HEAD = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","created":1700000000,"model":"paced",'
    b'"object":"text_completion","system_fingerprint":"fp_0123456789","choices":[{"index":0,"text":"'
)
_TAIL = b'","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'


def chunk(now: float) -> bytes:
    """Return the event of a token made at ``now``, in seconds of the monotonic clock."""
    return b"%b~%05d%b" % (_HEAD, int(now / TICK_S) % NUM_TICKS, _TAIL)


class FloorApp:
    """An ASGI application that answers completions as the server with paced parts does, without making them.

    Args:
        num_streams: Streams that the first step waits for.
    """

    def __init__(self, num_streams: int) -> None:
        self._num_streams = num_streams
        self._waiting: list[tuple[Any, asyncio.Event]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request: join the others, and end when the last step is over."""
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        asked = json.loads(body)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        ended = asyncio.Event()
        self._waiting.append((send, ended))
        if len(self._waiting) == self._num_streams:
            streams, self._waiting = self._waiting, []
            await self._step(streams, asked["prompt"][0] * TICK_S, asked["max_tokens"])
        await ended.wait()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _step(self, streams: list[tuple[Any, asyncio.Event]], step_s: float, num_tokens: int) -> None:
        for _ in range(num_tokens):
            await asyncio.sleep(step_s)
            body = chunk(time.monotonic())
            for send, _ in streams:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        for _, ended in streams:
            ended.set()


def main(num_streams: int) -> None:
    """Serve on a free port, which is printed."""
    bound = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        FloorApp(num_streams),
        log_config=None,
        access_log=False,
        lifespan="off",
        proxy_headers=False,
        server_header=False,
    )
    print(f"at http://127.0.0.1:{bound.getsockname()[1]}", flush=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(uvicorn.Server(config).serve(sockets=[bound]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
