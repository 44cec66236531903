"""A backbone of a node: its sealed memory, the process that holds it, and the zygote over it.

::

    loader  (manylora backbone)  loads and seals, then ends
      |  descriptor
    agent --- descriptor ---> holder  hands it to the next agent, if this one ends
      |
    zygote  forks functions

An agent that starts finds the holder of the one before and loads nothing. A holder that ends is started again from the
agent's own descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import msgspec

from manylora.core.errors import CapacityError, ConfigError, EngineDead
from manylora.demo import demo_model_path
from manylora.functions.deployment import BackboneSpec
from manylora.functions.node.readings import memory_of
from manylora.functions.processes.backbone import fetch_backbone, load_command
from manylora.functions.processes.frames import in_memory
from manylora.functions.processes.holder import hold_command, holder_of
from manylora.functions.processes.messages import Backbone
from manylora.functions.processes.zygote import Zygote
from manylora.functions.wire import BackboneState

__all__ = ["BackboneHost"]

POLL_S = 0.02
RETRY_S = 30.0  # seconds after a failure in which the backbone is not loaded ahead; a request tries again

LOAD_TIMEOUT_S = 1800.0

_BITS = {"float32": 32, "int8": 9, "int4": 5}  # bits a weight, scales included and rounded up

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class BackboneHost:
    """One backbone. Only for the event loop's thread."""

    name: str
    spec: BackboneSpec
    folder: Path  # where its sockets are made
    _: KW_ONLY
    parent_pipe: int | None  # descriptor of a pipe with which the holder ends; ``None`` to outlive this process
    on_change: Callable[[], None]  # called when its memory or its zygote comes or goes
    load_s: float = 0.0
    zygote_s: float = 0.0
    zygote_bytes: int = 0
    is_ready: bool = False
    _failed_at: float = -math.inf
    _backbone: Backbone | None = None
    pid: int | None = None  # the holder's process at the last look
    _holder: subprocess.Popen[bytes] | None = None  # ``None`` if another agent started it
    _zygote: Zygote | None = None
    _starting: asyncio.Task[Zygote] | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # of a start or a release

    def __post_init__(self) -> None:
        self._model = str(demo_model_path() if self.spec.model == "demo" else Path(self.spec.model).resolve())
        self._path = self.folder / f"backbone-{self.name.replace('/', '%')}"

    @property
    def state(self) -> str:
        """``absent``, ``loading``, ``loaded``, ``ready`` with a zygote that forks, or ``failed`` a while ago."""
        if self.is_ready:
            return "ready"
        if self._starting is not None:
            return "loading"
        if time.monotonic() - self._failed_at < RETRY_S:
            return "failed"
        return "absent" if self._backbone is None else "loaded"

    @property
    def begun_from(self) -> str:
        """What a cold start finds: ``nothing``, ``backbone`` or ``zygote``."""
        if self.is_ready:
            return "zygote"
        return "nothing" if self._backbone is None and holder_of(self._path) is None else "backbone"

    @property
    def num_bytes(self) -> int:
        """Bytes of the base in memory; 0 without it."""
        return 0 if self._backbone is None else self._backbone.base.num_bytes

    @property
    def expected_bytes(self) -> int:
        """Bytes that the base will take, by the size of its files: in 16 bits, or kept as they are stored."""
        size = sum(file.stat().st_size for file in Path(self._model).glob("*.safetensors"))
        return size * _BITS.get(self.spec.base_dtype, 16) // 16

    @property
    def backbone(self) -> Backbone:
        """The base; after ``ready``."""
        assert self._backbone is not None
        return self._backbone

    def describe(self) -> BackboneState:
        """Return the state of the backbone for a report."""
        return BackboneState(
            name=self.name,
            state=self.state,
            pid=self.pid,
            zygote_pid=None if self._zygote is None else self._zygote.pid,
            num_bytes=self.num_bytes,
            zygote_bytes=self.zygote_bytes,
            load_s=self.load_s,
            zygote_s=self.zygote_s,
        )

    async def ready(self) -> Zygote:
        """Load the base and warm a zygote, unless both are there; return the zygote.

        ``CapacityError`` if the backbone was released meanwhile, ``ConfigError`` if the base cannot be loaded,
        ``EngineDead`` if the zygote ended, ``OSError`` if a process cannot be started.
        """
        if self._zygote is not None and self.is_ready:
            await self._zygote.start()  # a new one, if it has ended
            return self._zygote
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(self._start_ended)  # whether or not a function still waits
        starting = self._starting
        await asyncio.wait({starting})
        if starting.cancelled():
            raise CapacityError(f"Backbone {self.name!r} left the memory; please try again.", status=503)
        return starting.result()

    def _start_ended(self, starting: asyncio.Task[Zygote]) -> None:
        if self._starting is starting:
            self._starting = None
        if not starting.cancelled() and starting.exception() is not None:
            self._failed_at = time.monotonic()

    def tend(self) -> None:
        """Start the holder again if it has ended; read the zygote's memory."""
        if self._backbone is None or self._turn.locked():  # a holder that a release ends has no successor
            return
        if self._holder is not None:
            self._holder.poll()  # reaped
        self.pid = holder_of(self._path)
        if self.pid is None and (self._holder is None or self._holder.returncode is not None):
            logger.warning("backbone_holder_ended name=%s", self.name)
            try:
                self._hold()
            except OSError as error:  # for lack of processes or memory: tried again at the next look
                logger.error("backbone_not_held name=%s error=%r", self.name, error)
        pid = None if self._zygote is None else self._zygote.pid
        if pid is not None and (reading := memory_of(pid)) is not None:
            self.zygote_bytes = reading.anonymous

    async def release(self) -> None:
        """Let the memory and the zygote go; functions on it end. A start that is asked for meanwhile comes after."""
        self.is_ready = False
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        async with self._turn:
            self.is_ready = False
            zygote, self._zygote = self._zygote, None
            if zygote is not None:
                await zygote.stop()
            await self._end_holder()
            backbone, self._backbone = self._backbone, None
            if backbone is not None:
                with contextlib.suppress(OSError):
                    os.close(backbone.base.file)
            self.zygote_bytes = 0
        self.on_change()

    async def _end_holder(self) -> None:
        holder, self._holder, self.pid = self._holder, None, None
        if holder is not None:
            holder.kill()  # it may not listen yet, or be stopped
            await asyncio.to_thread(holder.wait)
        while (pid := holder_of(self._path)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(POLL_S)
        self._path.unlink(missing_ok=True)

    async def _start(self) -> Zygote:
        async with self._turn:
            if self._backbone is None:
                began = time.monotonic()
                self._backbone = await self._fetch_or_load()
                self.load_s = max(self.load_s, time.monotonic() - began)
                logger.info("backbone_ready name=%s bytes=%d took_s=%.3f", self.name, self.num_bytes, self.load_s)
                self.on_change()
            began = time.monotonic()
            zygote = self._zygote = Zygote(self._backbone)
            await zygote.start()
            self.zygote_s = time.monotonic() - began
            self.is_ready = True
        self.tend()
        self.on_change()
        return zygote

    async def _fetch_or_load(self) -> Backbone:
        with contextlib.suppress(ConfigError):
            found = await asyncio.to_thread(fetch_backbone, self._path)
            model = found.model
            if (model.model, model.dtype, model.base_dtype) == (self._model, self.spec.dtype, self.spec.base_dtype):
                logger.info("backbone_found name=%s bytes=%d", self.name, found.base.num_bytes)
                return found
            os.close(found.base.file)
            await self._end_holder()
        loading = self._path.with_name(self._path.name + ".loading")
        kinds = ["--dtype", self.spec.dtype, "--base-dtype", self.spec.base_dtype]
        command = load_command(["backbone", self._model, "--socket", str(loading), *kinds])
        loader = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                while loader.poll() is None:
                    with contextlib.suppress(ConfigError):
                        found = await asyncio.to_thread(fetch_backbone, loading)
                        self._backbone = found
                        self._hold()
                        return found
                    await asyncio.sleep(POLL_S)
            raise ConfigError(
                f"Got backbones.{self.name}: model = {self.spec.model!r}, which could not be loaded; see the log"
            )
        except TimeoutError:
            raise EngineDead(f"Backbone {self.name!r} was not loaded within {LOAD_TIMEOUT_S:g} s.") from None
        finally:
            loader.kill()
            await asyncio.to_thread(loader.wait)
            loading.unlink(missing_ok=True)

    def _hold(self) -> None:
        """Start the process that holds the memory for later agents."""
        assert self._backbone is not None
        parent_pipe = -1 if self.parent_pipe is None else self.parent_pipe
        keep = [self._backbone.base.file, *([] if self.parent_pipe is None else [self.parent_pipe])]
        with in_memory(msgspec.msgpack.encode(self._backbone)) as stdin:
            self._holder = subprocess.Popen(
                hold_command(self._path, self._backbone.base.file, parent_pipe=parent_pipe),
                stdin=stdin,
                pass_fds=keep,
                start_new_session=True,
            )
