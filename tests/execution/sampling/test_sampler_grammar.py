"""Constrained answers: whatever the model wants, what comes out parses and validates."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_sampler import sequence
from text_tokenizers import MAKERS, make_huggingface

from manylora.core.errors import RequestError
from manylora.core.plan import PlannedSequence
from manylora.core.types import Constraint, SamplingParams
from manylora.execution.sampling import grammar
from manylora.execution.sampling.grammar import MAX_COMPILED, Grammars, check_constraint
from manylora.execution.sampling.sampler import Sampler
from manylora.serving.text import Tokenizer

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
    constraint = schema if isinstance(schema, Constraint) else Constraint("json", json.dumps(schema))
    sampling = SamplingParams(constraint=constraint, temperature=0.9)
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
    check_constraint(Constraint("json", json.dumps(schema)))
    sampler = Sampler(vocab, tokenizer.eos_token_ids, grammar=Grammars(source, vocab, tokenizer.eos_token_ids))
    for seed in range(2):
        text, tokens = answer(sampler, tokenizer, vocab, schema, seed=seed)
        assert is_valid(json.loads(text)), text
        assert answer(sampler, tokenizer, vocab, schema, seed=seed, forget_every=3)[1] == tokens


def test_rows_without_a_schema_are_left_alone(saved: tuple[str, Tokenizer]) -> None:
    source, tokenizer = saved
    vocab = tokenizer.vocab_size
    sampler = Sampler(vocab, tokenizer.eos_token_ids, grammar=Grammars(source, vocab, tokenizer.eos_token_ids))
    favourite = tokenizer.encode("w", add_special_tokens=False)[-1]
    logits = torch.zeros(2, vocab)
    logits[:, favourite] = 9.0
    free, bound = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, constraint=Constraint("json", '{"enum": [1]}')),
    )
    first, second = sampler.sample(logits, [sequence(free), sequence(bound, seq_id=1)])
    assert first.token_id == favourite
    assert tokenizer.decode([second.token_id]).strip() in ("", "1")


def test_a_grammar_over_its_budget_of_time_ends_alone(saved: tuple[str, Tokenizer]) -> None:
    source, tokenizer = saved
    grammars = Grammars(source, tokenizer.vocab_size, tokenizer.eos_token_ids)
    sampler = Sampler(tokenizer.vocab_size, tokenizer.eos_token_ids, grammar=grammars)
    goes_on = tuple((token, -90.0) for token in tokenizer.eos_token_ids)
    dear, cheap = (
        SamplingParams(temperature=0.0, logit_bias=goes_on, constraint=Constraint("grammar", text))
        for text in ('root ::= s\ns ::= s s | s s s | "o"', 'root ::= "o"*')
    )
    texts: tuple[list[int], list[int]] = ([], [])
    while len(texts[0]) < 600:
        pairs = zip((dear, cheap), texts, strict=True)
        rows = [sequence(one, generated=text, seq_id=i) for i, (one, text) in enumerate(pairs)]
        sampler.begin(rows)
        ended, other = sampler.sample(torch.zeros(2, tokenizer.vocab_size), rows)
        assert other is not None
        if ended is None:
            break
        texts[0].append(ended.token_id)
        texts[1].append(other.token_id)
    assert sampler.is_over_budget(0) and not sampler.is_over_budget(1)
    assert 5 < len(texts[0]) < 600
    sampler.release([0, 1])
    assert not sampler.is_over_budget(0)


def test_a_schema_that_fails_late_ends_its_row(saved: tuple[str, Tokenizer], caplog: pytest.LogCaptureFixture) -> None:
    source, tokenizer = saved
    vocab = tokenizer.vocab_size
    grammar = Grammars(source, vocab, tokenizer.eos_token_ids)
    sampler = Sampler(vocab, tokenizer.eos_token_ids, grammar=grammar)
    unchecked = SamplingParams(constraint=Constraint("json", '{"type": "nonsense"}'))
    impossible = SamplingParams(
        constraint=Constraint("json", '{"enum": [1]}')
    )  # continues text it would never have allowed
    stray = tokenizer.encode("fox", add_special_tokens=False)
    tokens = sampler.sample(
        torch.zeros(2, vocab), [sequence(unchecked), sequence(impossible, generated=stray, seq_id=1)]
    )
    assert [token.token_id for token in tokens] == list(tokenizer.eos_token_ids) * 2
    assert "grammar_failed" in caplog.text


def bound(constraint: Constraint, *, seq_id: int = 0) -> PlannedSequence:
    return sequence(SamplingParams(constraint=constraint), seq_id=seq_id)


def test_compiled_schemas_are_bounded(saved: tuple[str, Tokenizer]) -> None:
    source, tokenizer = saved
    grammar = Grammars(source, tokenizer.vocab_size, tokenizer.eos_token_ids)
    constraints = [Constraint("json", json.dumps({"enum": [i]})) for i in range(MAX_COMPILED + 10)]
    masks = grammar.masks([bound(one, seq_id=i) for i, one in enumerate(constraints)])
    assert masks.any(axis=1).all()
    assert len(grammar._compiled) == MAX_COMPILED


def test_large_compiled_schemas_are_bounded_by_their_size(
    saved: tuple[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, tokenizer = saved
    grammars = Grammars(source, tokenizer.vocab_size, tokenizer.eos_token_ids)
    constraints = [Constraint("json", json.dumps({"enum": ["fox" * 100, i]})) for i in range(6)]
    monkeypatch.setattr(grammar, "MAX_COMPILED_CHARS", 3 * len(constraints[0].text))
    for number in (0, 1, 2, 0, 3, 0, 4, 5):
        grammars.prepare(constraints[number])
    assert list(grammars._compiled) == [constraints[number] for number in (0, 4, 5)]
    assert grammars._num_chars == sum(len(one.text) for one in grammars._compiled)


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
        ('{"type": "integer", "multipleOf": 99440891}', "multipleOf"),
        ('{"type": "integer", "multiple\\u004ff": 99440891}', "multipleOf"),
        ('{"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}', "remainders"),
    ],
)
def test_bad_schemas_are_refused_early(schema: str, part: str) -> None:
    with pytest.raises(RequestError, match="cannot be followed") as caught:
        check_constraint(Constraint("json", schema))
    assert part in str(caught.value) and caught.value.param == "structured_outputs"


def test_schemas_that_allow_anything() -> None:
    for schema in ("{}", "true", '{"type": "object"}'):
        check_constraint(Constraint("json", schema))


def test_without_the_extra_a_schema_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"manylora\[grammar\]"):
        check_constraint(Constraint("json", "{}"))
    masks = Grammars(str(tmp_path), 10, (2,)).masks([bound(Constraint("json", "{}"))])
    assert masks.shape == (1, 4) and not masks.any(), "a row that cannot be constrained must not go on unconstrained"


FORMS: dict[str, tuple[Constraint, str]] = {
    "regex": (Constraint("regex", r"[abc]{3}:[0-9]{2}"), r"[abc]{3}:[0-9]{2}"),
    "choice": (Constraint("choice", json.dumps(["the fox", 'a "dog"\n'])), r'the fox|a "dog"'),
    "lark": (Constraint("grammar", 'start: "a" (", " NUM)~2\nNUM: /[0-9]/'), r"a, [0-9], [0-9]"),
    "gbnf": (Constraint("grammar", 'root ::= "SELECT " col\ncol ::= "a" | "b"'), r"SELECT [ab]"),
}


@pytest.mark.parametrize("name", FORMS)
def test_random_logits_give_every_form(saved: tuple[str, Tokenizer], name: str) -> None:
    source, tokenizer = saved
    if source.rpartition("characters")[1] and name in ("choice", "gbnf"):
        pytest.skip("its vocabulary lacks the letters")
    vocab = tokenizer.vocab_size + NUM_PADDING
    constraint, pattern = FORMS[name]
    check_constraint(constraint)
    grammar = Grammars(source, vocab, tokenizer.eos_token_ids)
    grammar.prepare(constraint)
    sampler = Sampler(vocab, tokenizer.eos_token_ids, grammar=grammar)
    for seed in range(2):
        text, tokens = answer(sampler, tokenizer, vocab, constraint, seed=seed)
        assert re.fullmatch(pattern, text.replace("</s>", "").strip()), text
        assert answer(sampler, tokenizer, vocab, constraint, seed=seed, forget_every=2)[1] == tokens


def test_structural_tags_bind_only_the_text_between(saved: tuple[str, Tokenizer]) -> None:
    source, tokenizer = saved
    structures = [{"begin": "<f=a>", "schema": {"enum": [1]}, "end": "</f>"}]
    tags = Constraint("structural_tag", json.dumps({"structures": structures, "triggers": ["<f="]}))
    check_constraint(tags)
    grammar = Grammars(source, tokenizer.vocab_size, tokenizer.eos_token_ids)
    grammar.prepare(tags)
    assert np.bitwise_count(grammar.masks([bound(tags)])).sum() > tokenizer.vocab_size // 2


@pytest.mark.parametrize(
    ("kind", "text", "part"),
    [
        ("regex", "(", "regex"),
        ("choice", "[]", "1 to 4096"),
        ("choice", '["a", ""]', "not empty"),
        ("choice", '"a"', "array"),
        ("grammar", "start: x", "unknown name"),
        ("grammar", "::=", "grammar"),
        ("structural_tag", '{"format": {}}', "format"),
        ("structural_tag", '{"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<b"]}', "no trigger begins"),
        (
            "structural_tag",
            '{"structures": [{"begin": "x", "end": "", "schema": false}], "triggers": ["x"]}',
            "nothing",
        ),
    ],
)
def test_bad_constraints_are_refused_early(kind: str, text: str, part: str) -> None:
    with pytest.raises(RequestError, match="cannot be followed") as caught:
        check_constraint(Constraint(kind, text))
    assert part in str(caught.value)


def test_a_form_that_is_too_ambiguous_is_refused_before_its_first_step(saved: tuple[str, Tokenizer]) -> None:
    source, tokenizer = saved
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3_000)}}
    constraint = Constraint("json", json.dumps(schema))
    check_constraint(constraint)
    with pytest.raises(RequestError, match="cannot be followed"):
        Grammars(source, tokenizer.vocab_size, tokenizer.eos_token_ids).prepare(constraint)


def test_as_many_choices_as_are_allowed_can_be_followed(saved: tuple[str, Tokenizer]) -> None:
    source, tokenizer = saved
    constraint = Constraint("choice", json.dumps([f"{i:x}" for i in range(4_096)]))
    grammar = Grammars(source, tokenizer.vocab_size, tokenizer.eos_token_ids)
    grammar.prepare(constraint)
    assert grammar.masks([bound(constraint)]).any()


def test_constraints_are_bounded() -> None:
    for kind, text in (("yaml", ""), ("regex", "a" * 300_000)):
        with pytest.raises(RequestError, match="constraint"):
            Constraint(kind, text)


def test_masks_begun_beside_the_model_are_those_of_each_sequence_alone(saved: tuple[str, Tokenizer]) -> None:
    source, tokenizer = saved
    grammars = [Grammars(source, tokenizer.vocab_size, tokenizer.eos_token_ids) for _ in range(2)]
    texts = ("[0-9]{9}", "[abc]{9}", "[0-9]{9}")
    sequences = [bound(Constraint("regex", text), seq_id=index) for index, text in enumerate(texts)]
    for _ in range(3):
        alone = np.concatenate([grammars[1].masks([one]).copy() for one in sequences])
        grammars[0].begin(sequences)
        assert (grammars[0].masks(sequences[::-1]) == alone[::-1]).all()
        grammars[0].begin(sequences)  # of a step that failed for the second
        assert (grammars[0].masks(sequences[::2]) == alone[::2]).all()
        allowed = np.unpackbits(alone, axis=1, bitorder="little").argmax(axis=1)
        sequences = [
            sequence(one.sampling, generated=[*one.tokens[1:], int(token)], seq_id=one.seq_id)
            for one, token in zip(sequences, allowed, strict=True)
        ]
