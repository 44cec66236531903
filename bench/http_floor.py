"""The floor of HTTP latency: the same library and settings, and an application that only writes.

``python bench/http_floor.py STREAMS`` waits until so many streams are open, then sends all of them a chunk
per step from one loop, one stream after another, no task woken for any. The chunks are as long as the server's and
carry the moment the step ended, as the server's do. There is no engine, no text and no JSON.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from typing import Any

import uvicorn
import uvloop
from paced import NUM_TICKS, TICK_S

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
