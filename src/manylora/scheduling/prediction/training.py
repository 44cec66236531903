"""Train a length predictor on a request log, and say honestly whether it is better than the default.

The log is taken in order of time: the first four fifths train, the last fifth tests, and the adapters' means at
each request are those of the requests before it, in training as in service. Both predictors go on learning
through the test as they would while serving.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import median
from typing import Any

from manylora.errors import ConfigError
from manylora.memory import BlockTable
from manylora.scheduling.prediction.features import FEATURES, AdapterMeans, request_features
from manylora.scheduling.prediction.port import LengthPredictor
from manylora.scheduling.prediction.quantile import QuantilePredictor
from manylora.scheduling.prediction.request_log import RequestRecord
from manylora.scheduling.prediction.trained import FORMAT, load_trained
from manylora.scheduling.sequence import Sequence
from manylora.types import Request, SamplingParams

__all__ = ["Accuracy", "measure", "train"]

MIN_RECORDS = 100
NUM_TREES, DEPTH, RATE = 100, 3, 0.1
TEST_SHARE = 0.2
MAX_PAIRS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """How good a predictor's estimates were, on arrival.

    Args:
        num_requests: Requests it was tried on.
        relative_error: Median of ``|p50 - truth| / truth``.
        within_quarter: Share of p50 within a quarter of the truth.
        ordered: Share of pairs of requests put in the right order: what shortest-job-first needs.
        covered: Share of answers no longer than p90; 0.9 is right.
    """

    num_requests: int
    relative_error: float
    within_quarter: float
    ordered: float
    covered: float


def train(records: Seq[RequestRecord], out: str | Path) -> tuple[Accuracy, Accuracy]:
    """Train on a log and write the predictor.

    Returns:
        The accuracy of the trained predictor and of the default, on the last fifth of the log.

    Raises:
        ConfigError: The log is too short, or scikit-learn is not installed.
    """
    if len(records) < MIN_RECORDS:
        raise ConfigError(f"Got a log of {len(records)} finished requests, expected at least {MIN_RECORDS}")
    records = sorted(records, key=lambda record: record.arrived_at)
    num_train = int(len(records) * (1 - TEST_SHARE))
    means = AdapterMeans()
    rows, targets = [], []
    for record in records[:num_train]:
        rows.append(_features(record, means))
        targets.append(log(max(1, record.output_tokens)))
        means.add(record.adapter, record.output_tokens)
    content = {
        "format": FORMAT,
        "features": FEATURES,
        "mean": means.total / means.count,
        "count": means.count,
        "adapters": dict(means.by_name),
        "p50": _fit(rows, targets, 0.5),
        "p90": _fit(rows, targets, 0.9),
    }
    Path(out).write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    default = QuantilePredictor()
    trained = load_trained(out, QuantilePredictor())
    for record in records[:num_train]:
        default.observe(_as_sequence(record, is_done=True))
    return measure(trained, records[num_train:]), measure(default, records[num_train:])


def measure(predictor: LengthPredictor, records: Seq[RequestRecord]) -> Accuracy:
    """Let a predictor estimate each request on arrival, and learn from it afterwards."""
    truths, guesses, num_covered = [], [], 0
    for record in records:
        estimate = predictor.predict(_as_sequence(record, is_done=False))
        predictor.observe(_as_sequence(record, is_done=True))
        truths.append(record.output_tokens)
        guesses.append(estimate.p50)
        num_covered += record.output_tokens <= estimate.p90
    errors = [abs(guess - truth) / max(1, truth) for guess, truth in zip(guesses, truths, strict=True)]
    # Every request against one half the log away: as many pairs as requests, each request twice.
    half = len(truths) // 2
    pairs = [(index, (index + half) % len(truths)) for index in range(min(len(truths), MAX_PAIRS))]
    unequal = [(a, b) for a, b in pairs if truths[a] != truths[b]]
    in_order = sum(
        0.5 if guesses[a] == guesses[b] else float((guesses[a] < guesses[b]) == (truths[a] < truths[b]))
        for a, b in unequal
    )
    return Accuracy(
        num_requests=len(records),
        relative_error=median(errors),
        within_quarter=sum(error <= 0.25 for error in errors) / len(errors),
        ordered=in_order / max(1, len(unequal)),
        covered=num_covered / len(records),
    )


def _features(record: RequestRecord, means: AdapterMeans) -> list[float]:
    return request_features(
        prompt_tokens=record.prompt_tokens,
        max_tokens=record.max_tokens,
        temperature=record.temperature,
        has_schema=record.has_schema,
        adapter=record.adapter,
        means=means,
    )


def _as_sequence(record: RequestRecord, *, is_done: bool) -> Sequence:
    """Return the sequence that the record was, at its arrival or at its end."""
    sequence = Sequence(
        seq_id=0,
        request=Request(
            request_id="",
            prompt=(0,) * record.prompt_tokens,
            sampling=SamplingParams(
                max_tokens=record.max_tokens,
                temperature=record.temperature,
                json_schema="{}" if record.has_schema else None,
            ),
        ),
        version=None,
        name=record.adapter,
        table=BlockTable(b"", 16),
        max_tokens=record.limit,
        stop_token_ids=frozenset(),
        seed=0,
        arrived_at=record.arrived_at,
    )
    for _ in range(record.output_tokens if is_done else 0):
        sequence.launched(sequence.num_to_run)
        sequence.took_token(0, record.arrived_at)
    return sequence


def _fit(rows: list[list[float]], targets: list[float], share: float) -> dict[str, Any]:
    """Fit trees for one quantile and take them out of scikit-learn."""
    try:
        from sklearn.ensemble import GradientBoostingRegressor
    except ImportError:
        raise ConfigError("Training needs scikit-learn: pip install 'manylora[predictor]'") from None
    model = GradientBoostingRegressor(
        loss="quantile", alpha=share, n_estimators=NUM_TREES, max_depth=DEPTH, learning_rate=RATE, random_state=0
    )
    model.fit(rows, targets)
    trees = []
    for estimator in model.estimators_[:, 0]:
        tree = estimator.tree_
        trees.append(
            [
                # scikit-learn marks leaves with -2 and has no children there.
                (int(max(feature, -1)), float(threshold), int(low), int(high), float(value))
                for feature, threshold, low, high, value in zip(
                    tree.feature,
                    tree.threshold,
                    tree.children_left,
                    tree.children_right,
                    tree.value[:, 0, 0],
                    strict=True,
                )
            ]
        )
    return {"base": float(model.init_.constant_.ravel()[0]), "rate": RATE, "trees": trees}
