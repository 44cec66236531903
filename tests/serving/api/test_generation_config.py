"""The defaults that a model's author recommends apply to requests that set none, as in vLLM."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from reciter import engine_config, recite, reciter_parts, write_reciter
from serving import TEMPLATE, write_tokenizer

from manylora.core.clock import Clock
from manylora.core.config import EngineConfig, ModelConfig, ServerConfig
from manylora.core.errors import ConfigError
from manylora.core.generation import GenerationDefaults, parse_generation_config
from manylora.core.plan import PlannedSequence
from manylora.core.ports import EngineParts
from manylora.core.types import SampledToken, SamplingParams
from manylora.lab.costs.model import FixedCost
from manylora.lab.sim.run.executor import SimulatedExecutor
from manylora.serving.server import BackgroundServer, LoraModule
from manylora.serving.text.model_files import load_generation_defaults

seen: list[SamplingParams] = []


def noting_parts(config: EngineConfig, clock: Clock) -> EngineParts:
    """Build an engine that recites and notes the sampling parameters."""

    def choose(part: PlannedSequence) -> SampledToken:
        seen.append(part.sampling)
        return recite(part)

    executor = SimulatedExecutor(FixedCost(step_s=0.001, token_s=0.0), vocab_size=257, choose=choose)
    return replace(reciter_parts(config, clock), executor=executor)


def write(folder: Path, **values: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(values))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_tokenizer(tmp_path / "model")
    write(folder, temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05, max_new_tokens=9, do_sample=True)
    return folder


def test_requests_get_the_models_defaults_unless_they_set_them(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    adapter = write_reciter(tmp_path / "m", "m")
    write(adapter, temperature=0.2, max_new_tokens=4, num_beams=3)
    (adapter / "chat_template.jinja").write_text("[{{ messages[0].content }}]")
    (adapter / "added_tokens.json").write_text('{"<new>": 300, "</s>": 256}')
    trained_on = {"base_model_name_or_path": "org/other", **json.loads((adapter / "adapter_config.json").read_text())}
    (adapter / "adapter_config.json").write_text(json.dumps(trained_on))
    plain = write_reciter(tmp_path / "n", "n")
    (plain / "chat_template.jinja").write_text(TEMPLATE)
    config = ServerConfig(port=0, in_process=True, trust_adapter_templates=True)
    modules = [LoraModule("m", str(adapter)), LoraModule("n", str(plain))]
    running = BackgroundServer(engine_config(model), config, modules, builder="test_generation_config:noting_parts")
    with running as server, openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

        def ask(name: str, **fields: Any) -> tuple[SamplingParams, Any]:
            seen.clear()
            hello: Any = [{"role": "user", "content": "hello"}]
            chat = client.chat.completions.create(model=name, messages=hello, **fields)
            return seen[-1], chat

        sampling, chat = ask("base")
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.95, 20)
        assert (sampling.repetition_penalty, sampling.min_p) == (1.05, 0.0)
        assert chat.usage.completion_tokens == 9
        sampling, chat = ask("base", temperature=1.0, max_tokens=50, extra_body={"top_k": -1})
        assert (sampling.temperature, sampling.top_k, chat.usage.completion_tokens) == (1.0, 0, 9)
        sampling, chat = ask("base:m", top_p=1.0)
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.2, 1.0, 20)
        assert (chat.usage.completion_tokens, chat.usage.prompt_tokens) == (4, len("[hello]"))
        sampling, chat = ask("n")
        assert (sampling.temperature, chat.usage.prompt_tokens) == (0.6, len("<user>hello</user><assistant>"))
        long = client.chat.completions.create(model="base", messages=[{"role": "user", "content": "x" * 226}])
        assert long.usage is not None and long.usage.completion_tokens == 256 - long.usage.prompt_tokens < 9
        status = httpx.get(server.url + "/status").json()
    assert status["generation_defaults"]["temperature"] == 0.6
    assert "generation_defaults from=" in caplog.text
    assert "adapter_setting_ignored name=m: generation_config.json: num_beams has no effect" in caplog.text
    assert "name=m: 1 tokens that the base's tokenizer lacks, as '<new>'" in caplog.text
    assert "adapter_of_another_base name=m trained_on='org/other' served='base'" in caplog.text
    assert "name=n" not in caplog.text


def test_the_option_chooses_the_file(model: Path, tmp_path: Path) -> None:
    def load(choice: str) -> GenerationDefaults | None:
        return load_generation_defaults(ModelConfig(model=str(model), generation_config=choice))

    assert load("vllm") is None
    found = load("auto")
    assert found is not None and found.temperature == 0.6
    write(tmp_path, top_k=-1)
    assert load(str(tmp_path)) == GenerationDefaults(top_k=0)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(str(tmp_path / "nowhere"))
    (model / "generation_config.json").unlink()
    assert load("auto") == GenerationDefaults()


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "expected an object"),
        ('{"temperature": "hot"}', "got temperature = 'hot'"),
        ('{"temperature": true}', "expected a number"),
        ('{"top_k": 1.5}', "got top_k"),
        ('{"top_p": 7}', "top_p = 7.0"),
        ('{"temperature": NaN}', "temperature = nan"),
        ('{"max_new_tokens": 0}', "at least 1"),
    ],
)
def test_a_wrong_file_is_named(content: str, part: str) -> None:
    with pytest.raises(ConfigError, match=r"here\.json") as caught:
        parse_generation_config(content.encode(), "here.json")
    assert part in str(caught.value)
