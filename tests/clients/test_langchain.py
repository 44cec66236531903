"""langchain-openai: chats, bound tools, structured output by both of its methods, and a tool's message."""

from __future__ import annotations

from typing import Any, Literal

import pytest

langchain_openai = pytest.importorskip("langchain_openai")
from langchain_core.messages import HumanMessage, ToolMessage  # noqa: E402
from pydantic import BaseModel, Field  # noqa: E402


class Weather(BaseModel, extra="forbid"):
    """The weather of a city."""

    city: Literal["Paris", "Rome"] = Field(description="Its name.")
    degrees: Literal[18, 21]


@pytest.fixture
def chat(url: str) -> Any:
    return langchain_openai.ChatOpenAI(
        model="upper", base_url=f"{url}/v1", api_key="none", temperature=0, max_retries=0, stream_usage=True
    )


def test_a_chat_whole_and_streamed(chat: Any) -> None:
    answer = chat.invoke("hello world")
    assert answer.content == "HELLO WORLD"
    assert answer.usage_metadata["output_tokens"] == len("HELLO WORLD") + 1
    assert "".join(chunk.content for chunk in chat.stream("hello world")) == "HELLO WORLD"


@pytest.mark.parametrize("choice", ["any", "Weather"])
def test_bound_tools_whole_and_streamed(chat: Any, choice: str) -> None:
    bound = chat.bind_tools([Weather], tool_choice=choice, parallel_tool_calls=False)
    [call] = bound.invoke("hello world").tool_calls
    Weather.model_validate(call["args"])
    chunks = list(bound.stream("hello world"))
    whole = sum(chunks[1:], chunks[0])
    Weather.model_validate(whole.tool_calls[0]["args"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: Any, method: str) -> None:
    assert isinstance(chat.with_structured_output(Weather, method=method).invoke("hello world"), Weather)
    assert isinstance(chat.with_structured_output(Weather).invoke("hello world"), Weather)


def test_a_tools_message_is_answered(chat: Any) -> None:
    called = chat.bind_tools([Weather], tool_choice="Weather").invoke("hello world")
    result = ToolMessage("tiny llama", tool_call_id=called.tool_calls[0]["id"])
    assert chat.bind_tools([Weather]).invoke([HumanMessage("hello world"), called, result]).content == "TINY LLAMA"


def test_the_responses_api(url: str) -> None:
    chat = langchain_openai.ChatOpenAI(
        model="upper", base_url=f"{url}/v1", api_key="none", temperature=0, use_responses_api=True
    )
    assert chat.invoke("hello world").text == "HELLO WORLD"
    assert "".join(chunk.text for chunk in chat.stream("hello world")) == "HELLO WORLD"
