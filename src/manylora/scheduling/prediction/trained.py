"""A trained predictor: boosted trees on a few features, read from JSON and walked in plain Python.

Training wants scikit-learn (``training.py``); serving does not. The file is data, not a pickle, so a model from
elsewhere can be loaded without running anything it brings. Two hundred trees of depth three are some 20 us.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

from manylora.errors import ConfigError
from manylora.options import option
from manylora.scheduling.prediction.features import FEATURES, AdapterMeans, request_features
from manylora.scheduling.prediction.port import LengthEstimate, LengthPredictor, bounded_estimate
from manylora.scheduling.sequence import Sequence

__all__ = ["FORMAT", "BoostedTrees", "Node", "TrainedPredictor", "load_trained"]

FORMAT = "manylora-length-predictor-1"

Node = tuple[int, float, int, int, float]
"""(feature, threshold, index if at most the threshold, index if above, value); a leaf has feature -1."""


@dataclass(frozen=True, slots=True)
class BoostedTrees:
    """A sum of trees over a base value; yields the logarithm of a length.

    Args:
        base: What it starts from.
        rate: What each tree's value is multiplied by.
        trees: Their nodes; the first of each is its root.
    """

    base: float
    rate: float
    trees: tuple[tuple[Node, ...], ...]

    def evaluate(self, features: Seq[float]) -> float:
        """Return the value for one request."""
        total = 0.0
        for tree in self.trees:
            feature, threshold, low, high, value = tree[0]
            while feature >= 0:
                feature, threshold, low, high, value = tree[low if features[feature] <= threshold else high]
            total += value
        return self.base + self.rate * total


class TrainedPredictor:
    """Asks the trees while the answer is no longer than they said, and the fallback from there on.

    Args:
        p50: Trees for the median.
        p90: Trees for the ninth decile.
        means: What adapters' answers were like in the log; goes on learning.
        fallback: Learns beside it.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Options:
        """Where it is."""

        file: str = option(
            panel="Scheduling",
            flag="--predictor-file",
            metavar="FILE",
            help="Under trained: the predictor that [bold]manylora predictor train[/bold] wrote.",
        )

    def __init__(self, p50: BoostedTrees, p90: BoostedTrees, means: AdapterMeans, fallback: LengthPredictor) -> None:
        self._p50 = p50
        self._p90 = p90
        self._means = means
        self._fallback = fallback

    def predict(self, sequence: Sequence) -> LengthEstimate:
        """Return the trees' estimate; past its p50 that is p90, past its p90 the fallback's."""
        features = self._features(sequence)
        p50 = exp(self._p50.evaluate(features))
        p90 = max(p50, exp(self._p90.evaluate(features)))
        generated = sequence.num_output_tokens
        if generated >= p90:
            return self._fallback.predict(sequence)
        return bounded_estimate(sequence, p50 if generated < p50 else p90, p90)

    def observe(self, sequence: Sequence) -> None:
        """Learn what this adapter's answers are like."""
        self._means.add(sequence.name, sequence.num_output_tokens)
        self._fallback.observe(sequence)

    def _features(self, sequence: Sequence) -> list[float]:
        sampling = sequence.request.sampling
        return request_features(
            prompt_tokens=sequence.num_prompt_tokens,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            has_schema=sampling.json_schema is not None,
            adapter=sequence.name,
            means=self._means,
        )


def load_trained(path: str | Path, fallback: LengthPredictor) -> TrainedPredictor:
    """Read what ``manylora predictor train`` wrote.

    Raises:
        ConfigError: There is no such file, or it is not one of ours.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != FORMAT or tuple(content["features"]) != FEATURES:
            raise ConfigError(f"{path} is of another version: train it again with `manylora predictor train`")
        adapters = {name: (float(total), int(count)) for name, (total, count) in content["adapters"].items()}
        means = AdapterMeans(float(content["mean"]), float(content["count"]), adapters)
        return TrainedPredictor(_trees(content["p50"]), _trees(content["p90"]), means, fallback)
    except OSError as error:
        raise ConfigError(f"Cannot read the predictor {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a length predictor: {error!r}") from None


def _trees(content: Any) -> BoostedTrees:
    trees = tuple(
        tuple((int(f), float(t), int(low), int(high), float(value)) for f, t, low, high, value in tree)
        for tree in content["trees"]
    )
    for tree in trees:
        for index, (feature, _, low, high, _) in enumerate(tree):
            # Children come after their parent, so that walking a tree always ends.
            is_leaf = feature == -1
            if not (is_leaf or (0 <= feature < len(FEATURES) and index < low < len(tree) and index < high < len(tree))):
                raise ValueError(f"node {index} of a tree leads nowhere")
    return BoostedTrees(float(content["base"]), float(content["rate"]), trees)
