"""A server without a model: made-up tokens at the pace of a cost profile, and the log of its steps."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import openai
import pytest
from sim_profiles import make_profile

from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, ServerConfig
from manylora.core.costs.step_log import LogHeader, StepRecord, read_step_log
from manylora.core.errors import ConfigError
from manylora.demo import demo_adapters, demo_model_path
from manylora.serving.server import BackgroundServer, LoraModule

STEP_S = 0.02


def engine(simulate: str, **fields: str) -> EngineConfig:
    model = ModelConfig(model=str(demo_model_path()), served_model_name="demo")
    return EngineConfig(model=model, memory=MemoryConfig(num_pages=2000), simulate=simulate, **fields)  # type: ignore[arg-type]


def test_it_streams_at_the_profile_s_pace_and_logs_its_steps(tmp_path: Path) -> None:
    profile, log = tmp_path / "profile.json", tmp_path / "steps.jsonl"
    make_profile(terms={"step": STEP_S}).write(profile)
    name, folder = next(iter(demo_adapters().items()))
    config = engine(str(profile), step_log=str(log))
    with BackgroundServer(config, ServerConfig(port=0, in_process=True), [LoraModule(name, str(folder))]) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        began_at = time.monotonic()
        stream = client.completions.create(model=name, prompt="hello", max_tokens=30, stream=True, temperature=0.0)
        texts = [chunk.choices[0].text for chunk in stream if chunk.choices]
        took_s = time.monotonic() - began_at
        again = client.completions.create(model=name, prompt="hello", max_tokens=30, temperature=0.0)
        other = client.completions.create(model="demo", prompt="hello", max_tokens=30, temperature=0.0)
        client.close()
    assert took_s >= 30 * STEP_S  # it cannot be faster than what it stands for
    assert "".join(texts) == again.choices[0].text != other.choices[0].text
    assert (again.usage and again.usage.completion_tokens) == 30
    header, *records = read_step_log(log)
    assert isinstance(header, LogHeader)
    assert (header.base.vocab_size, header.machine) == (115, "simulated: a machine")
    steps = [one for one in records if isinstance(one, StepRecord)]
    assert len(steps) == 90
    assert min(step.took_s for step in steps) >= STEP_S
    assert min(step.took_s for step in steps) < 2 * STEP_S


def test_answers_without_a_cap_end_by_themselves(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    make_profile(terms={"step": 1e-6}, turn_s=0.0).write(profile)
    with BackgroundServer(engine(str(profile)), ServerConfig(port=0, in_process=True)) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        messages = [{"role": "user", "content": "hello"}]
        lengths = []
        for seed in range(20):
            answer = client.chat.completions.create(model="demo", messages=messages, seed=seed)  # type: ignore[arg-type]
            assert answer.choices[0].finish_reason == "stop"
            assert answer.usage is not None
            lengths.append(answer.usage.completion_tokens)
        client.close()
    assert len(set(lengths)) > 10
    assert 50 < statistics.mean(lengths) < 500


@pytest.mark.parametrize(
    ("simulate", "message"),
    [
        ("nowhere.json", "expected the file of a profile"),
        ("abacus:llama-7b", "hardware"),
        ("a40:parrot", "model"),
    ],
)
def test_what_cannot_be_stood_in_for_is_refused_at_start(simulate: str, message: str) -> None:
    with (
        pytest.raises(ConfigError, match=message),
        BackgroundServer(engine(simulate), ServerConfig(port=0, in_process=True)),
    ):
        pytest.fail("it started")
