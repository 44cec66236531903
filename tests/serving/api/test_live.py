"""The torch executor behind the server: a tiny random model with real adapters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from bad_adapters import tiny_base, write_good_adapter
from live_model import VOCAB_SIZE, write_model
from safetensors.torch import load_file, save_file

from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, ServerConfig
from manylora.serving.server import BackgroundServer, LoraModule


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundServer]:
    root = tmp_path_factory.mktemp("live").resolve()
    write_model(root / "base")
    modules = []
    for seed in range(2):
        path = write_good_adapter(root / str(seed), tiny_base(vocab=VOCAB_SIZE), seed=seed)
        modules.append(LoraModule(f"lora-{seed}", str(path)))
    path = write_good_adapter(root / "loud", tiny_base(vocab=VOCAB_SIZE))
    weights = load_file(path / "adapter_model.safetensors")
    save_file({name: weight * 1e30 for name, weight in weights.items()}, path / "adapter_model.safetensors")
    modules.append(LoraModule("overflows", str(path)))
    engine = EngineConfig(
        model=ModelConfig(model=str(root / "base"), served_model_name="base", device="cpu"),
        memory=MemoryConfig(num_pages=128),
    )
    server = ServerConfig(port=0, in_process=True, lora_dirs=(str(root),))
    with BackgroundServer(engine, server, modules) as running:
        yield running


@pytest.fixture
def client(live: BackgroundServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_adapters_answer_differently_and_always_the_same(client: openai.OpenAI) -> None:
    def say(model: str) -> str:
        answer = client.completions.create(model=model, prompt="hello", max_tokens=20, temperature=0)
        return answer.choices[0].text

    models = ("base", "lora-0", "lora-1")
    answers = [say(model) for model in models]
    assert len(set(answers)) == 3
    assert [say(model) for model in reversed(models)] == answers[::-1]


def test_a_seed_is_a_promise(client: openai.OpenAI) -> None:
    def say(seed: int, n: int = 1) -> list[str]:
        answer = client.completions.create(model="lora-0", prompt="hello", max_tokens=20, seed=seed, n=n)
        return [choice.text for choice in answer.choices]

    assert say(5) == say(5)
    assert say(5) != say(6)
    both = say(5, n=2)
    assert both[0] == say(5)[0]
    assert both[0] != both[1]


def test_json_schemas_are_kept(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["ok", "kind"],
        "additionalProperties": False,
    }
    chat = client.chat.completions.create(
        model="lora-1",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=200,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    answer = json.loads(chat.choices[0].message.content or "")
    assert set(answer) == {"ok", "kind"}
    assert isinstance(answer["ok"], bool)
    assert chat.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "move"}}])
def test_forced_tool_calls_match_their_schema(client: openai.OpenAI, choice: Any) -> None:
    schema = {
        "$defs": {"way": {"enum": ["up", "down"]}},
        "type": "object",
        "properties": {"way": {"$ref": "#/$defs/way"}, "twice": {"type": "boolean"}},
        "required": ["way", "twice"],
        "additionalProperties": False,
    }
    chat = client.chat.completions.create(
        model="lora-1",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=200,
        seed=1,
        tools=[{"type": "function", "function": {"name": "move", "parameters": schema}}],
        tool_choice=choice,
        parallel_tool_calls=False,
    )
    [call] = chat.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "move"
    arguments = json.loads(call.function.arguments)
    assert arguments["way"] in ("up", "down")
    assert isinstance(arguments["twice"], bool)


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": "[ab]{3}-[0-9]"}}, r"[ab]{3}-[0-9]"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"structured_outputs": {"grammar": 'start: "x" "y"~2'}}, "xyy"),
    ({"structured_outputs": {"json": {"enum": [7]}}}, r"\s*7\s*"),
    ({"guided_choice": ["up", "down"]}, "up|down"),
    ({"guided_regex": "[0-9]{2}"}, "[0-9]{2}"),
    ({"guided_grammar": 'root ::= "a" | "b"'}, "[ab]"),
    ({"guided_json": '{"enum": ["k"]}'}, r'\s*"k"\s*'),
]


@pytest.mark.parametrize(("fields", "pattern"), FORMS)
@pytest.mark.parametrize("is_chat", [False, True])
def test_answers_have_the_form_that_is_asked_for(
    client: openai.OpenAI, fields: dict[str, Any], pattern: str, is_chat: bool
) -> None:
    asked: dict[str, Any] = {"model": "lora-1", "max_tokens": 60, "seed": 2, "extra_body": fields}
    if is_chat:
        hello: Any = [{"role": "user", "content": "hello"}]
        whole = client.chat.completions.create(messages=hello, **asked).choices[0].message.content or ""
        chunks = client.chat.completions.create(messages=hello, stream=True, **asked)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        whole = client.completions.create(prompt="hello", **asked).choices[0].text
        chunks = client.completions.create(prompt="hello", stream=True, **asked)
        streamed = "".join(chunk.choices[0].text for chunk in chunks)
    assert re.fullmatch(pattern, whole)
    assert streamed == whole


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex cannot be followed"),
        ({"guided_grammar": "start: x"}, "guided_grammar", "unknown name"),
        ({"guided_choice": ["a"], "structured_outputs": {"regex": "b"}}, "guided_choice", "expected one"),
        ({"structured_outputs": {"regex": "b", "choice": ["a"]}}, "structured_outputs", "Got 2 constraints"),
        ({"structured_outputs": {"yaml": "b"}}, "structured_outputs", "yaml"),
        ({"structured_outputs": {"json": "{}", "whitespace_pattern": " "}}, "structured_outputs", "whitespace_pattern"),
        ({"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs", "at most"),
    ],
)
def test_a_wrong_form_is_named(client: openai.OpenAI, fields: dict[str, Any], param: str, part: str) -> None:
    with pytest.raises(openai.BadRequestError, match=part) as caught:
        client.completions.create(model="base", prompt="x", extra_body=fields)
    assert caught.value.param == param


def test_logprobs_are_of_the_model(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="lora-0", prompt="hello", max_tokens=3, temperature=0, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.token_logprobs is not None
    for chosen, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert chosen == max(top.values()) < 0


def test_weights_that_overflow_end_with_a_named_error_beside_sound_answers(live: BackgroundServer) -> None:
    with httpx.Client(base_url=live.url, timeout=60) as http:

        def ask(model: str, *, stream: bool) -> httpx.Response:
            body = {"model": model, "prompt": "hello", "max_tokens": 5, "temperature": 0, "stream": stream}
            return http.post("/v1/completions", json=body)

        sound = ask("lora-0", stream=False).json()["choices"]
        for stream in (False, True):
            answer = ask("overflows", stream=stream)
            assert answer.status_code == (200 if stream else 500)
            assert "adapter 'overflows': the logits of the next token are not finite" in answer.text
            assert ask("lora-0", stream=False).json()["choices"] == sound
        assert http.delete("/adapters/overflows").status_code == 200


def _resident(metrics: str) -> float:
    return float(metrics.partition("\nmanylora_adapters_resident ")[2].partition("\n")[0])


def test_unloading_really_frees(live: BackgroundServer, client: openai.OpenAI) -> None:
    with httpx.Client(base_url=live.url, timeout=60) as http:
        path = http.get("/adapters/lora-1").json()["source"]
        client.completions.create(model="lora-1", prompt="hello", max_tokens=1)
        before = http.get("/metrics").text
        assert "lora-1" in before
        assert http.delete("/adapters/lora-1").status_code == 200
        assert _resident(http.get("/metrics").text) == _resident(before) - 1
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="lora-1", prompt="hello", max_tokens=1)
        assert http.post("/adapters", json={"name": "lora-1", "src": path}).status_code == 200
