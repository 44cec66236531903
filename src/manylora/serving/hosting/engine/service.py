"""The engine's side of a link: commands in, messages out, around the engine's loop.

The loop's thread alone uses the core and sends messages. Commands arrive on any thread and are posted to the loop.
Adapter files are read on threads of their own, because a step must not wait for a disk, and the version that was read
is posted. The service runs in an engine process or in a thread of the API process; it uses no sockets.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from importlib import import_module
from typing import TypeAlias, cast

from manylora.core.clock import Clock
from manylora.core.config import EngineConfig
from manylora.core.costs.step_log import LoggedExecutor, open_step_log
from manylora.core.engine.core import EngineCore
from manylora.core.engine.loop import EngineLoop
from manylora.core.engine.status import AdapterStatus
from manylora.core.errors import ConfigError, ManyloraError, RequestError, SnapshotFailed
from manylora.core.plugins import find_factory, is_own
from manylora.core.ports import EngineParts, Executor, SharedBase
from manylora.core.types import Constraint, FinishReason, Output
from manylora.serving.hosting.engine.adapter_reads import AdapterReads
from manylora.serving.hosting.engine.observer import Observer
from manylora.serving.hosting.engine.startup import TORCH_BUILDER, collector_paused
from manylora.serving.hosting.protocol import (
    AddRequests,
    Cancel,
    ChangeAdapter,
    Command,
    EngineInfo,
    EngineRoom,
    EngineSpec,
    Fault,
    LoadAdapter,
    LoadAdapters,
    Message,
    Ready,
    Reply,
    StartRefused,
    TakeSnapshot,
    Turn,
)

__all__ = ["BuildParts", "Builder", "EngineService", "builder_for", "load_builder"]

logger = logging.getLogger(__name__)

BuildParts = Callable[..., EngineParts]
"""Called with ``EngineConfig`` and ``Clock``; also with ``shared``, if the parts of an earlier call had one."""

Builder: TypeAlias = str | BuildParts
"""A function that builds an engine's parts, or its name as ``module:function``, for another process."""

MODEL_CLASSES = "manylora.execution.imports"
SIMULATED_BUILDER = "manylora.lab.sim.build:build_simulated_parts"

NUM_COMPILERS = 2
NO_FAULTS: Mapping[Constraint | None, Fault] = {}
MOST_ROOM_TOLD = 256  # room for more requests is not told: fewer arrive in a turn


def builder_for(config: EngineConfig) -> str:
    """Return the builder of a live or a simulated engine, by configuration."""
    return TORCH_BUILDER if config.simulate is None else SIMULATED_BUILDER


def load_builder(builder: Builder, *, is_alone: bool = False) -> BuildParts:
    """Return the function behind a builder; ``is_alone``: this process serves and does nothing else.

    ``ConfigError`` if there is none of that name.
    """
    if not isinstance(builder, str):
        return builder
    if not is_own(builder):
        raise ConfigError(f"Got builder = {builder!r}, expected module:function or file.py:function")
    if builder not in (TORCH_BUILDER, SIMULATED_BUILDER):
        return cast(BuildParts, find_factory("builder", builder, {}))
    if is_alone and builder == TORCH_BUILDER:
        import_module(MODEL_CLASSES).import_model_classes()
    module, _, function = builder.partition(":")
    return cast(BuildParts, getattr(import_module(module), function))


@dataclass(eq=False)
class EngineService:
    """One engine behind commands and messages."""

    engine: EngineSpec
    _: KW_ONLY
    clock: Clock
    send: Callable[[Message], None]  # sends a message; called on the loop's thread alone
    base: SharedBase | None = None  # the weights that another engine has loaded, if one has
    is_alone: bool = False  # in a process that does nothing else
    _observer: Observer = field(default_factory=Observer)
    _preparing: dict[str, bool] = field(default_factory=dict)  # by request whose constraint compiles: whether cancelled
    _loop: EngineLoop | None = None
    _reads: AdapterReads | None = None
    _parts: EngineParts | None = None
    _is_stopping: bool = False

    def __post_init__(self) -> None:
        self._config = self.engine.config
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="constraint-compiler")

    def run(self) -> bool:
        """Build the engine and serve on the calling thread until ``stop``.

        False if the configuration was refused, with the reason in a ``StartRefused`` message. An exception means that
        the engine failed and cannot be used again.
        """
        try:
            given = {} if self.base is None else {"shared": self.base}
            build = self._import()
            parts = self._parts = build(self._config, self.clock, **given)
        except ManyloraError as error:
            self.send(StartRefused(Fault.of(error)))
            return False
        files = contextlib.ExitStack()
        try:
            core = EngineCore(
                replace(parts, executor=self._logged(parts, files)),
                self._config,
                served_name=self.engine.served_name,
                sinks=[self._observer] if self.engine.is_observed else [],
            )

            def send_turn(outputs: list[Output], now: float) -> None:
                self.send(Turn(outputs, self._observer.take(), _room(core, now)))

            loop = self._loop = EngineLoop(core, self.clock, on_outputs=send_turn, live=True)
            if self._is_stopping:  # ``stop`` was called before the loop existed
                loop.stop()
            self._reads = AdapterReads(
                reader=parts.reader, clock=self.clock, post=loop.post, send=self.send, observe=self._observer
            )
            page, base = parts.base.page, parts.base
            info = EngineInfo(
                max_model_len=base.max_model_len,
                vocab_size=base.vocab_size,
                block_size=page.block_size,
                page_bytes=page.num_bytes,
                eos_token_ids=base.eos_token_ids,
                base_bytes=parts.base_bytes,
                is_accelerated=parts.is_accelerated,
            )
            self.send(Ready(info, parts.shared))
            loop.run()
        except ManyloraError as error:
            if self._loop is not None:
                raise
            self.send(StartRefused(Fault.of(error)))
            return False
        finally:
            if self._reads is not None:
                self._reads.close()
            self._compilers.shutdown(wait=False, cancel_futures=True)
            parts.close()
            with contextlib.suppress(OSError):  # of a disk that is full
                files.close()
            # The loop holds this service: together they would keep the engine's memory until gc finds them.
            self._loop = self._reads = self._parts = None
        return True

    def _import(self) -> BuildParts:
        """Return the builder, which may import torch; a process that was started early has imported it."""
        builder = self.engine.builder
        is_imported = not isinstance(builder, str) or builder.partition(":")[0] in sys.modules
        if not is_imported:
            logger.info("engine_start next=%r", "imports")
        began_at = self.clock.now()
        with collector_paused():
            build = load_builder(builder, is_alone=self.is_alone)
        if not is_imported:
            logger.info("engine_start stage=imports took_s=%.2f next=%r", self.clock.now() - began_at, "weights")
        return build

    def _logged(self, parts: EngineParts, files: contextlib.ExitStack) -> Executor:
        """Return the executor, with a step log if configured; ``files`` closes it. ``ConfigError`` if not writable."""
        path = self._config.step_log
        if path is None:
            return parts.executor
        return LoggedExecutor(parts.executor, files.enter_context(open_step_log(path, parts, self._config.model)))

    def stop(self) -> None:
        """End ``run`` soon, or once the engine is built; safe from any thread."""
        self._is_stopping = True
        if (loop := self._loop) is not None:
            loop.stop()

    def handle(self, command: Command) -> None:
        """Post a command to the loop; safe from any thread, once ``Ready`` was sent. After the end it is ignored."""
        loop, reads = self._loop, self._reads
        if loop is None or reads is None:
            return
        post = loop.post
        match command:
            case AddRequests(requests=requests):
                if constraints := {wanted for one in requests if (wanted := one.sampling.constraint) is not None}:
                    self._preparing.update(dict.fromkeys((one.request_id for one in requests), False))
                    with contextlib.suppress(RuntimeError):  # the engine has just ended
                        self._compilers.submit(self._prepare, command, constraints)
                else:
                    post(lambda core, now: self._add(core, now, command))
            case Cancel():
                post(lambda core, now: self._cancel(core, now, command))
            case LoadAdapter():
                reads.load(command)
            case LoadAdapters():
                reads.check(command)
            case ChangeAdapter():
                post(lambda core, now: self._change(core, now, command))
            case TakeSnapshot():
                post(lambda core, now: self._snapshot(core, now, command))

    def _change(self, core: EngineCore, now: float, command: ChangeAdapter) -> None:
        name, adapters = command.name, core.adapters
        status: AdapterStatus | None = None
        try:
            match command.change:
                case "unload":
                    adapters.unregister(name, now)
                case "warm":
                    status = adapters.warm(name, now)
                case "point":
                    status = adapters.point(name, command.to, now)
                case _:
                    status = adapters.pin(name, command.change == "pin", now)
        except ManyloraError as error:
            self.send(Reply(command.call, Fault.of(error)))
        else:
            self.send(Reply(command.call, statuses=() if status is None else (status,)))

    def _add(
        self, core: EngineCore, now: float, command: AddRequests, faults: Mapping[Constraint | None, Fault] = NO_FAULTS
    ) -> None:
        added: list[str] = []
        refused: dict[str, Fault] = {}
        for request in command.requests:
            try:
                if (fault := faults.get(request.sampling.constraint)) is not None:
                    raise fault.to_error()
                core.add_request(request, now)
            except ManyloraError as error:
                if not command.each:
                    self._observer.forget(added)
                    for request_id in added:
                        core.cancel(request_id, now)
                    self.send(Reply(command.call, Fault.of(error)))
                    return
                refused[request.request_id] = Fault.of(error)
            else:
                added.append(request.request_id)
        self.send(Reply(command.call, refused=refused))

    def _cancel(self, core: EngineCore, now: float, command: Cancel) -> None:
        reason = FinishReason.STOP if command.stopped else FinishReason.CANCELLED
        if command.refused:
            self._observer.forget(command.request_ids)
        for request_id in command.request_ids:
            if request_id in self._preparing:
                self._preparing[request_id] = True
            core.cancel(request_id, now, reason)

    def _prepare(self, command: AddRequests, constraints: set[Constraint]) -> None:
        """Compile constraints on a thread, then post the requests to the loop. Never raises."""
        loop, parts = self._loop, self._parts
        if loop is None or parts is None:  # the engine has just ended
            return
        faults: dict[Constraint | None, Fault] = {}
        for constraint in constraints:
            try:
                parts.prepare(constraint)
            except ManyloraError as error:
                faults[constraint] = Fault.of(error)
            except BaseException as error:  # a panic of the compiler is no ``Exception``
                logger.exception("constraint_failed kind=%s", constraint.kind)
                faults[constraint] = Fault.of(RequestError(f"The constraint could not be compiled: {error!r}"))
        loop.post(lambda core, now: self._add_prepared(core, now, command, faults))

    def _add_prepared(
        self, core: EngineCore, now: float, command: AddRequests, faults: Mapping[Constraint | None, Fault]
    ) -> None:
        """Add requests whose constraints are compiled; those that were cancelled meanwhile are left out."""
        kept = [one for one in command.requests if not self._preparing.pop(one.request_id, False)]
        self._add(core, now, AddRequests(command.call, kept, command.each), faults)

    def _snapshot(self, core: EngineCore, now: float, command: TakeSnapshot) -> None:
        """Answer a read. It changes nothing, so its failure is an error of this read, never the end of the loop."""
        try:
            statuses, stats = _statuses(core, now, command), core.stats()
        except Exception as error:
            logger.exception("snapshot_failed")
            failure = SnapshotFailed(f"The engine's state could not be read: {error!r}")
            self.send(Reply(command.call, Fault.of(failure)))
        else:
            self.send(Reply(command.call, statuses=statuses, stats=stats, observations=self._observer.take()))


def _statuses(core: EngineCore, now: float, command: TakeSnapshot) -> tuple[AdapterStatus, ...]:
    """Return the status of the adapters that a read asks for."""
    adapters = core.adapters
    if command.name is not None:
        return (adapters.status(command.name, now),) if command.name in adapters else ()
    if command.only_in_use:
        return adapters.in_use(now)
    if command.num_adapters is not None:
        return adapters.busiest(command.num_adapters, now)
    return adapters.statuses(now)


def _room(core: EngineCore, now: float) -> EngineRoom | None:
    num = core.queue_wait.num_room()
    return None if num > MOST_ROOM_TOLD else EngineRoom(num, Fault.of(core.queue_wait.no_room(now)))
