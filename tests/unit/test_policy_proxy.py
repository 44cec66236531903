"""The proxy predictor, on tiny checkpoints made here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import sequence
from text_tokenizers import make_huggingface
from transformers import BertConfig, BertForSequenceClassification

from manylora.errors import ConfigError
from manylora.execution.proxy_predictor import load_proxy
from manylora.scheduling.prediction import OraclePredictor


def checkpoint(folder: Path, labels: list[str], bias: list[float]) -> Path:
    """Write a classifier that always says the same, whatever the text."""
    config = BertConfig(
        vocab_size=400,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=64,
        num_labels=len(labels),
        id2label=dict(enumerate(labels)),
        label2id={label: index for index, label in enumerate(labels)},
    )
    model = BertForSequenceClassification(config)
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor(bias))
    model.save_pretrained(folder)
    tokenizer = make_huggingface("byte_level")
    tokenizer.model_max_length = 64
    tokenizer.save_pretrained(folder)
    return folder


def test_classes_are_lengths(tmp_path):
    # Shares of about 0.2, 0.6 and 0.2: the median lies in the second class, the ninth decile in the third.
    logits = [0.0, 1.1, 0.0]
    predictor = load_proxy(checkpoint(tmp_path, ["0-64", "64-256", "256-1024"], logits), OraclePredictor())
    one = sequence(0, max_tokens=2000)
    assert predictor.predict(one).p50 == 2000  # nobody asked the proxy: the fallback's
    predictor.prepare("r0", "how long will this be? " * 50)
    assert (predictor.predict(one).p50, predictor.predict(one).p90) == (256, 1024)
    one.tokens.extend([0] * 300)
    assert predictor.predict(one).p50 == 1024
    one.tokens.extend([0] * 800)
    assert predictor.predict(one).p50 == 2000
    predictor.observe(one)
    assert not predictor._prepared


def test_one_output_is_a_regression(tmp_path):
    predictor = load_proxy(checkpoint(tmp_path, ["tokens"], [100.0]), OraclePredictor())
    predictor.prepare("r0", "short")
    assert predictor.predict(sequence(0, max_tokens=2000)).p50 == 100
    assert predictor.predict(sequence(0, max_tokens=2000)).p90 == 180


def test_checkpoints_that_are_no_length_classifier_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="expected rising lengths"):
        load_proxy(checkpoint(tmp_path / "a", ["LABEL_0", "LABEL_1"], [0.0, 0.0]), OraclePredictor())
    with pytest.raises(ConfigError, match="expected rising lengths"):
        load_proxy(checkpoint(tmp_path / "b", ["256", "64"], [0.0, 0.0]), OraclePredictor())
    with pytest.raises(ConfigError, match="Cannot load"):
        load_proxy(tmp_path / "nothing", OraclePredictor())
