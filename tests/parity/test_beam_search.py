"""Beam search finds what transformers finds: the search by itself, and through HTTP with adapters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from bad_adapters import tiny_base, write_good_adapter
from live_model import VOCAB_SIZE, write_model
from peft import PeftModel
from transformers import GenerationConfig, LlamaForCausalLM

from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, ServerConfig
from manylora.core.types import SampledToken
from manylora.serving.api.beam_search import BeamSearch
from manylora.serving.server import BackgroundServer, LoraModule

PROMPT = list(b"beams of a prompt")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("beams").resolve()
    write_model(root / "base")
    write_good_adapter(root / "lora", tiny_base(vocab=VOCAB_SIZE), seed=1)
    return root


@pytest.fixture(scope="module")
def model(root: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(root / "base", dtype=torch.float32).eval()


def expected(model: Any, prompt: list[int], *, width: int, ends: list[int], **settings: Any) -> list[Any]:
    """Return token ids and scores of transformers' answers, best first."""
    config = GenerationConfig(
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        early_stopping=False,
        eos_token_id=ends or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    with torch.inference_mode():
        found = model.generate(torch.tensor([prompt]), generation_config=config)
    answers = []
    for row, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True):
        end = next((at for at, token in enumerate(row, 1) if token in ends), len(row))
        answers.append((row[:end], pytest.approx(score, rel=1e-5, abs=1e-4)))
    return answers


def searched(model: Any, prompt: list[int], search: BeamSearch) -> list[Any]:
    """Run a search on the model by itself."""
    while not search.is_over:
        found = []
        for beam in search.running:
            tokens = torch.tensor([[*prompt, *beam.tokens]])
            with torch.inference_mode():
                logprobs = model(tokens).logits[0, -1].log_softmax(-1)
            top = logprobs.topk(search.num_candidates)
            found.append(
                SampledToken(token_id=0, top=tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
            )
        search.advance(found)
    return [(list(beam.tokens), beam.score) for beam in search.ended]


@pytest.mark.parametrize("penalty", [1.0, 0.0, -1.0, 2.0])
@pytest.mark.parametrize("num_ends", [0, 1, 3])
@pytest.mark.parametrize(("width", "max_tokens"), [(2, 1), (3, 8), (5, 12)])
def test_the_search_is_that_of_transformers(
    model: Any, width: int, max_tokens: int, num_ends: int, penalty: float
) -> None:
    for prompt in (PROMPT, PROMPT[3:9]):
        with torch.inference_mode():
            likely = model(torch.tensor([prompt])).logits[0, -1].topk(6).indices.tolist()
        ends = likely[1::2][:num_ends]
        found = searched(model, prompt, BeamSearch(width, max_tokens, penalty, frozenset(ends)))
        assert found == expected(
            model, prompt, width=width, ends=ends, max_new_tokens=max_tokens, length_penalty=penalty
        )


@pytest.fixture(scope="module")
def http(root: Path) -> Iterator[httpx.Client]:
    engine = EngineConfig(
        model=ModelConfig(model=str(root / "base"), served_model_name="base", device="cpu", dtype="float32"),
        memory=MemoryConfig(num_pages=31),
    )
    modules = [LoraModule("lora", str(root / "lora"))]
    with (
        BackgroundServer(engine, ServerConfig(port=0, in_process=True), modules) as running,
        httpx.Client(base_url=running.url, timeout=60) as opened,
    ):
        yield opened


@pytest.mark.parametrize("name", ["base", "lora"])
def test_answers_equal_transformers_and_peft(http: httpx.Client, model: Any, root: Path, name: str) -> None:
    asked = {"model": name, "use_beam_search": True, "n": 4, "max_tokens": 24, "logprobs": 1, "return_token_ids": True}
    body = http.post("/v1/completions", json={**asked, "prompt": [PROMPT, PROMPT[3:]]}).json()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by an older name
        reference = model if name == "base" else PeftModel.from_pretrained(model, root / "lora").eval()
    try:
        for at, prompt in enumerate((PROMPT, PROMPT[3:])):
            choices = body["choices"][4 * at : 4 * at + 4]
            found = [
                (one["token_ids"], sum(one["logprobs"]["token_logprobs"]) / len(one["token_ids"])) for one in choices
            ]
            assert found == expected(reference, prompt, width=4, ends=[256], max_new_tokens=24)
            assert all(len(one["logprobs"]["tokens"]) == len(one["token_ids"]) for one in choices)
    finally:
        if name != "base":
            reference.unload()
    assert body["usage"]["completion_tokens"] == sum(len(one["token_ids"]) for one in body["choices"])
    chat = {**asked, "messages": [{"role": "user", "content": "x"}], "logprobs": True}
    choices = http.post("/v1/chat/completions", json=chat).json()["choices"]
    assert len({tuple(one["token_ids"]) for one in choices}) == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 33}, "n"),
        ({"n": 17, "prompt": ["x", "y"]}, "n"),
        ({"length_penalty": 11.0}, "length_penalty"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        ({"stop": "x"}, "stop"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"guided_regex": "a"}, "response_format"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"max_tokens": 600}, "max_tokens"),
    ],
)
def test_what_beams_cannot_have_is_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    asked = {"model": "base", "prompt": "x", "use_beam_search": True, "n": 2, "max_tokens": 4, **fields}
    answer = http.post("/v1/completions", json=asked)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_answer_that_the_pool_cannot_hold_is_refused_before_the_search(http: httpx.Client) -> None:
    def steps() -> list[str]:
        return [line for line in http.get("/metrics").text.splitlines() if "iteration_tokens_total_count" in line]

    before = steps()
    asked = {"model": "lora", "prompt": "x", "use_beam_search": True, "n": 2, "max_tokens": 490}
    answer = http.post("/v1/completions", json=asked)
    assert answer.status_code == 400
    assert "needs KV for 490 tokens; the memory left beside its adapter" in answer.json()["error"]["message"]
    assert before == steps() != []
