"""OpenAI's own client: chats, its streaming helpers, forced calls, parsed answers, responses, completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest

openai = pytest.importorskip("openai")
from pydantic import BaseModel  # noqa: E402

HELLO: Any = [{"role": "user", "content": "hello world"}]


class Weather(BaseModel, extra="forbid"):
    city: Literal["Paris", "Rome"]
    degrees: Literal[18, 21]


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


def tool(*, flat: bool) -> Any:
    function = openai.pydantic_function_tool(Weather, name="weather")["function"]
    return {"type": "function", **function} if flat else {"type": "function", "function": function}


def test_a_chat_and_the_list_of_models(client: Any) -> None:
    assert {"upper", "rot13"} < {model.id for model in client.models.list()}
    chat = client.chat.completions.create(model="upper", messages=HELLO, temperature=0, logprobs=True, top_logprobs=2)
    assert chat.choices[0].message.content == "HELLO WORLD"
    assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2


def test_the_stream_helper_of_chats(client: Any) -> None:
    with client.chat.completions.stream(model="upper", messages=HELLO, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert kinds >= {"chunk", "content.delta", "content.done"}
    assert final.choices[0].message.content == "HELLO WORLD"


def test_a_parsed_answer_whole_and_streamed(client: Any) -> None:
    parsed = client.chat.completions.parse(model="upper", messages=HELLO, response_format=Weather)
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(model="upper", messages=HELLO, response_format=Weather) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)


def test_required_and_named_calls_whole_and_streamed(client: Any) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        asked = {"model": "demo", "messages": HELLO, "tools": [tool(flat=False)], "tool_choice": choice}
        asked["parallel_tool_calls"] = False
        [call] = client.chat.completions.create(**asked).choices[0].message.tool_calls
        Weather.model_validate_json(call.function.arguments)
        with client.chat.completions.stream(**asked) as stream:
            kinds = {event.type for event in stream}
            [call] = stream.get_final_completion().choices[0].message.tool_calls
        assert "tool_calls.function.arguments.done" in kinds
        assert call.function.name == "weather"
        assert isinstance(call.function.parsed_arguments, Weather)


def test_a_call_and_its_result_are_input_again(client: Any) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    asked = {"model": "upper", "messages": HELLO, "tools": [tool(flat=False)]}
    message = client.chat.completions.create(**asked, tool_choice=choice).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "tiny llama"}
    asked["messages"] = [*HELLO, message, result]
    answer = client.chat.completions.create(**asked, tool_choice="auto", temperature=0)
    assert answer.choices[0].message.content == "TINY LLAMA"


def test_responses_whole_streamed_and_parsed(client: Any) -> None:
    asked = {"model": "upper", "input": "hello world", "temperature": 0}
    assert client.responses.create(**asked).output_text == "HELLO WORLD"
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "HELLO WORLD"
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert isinstance(client.responses.parse(**asked, text_format=Weather).output_parsed, Weather)
    asked |= {"tools": [tool(flat=True)], "tool_choice": "required", "parallel_tool_calls": False}
    [call] = client.responses.create(**asked).output
    assert call.type == "function_call"
    assert json.loads(call.arguments).keys() == {"city", "degrees"}


def test_completions_whole_and_streamed(client: Any) -> None:
    asked = {"model": "upper", "prompt": "<|bos|><|user|>hello world<|end|><|assistant|>", "temperature": 0}
    assert client.completions.create(**asked).choices[0].text == "HELLO WORLD"
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "HELLO WORLD"
