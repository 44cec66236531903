"""Whatever a body holds, it becomes sampling parameters or a refusal, never a failure."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.core.errors import RequestError
from manylora.core.generation import NO_DEFAULTS
from manylora.core.types import Constraint, SamplingParams
from manylora.serving.api.json_body import parse
from manylora.serving.api.model_settings import Settings
from manylora.serving.api.request import AnswerCall
from manylora.serving.api.responses import ResponsesBody
from manylora.serving.api.sampling import count_logprobs, sampling_params
from manylora.serving.api.schemas import REFUSED, ChatBody, CompletionBody, SamplingFields
from manylora.serving.text import Tokenizer

NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=True),
    st.sampled_from([0.0, 1.0, 0.5, -0.0]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
BODIES = [CompletionBody, ChatBody, ResponsesBody]
NAMES = sorted({name for body in BODIES for name in body.__struct_fields__}.union(REFUSED))


@pytest.fixture(scope="module")
def words(tokenizer: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer)


def asked(body: SamplingFields, words: Tokenizer, vocab_size: int) -> AnswerCall[Any]:
    """Return a call with what the parameters depend on."""
    engines = SimpleNamespace(info=SimpleNamespace(vocab_size=vocab_size))
    config = SimpleNamespace(web=SimpleNamespace(max_logprobs=-1))
    context = SimpleNamespace(tokenizer=words, fleet=SimpleNamespace(engines=engines), config=config)
    return AnswerCall(cast(Any, None), cast(Any, context), "", body, Settings(defaults=NO_DEFAULTS))


HELLO = [{"role": "user", "content": "x"}]


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6), st.sampled_from(BODIES))
def test_any_body_is_understood_or_refused(
    words: Tokenizer, values: dict[str, Any], kind: type[SamplingFields]
) -> None:
    given_values = {"model": "m", "prompt": "p", "messages": HELLO, "input": "x", **values}
    try:
        body = asyncio.run(parse(json.dumps(given_values).encode(), kind))
        call = asked(body, words, 1000)
        count_logprobs(call)
        params = sampling_params(call, max_tokens=body.max_tokens, logprobs=None)
    except RequestError as error:
        assert str(error)
    else:
        assert isinstance(params, SamplingParams)


def test_what_is_understood_arrives(words: Tokenizer) -> None:
    given_values = {
        "model": "m",
        "prompt": "p",
        "temperature": 0,
        "top_k": -1,
        "stop": ["a", "b"],
        "logit_bias": {"5": -1.5},
        "seed": 2**63,
        "min_tokens": 2,
        "ignore_eos": True,
        "bad_words": ["no", " no", "\N{SNOWMAN}"],
        "response_format": {"type": "json_object"},
    }
    body = asyncio.run(parse(json.dumps(given_values).encode(), CompletionBody))
    params = sampling_params(asked(body, words, 10), max_tokens=9, logprobs=4, prompt_logprobs=3)
    assert params == SamplingParams(
        max_tokens=9,
        logprobs=4,
        prompt_logprobs=3,
        temperature=0.0,
        top_k=0,
        stop=("a", "b"),
        logit_bias=((5, -1.5),),
        seed=2**63,
        min_tokens=2,
        ignore_eos=True,
        bad_words_token_ids=((110, 111), tuple("\N{SNOWMAN}".encode())),
        constraint=Constraint("json", '{"type":"object"}'),
    )


def test_a_seed_of_minus_one_is_none(words: Tokenizer) -> None:
    """As in vLLM: clients send it for an answer that differs from time to time."""
    for given_seed, expected in ((-1, None), (-2, -2), (0, 0), (None, None)):
        body = CompletionBody(model="m", prompt=msgspec.Raw(b'"p"'), seed=given_seed)
        assert sampling_params(asked(body, words, 10), max_tokens=9, logprobs=None).seed == expected


def test_an_unknown_field_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        asyncio.run(parse(b'{"model": "m", "prompt": "p", "reported_once": 1}', CompletionBody))
    assert [record.getMessage() for record in caplog.records] == ["unknown_field_ignored name='reported_once'"]


def test_long_unknown_names_with_one_beginning_are_one(caplog: pytest.LogCaptureFixture) -> None:
    fields = {"y" * 100 + str(i): 1 for i in range(50)}
    for _ in range(2):
        asyncio.run(parse(json.dumps({"model": "m", "prompt": "p", **fields}).encode(), CompletionBody))
    assert [record.getMessage() for record in caplog.records] == [f"unknown_field_ignored name={'y' * 100!r}"]
