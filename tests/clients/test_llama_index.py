"""llama-index, by its model for servers like OpenAI's: chats, streams, completions, calls, objects, agents."""

# Without `annotations` of `__future__`: it reads the types of tools.

import asyncio
from typing import Any, Literal

import pytest

pytest.importorskip("llama_index.llms.openai_like")
import openai
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

HELLO = [ChatMessage(role="user", content="hello world")]
PROMPT = "<|bos|><|user|>hello world<|end|><|assistant|>"


class Weather(BaseModel, extra="forbid"):
    city: Literal["Paris", "Rome"]
    degrees: Literal[18, 21]


def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return "tiny llama"


def model(url: str, name: str = "upper", **options: Any) -> OpenAILike:
    options = {"is_chat_model": True, "temperature": 0.0, "max_retries": 0, **options}
    return OpenAILike(model=name, api_base=f"{url}/v1", api_key="none", **options)


def test_a_chat_whole_and_streamed(url: str) -> None:
    assert model(url).chat(HELLO).message.content == "HELLO WORLD"
    assert "".join(chunk.delta or "" for chunk in model(url).stream_chat(HELLO)) == "HELLO WORLD"

    async def streamed() -> str:
        return "".join([chunk.delta or "" async for chunk in await model(url).astream_chat(HELLO)])

    assert asyncio.run(streamed()) == "HELLO WORLD"


def test_completions_whole_and_streamed(url: str) -> None:
    plain = model(url, is_chat_model=False, max_tokens=20)
    assert plain.complete(PROMPT).text == "HELLO WORLD"
    assert list(plain.stream_complete(PROMPT))[-1].text == "HELLO WORLD"


def test_a_required_call_whole_and_streamed(url: str) -> None:
    tools, asked = [FunctionTool.from_defaults(weather)], model(url, is_function_calling_model=True)
    options: Any = {"user_msg": "hello world", "tool_required": True}
    *_, last = asked.stream_chat_with_tools(tools, **options)
    for answer in (asked.chat_with_tools(tools, **options), last):
        [call] = asked.get_tool_calls_from_response(answer)
        assert call.tool_name == "weather"
        assert call.tool_kwargs["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("by_schema", [True, False])
def test_structured_output(url: str, by_schema: bool) -> None:
    asked = model(url, is_function_calling_model=True, should_use_structured_outputs=by_schema)
    found = asked.as_structured_llm(Weather).chat(HELLO)
    assert isinstance(found.raw, Weather)


def test_an_agent_that_is_not_forced(url: str) -> None:
    async def run() -> str:
        agent = FunctionAgent(tools=[weather], llm=model(url, is_function_calling_model=True), streaming=True)
        return str(await agent.run("hello world"))

    assert asyncio.run(run()) == "HELLO WORLD"


def test_an_unknown_model_is_its_error(url: str) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such"):
        model(url, "no-such").chat(HELLO)
