"""Controller and agent of one machine, started and restarted: ``manylora functions serve``.

Their listening sockets are made here, so that a process that starts again has the address of the one before, and
connections wait for it meanwhile. A pipe ends with this process, and with it all others, backbones included.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from manylora.core.config import ServerConfig
from manylora.core.errors import EngineDead
from manylora.functions.controller.credentials import own_token, read_token
from manylora.functions.deployment import check_folder, read_deployment
from manylora.functions.wire import AgentSetup, ControllerSetup
from manylora.serving.hosting.fleet.keeper import RestartPolicy
from manylora.serving.http.listening import BACKLOG, bind, url_of

__all__ = ["RESTARTS", "Child", "keep_until_stopped", "open_controller", "supervise"]

RESTARTS = RestartPolicy(max_deaths=10, first_pause_s=0.2, max_pause_s=5.0, healthy_after_s=10.0)

logger = logging.getLogger(__name__)


def supervise(
    config: Path, folder: Path, server: ServerConfig, *, node: str, token_file: Path | None, log_level: int
) -> int:
    """Run controller and agent until SIGTERM or SIGINT; return the exit code.

    State (database, token and sockets) is in ``folder``, made for this user alone. The ``server`` is in front of the
    functions. Without ``token_file`` the controller has a token of its own in the folder.

    ``ConfigError`` if the file is wrong, an adapter cannot be read, or an address cannot be listened on; ``EngineDead``
    if the agent died too often, or the controller before it had worked.
    """
    for name, function in read_deployment(config).functions.items():
        check_folder(name, function)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = own_token(folder) if token_file is None else read_token(token_file)
    setup = ControllerSetup(
        config=str(config.resolve()), folder=str(folder), token=token, has_adapters=True, log_level=log_level
    )
    with bind(server.host, server.port) as public, open_controller(setup, "127.0.0.1") as (controller, url, pipe):
        public.listen(BACKLOG)
        agent = AgentSetup(
            node=node,
            controller=url,
            token=token,
            server=server,
            folder=str(folder),
            socket=public.fileno(),
            parent_pipe=pipe,
            log_level=log_level,
        )
        asyncio.run(keep_until_stopped(controller, Child("manylora.functions.agent.agent", agent)))
    return 0


class Child:
    """A process that is started again when it ends; one that ``is_optional`` is not given up once it has worked."""

    def __init__(self, module: str, setup: AgentSetup | ControllerSetup, *, is_optional: bool = False) -> None:
        self._module = module
        self._setup = setup
        self._is_optional = is_optional
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False

    async def keep(self) -> None:
        """Run it until ``stop``; ``EngineDead`` if it died too often in a row, or its configuration is wrong."""
        now = asyncio.get_running_loop().time
        deaths, has_worked = 0, False
        while not self._is_stopping:
            since = now()
            process = self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", self._module),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=[one for one in (self._setup.socket, self._setup.parent_pipe) if one is not None],
                start_new_session=True,  # Ctrl-C is for this process
            )
            await process.communicate(msgspec.json.encode(self._setup))
            if self._is_stopping:
                return
            worked = now() - since >= RESTARTS.healthy_after_s
            has_worked = has_worked or worked
            deaths = 1 if worked else deaths + 1
            logger.error("process_ended module=%s code=%s in_a_row=%d", self._module, process.returncode, deaths)
            is_hopeless = deaths >= RESTARTS.max_deaths or process.returncode == 2  # 2: its configuration is wrong
            if is_hopeless and not (self._is_optional and has_worked):
                raise EngineDead(f"{self._module} ended {deaths} times in a row (exit code {process.returncode})")
            await asyncio.sleep(RESTARTS.pause_s(deaths))

    async def stop(self) -> None:
        """End the process, and wait for its end."""
        self._is_stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()


@contextlib.contextmanager
def open_controller(setup: ControllerSetup, host: str) -> Iterator[tuple[Child, str, int]]:
    """Yield a controller on a free port of ``host``, its address, and a pipe that ends with this process."""
    parent_pipe, held = os.pipe()
    try:
        with bind(host, 0) as bound:
            bound.listen(BACKLOG)
            url = url_of(bound, is_tls=setup.tls is not None)
            setup = msgspec.structs.replace(setup, socket=bound.fileno(), parent_pipe=parent_pipe)
            controller = Child("manylora.functions.controller.server", setup, is_optional=True)  # agents serve without
            yield controller, url, parent_pipe
    finally:
        os.close(held)
        os.close(parent_pipe)


class Kept(Protocol):
    """A part that is started again when it ends."""

    async def keep(self) -> None:
        """Run the process, and start it again when it ends, until ``stop``."""

    async def stop(self) -> None:
        """End the process, and wait for its end."""


async def keep_until_stopped(controller: Kept, agents: Kept) -> None:
    """Run both until SIGTERM or SIGINT; an error if one of them died too often, or could not be started."""
    stopping = asyncio.Event()

    def stop() -> None:
        if stopping.is_set():
            os._exit(130)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    keeping = [asyncio.create_task(child.keep()) for child in (controller, agents)]
    waiting = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({waiting, *keeping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        await agents.stop()  # its last report needs the controller
        await controller.stop()
    for task in keeping:
        task.cancel()
    for result in await asyncio.gather(*keeping, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
