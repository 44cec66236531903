"""litellm, by its providers for OpenAI's API and for vLLM."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

litellm = pytest.importorskip("litellm")
from pydantic import BaseModel  # noqa: E402

HELLO: Any = [{"role": "user", "content": "hello world"}]
PROVIDERS = ("openai", "hosted_vllm")


class Weather(BaseModel, extra="forbid"):
    city: Literal["Paris", "Rome"]
    degrees: Literal[18, 21]


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}]


def asked(url: str, provider: str, model: str) -> dict[str, Any]:
    where = {"api_base": f"{url}/v1", "api_key": "none"}
    return {**where, "model": f"{provider}/{model}", "messages": HELLO, "temperature": 0}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_chat_whole_and_streamed(url: str, provider: str) -> None:
    request = asked(url, provider, "upper")
    assert litellm.completion(**request).choices[0].message.content == "HELLO WORLD"
    chunks = list(litellm.completion(**request, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "HELLO WORLD"
    assert chunks[-1].usage.completion_tokens == len("HELLO WORLD") + 1


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_required_call_whole_and_streamed(url: str, provider: str) -> None:
    request = {**asked(url, provider, "demo"), "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    built = litellm.stream_chunk_builder(list(litellm.completion(**request, stream=True)))
    for answer in (litellm.completion(**request), built):
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == "weather"
        arguments = json.loads(call.function.arguments)
        # For vLLM litellm takes additionalProperties out of the schema, so there may be more of them.
        Weather.model_validate({name: arguments[name] for name in ("city", "degrees")})


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_answer_of_a_pydantic_model(url: str, provider: str) -> None:
    answer = litellm.completion(**asked(url, provider, "demo"), response_format=Weather)
    Weather.model_validate_json(answer.choices[0].message.content)


def test_completions_and_responses(url: str) -> None:
    request = asked(url, "text-completion-openai", "upper")
    del request["messages"]
    answer = litellm.text_completion(**request, prompt="<|bos|><|user|>hello world<|end|><|assistant|>")
    assert answer.choices[0].text == "HELLO WORLD"
    request = asked(url, "openai", "upper")
    del request["messages"]
    answer = litellm.responses(**request, input="hello world")
    assert answer.output[0].content[0].text == "HELLO WORLD"
