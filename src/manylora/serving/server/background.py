"""A server in a thread of this process, for tests, notebooks and demos."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Sequence
from functools import partial

from manylora.core.config import EngineConfig, ServerConfig
from manylora.core.errors import EngineDead
from manylora.serving.hosting.fleet.adapter_book import LoraModule
from manylora.serving.hosting.fleet.keeper import RestartPolicy
from manylora.serving.server.serve import Server

__all__ = ["BackgroundServer"]


class BackgroundServer:
    """A server in a thread of this process, as a context manager; entering raises ``ManyloraError`` if it cannot start.

    ::

        with BackgroundServer(EngineConfig(model=ModelConfig(model="demo"))) as server:
            client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")

    It listens on a free port of the loopback address unless ``server`` says otherwise. ``builder`` is for tests.
    """

    def __init__(
        self,
        engine: EngineConfig,
        server: ServerConfig | None = None,
        lora_modules: Sequence[LoraModule] = (),
        *,
        builder: str | None = None,
        restarts: RestartPolicy | None = None,
    ) -> None:
        config = server or ServerConfig(port=0)
        self._make = partial(Server, engine, config, lora_modules, builder=builder, restarts=restarts)
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._server: Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._serve, name="manylora-server", daemon=True)

    def __enter__(self) -> BackgroundServer:
        """Start, and wait until the server is ready."""
        self._thread.start()
        self._ready.result()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Stop at once."""
        self.stop()

    @property
    def url(self) -> str:
        """Return the server's address, without a path."""
        assert self._server is not None
        return self._server.url

    @property
    def engine_pid(self) -> int | None:
        """Return the engine's process id; ``None`` before it has started."""
        assert self._server is not None
        return self._server.fleet.engines.replicas()[0].pid

    @property
    def has_ended(self) -> bool:
        """Whether the server has ended; ``wait`` raises its error."""
        return self._ended.done()

    def drain(self) -> None:
        """Begin to stop gracefully, as the first SIGTERM does; ``wait`` returns when it is done."""
        assert self._loop is not None
        assert self._server is not None
        self._loop.call_soon_threadsafe(self._server.drain)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the server has ended, and raise its error; ``TimeoutError`` if it has not ended yet."""
        self._ended.result(timeout_s)

    def stop(self) -> None:
        """Stop at once, and wait for the thread."""
        if self._loop is not None and self._server is not None and not self._ended.done():
            server = self._server
            with contextlib.suppress(RuntimeError):  # its loop has just closed
                self._loop.call_soon_threadsafe(server.abandon)
        self._thread.join()

    def _serve(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._server = self._make()
            await self._server.serve(lambda: self._ready.set_result(None))

        try:
            asyncio.run(serve())
        except Exception as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            self._ended.set_exception(error)
        else:
            if not self._ready.done():
                self._ready.set_exception(EngineDead("The server was stopped before it was ready."))
            self._ended.set_result(None)
