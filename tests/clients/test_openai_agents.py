"""OpenAI's Agents SDK, by chats and by responses: text, streams, a call and its result, typed output, errors."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

agents = pytest.importorskip("agents")
import openai  # noqa: E402
from agents import (  # noqa: E402
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel  # noqa: E402

set_tracing_disabled(True)
APIS = pytest.mark.parametrize("api", [OpenAIChatCompletionsModel, OpenAIResponsesModel], ids=["chats", "responses"])


class Weather(BaseModel, extra="forbid"):
    city: Literal["Paris", "Rome"]
    degrees: Literal[18, 21]


@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return "tiny llama"


def agent(url: str, api: Any, name: str = "upper", *, settings: dict[str, Any] | None = None, **options: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = api(model=name, openai_client=client)
    return Agent(name="demo", model=model, model_settings=ModelSettings(temperature=0.0, **settings or {}), **options)


@APIS
def test_text_whole_and_streamed(url: str, api: Any) -> None:
    assert Runner.run_sync(agent(url, api), "hello world").final_output == "HELLO WORLD"

    async def stream() -> tuple[str, Any]:
        result = Runner.run_streamed(agent(url, api), "hello world")
        text = ""
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                text += event.data.delta
        return text, result.final_output

    assert asyncio.run(stream()) == ("HELLO WORLD", "HELLO WORLD")


@APIS
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_call_and_an_answer_to_its_result(url: str, api: Any, streamed: bool) -> None:
    """The first turn must call; the tool's choice is reset behind it, as the SDK does by default."""
    settings = {"tool_choice": "weather", "parallel_tool_calls": False}
    caller = agent(url, api, tools=[weather], settings=settings)

    async def run() -> Any:
        if not streamed:
            return await Runner.run(caller, "hello world")
        result = Runner.run_streamed(caller, "hello world")
        async for _ in result.stream_events():
            pass
        return result

    result = asyncio.run(run())
    assert [item.type for item in result.new_items] == [
        "tool_call_item",
        "tool_call_output_item",
        "message_output_item",
    ]
    assert result.final_output == "TINY LLAMA"


@APIS
def test_typed_output(url: str, api: Any) -> None:
    result = Runner.run_sync(agent(url, api, output_type=Weather), "hello world")
    assert isinstance(result.final_output, Weather)


@APIS
def test_an_unknown_model_is_its_error(url: str, api: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such"):
        Runner.run_sync(agent(url, api, "no-such"), "hello world")
