"""Constrained answers: whatever the model wants, what comes out parses and validates."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_sampler import sequence
from text_tokenizers import MAKERS, make_huggingface

from manylora.errors import RequestError
from manylora.execution.sampling.grammar import MAX_COMPILED, JsonGrammar, check_schema, grammar_available
from manylora.execution.sampling.sampler import Sampler
from manylora.text import Tokenizer
from manylora.types import SamplingParams

pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["the", "fox"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, tuple[Any, Callable[[Any], bool]]] = {
    "person": (
        PERSON,
        lambda v: (
            list(v) == ["name", "age", "tags"]
            and len(v["name"]) <= 6
            and 0 <= v["age"] <= 99
            and len(v["tags"]) <= 2
            and set(v["tags"]) <= {"the", "fox"}
        ),
    ),
    "choice": ({"enum": ["text", 7, None]}, lambda v: v in ("text", 7, None)),
    "number": ({"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3}, lambda v: len(v) == 3),
}
NUM_PADDING = 9  # the model's embedding is larger than the tokenizer


@pytest.fixture(scope="module", params=MAKERS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tokenizer]:
    folder = tmp_path_factory.mktemp(request.param)
    hf = make_huggingface(request.param)
    if request.param == "characters":
        hf.add_tokens([c for c in '{}[]":,0123456789abcdefghijklmnopqrstuvwxyz\\' if c not in hf.get_vocab()])
    hf.save_pretrained(folder)
    return str(folder), Tokenizer.load(folder)


def answer(
    sampler: Sampler, tokenizer: Tokenizer, vocab: int, schema: Any, *, seed: int, forget_every: int = 0
) -> tuple[str, list[int]]:
    """Generate with random logits until the end; ``forget_every`` plays pre-emption."""
    sampling = SamplingParams(json_schema=json.dumps(schema), temperature=0.9)
    rng = torch.Generator().manual_seed(seed)
    generated: list[int] = []
    for step in range(400):
        logits = torch.randn(1, vocab, generator=rng) * 3
        (token,) = sampler.sample(logits, [sequence(sampling, generated=generated, seed=seed, seq_id=seed)])
        generated.append(token.token_id)
        if token.token_id in tokenizer.eos_token_ids:
            sampler.release([seed])
            return tokenizer.decode(generated), generated
        if forget_every and step % forget_every == 0:
            sampler.release([seed])
    raise AssertionError(f"no end: {tokenizer.decode(generated)!r}")


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_logits_give_valid_json(saved: tuple[str, Tokenizer], name: str) -> None:
    source, tokenizer = saved
    vocab = tokenizer.vocab_size + NUM_PADDING
    schema, is_valid = SCHEMAS[name]
    check_schema(json.dumps(schema))
    sampler = Sampler(vocab, tokenizer.eos_token_ids, grammar=JsonGrammar(source, vocab, tokenizer.eos_token_ids))
    for seed in range(2):
        text, tokens = answer(sampler, tokenizer, vocab, schema, seed=seed)
        assert is_valid(json.loads(text)), text
        assert answer(sampler, tokenizer, vocab, schema, seed=seed, forget_every=3)[1] == tokens


def test_rows_without_a_schema_are_left_alone(saved: tuple[str, Tokenizer]) -> None:
    source, tokenizer = saved
    vocab = tokenizer.vocab_size
    sampler = Sampler(vocab, tokenizer.eos_token_ids, grammar=JsonGrammar(source, vocab, tokenizer.eos_token_ids))
    favourite = tokenizer.encode("w", add_special_tokens=False)[-1]
    logits = torch.zeros(2, vocab)
    logits[:, favourite] = 9.0
    free, bound = SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, json_schema='{"enum": [1]}')
    first, second = sampler.sample(logits, [sequence(free), sequence(bound, seq_id=1)])
    assert first.token_id == favourite
    assert tokenizer.decode([second.token_id]).strip() in ("", "1")


def test_a_schema_that_fails_late_ends_its_row(saved: tuple[str, Tokenizer], caplog: pytest.LogCaptureFixture) -> None:
    source, tokenizer = saved
    vocab = tokenizer.vocab_size
    grammar = JsonGrammar(source, vocab, tokenizer.eos_token_ids)
    sampler = Sampler(vocab, tokenizer.eos_token_ids, grammar=grammar)
    unchecked = SamplingParams(json_schema='{"type": "nonsense"}')
    impossible = SamplingParams(json_schema='{"enum": [1]}')  # continues text it would never have allowed
    stray = tokenizer.encode("fox", add_special_tokens=False)
    tokens = sampler.sample(
        torch.zeros(2, vocab), [sequence(unchecked), sequence(impossible, generated=stray, seq_id=1)]
    )
    assert [token.token_id for token in tokens] == list(tokenizer.eos_token_ids) * 2
    assert "grammar_failed" in caplog.text


def test_compiled_schemas_are_bounded(saved: tuple[str, Tokenizer]) -> None:
    source, tokenizer = saved
    grammar = JsonGrammar(source, tokenizer.vocab_size, tokenizer.eos_token_ids)
    for i in range(MAX_COMPILED + 10):
        assert grammar.allowed(i, json.dumps({"enum": [i]}), []).any()
    assert len(grammar._compiled) == MAX_COMPILED


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ("{not json", "key must be a string"),
        ("[]", "object schema"),
        ('{"type": "objec"}', "objec"),
        ('{"type": "string", "not": {"const": "a"}}', "not"),
        ('{"type": "string", "pattern": "(?=x)"}', "regex"),
        ('{"$ref": "http://example.com/x"}', "http://example.com/x"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_bad_schemas_are_refused_early(schema: str, part: str) -> None:
    with pytest.raises(RequestError, match="cannot be followed") as caught:
        check_schema(schema)
    assert part in str(caught.value) and caught.value.param == "json_schema"


def test_schemas_that_allow_anything() -> None:
    for schema in ("{}", "true", '{"type": "object"}'):
        check_schema(schema)


def test_without_the_extra_a_schema_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not grammar_available()
    with pytest.raises(RequestError, match=r"manylora\[grammar\]"):
        check_schema("{}")
    mask = JsonGrammar(str(tmp_path), 10, (2,)).allowed(0, "{}", [])
    assert not mask.any(), "a row that cannot be constrained must not go on unconstrained"
