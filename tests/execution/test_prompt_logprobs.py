"""Log-probabilities of prompts equal those of transformers and PEFT, however their steps are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from text_tokenizers import make_huggingface
from thread_stream import ThreadStream
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, LlamaConfig, PreTrainedConfig

from manylora import Engine, Generation, SamplingParams
from manylora.core.adapters.shape import BaseShape
from manylora.core.clock import Clock
from manylora.core.config import EngineConfig
from manylora.core.ports import EngineParts
from manylora.execution.assist.exchange import Assistant
from manylora.execution.build import build_parts
from manylora.execution.model import head
from manylora.execution.storage.adapter_files import InlineReader

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT's

TOLERANCE = 1e-4
NUM_TOP = 5
ADAPTERS = ["one", "two"]


def make_model(folder: Path, kind: type[PreTrainedConfig], **options: object) -> Path:
    hf = make_huggingface("byte_level")
    hf.save_pretrained(folder)
    torch.manual_seed(0)
    config = kind(
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
        pad_token_id=0,
        **options,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), LlamaConfig)


@pytest.fixture(scope="module")
def adapter_paths(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for seed, name in enumerate(ADAPTERS):
        torch.manual_seed(seed)
        modules = ["q_proj", "down_proj", "lm_head"] if seed else ["v_proj", "up_proj"]
        lora = LoraConfig(r=4 + seed, lora_alpha=16, target_modules=modules, init_lora_weights=False)
        paths[name] = tmp_path_factory.mktemp(name)
        get_peft_model(AutoModelForCausalLM.from_pretrained(model_path), lora).save_pretrained(
            paths[name], save_embedding_layers=False
        )
    return paths


@pytest.fixture
def make(model_path: Path, adapter_paths: dict[str, Path]) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(model: Path = model_path, **options: object) -> Engine:
        adapters = adapter_paths if model == model_path else {}
        engine = Engine(model, adapters=adapters, **{"num_pages": 200, "block_size": 4, "build": alone} | options)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


class Oracle:
    """Log-softmax by transformers and PEFT, ``[positions, vocab]``."""

    def __init__(self, model: Path, adapters: dict[str, Path]) -> None:
        self._models: dict[str | None, torch.nn.Module] = {None: AutoModelForCausalLM.from_pretrained(model)}
        for name, path in adapters.items():
            self._models[name] = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), path)

    @torch.inference_mode()
    def logprobs(self, prompt: tuple[int, ...], adapter: str | None) -> torch.Tensor:
        return self._models[adapter](torch.tensor([prompt])).logits[0].float().log_softmax(-1)

    def check(self, prompt: tuple[int, ...], adapter: str | None, answer: Generation, num_top: int = NUM_TOP) -> None:
        assert answer.error is None and answer.prompt_logprobs is not None and answer.num_cached_tokens == 0
        first, *found = answer.prompt_logprobs
        expected = self.logprobs(prompt, adapter)
        assert first is None and len(found) == len(prompt) - 1
        for position, token in enumerate(found):
            assert token is not None and token.token_id == prompt[position + 1]
            row = expected[position]
            assert token.logprob == pytest.approx(float(row[token.token_id]), abs=TOLERANCE)
            best = row.topk(num_top).values.tolist() if num_top else []
            assert [one.logprob for one in token.top] == pytest.approx(best, abs=TOLERANCE)
            assert [float(row[one.token_id]) for one in token.top] == pytest.approx(best, abs=TOLERANCE)


@pytest.fixture(scope="module")
def oracle(model_path: Path, adapter_paths: dict[str, Path]) -> Oracle:
    return Oracle(model_path, adapter_paths)


def alone(config: EngineConfig, clock: Clock) -> EngineParts:
    """Build an engine that reads adapters by itself."""
    return build_parts(config, clock, readers=[InlineReader()])


def with_workers(config: EngineConfig, clock: Clock) -> EngineParts:
    """Build an engine whose adapters in host memory are computed by workers, as beside a GPU."""

    def start(device: torch.device, base: BaseShape) -> Assistant:
        return Assistant(ThreadStream(), base, num_workers=2)

    return build_parts(config, clock, open_assistant=start, readers=[InlineReader()])


def scored(num_top: int = NUM_TOP, max_tokens: int = 1) -> SamplingParams:
    return SamplingParams(prompt_logprobs=num_top, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((7 * i * (i + seed) + 3 + seed) % 250 for i in range(length))


@pytest.mark.parametrize("plan_ahead", [False, True])
def test_a_mixed_batch_in_chunks_equals_transformers(
    make: Callable[..., Engine], oracle: Oracle, monkeypatch: pytest.MonkeyPatch, plan_ahead: bool
) -> None:
    monkeypatch.setattr(head, "SLICE_LOGITS", 7 * len(make_huggingface("byte_level")))  # seven rows
    engine = make(max_num_batched_tokens=32, plan_ahead=plan_ahead)
    jobs = [
        (prompt_of(length, seed), adapter)
        for seed, length in enumerate((1, 2, 45, 90))
        for adapter in (None, *ADAPTERS)
    ]
    samplings = [scored(index % 3 and NUM_TOP, max_tokens=1 + index % 4) for index in range(len(jobs))]
    samplings[4] = SamplingParams(max_tokens=9)  # one of the batch reports nothing
    answers = engine.generate(
        [prompt for prompt, _ in jobs], adapter=[adapter for _, adapter in jobs], sampling=samplings
    )
    assert answers.pop(4).prompt_logprobs is None
    del jobs[4], samplings[4]
    for (prompt, adapter), sampling, answer in zip(jobs, samplings, answers, strict=True):
        oracle.check(prompt, adapter, answer, sampling.prompt_logprobs or 0)


def test_cached_prefixes_are_computed_again_and_shared_afterwards(make: Callable[..., Engine], oracle: Oracle) -> None:
    engine = make(max_num_batched_tokens=16)
    prompt = prompt_of(50)
    for adapter in (None, "two"):
        engine.generate(prompt, adapter=adapter, sampling=SamplingParams(max_tokens=1))
        for _ in range(2):
            (answer,) = engine.generate(prompt, adapter=adapter, sampling=scored())
            oracle.check(prompt, adapter, answer)
        (after,) = engine.generate(prompt, adapter=adapter, sampling=SamplingParams(max_tokens=1))
        assert after.num_cached_tokens == 48


def test_preemptions_lose_and_double_no_row(make: Callable[..., Engine], oracle: Oracle) -> None:
    engine = make(num_pages=44, max_num_batched_tokens=24, max_model_len=160)
    jobs = [(prompt_of(20 + 5 * i, i), (None, *ADAPTERS)[i % 3]) for i in range(9)]
    answers = engine.generate(
        [prompt for prompt, _ in jobs], adapter=[adapter for _, adapter in jobs], sampling=scored(max_tokens=40)
    )
    assert engine.stats().num_preemptions > 0
    for (prompt, adapter), answer in zip(jobs, answers, strict=True):
        oracle.check(prompt, adapter, answer)


@pytest.mark.parametrize(
    "options",
    [
        {"cold_start": "assist"},
        {"cold_start": "layers"},
        {"lora_kernel": "ragged", "attention_kernel": "triton"},
        {"build": with_workers, "cold_start": "assist"},
    ],
    ids=["from the host", "by layers", "triton", "by workers"],
)
def test_adapters_that_are_read_in_other_ways(
    make: Callable[..., Engine], oracle: Oracle, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    if "lora_kernel" in options:
        pytest.importorskip("triton")
    if "build" in options:
        pytest.importorskip("numba")
    monkeypatch.setattr(head, "SLICE_LOGITS", 7 * len(make_huggingface("byte_level")))
    engine = make(max_num_batched_tokens=16, **options)
    jobs = [(prompt_of(25, seed), adapter) for seed, adapter in enumerate(("two", None, "one", "two"))]
    answers = engine.generate([p for p, _ in jobs], adapter=[adapter for _, adapter in jobs], sampling=scored())
    for (prompt, adapter), answer in zip(jobs, answers, strict=True):
        oracle.check(prompt, adapter, answer)
    used = {status.mode: status.num_starts for status in engine.stats().cold_starts}
    assert used.get(str(options.get("cold_start")), 1) > 0


@pytest.mark.parametrize(
    ("kind", "options"),
    [(Gemma2Config, {"head_dim": 8, "final_logit_softcapping": 5.0}), (CohereConfig, {"logit_scale": 0.25})],
)
def test_models_that_change_their_logits_behind_the_head(
    make: Callable[..., Engine], tmp_path: Path, kind: type[PreTrainedConfig], options: dict[str, object]
) -> None:
    model = make_model(tmp_path, kind, **options)
    prompt = prompt_of(30)
    (answer,) = make(model).generate(prompt, sampling=scored())
    Oracle(model, {}).check(prompt, None, answer)


def test_the_offsets_of_a_prompts_tokens_count_its_text(make: Callable[..., Engine]) -> None:
    engine = make()
    text = "the quick 世界"
    (answer,) = engine.generate(text, sampling=scored(0))
    assert answer.prompt_logprobs is not None
    for token in answer.prompt_logprobs[1:]:
        assert token is not None
        if "\N{REPLACEMENT CHARACTER}" not in token.text:
            assert text[token.text_offset :].startswith(token.text)
