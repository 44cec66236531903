"""A proxy model for answer lengths: any local sequence-classification checkpoint, asked about the prompt's text.

It takes milliseconds, which the engine's thread does not have. So it is asked beforehand, by whoever has the text,
on a thread of its own choosing (`prepare`); the engine finds the answer by request id, and where there is none
(yet) it asks the fallback.

A checkpoint with one output is taken for a regression of the length in tokens; one with several for a choice among
classes, whose names are the lengths they reach up to (``"128"`` or ``"64-128"``).

Source: uServe predicts answer lengths with a BERT proxy, and Chameleon (section 4.3.1) takes its predictor over.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from manylora.errors import ConfigError
from manylora.scheduling.prediction.port import LengthEstimate, LengthPredictor, bounded_estimate
from manylora.scheduling.sequence import Sequence

__all__ = ["ProxyPredictor", "load_proxy"]

REGRESSION_SPREAD = 1.8
"""What p90 is to p50 for a regression, which says nothing of it: the ratio within a class of task in chat traces."""
MAX_PREPARED = 10_000


class ProxyPredictor:
    """Looks up what the proxy said of a request's prompt.

    Args:
        model: A classification model on its device, in evaluation mode.
        tokenizer: The model's own.
        bounds: Length each class reaches up to, rising; ``None`` for a regression.
        fallback: For requests it was not asked about, and those that outlived its estimate; goes on learning.
    """

    def __init__(self, model: Any, tokenizer: Any, bounds: tuple[float, ...] | None, fallback: LengthPredictor) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._bounds = bounds
        self._fallback = fallback
        self._prepared: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self, request_id: str, text: str) -> None:
        """Ask the proxy about a prompt, before its request is posted; blocks for a forward pass, on any thread."""
        inputs = self._tokenizer(text, truncation=True, return_tensors="pt").to(self._model.device)
        with torch.inference_mode():
            logits = self._model(**inputs).logits[0].float()
        if self._bounds is None:
            p50 = float(logits[0])
            answer = (p50, p50 * REGRESSION_SPREAD)
        else:
            shares = list(accumulate(logits.softmax(0).tolist()))
            p50, p90 = (next((i for i, s in enumerate(shares) if s >= share), len(shares) - 1) for share in (0.5, 0.9))
            answer = (self._bounds[p50], self._bounds[p90])
        with self._lock:
            self._prepared[request_id] = answer
            if len(self._prepared) > MAX_PREPARED:
                self._prepared.popitem(last=False)

    def predict(self, sequence: Sequence) -> LengthEstimate:
        """Return what the proxy said; past its p50 that is its p90, past that the fallback's."""
        prepared = self._prepared.get(sequence.request.request_id)
        generated = sequence.num_output_tokens
        if prepared is None or generated >= prepared[1]:
            return self._fallback.predict(sequence)
        p50, p90 = prepared
        return bounded_estimate(sequence, p50 if generated < p50 else p90, p90)

    def observe(self, sequence: Sequence) -> None:
        """Forget what was prepared for it, and let the fallback learn."""
        with self._lock:
            self._prepared.pop(sequence.request.request_id, None)
        self._fallback.observe(sequence)


def load_proxy(path: str | Path, fallback: LengthPredictor, *, device: str = "cpu") -> ProxyPredictor:
    """Load a sequence-classification checkpoint from a folder.

    Raises:
        ConfigError: It cannot be loaded, or its classes' names are no lengths.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        model = AutoModelForSequenceClassification.from_pretrained(path, local_files_only=True).to(device).eval()
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot load the proxy model {path}: {error}") from None
    num_labels = model.config.num_labels
    if num_labels == 1:
        return ProxyPredictor(model, tokenizer, None, fallback)
    names = [str(model.config.id2label[index]) for index in range(num_labels)]
    numbers = [re.search(r"(\d+)\D*$", name) for name in names]
    bounds = tuple(float(number[1]) for number in numbers if number)
    if len(bounds) < num_labels or list(bounds) != sorted(set(bounds)) or any("LABEL_" in name for name in names):
        raise ConfigError(f"Got a proxy model with classes {names}, expected rising lengths such as '64-128'")
    return ProxyPredictor(model, tokenizer, bounds, fallback)
