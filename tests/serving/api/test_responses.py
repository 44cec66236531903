"""``/v1/responses`` as the openai client speaks it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from reciter import engine_config
from serving import write_tokenizer
from test_tools import CALL, SCHEMA, TEMPLATE

from manylora.core.config import ServerConfig
from manylora.serving.server import BackgroundServer

TOOLS: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
THOUGHT = f"<think>hm</think>\n\nSo: {CALL}"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("responses"), TEMPLATE)
    config = ServerConfig(port=0, in_process=True, tool_call_parser="hermes", reasoning_parser="qwen3")
    with (
        BackgroundServer(engine_config(tokenizer), config, [], builder="reciter:scripted_parts") as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as opened,
    ):
        yield opened


def test_a_text_is_answered_with_a_text(client: openai.OpenAI) -> None:
    response = client.responses.create(model="base", input="say:Hello.", instructions="Be kind.", store=True)
    assert (response.status, response.output_text, response.instructions) == ("completed", "Hello.", "Be kind.")
    assert response.to_dict()["store"] is False
    assert response.usage
    prompt = "<system>Be kind.</system><user>say:Hello.</user><assistant>"
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(prompt), len("Hello.") + 1)
    cut = client.responses.create(model="base", input="say:Hello.", max_output_tokens=2)
    assert (cut.status, cut.output_text) == ("incomplete", "He")
    assert cut.incomplete_details
    assert cut.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("responses", "max_output_tokens", 0),
        ("responses", "max_output_tokens", 2**40),
        ("responses", "guided_choice", [""]),
        ("chat/completions", "max_completion_tokens", 0),
    ],
)
def test_errors_name_the_field_of_the_body(client: openai.OpenAI, path: str, field: str, value: object) -> None:
    body = {"model": "base", "input": "a"} if path == "responses" else {"model": "base", "messages": [{"role": "user"}]}
    with pytest.raises(openai.BadRequestError) as caught:
        client.post(f"/{path}", body={**body, field: value}, cast_to=object)
    assert caught.value.param == field


def test_reasoning_text_and_calls_are_items(client: openai.OpenAI) -> None:
    response = client.responses.create(model="base", input=f"say:{THOUGHT}", tools=TOOLS)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    call: Any = response.output[2]
    assert (call.name, call.arguments, call.status) == ("weather", '{"city": "Paris"}', "completed")
    assert response.output_text == "\n\nSo:"


def test_a_stream_builds_the_same_response(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="base", input=f"say:{THOUGHT}", tools=TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == "response.completed"
    assert {
        "response.reasoning_text.delta",
        "response.output_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
    } <= {*kinds}
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == '{"city": "Paris"}'
    with client.responses.stream(model="base", input=f"say:{THOUGHT}", tools=TOOLS) as stream:
        final = stream.get_final_response() if list(stream) else None
    assert final
    whole = client.responses.create(model="base", input=f"say:{THOUGHT}", tools=TOOLS)
    assert [_without_ids(item) for item in final.output] == [_without_ids(item) for item in whole.output]


def _without_ids(item: Any) -> dict[str, Any]:
    kept = {"type", "role", "name", "arguments", "status"}
    texts = [part.text for part in getattr(item, "content", None) or []]
    return {key: value for key, value in item.to_dict().items() if key in kept} | {"texts": texts}


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_come_with_the_text_of_their_tokens(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"input": f"say:{THOUGHT}", "include": ["message.output_text.logprobs"]}
    if stream:
        events = list(client.responses.create(model="base", stream=True, tools=TOOLS, **asked))
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert all([one.token for one in event.logprobs] == list(event.delta) for event in deltas)
        response: Any = events[-1].response  # type: ignore[union-attr]
    else:
        response = client.responses.create(model="base", tools=TOOLS, **asked)
    _, message, _ = response.output
    (part,) = message.content
    assert "".join(one.token for one in part.logprobs) == part.text
    assert {one.logprob for one in part.logprobs} == {-0.5}


def test_tokens_of_the_reasoning_are_counted(client: openai.OpenAI) -> None:
    """Also where tokens behind it arrive together with its own."""
    usage = client.responses.create(model="base", input="say:<think>hm</think>So.").usage
    assert usage is not None
    assert usage.output_tokens_details.reasoning_tokens == len("<think>hm</think>")
    usage = client.responses.create(model="base", input="say:So.").usage
    assert usage is not None and usage.output_tokens_details.reasoning_tokens == 0


def test_without_a_model_the_base_answers_and_an_effort_goes_to_the_template(tmp_path: Path) -> None:
    template = "{{ enable_thinking }} {{ reasoning_effort }} say:{{ messages[0].content }}</"
    config = ServerConfig(port=0, in_process=True)
    with (
        BackgroundServer(
            engine_config(write_tokenizer(tmp_path, template)), config, [], builder="reciter:reciter_parts"
        ) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as opened,
    ):
        for effort, shown in (("none", "False none"), ("low", "True low")):
            answer = opened.responses.create(
                input="x",
                reasoning={"effort": effort},  # type: ignore[typeddict-item]
                top_logprobs=3,
                max_output_tokens=2,
            )
            assert answer.model == "base" and answer.reasoning is not None and answer.reasoning.effort == effort
            assert answer.usage is not None and answer.usage.input_tokens == len(f"{shown} say:x</")
            part: Any = answer.output[0].content[0]  # type: ignore[union-attr, index]
            assert [len(one.top_logprobs) for one in part.logprobs] == [3, 3]


def test_the_output_is_input_again(client: openai.OpenAI) -> None:
    first = client.responses.create(model="base", input=f"say:{THOUGHT}", tools=TOOLS)
    call: Any = first.output[2]
    history: Any = [
        {"role": "developer", "content": [{"type": "input_text", "text": "x"}]},
        {"role": "user", "content": "y"},
        *[item.to_dict() for item in first.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "say:Rain."},
    ]
    answer = client.responses.create(model="base", input=history)
    assert answer.output_text == f"Rain.({call.call_id})"
    assistant = f"<assistant>\n\nSo:[{call.call_id} weather Paris](hm)</assistant>"
    prompt = f"<system>x</system><user>y</user>{assistant}<tool>say:Rain.({call.call_id})</tool><assistant>"
    assert answer.usage
    assert answer.usage.input_tokens == len(prompt)


def test_a_parsed_answer_and_a_forced_call(client: openai.OpenAI) -> None:
    class Weather(BaseModel):
        city: str

    parsed = client.responses.parse(model="base", input='say:{"city": "Rome"}', text_format=Weather)
    assert parsed.output_parsed == Weather(city="Rome")
    choice: Any = {"type": "function", "name": "weather"}
    forced = client.responses.create(model="base", input='say:{"city": "Rome"}', tools=TOOLS, tool_choice=choice)
    [call] = forced.output
    assert call.type == "function_call"
    assert call.arguments == '{"city": "Rome"}'


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("background", {"background": True}),
        ("truncation", {"truncation": "auto"}),
        ("include", {"include": ["file_search_call.results"]}),
        ("reasoning.effort", {"reasoning": {"effort": "some"}}),
        ("reasoning", {"reasoning": {"no_such": 1}}),
        ("top_logprobs", {"top_logprobs": 21}),
        ("tools", {"tools": [{"type": "web_search"}]}),
        ("tools", {"tools": [{"type": "function"}]}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "file_search"}}),
        ("input", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("input", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("input", {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "3"}]}),
        ("input", {"input": []}),
        ("text", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no such"}}}}),
    ],
)
def test_a_mistake_is_refused_by_name(client: openai.OpenAI, param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": "base", "input": "x", **fields})
    assert refused.value.param == param
