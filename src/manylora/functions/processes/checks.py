"""Bounds on a function, which is not trusted: the contents of its messages, and the time that reading them takes.

A message of the right types may still carry a name of another function, a NaN that no sum recovers from, or a text that
the controller refuses. The first that does ends the function: what passes can be counted, summed and reported. And a
flood of good messages must delay no other function.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
from msgspec import structs

from manylora.core.isolation.confine import MEASURES, Measure
from manylora.core.types import FinishReason, Output, Request
from manylora.functions.processes.frames import MAX_FRAME_BYTES, FrameError
from manylora.serving.hosting.fleet.snapshot import STATES
from manylora.serving.hosting.protocol import (
    Fault,
    Message,
    Observations,
    Ready,
    Reply,
    StartRefused,
    StartReport,
    Turn,
)

__all__ = ["MessageCheck", "TimeBudget"]

MAX_SECONDS = 1e9
MAX_COUNT = 2**31 - 1
MAX_CHARS = 4096
MAX_ENTRIES = 2**17  # most values of one kind in a message: more than the requests that a function may have

FRAME_BYTES = 1 << 20  # most of a message without what requests ask for
REQUEST_BYTES = 4096  # most of it for a request, its texts included
TOKENS_AT_ONCE = 16  # most tokens of an answer in a message
LOGPROB_BYTES = 32  # most bytes of a log-probability and its token

MAX_PARTS = 4096  # most values of one kind in a snapshot, which has some of each

MAX_NOTE_CHARS = 1000
MAX_FAULT_CHARS = 2**16
MAX_ANSWER = 2**20  # tokens of an answer whose request sets no limit
NUM_EMPTY = 8  # outputs of a request that have no token: its prompt's part, its end

STAGES = frozenset({"fork", "confine", "map", "build"})
REASONS = frozenset(reason.value for reason in FinishReason)

WINDOW_S = 0.25
MAX_IDLE_SHARE = 0.02
"""Most of a processor for the messages of a function without requests, which has next to nothing to say."""

MAX_BUSY_SHARE = 0.25  # likewise with requests; an engine with sixteen of them on a small model needs a tenth

MAX_PAUSE_S = 5.0


class MessageCheck:
    """Checks the messages of one process, which may report on ``names``; more may be added."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = set(names)
        self._tenants = {""}  # those whose requests it has had, whose usage it tells
        self._has_started = False
        self._asked_bytes: dict[str, int] = {}  # of a message, by request
        self.max_bytes = FRAME_BYTES  # most of a message: a request that was cancelled may have part of one on its way
        self._left: dict[str, int] = {}  # tokens that each request may still get
        self._tops: dict[str, int] = {}  # log-probabilities of a token that each may get, if any
        self._prompts: set[str] = set()  # requests that may get the log-probabilities of their prompts
        self._calls: dict[int, tuple[str, ...]] = {}  # requests by call, before its reply

    @property
    def expects_answers(self) -> bool:
        """Whether the process has requests."""
        return bool(self._left)

    def expect(self, call: int, requests: Iterable[Request]) -> None:
        """Expect the answers of requests, each as long as it asked for."""
        for one in requests:
            self._tenants.add(one.tenant)
            self._left[one.request_id] = NUM_EMPTY + (one.sampling.max_tokens or one.default_max_tokens or MAX_ANSWER)
            if num_top := len(one.sampling.logprob_token_ids) or one.sampling.logprobs:
                self._tops[one.request_id] = num_top
            if one.sampling.prompt_logprobs is not None:
                self._prompts.add(one.request_id)
            self._asked_bytes[one.request_id] = _message_bytes(one)
        needed = FRAME_BYTES + sum(self._asked_bytes.values())
        self.max_bytes = max(self.max_bytes, min(MAX_FRAME_BYTES, needed))
        self._calls[call] = tuple(one.request_id for one in requests)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Expect nothing more of requests that were refused, or cancelled."""
        for request_id in request_ids:
            self._left.pop(request_id, None)
            self._tops.pop(request_id, None)
            self._asked_bytes.pop(request_id, None)
            self._prompts.discard(request_id)

    def checked(self, message: Message) -> Message:
        """Return a message without the parts that a function has no say in.

        ``FrameError`` if a part of it is beyond its bound; the message names the part.
        """
        if isinstance(message, Ready):
            if self._has_started:
                raise FrameError("it starts twice")
            self._has_started = True
            _check_all("info", message.info)
            return structs.replace(message, base=None, start=None if message.start is None else _start(message.start))
        if isinstance(message, Turn):
            self._check_outputs(message.outputs)
            self._check_observations(message.observations)
            if message.room is not None:
                _check_range("room", (message.room.num,), MAX_COUNT)
                _check_fault(message.room.beyond)
        elif isinstance(message, StartRefused):
            _check_fault(message.fault)
        elif isinstance(message, Reply):
            self._check_reply(message)
        return message

    def _check_reply(self, message: Reply) -> None:
        for fault in (message.fault, *message.refused.values()):
            _check_fault(fault)
        asked = self._calls.pop(message.call, ())
        self.forget(message.refused if message.fault is None else asked)
        if (num := len(message.statuses)) > len(self.names):
            raise FrameError(f"it has {num} statuses, of {len(self.names)} adapters at most")
        self._check_names((*message.registered, *(one.name for one in message.statuses)))
        _check_all("registered", message.registered)
        if (stats := message.stats) is not None:
            _check_all("stats", stats)
            self._check_names((*stats.running_adapters, *stats.waiting_adapters, *stats.resident_adapters))
        for status in message.statuses:
            _check_known("state", status.state, STATES)
            _check_all("statuses", status)
        if message.observations is not None:
            self._check_observations(message.observations)

    def _check_outputs(self, outputs: Collection[Output]) -> None:
        """Check that outputs are no more than was asked for: a client that does not read has them waiting here."""
        left_of = self._left
        if len(outputs) > MAX_ENTRIES:
            raise FrameError(f"a turn has {len(outputs)} outputs, at most {MAX_ENTRIES}")
        for output in outputs:
            left = left_of.get(output.request_id)
            if left is None:
                continue  # dropped: it was cancelled, or is no request of this function
            tokens = output.tokens
            left -= len(tokens) or 1
            if left < 0:
                raise FrameError("an answer has more tokens than its request asked for")
            most = self._tops.get(output.request_id, 0)
            for token in tokens:
                if len(token.top) > most:
                    raise FrameError(f"a token has {len(token.top)} log-probabilities, at most {most}")
            if output.prompt_logprobs is not None:
                if output.request_id not in self._prompts:
                    raise FrameError("a prompt has log-probabilities that were not asked for")
                self._prompts.discard(output.request_id)
            if (num_chars := len(output.adapter or "") + len(output.error or "")) > MAX_CHARS:
                raise FrameError(f"an output's texts have {num_chars} characters, at most {MAX_CHARS}")
            left_of[output.request_id] = left
            if output.finish is not None:
                self.forget((output.request_id,))

    def _check_observations(self, seen: Observations) -> None:
        self._check_names((*seen.ttft_s, *seen.inter_token_s, *(one.adapter for one in seen.finished)))
        for what in ("queue_s", "device_loads_s", "host_loads_s"):
            _check_range(what, getattr(seen, what), MAX_SECONDS)
        for times in seen.ttft_s.values():
            _check_range("ttft_s", times, MAX_SECONDS)
        for times in seen.inter_token_s.values():
            _check_range("inter_token_s", times, MAX_SECONDS)
        _check_range("step_tokens", seen.step_tokens, MAX_COUNT)
        _check_range("num_failed_loads", (seen.num_failed_loads,), MAX_COUNT)
        if len(seen.finished) > MAX_ENTRIES:
            raise FrameError(f"finished has {len(seen.finished)} values, at most {MAX_ENTRIES}")
        for one in seen.finished:
            _check_known("reason", one.reason, REASONS)
            if one.tenant not in self._tenants:
                raise FrameError("it tells the usage of a tenant that it had no request of")
            seconds = (one.e2e_s, one.prefill_s or 0.0, one.decode_s or 0.0, one.engine_s, one.load_s)
            _check_range("seconds of a request", seconds, MAX_SECONDS)
            counts = (one.num_prompt_tokens, one.num_output_tokens, one.num_cached_tokens, one.max_tokens)
            _check_range("tokens of a request", counts, MAX_COUNT)
            _check_range("num_preemptions", (one.num_preemptions,), MAX_COUNT)
        if seen.moves:  # thousands are kept for the live page
            seen.moves = [structs.replace(one, error=one.error[:MAX_NOTE_CHARS]) for one in seen.moves[:MAX_PARTS]]
            _check_all("moves", seen.moves)
            _check_range("took_s", [one.took_s for one in seen.moves], MAX_SECONDS)

    def _check_names(self, names: Collection[str]) -> None:
        if not self.names.issuperset(names):
            other = min(set(names) - self.names)
            raise FrameError(f"it reports on adapter {other[:100]!r}, which is not its own")


def _message_bytes(one: Request) -> int:
    """Return the most that a request takes of a message, with the log-probabilities that it asks for."""
    sampling = one.sampling
    num = TOKENS_AT_ONCE * (1 + (len(sampling.logprob_token_ids) or sampling.logprobs or 0))
    if sampling.prompt_logprobs is not None:
        num += len(one.prompt) * (1 + sampling.prompt_logprobs)
    return REQUEST_BYTES + LOGPROB_BYTES * num


def _start(report: StartReport) -> StartReport:
    """Return the report of a start, with notes of a bounded length."""
    for stage in report.took_s:
        _check_known("stage", stage, STAGES)
    _check_range("took_s", report.took_s.values(), MAX_SECONDS)
    names = [one.name for one in report.measures]
    if len(names) > len({*names}) or not MEASURES.issuperset(names):
        raise FrameError(f"its {len(names)} measures are not some of {len(MEASURES)} known ones")
    return StartReport(
        took_s=report.took_s,
        measures=tuple(Measure(one.name, one.is_on, one.note[:MAX_NOTE_CHARS]) for one in report.measures),
    )


def _check_fault(fault: Fault | None) -> None:
    """Check an error of a function, which is logged, and told to its callers."""
    if fault is None:
        return
    texts = (fault.kind, fault.message, fault.param or "", fault.adapter, fault.reason)
    if (num_chars := sum(map(len, texts))) > MAX_FAULT_CHARS:
        raise FrameError(f"an error has {num_chars} characters, at most {MAX_FAULT_CHARS}")
    if not math.isfinite(fault.retry_after_s + fault.every_s):
        raise FrameError("an error's times to try again are not finite")
    if not 400 <= fault.status < 600:
        raise FrameError(f"an error has the status {fault.status}, expected 400 to 599")


def _check_known(what: str, text: str, known: Collection[str]) -> None:
    if text not in known:
        raise FrameError(f"{what} is {text[:100]!r}, expected one of {', '.join(sorted(known))}")


def _check_range(what: str, values: Collection[float], most: float) -> None:
    """Check that times or counts are from 0 to ``most``, which a NaN is not."""
    if len(values) > MAX_ENTRIES:
        raise FrameError(f"{what} has {len(values)} values, at most {MAX_ENTRIES}")
    for one in values:
        if not 0 <= one <= most:
            raise FrameError(f"{what}: {one} is out of range 0..{most:.0f}")


def _check_all(what: str, value: Any) -> None:
    """Check every number and text in a tree of structs and data classes, for metrics and reports."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise FrameError(f"{what} is {value}, expected a finite number")
    elif isinstance(value, int):
        if abs(value) >= 2**62:
            raise FrameError(f"{what} is not within 2^62 of 0")
    elif isinstance(value, str):
        if len(value) > MAX_CHARS:
            raise FrameError(f"{what} has {len(value)} characters, at most {MAX_CHARS}")
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            _check_all(name, getattr(value, name))
    elif is_dataclass(value):
        for field in fields(value):
            _check_all(field.name, getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key, one in value.items():
            _check_all(what, key)
            _check_all(what, one)
    elif isinstance(value, tuple | list):
        if len(value) > MAX_PARTS:
            raise FrameError(f"{what} has {len(value)} values, at most {MAX_PARTS}")
        for one in value:
            _check_all(what, one)


class TimeBudget:
    """Counts the processor time that the messages of a function take, by windows, with and without requests."""

    def __init__(self) -> None:
        self._began_at = float("-inf")
        self._spent_s = [0.0, 0.0]  # without requests, and with

    def spend(self, now: float, took_s: float, *, is_busy: bool) -> float:
        """Count the processor time of messages; return the seconds for which no further ones may be read.

        ``now`` is of any clock that never goes back. A function ``is_busy`` if it had requests when they came.
        """
        if now - self._began_at >= WINDOW_S:
            self._began_at = now
            self._spent_s = [0.0, 0.0]
        self._spent_s[is_busy] += took_s
        share = MAX_BUSY_SHARE if is_busy else MAX_IDLE_SHARE
        spent_s = self._spent_s[is_busy]
        if spent_s <= share * WINDOW_S:
            return 0.0
        return min(MAX_PAUSE_S, max(0.0, spent_s / share - (now - self._began_at)))
