"""The offline API on real (tiny, random) weights: the same tokens as transformers and PEFT, and JSON on demand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from text_tokenizers import make_huggingface
from transformers import LlamaConfig, LlamaForCausalLM

from manylora import Constraint, Engine, SamplingParams
from manylora.core.clock import Clock
from manylora.core.config import EngineConfig
from manylora.core.plan import StepPlan
from manylora.core.ports import EngineParts, Work
from manylora.execution.build import build_parts

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT's

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    hf = make_huggingface("byte_level")
    hf.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(hf),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.4,
        eos_token_id=hf.eos_token_id,
        bos_token_id=hf.bos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter_paths(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        lora = LoraConfig(r=4 + seed, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
        paths[name] = tmp_path_factory.mktemp(name)
        get_peft_model(LlamaForCausalLM.from_pretrained(model_path), lora).save_pretrained(paths[name])
    return paths


@pytest.fixture(scope="module")
def engine(model_path: Path, adapter_paths: dict[str, Path]) -> Iterator[Engine]:
    with Engine(model_path, adapters=adapter_paths, num_pages=200, max_num_batched_tokens=64) as engine:
        yield engine


def test_a_mixed_batch_is_what_transformers_and_peft_say(
    engine: Engine, model_path: Path, adapter_paths: dict[str, Path]
) -> None:
    prompts = ["hello world", "the quick brown fox", "naïve 世界"]
    adapters = ["one", None, "two"]
    jobs = [(prompt, adapter) for prompt in prompts for adapter in adapters]
    answers = engine.generate([p for p, _ in jobs], adapter=[a for _, a in jobs], sampling=GREEDY)
    for (prompt, adapter), answer in zip(jobs, answers, strict=True):
        model = LlamaForCausalLM.from_pretrained(model_path)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter_paths[adapter])
        ids = torch.tensor([engine.tokenizer.encode(prompt)])
        with torch.inference_mode():
            for _ in range(NUM_TOKENS):
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        assert answer.error is None
        assert answer.token_ids == tuple(ids[0, -NUM_TOKENS:].tolist()), (prompt, adapter)
    assert len({answer.token_ids for answer in answers[:3]}) == 3, "the adapters make no difference"


def test_a_seed_gives_the_same_answer_whatever_shares_the_batch(engine: Engine) -> None:
    sampling = SamplingParams(temperature=1.3, top_p=0.95, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)
    (alone,) = engine.generate("hello world", adapter="one", sampling=sampling)
    crowd = engine.generate(
        ["the fox", "hello world", "brown", "quick text"],
        adapter=["two", "one", None, "one"],
        sampling=[SamplingParams(max_tokens=9), sampling, GREEDY, SamplingParams(max_tokens=30)],
    )
    assert crowd[1].token_ids == alone.token_ids


def test_random_weights_answer_in_json_when_told_to(engine: Engine) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "size": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["colour", "size"],
        "additionalProperties": False,
    }
    sampling = SamplingParams(constraint=Constraint("json", json.dumps(schema)), max_tokens=200, seed=1)
    for answer in engine.generate(["hello"] * 4, adapter=[None, "one", "two", None], sampling=sampling):
        value = json.loads(answer.text)
        assert value["colour"] in ("red", "blue") and 0 <= value["size"] <= 9
        assert answer.finish_reason == "stop"


def test_planning_ahead_changes_no_token(
    engine: Engine, model_path: Path, adapter_paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties, seeds and grammars look at tokens that the next step was planned without."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    samplings = [
        GREEDY,
        SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_TOKENS, repetition_penalty=1.5, frequency_penalty=0.5),
        SamplingParams(temperature=0.8, seed=4, max_tokens=NUM_TOKENS, top_p=0.9, logprobs=2, min_tokens=8),
        SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, constraint=Constraint("json", json.dumps(schema))),
    ]
    adapters = ["one", None, "two"]
    jobs = [(f"hello {i}", adapters[i % 3], samplings[i % 4]) for i in range(12)]

    def answer(one: Engine) -> list[tuple[int, ...]]:
        prompts, adapter, sampling = (list(column) for column in zip(*jobs, strict=True))
        return [made.token_ids for made in one.generate(prompts, adapter=adapter, sampling=sampling)]

    monkeypatch.setattr("manylora.core.engine.steps.plan_ahead.plan_at", lambda began_at, expected_s: began_at)
    options = {"num_pages": 200, "max_num_batched_tokens": 64, "max_num_seqs": 6}
    awaited = 0

    def build(config: EngineConfig, clock: Clock) -> EngineParts:
        parts = build_parts(config, clock)
        launch = parts.executor.launch

        def count(plan: StepPlan, now: float) -> Work:
            nonlocal awaited
            awaited += sum(part.awaits_token for part in plan.sequences)
            return launch(plan, now)

        monkeypatch.setattr(parts.executor, "launch", count)
        return parts

    with Engine(model_path, adapters=adapter_paths, plan_ahead=True, build=build, **options) as ahead:
        assert answer(ahead) == answer(engine)
        assert awaited > 12 * NUM_TOKENS / 2
