"""Checks of the messages of a function, which is not trusted: what passes can be counted, summed and reported.

A message of the right types may still carry a name of another function, a NaN that no sum recovers from, or a text that
the controller refuses. The first that does ends the function.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec

from manylora.core.isolation import MEASURES, Measure
from manylora.core.types import MAX_LOGPROBS, FinishReason, Output, Request
from manylora.functions.processes.frames import FrameError
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

__all__ = ["MessageCheck"]

MAX_SECONDS = 1e9
MAX_COUNT = 2**31
MAX_CHARS = 4096
MAX_ENTRIES = 2**17
"""Most values of one kind in a message: more than the requests that a function may have."""

MAX_NOTE_CHARS = 1000

STAGES = frozenset({"fork", "confine", "map", "build"})
MAX_FAULT_CHARS = 2**16
MAX_ANSWER = 2**20
"""Tokens of an answer whose request sets no limit."""

NUM_EMPTY = 8
"""Outputs of a request that have no token: its prompt's part, its end."""

REASONS = frozenset(reason.value for reason in FinishReason)


class MessageCheck:
    """Checks the messages of one process.

    Args:
        names: Names that it may report on; more may be added.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = set(names)
        self._has_started = False
        self._left: dict[str, int] = {}  # tokens that each request may still get
        self._prompts: set[str] = set()  # requests that may get the log-probabilities of their prompts
        self._calls: dict[int, tuple[str, ...]] = {}  # requests by call, before its reply

    def expect(self, call: int, requests: Iterable[Request]) -> None:
        """Expect the answers of requests, each as long as it asked for."""
        for one in requests:
            self._left[one.request_id] = NUM_EMPTY + (one.sampling.max_tokens or one.default_max_tokens or MAX_ANSWER)
            if one.sampling.prompt_logprobs is not None:
                self._prompts.add(one.request_id)
        self._calls[call] = tuple(one.request_id for one in requests)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Expect nothing more of requests that were refused, or cancelled."""
        for request_id in request_ids:
            self._left.pop(request_id, None)
            self._prompts.discard(request_id)

    def checked(self, message: Message) -> Message:
        """Return a message without the parts that a function has no say in.

        Raises:
            FrameError: A part of it cannot be true.
        """
        if isinstance(message, Ready):
            _expect(not self._has_started, "it starts twice")
            self._has_started = True
            _check_all(message.info)
            return msgspec.structs.replace(
                message, base=None, start=None if message.start is None else _start(message.start)
            )
        if isinstance(message, Turn):
            self._check_outputs(message.outputs)
            self._check_observations(message.observations)
        elif isinstance(message, StartRefused):
            _check_fault(message.fault)
        elif isinstance(message, Reply):
            for fault in (message.fault, *message.refused.values()):
                _check_fault(fault)
            asked = self._calls.pop(message.call, ())
            self.forget(message.refused if message.fault is None else asked)
            named = {*message.registered, *(one.name for one in message.statuses)}
            if message.stats is not None:
                stats = message.stats
                named |= {*stats.running_adapters, *stats.waiting_adapters, *stats.resident_adapters}
                _check_all(stats)
            _expect(named <= self.names, "it reports on adapters of others")
            for status in message.statuses:
                _expect(status.state in STATES, "an adapter has no known state")
                _check_all(status)
            if message.observations is not None:
                self._check_observations(message.observations)
        return message

    def _check_outputs(self, outputs: Iterable[Output]) -> None:
        """Check that outputs are no more than was asked for: a client that does not read has them waiting here."""
        left_of = self._left
        for output in outputs:
            left = left_of.get(output.request_id)
            if left is None:
                continue  # dropped: it was cancelled, or is no request of this function
            tokens = output.tokens
            left -= len(tokens) or 1
            _expect(left >= 0, "it answers more than was asked for")
            for token in tokens:
                _expect(len(token.top) <= MAX_LOGPROBS, "it reports more log-probabilities than can be asked for")
            if output.prompt_logprobs is not None:
                _expect(output.request_id in self._prompts, "it reports on a prompt unasked")
                self._prompts.discard(output.request_id)
            _expect(
                len(output.adapter or "") + len(output.error or "") <= MAX_CHARS, "it reports a text that is too long"
            )
            left_of[output.request_id] = left
            if output.finish is not None:
                self.forget((output.request_id,))

    def _check_observations(self, seen: Observations) -> None:
        named = {*seen.ttft_s, *seen.inter_token_s, *(one.adapter for one in seen.finished)}
        _expect(named <= self.names, "it reports on adapters of others")
        for times in (
            seen.queue_s,
            *seen.ttft_s.values(),
            *seen.inter_token_s.values(),
            seen.device_loads_s,
            seen.host_loads_s,
        ):
            _check_times(times)
        _expect(max(len(seen.finished), len(seen.step_tokens)) <= MAX_ENTRIES, "it reports more than there can be")
        if seen.step_tokens:
            _check_counts(seen.step_tokens)
        _check_counts((seen.num_failed_loads,))
        for one in seen.finished:
            _expect(one.reason in REASONS, "a request has no known reason to end")
            _check_times([one.e2e_s, one.prefill_s or 0.0, one.decode_s or 0.0])
            _check_counts((one.num_prompt_tokens, one.num_output_tokens, one.num_cached_tokens, one.max_tokens))


def _start(report: StartReport) -> StartReport:
    """Return the report of a start, with notes of a bounded length."""
    _expect(report.took_s.keys() <= STAGES, "it started in unknown stages")
    _check_times(list(report.took_s.values()))
    names = [one.name for one in report.measures]
    _expect(len(names) == len({*names}) and MEASURES.issuperset(names), "it reports unknown measures")
    return StartReport(
        took_s=report.took_s,
        measures=tuple(Measure(one.name, one.is_on, one.note[:MAX_NOTE_CHARS]) for one in report.measures),
    )


def _check_fault(fault: Fault | None) -> None:
    """Check an error of a function, which is logged, and told to its callers."""
    if fault is not None:
        texts = (fault.kind, fault.message, fault.param or "", fault.adapter, fault.reason)
        _expect(sum(map(len, texts)) <= MAX_FAULT_CHARS, "it reports an error that is too long")
        _expect(math.isfinite(fault.retry_after_s + fault.every_s), "it reports a number that is not finite")
        _expect(400 <= fault.status < 600, "it reports an error of no known status")


def _expect(is_true: bool, otherwise: str) -> None:
    if not is_true:
        raise FrameError(otherwise)


def _check_times(times: list[float]) -> None:
    _expect(len(times) <= MAX_ENTRIES, "it reports more than there can be")
    # A sum, because ``min`` and ``max`` may pass over a NaN.
    _expect(not times or (min(times) >= 0.0 and sum(times) <= MAX_SECONDS), "it reports times that cannot be")


def _check_counts(counts: Iterable[int]) -> None:
    _expect(all(0 <= count < MAX_COUNT for count in counts), "it reports counts that cannot be")


def _check_all(value: Any) -> None:
    """Check every number and text in a tree of structs and data classes, for metrics and reports."""
    if isinstance(value, float):
        _expect(math.isfinite(value), "it reports a number that is not finite")
    elif isinstance(value, int):
        _expect(abs(value) < 2**62, "it reports a number that is too large")
    elif isinstance(value, str):
        _expect(len(value) <= MAX_CHARS, "it reports a text that is too long")
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            _check_all(getattr(value, name))
    elif is_dataclass(value):
        for field in fields(value):
            _check_all(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key, one in value.items():
            _check_all(key)
            _check_all(one)
    elif isinstance(value, tuple | list):
        for one in value:
            _check_all(one)
