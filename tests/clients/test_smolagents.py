"""smolagents, by its model for OpenAI's API: messages, streams, calls, schemas, an agent that calls tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

smolagents = pytest.importorskip("smolagents")
from smolagents import OpenAIModel, ToolCallingAgent, tool  # noqa: E402
from smolagents.models import ChatMessage, MessageRole, agglomerate_stream_deltas  # noqa: E402

HELLO: Any = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": "hello world"}])]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}


@tool
def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: A city.
    """
    return "tiny llama"


def model(url: str, name: str = "upper", **options: Any) -> OpenAIModel:
    client = {"max_retries": 0}
    return OpenAIModel(name, f"{url}/v1", api_key="none", client_kwargs=client, temperature=0.0, **options)


@pytest.mark.parametrize("flat", [False, True], ids=["parts", "text"])
def test_a_message_whole_and_streamed(url: str, flat: bool) -> None:
    asked = model(url, flatten_messages_as_text=flat)
    answer = asked.generate(HELLO)
    assert answer.content == "HELLO WORLD"
    assert answer.token_usage.output_tokens == len("HELLO WORLD") + 1
    assert agglomerate_stream_deltas(list(asked.generate_stream(HELLO))).content == "HELLO WORLD"


def test_a_required_call_whole_and_streamed(url: str) -> None:
    asked: Any = {"tools_to_call_from": [weather], "tool_choice": "required", "max_tokens": 120}
    streamed = agglomerate_stream_deltas(list(model(url).generate_stream(HELLO, **asked)))
    for answer in (model(url).generate(HELLO, **asked), streamed):
        assert answer.tool_calls[0].function.name == "weather"


def test_an_answer_of_a_schema(url: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    answer = model(url).generate(HELLO, response_format=form)
    assert json.loads(answer.content)["city"] in ("Paris", "Rome")


def test_an_agent_runs_its_steps(url: str) -> None:
    """Its calls are forced. The demo knows nothing of `final_answer`, so it ends by its limit of steps."""
    agent = ToolCallingAgent(
        tools=[weather], model=model(url, "demo", max_tokens=200), max_steps=1, verbosity_level=-1, stream_outputs=True
    )
    agent.run("hello world")
    step = next(step for step in agent.memory.steps if type(step).__name__ == "ActionStep")
    assert step.token_usage.output_tokens > 0


def test_an_unknown_model_is_its_error(url: str) -> None:
    with pytest.raises(Exception, match="no-such"):
        model(url, "no-such").generate(HELLO)
