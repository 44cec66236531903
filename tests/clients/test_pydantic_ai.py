"""pydantic-ai: text, its default mode of structured output (a required call), its native one, and streams."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

pydantic_ai = pytest.importorskip("pydantic_ai")
from pydantic import BaseModel  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

SETTINGS: Any = {"temperature": 0, "max_tokens": 200}


class Weather(BaseModel, extra="forbid"):
    city: Literal["Paris", "Rome"]
    degrees: Literal[18, 21]


def agent(url: str, kind: Any = OpenAIChatModel, **options: Any) -> Any:
    model = kind("upper", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    return pydantic_ai.Agent(model, model_settings=SETTINGS, retries=0, **options)


def test_text_of_chats_and_of_responses(url: str) -> None:
    assert agent(url).run_sync("hello world").output == "HELLO WORLD"
    assert agent(url, OpenAIResponsesModel).run_sync("hello world").output == "HELLO WORLD"


def test_a_stream_of_text(url: str) -> None:
    async def whole() -> Any:
        async with agent(url).run_stream("hello world") as stream:
            return await stream.get_output()

    assert asyncio.run(whole()) == "HELLO WORLD"


def test_the_default_mode_whole_and_streamed(url: str) -> None:
    asked = agent(url, output_type=Weather)
    assert isinstance(asked.run_sync("hello world").output, Weather)

    async def streamed() -> Any:
        async with asked.run_stream("hello world") as stream:
            return await stream.get_output()

    assert isinstance(asyncio.run(streamed()), Weather)


def test_native_output(url: str) -> None:
    asked = agent(url, output_type=pydantic_ai.NativeOutput(Weather))
    assert isinstance(asked.run_sync("hello world").output, Weather)


def test_a_tool_offered_and_not_called(url: str) -> None:
    asked = agent(url)

    @asked.tool_plain
    def weather(city: str) -> str:
        """The weather of a city."""
        raise AssertionError

    assert asked.run_sync("hello world").output == "HELLO WORLD"
