"""The step log: content and duration of each step and each load, from which cost models are fitted.

``LoggedExecutor`` wraps any executor and writes a line when work completes:

::

    loop      |launched_at                       ended_at|launched_at of the next ...
              |--- plan ---|------ device_s ------|-wake-|
    executor               |------ the step ------|

``ended_at - launched_at`` is the duration in a simulator, where steps follow each other as turns of the loop do.
``device_s`` is the part of it that the executor measured, if any; it can be longer, where a step ended between the
time of a turn and its look at the step. Times are the loop's, so a log also replays a run exactly
(``bench/replay.py``), unless steps were planned ahead.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import msgspec

from manylora.core.adapters.shape import BaseShape
from manylora.core.config import ModelConfig
from manylora.core.costs.features import StepFeatures, step_features
from manylora.core.errors import ConfigError
from manylora.core.plan import AdapterLoad, LoadResult, StepPlan, StepResult
from manylora.core.ports import EngineParts, Executor, Work
from manylora.core.types import AdapterKey, Tier

__all__ = [
    "LoadRecord",
    "LogHeader",
    "LogLine",
    "LoggedExecutor",
    "StepLog",
    "StepRecord",
    "open_step_log",
    "read_step_log",
    "write_step_log",
]

logger = logging.getLogger(__name__)


class LogHeader(msgspec.Struct, frozen=True, kw_only=True, tag="engine"):
    """The engine of the following lines."""

    base: BaseShape
    num_pages: int  # pages in its pool
    machine: str = ""  # in words
    lora_kernel: str = ""
    reads_host: bool = False  # whether its steps can read adapters from host memory

    @classmethod
    def of(cls, parts: EngineParts, model: ModelConfig) -> LogHeader:
        """Return the header for the engine of ``parts`` and ``model``."""
        return cls(
            base=parts.base,
            num_pages=parts.num_pages,
            machine=parts.machine,
            lora_kernel=model.lora_kernel,
            reads_host=parts.reads_host,
        )


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One step."""

    step_id: int
    # Time of the turn that planned it, in seconds on the loop's clock; of a step planned ahead, the end of the step
    # before it.
    launched_at: float
    ended_at: float  # time of the turn that read its results, in seconds
    device_s: float | None  # duration that the executor measured, in seconds; ``None`` if it does not measure
    features: StepFeatures

    @property
    def took_s(self) -> float:
        """Duration from turn to turn, in seconds."""
        return self.ended_at - self.launched_at


class LoadRecord(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """One load of an adapter version."""

    adapter: AdapterKey  # the version
    tier: Tier  # destination: ``host`` or ``device``
    num_bytes: int  # bytes read from disk or copied to the device
    launched_at: float  # time of the turn that launched it, in seconds on the loop's clock
    ended_at: float  # time of the turn that saw it complete, in seconds
    device_s: float | None  # duration without its wait for the link, in seconds; ``None`` if not measured
    error: str | None = None  # the reason, if it failed

    @property
    def took_s(self) -> float:
        """Seconds from the turn that launched the load to the turn that saw it complete, with its wait for the link."""
        return self.ended_at - self.launched_at


LogLine = LogHeader | StepRecord | LoadRecord


class _LoggedWork:
    """Work whose completion is logged once, at the turn that sees it."""

    __slots__ = ("_log", "_work")

    def __init__(self, work: Work, log: Callable[[StepResult | LoadResult, float], None]) -> None:
        self._work = work
        self._log = log

    @property
    def ready_at(self) -> float:
        return self._work.ready_at

    def poll(self, now: float) -> StepResult | LoadResult | None:
        result = self._work.poll(now)
        if result is not None:  # the core polls completed work no more
            self._log(result, now)
        return result


class LoggedExecutor:
    """An executor that logs the duration of its work.

    ``write`` receives records on the loop's thread, in the order in which the core sees completions.
    """

    def __init__(self, executor: Executor, write: Callable[[StepRecord | LoadRecord], None]) -> None:
        self._executor = executor
        self._write = write
        self._ended_at = -math.inf  # the step logged last

    def launch(self, plan: StepPlan, now: float) -> Work:
        """Start a step; it is logged when its results are read."""
        features = step_features(plan)  # now: its token lists grow until then

        def log(result: StepResult | LoadResult, ended_at: float) -> None:
            began_at, self._ended_at = max(now, self._ended_at), ended_at
            self._write(
                StepRecord(
                    step_id=plan.step_id,
                    launched_at=began_at,
                    ended_at=ended_at,
                    device_s=result.device_s,
                    features=features,
                )
            )

        return _LoggedWork(self._executor.launch(plan, now), log)

    def load_adapter(self, load: AdapterLoad, now: float) -> Work:
        """Start a load; it is logged when it is seen to be complete."""
        version = load.version

        def log(result: StepResult | LoadResult, ended_at: float) -> None:
            assert isinstance(result, LoadResult)
            self._write(
                LoadRecord(
                    adapter=version.key,
                    tier=load.tier,
                    num_bytes=version.disk_bytes if load.tier is Tier.HOST else version.host_bytes,
                    launched_at=now,
                    ended_at=ended_at,
                    device_s=result.device_s,
                    error=result.error,
                )
            )

        return _LoggedWork(self._executor.load_adapter(load, now), log)

    def drop_adapter(self, key: AdapterKey, tier: Tier) -> None:
        """Drop an adapter; not logged."""
        self._executor.drop_adapter(key, tier)


class StepLog:
    """Writes log lines as JSON. An error of the disk, at any time, ends the log, not the engine that calls it.

    The header is first, so that runs in one file can be told apart. The caller closes the file.
    """

    def __init__(self, file: BinaryIO | FileIO, header: LogHeader) -> None:
        self._file: BinaryIO | FileIO | None = file
        self._encode = msgspec.json.Encoder().encode
        self(header)

    def __call__(self, line: LogLine) -> None:
        """Write a line."""
        if self._file is None:
            return
        try:
            self._file.write(self._encode(line) + b"\n")
        except OSError as error:
            logger.error("step_log_ended reason=%s", error)
            self._file = None


@contextmanager
def open_step_log(path: str | Path, parts: EngineParts, model: ModelConfig) -> Iterator[StepLog]:
    """Append the work of the engine of ``parts`` and ``model`` to a log; unbuffered, so a killed engine loses no line.

    ``ConfigError`` if the file cannot be written.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(Path(path).open("ab", buffering=0))
            log = StepLog(file, LogHeader.of(parts, model))
        except OSError as error:
            raise ConfigError(f"Got step_log = {str(path)!r}, which cannot be written: {error.strerror}") from error
        yield log


def write_step_log(path: str | Path, lines: Iterable[LogLine]) -> None:
    """Write lines to a log; raise ``ConfigError`` if the file cannot be written."""
    encode = msgspec.json.Encoder().encode
    try:
        Path(path).write_bytes(b"".join(encode(line) + b"\n" for line in lines))
    except OSError as error:
        raise ConfigError(f"Cannot write the step log {path}: {error.strerror}") from error


def read_step_log(path: str | Path) -> Iterator[LogLine]:
    """Yield the lines of a log, its header first.

    ``ConfigError`` if the file cannot be read, is empty, does not begin with a header, or has an invalid line.
    """
    decode = msgspec.json.Decoder(LogLine).decode
    number = 0
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = decode(line)
                except msgspec.DecodeError as error:  # no JSON, or no record
                    raise ConfigError(f"Line {number} of {path} is not a line of a step log: {error}") from None
                if number == 1 and not isinstance(record, LogHeader):
                    raise ConfigError(
                        f"The step log {path} does not begin with its header: its first lines are missing"
                    )
                yield record
    except OSError as error:
        raise ConfigError(f"Cannot read the step log {path}: {error.strerror}") from None
    if not number:
        raise ConfigError(f"The step log {path} is empty")
