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

from manylora.hosting.functions.messages import FrameError
from manylora.hosting.protocol import Message, Observations, Ready, Reply, StartReport, Turn
from manylora.hosting.snapshot import STATES
from manylora.isolation import MEASURES, Measure
from manylora.types import FinishReason

__all__ = ["MessageCheck"]

MAX_SECONDS = 1e9
MAX_COUNT = 2**31
MAX_CHARS = 4096
MAX_NOTE_CHARS = 1000

STAGES = frozenset({"fork", "confine", "map", "build"})
REASONS = frozenset(reason.value for reason in FinishReason)


class MessageCheck:
    """Checks the messages of one process.

    Args:
        names: Names that it may report on; more may be added.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = set(names)
        self._has_started = False

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
            self._check_observations(message.observations)
        elif isinstance(message, Reply):
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


def _expect(is_true: bool, otherwise: str) -> None:
    if not is_true:
        raise FrameError(otherwise)


def _check_times(times: list[float]) -> None:
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
