"""The log-likelihood of continuations over plain HTTP, as evaluators ask for it, against transformers and PEFT."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from bad_adapters import tiny_base, write_good_adapter
from live_model import VOCAB_SIZE, write_model
from peft import PeftModel
from transformers import AutoModelForCausalLM

from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig, ServerConfig
from manylora.serving.server import BackgroundServer, LoraModule

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT's

CASES = [
    ("The capital of France is", " Paris."),
    ("The capital of France is", " a city in the north of the country, on both banks of a river."),
    ("2 + 2 =", " 4"),
    ("", "no context at all"),
    ("naïve ", "世界"),
]

LogLikelihood = Callable[[str, str, str], tuple[float, bool]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("loglikelihood").resolve()
    write_model(root / "base")
    write_good_adapter(root / "lora", tiny_base(vocab=VOCAB_SIZE), targets=("q_proj", "v_proj", "up_proj"))
    return root


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[httpx.Client]:
    engine = EngineConfig(
        model=ModelConfig(model=str(folder / "base"), served_model_name="base", device="cpu"),
        memory=MemoryConfig(num_pages=128),
        scheduler=SchedulerConfig(max_num_batched_tokens=24),  # prompts run in chunks
    )
    modules = [LoraModule("lora", str(folder / "lora"))]
    with (
        BackgroundServer(engine, ServerConfig(port=0, in_process=True), modules) as running,
        httpx.Client(base_url=running.url, timeout=60) as opened,
    ):
        yield opened


@pytest.fixture(scope="module")
def oracle(folder: Path) -> LogLikelihood:
    def load() -> torch.nn.Module:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder / "base")
        return model

    models = {"base": load(), "lora": PeftModel.from_pretrained(load(), folder / "lora")}

    @torch.inference_mode()
    def loglikelihood(model: str, context: str, continuation: str) -> tuple[float, bool]:
        prompt, tokens = tokenize(context), list(continuation.encode())
        rows = models[model](torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        picked = rows.gather(1, torch.tensor(tokens)[:, None])
        return float(picked.sum()), rows.argmax(-1).tolist() == tokens

    return loglikelihood


def tokenize(context: str) -> list[int]:
    return list(context.encode()) or [VOCAB_SIZE - 1]  # an evaluator begins an empty context with this token


@pytest.mark.parametrize("model", ["base", "lora"])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_lm_evals_request(http: httpx.Client, oracle: LogLikelihood, model: str, max_tokens: int) -> None:
    prompts = [[*tokenize(context), *continuation.encode()] for context, continuation in CASES]
    body: dict[str, Any] = {"model": model, "prompt": prompts, "echo": True, "logprobs": 1, "temperature": 0, "seed": 1}
    for _ in range(2):  # the second time over cached prefixes
        answer = http.post("/v1/completions", json={**body, "max_tokens": max_tokens}).json()
        for (context, continuation), choice in zip(CASES, answer["choices"], strict=True):
            num_context, logprobs = len(tokenize(context)), choice["logprobs"]
            stop = len(logprobs["tokens"]) - max_tokens
            values = logprobs["token_logprobs"][num_context:stop]
            tops = logprobs["top_logprobs"][num_context:stop]
            expected, is_greedy = oracle(model, context, continuation)
            assert sum(values) == pytest.approx(expected, abs=1e-4 * len(values))
            assert all(value == max(top.values()) for value, top in zip(values, tops, strict=True)) == is_greedy


@pytest.mark.parametrize("model", ["base", "lora"])
def test_perplexity_by_vllms_field(http: httpx.Client, oracle: LogLikelihood, model: str) -> None:
    text = "What a model finds likely, it need not have been told."
    body = {"model": model, "prompt": text, "max_tokens": 1, "prompt_logprobs": 0, "return_token_ids": True}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    rows = zip(choice["prompt_token_ids"][1:], choice["prompt_logprobs"][1:], strict=True)
    total = sum(row[str(token)]["logprob"] for token, row in rows)
    assert total == pytest.approx(oracle(model, text[:1], text[1:])[0], abs=1e-3)


def test_bad_words_do_not_come(http: httpx.Client) -> None:
    def say(**fields: Any) -> bytes:
        body = {
            "model": "base",
            "prompt": "say",
            "max_tokens": 12,
            "temperature": 0,
            "return_token_ids": True,
            **fields,
        }
        return bytes(http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"])

    free = say()
    text = next(free[i : i + 2].decode() for i in range(11) if free[i : i + 2].isascii() and free[i : i + 2].strip())
    assert text.encode() not in say(bad_words=[text])
