"""Reports of backends, read from their metrics and lists of models under vLLM's, SGLang's and manylora's names.

Text of a backend is not trusted: it is read in pieces as it comes, only lines with known names are parsed, and lines,
names and their number are bounded.

A server reports no single step. Its histograms tell the mean gap between tokens, which is a decode step, and the mean
time of a prompt from its admission to its first token, and its counters tell the prompts' tokens. A poll with tokens is
one observed step, of the load that this router knows there. After about a minute of traffic a backend has a model
of its own (``core/costs/rank_fit.py``), and the router a price in seconds of this backend. Gaps with prompts in them
count as decode steps: on a busy backend decoding is priced a little high.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from manylora.core.costs.online import StepLoad
from manylora.core.costs.rank_fit import RankFit, model_of
from manylora.core.costs.step_model import StepModel
from manylora.core.routing import ReplicaView

__all__ = ["BackendMetrics", "Card", "MetricsReader", "ReportedTimes", "ServerKind", "read_models"]

MAX_LINE_BYTES = 1024 * 1024
MAX_ADAPTERS = 50_000
MAX_SAMPLES = 4 * MAX_ADAPTERS
"""Lines of metrics that are parsed, and objects of a list of models: reading them holds up all other requests."""
MAX_NAME = 512
LEAST_GAPS = 8  # tokens between two polls from which on their mean gap is one step's

_PREFIXES = (b"vllm:", b"sglang:", b"manylora:lora_adapter_loaded")
ANSWERS = (b"vllm:request_success_total", b"sglang:num_requests_total")
ANSWER_TOKENS = (b"vllm:generation_tokens_total", b"sglang:generation_tokens_total")
_NAME = re.compile(rb"[a-z:_]{1,64}")
_LABEL = re.compile(rb'([a-z_]{1,64})="((?:[^"\\\n]|\\.)*)",?')

RUNNING = (b"vllm:num_requests_running", b"sglang:num_running_reqs")
WAITING = (b"vllm:num_requests_waiting", b"sglang:num_queue_reqs")
KV_USAGE = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc", b"sglang:token_usage")
SUMS = {
    b"vllm:inter_token_latency_seconds_sum": "gaps_s",
    b"vllm:inter_token_latency_seconds_count": "num_gaps",
    b"vllm:time_per_output_token_seconds_sum": "gaps_s",
    b"vllm:time_per_output_token_seconds_count": "num_gaps",
    b"sglang:inter_token_latency_seconds_sum": "gaps_s",
    b"sglang:inter_token_latency_seconds_count": "num_gaps",
    b"vllm:request_prefill_time_seconds_sum": "prefills_s",
    b"vllm:request_prefill_time_seconds_count": "num_prefills",
    b"vllm:prompt_tokens_total": "num_prompt_tokens",
    b"vllm:prefix_cache_hits_total": "num_cached_tokens",
}
"""Totals of which the router takes the growth between two polls; one that comes under two names counts twice."""
LORA_INFO = b"vllm:lora_requests_info"
LORA_LOADED = (b"vllm:lora_adapter_loaded", b"manylora:lora_adapter_loaded")
DEVICE_LEVELS = frozenset(("gpu", "device"))


class ServerKind(Enum):
    """The server behind a backend, by the owner of its models."""

    MANYLORA = "manylora"
    VLLM = "vllm"
    SGLANG = "sglang"
    OTHER = "other"


@dataclass(slots=True, kw_only=True)
class BackendMetrics:
    """The part of a backend's metrics that the router reads; ``None`` for figures that it does not report."""

    num_running: int | None = None  # requests in steps, over all engines of the server
    num_waiting: int | None = None  # requests in its queue
    kv_usage: float | None = None  # share of KV memory in use, 0 to 1, of its fullest engine
    on_device: set[str] | None = None  # adapters on the device
    # Adapters with requests running or waiting, by the latest ``lora_requests_info``.
    in_use: frozenset[str] = frozenset()
    ranks: dict[str, int] = field(default_factory=dict)  # rank by adapter, where reported
    num_answers: int = 0  # requests that have ended, so far
    num_answer_tokens: int = 0  # tokens of answers, so far
    gaps_s: float = 0.0  # times between tokens, added up, in seconds
    num_gaps: float = 0.0  # their number
    prefills_s: float = 0.0  # times from admission to the first token, added up, in seconds
    num_prefills: float = 0.0  # their number
    num_prompt_tokens: float = 0.0  # tokens of prompts, so far
    num_cached_tokens: float = 0.0  # of these, the tokens that the prefix cache held

    @property
    def num_tokens(self) -> float:
        """Tokens so far; their growth is a sign of life. 0 where they are not reported."""
        return self.num_prompt_tokens + self.num_answer_tokens

    @property
    def num_requests(self) -> int | None:
        """Requests that run or wait, of all clients."""
        if self.num_running is None and self.num_waiting is None:
            return None
        return (self.num_running or 0) + (self.num_waiting or 0)


class MetricsReader:
    """Reads Prometheus text piece by piece, each in time linear in its length."""

    def __init__(self) -> None:
        self._metrics = BackendMetrics()
        self._rest = b""
        self._info_at = -math.inf
        self._num_samples = 0

    def feed(self, piece: bytes) -> None:
        """Read the lines that a piece completes."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest = b"#"  # the remainder of the line reads as a comment
        for line in lines:
            if line.startswith(_PREFIXES) and self._num_samples < MAX_SAMPLES:
                self._num_samples += 1
                self._read_line(line)

    def result(self) -> BackendMetrics:
        """Return the figures; the last line may have no line break."""
        self.feed(b"\n")
        return self._metrics

    def _read_line(self, line: bytes) -> None:
        metrics, match = self._metrics, _NAME.match(line)
        name = match[0] if match is not None else b""
        if name in RUNNING:
            metrics.num_running = _plus(metrics.num_running, _value(line))
        elif name in WAITING:
            metrics.num_waiting = _plus(metrics.num_waiting, _value(line))
        elif name in ANSWER_TOKENS:
            metrics.num_answer_tokens = _total(metrics.num_answer_tokens, _value(line))
        elif name in SUMS:
            setattr(metrics, SUMS[name], getattr(metrics, SUMS[name]) + (_value(line) or 0.0))
        elif name in ANSWERS:
            metrics.num_answers = _total(metrics.num_answers, _value(line))
        elif name in KV_USAGE:
            value = _value(line)
            if value is not None and 0 <= value <= 1:
                metrics.kv_usage = max(metrics.kv_usage or 0.0, value)
        elif name == LORA_INFO:
            self._read_adapters_in_use(line)
        elif name in LORA_LOADED:
            self._read_loaded_adapter(line)

    def _read_adapters_in_use(self, line: bytes) -> None:
        # vLLM keeps a series for every combination of labels that there was; the value is its time.
        value, labels = _value(line), _labels(line)
        if value is None or value < self._info_at:
            return
        self._info_at = value
        names = f"{labels.get('running_lora_adapters', '')},{labels.get('waiting_lora_adapters', '')}".split(",")
        self._metrics.in_use = frozenset(
            name.strip() for name in names[:MAX_ADAPTERS] if 0 < len(name.strip()) <= MAX_NAME
        )

    def _read_loaded_adapter(self, line: bytes) -> None:
        labels, metrics = _labels(line), self._metrics
        metrics.on_device = set() if metrics.on_device is None else metrics.on_device
        name, rank = labels.get("adapter_name", ""), labels.get("rank", "")
        if not 0 < len(name) <= MAX_NAME or len(metrics.ranks) >= MAX_ADAPTERS or not _value(line):
            return
        if labels.get("level", "") in DEVICE_LEVELS:
            metrics.on_device.add(name)
        metrics.ranks[name] = int(rank) if rank.isascii() and rank.isdigit() and len(rank) < 6 else 0


class ReportedTimes:
    """Learns the step times of one backend from its reports."""

    def __init__(self) -> None:
        self._fit = RankFit()
        self._before = BackendMetrics()

    def learn(self, metrics: BackendMetrics, view: ReplicaView) -> StepModel | None:
        """Learn from a report and the requests there; return the model, ``None`` before there were enough reports."""
        before, self._before = self._before, metrics
        load = max(1, metrics.num_running or view.load)
        context = round(view.times().context)
        num_adapted = min(load, view.num_adapted)
        num_gaps, gaps_s = metrics.num_gaps - before.num_gaps, metrics.gaps_s - before.gaps_s
        if num_gaps >= LEAST_GAPS and gaps_s > 0 and before.num_gaps:
            step = StepLoad(load, load, context, num_adapted, view.sum_rank, view.max_rank)
            self._fit.observe(step, gaps_s / num_gaps)
        num_prompts, prompts_s = metrics.num_prefills - before.num_prefills, metrics.prefills_s - before.prefills_s
        if num_prompts > 0 and prompts_s > 0 and before.num_prefills:
            prompt = (metrics.num_prompt_tokens - before.num_prompt_tokens) / num_prompts
            run = round(prompt - (metrics.num_cached_tokens - before.num_cached_tokens) / num_prompts)
            if 0 < run <= prompt + 1:
                rank = view.sum_rank / max(1, view.num_requests)
                adapted = round(run * num_adapted / load)
                step = StepLoad(
                    load + run, load, context + round(prompt), adapted, round(rank * (load + run)), view.max_rank
                )
                self._fit.observe(step, prompts_s / num_prompts)
        return model_of(self._fit.fits())


class Card(msgspec.Struct, frozen=True):
    """An entry of ``/v1/models``."""

    id: str  # the model's name
    root: str | None = None  # where its weights are; for an adapter, the path that it can be loaded from
    parent: str | None = None  # the base of an adapter; ``None`` for a base
    owned_by: str = ""  # the server's software


class _Cards(msgspec.Struct):
    data: list[Card]


class _Models(msgspec.Struct):
    data: list[msgspec.Raw]


_cards = msgspec.json.Decoder(_Cards)
_models = msgspec.json.Decoder(_Models)


def read_models(body: bytes) -> tuple[dict[str, Card], dict[str, msgspec.Raw], ServerKind]:
    """Read an answer of ``/v1/models``.

    Return the cards by name, the same as they came, and the kind of the server. ``ValueError`` if the body is not such
    an answer, or has too many models or too long names.
    """
    try:
        if body.count(b"{") > MAX_SAMPLES:  # before an object is made of each
            raise ValueError(f"more than {MAX_SAMPLES} objects, expected {MAX_ADAPTERS} models at most")
        cards = _cards.decode(body).data  # first: its items are objects, so that their number is bounded
        if len(cards) > MAX_ADAPTERS:
            raise ValueError(f"{len(cards)} models, expected {MAX_ADAPTERS} at most")
        raw = _models.decode(body).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no list of models: {error}") from None
    if any(not 0 < len(card.id) <= MAX_NAME for card in cards):
        raise ValueError(f"a model's name is empty or longer than {MAX_NAME} characters")
    owner = cards[0].owned_by if cards else ""
    kind = next((kind for kind in ServerKind if kind.value == owner), ServerKind.OTHER)
    return {card.id: card for card in cards}, {card.id: one for card, one in zip(cards, raw, strict=True)}, kind


def _value(line: bytes) -> float | None:
    """Return the value of a sample, ``None`` for no number; a timestamp behind it is left out."""
    parts = line[line.rfind(b"}") + 1 :].split() if b"}" in line else line.split()[1:]
    try:
        value = float(parts[0])
    except (IndexError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _plus(total: int | None, value: float | None) -> int | None:
    """Return a total with one more sample; a sample that is no count is left out."""
    if value is None or not 0 <= value < 1e9:
        return total
    return (total or 0) + int(value)


def _total(total: int, value: float | None) -> int:
    """Return a counter with one more sample; a sample that is no count is left out."""
    return total if value is None or not 0 <= value < 1e15 else total + int(value)


def _labels(line: bytes) -> dict[str, str]:
    start = line.find(b"{") + 1
    labels: dict[str, str] = {}
    while start and (match := _LABEL.match(line, start)) is not None:
        text = match[2].decode(errors="replace")
        if "\\" in text:
            text = re.sub(r"\\(.)", lambda escaped: "\n" if escaped[1] == "n" else escaped[1], text)
        labels[match[1].decode()] = text
        start = match.end()
    return labels
