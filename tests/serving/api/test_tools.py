"""Tool calls and reasoning, as the openai client asks for them and reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from reciter import engine_config
from serving import write_tokenizer

from manylora.core.config import ServerConfig
from manylora.serving.server import BackgroundServer
from manylora.serving.text.message_reader import REASONING_PARSERS
from manylora.serving.text.tools import TOOL_PARSERS, parser_of_template

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
TWO = f'Let me see.\n{CALL}\n<tool_call>{{"name": "time", "arguments": {{}}}}</tool_call>'


def say(text: str) -> Any:
    return [{"role": "user", "content": f"say:{text}"}]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., openai.OpenAI]]:
    """Return a maker of clients of scripted servers."""
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tools"), TEMPLATE)
    running: dict[tuple[Any, ...], BackgroundServer] = {}

    def client(**options: Any) -> openai.OpenAI:
        key = tuple(options.items())
        if key not in running:
            config = ServerConfig(port=0, in_process=True, **options)
            running[key] = BackgroundServer(engine_config(tokenizer), config, [], builder="reciter:scripted_parts")
            running[key].__enter__()
        return openai.OpenAI(base_url=running[key].url + "/v1", api_key="none", max_retries=0)

    yield client
    for server in running.values():
        server.__exit__(None, None, None)


@pytest.fixture
def hermes(serve: Callable[..., openai.OpenAI]) -> Iterator[openai.OpenAI]:
    with serve(tool_call_parser="hermes") as client:
        yield client


def test_the_choices_of_the_options_are_the_parsers() -> None:
    fields = ServerConfig.__dataclass_fields__
    for name, parsers in (("tool_call_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
        for parser in parsers:
            ServerConfig(**{name: parser})
        assert all(parser in str(fields[name].metadata) for parser in parsers)


def test_calls_are_taken_out_of_the_text(hermes: openai.OpenAI) -> None:
    choice = hermes.chat.completions.create(model="base", messages=say(TWO), tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    calls = choice.message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in calls] == [  # type: ignore[union-attr]
        ("weather", '{"city": "Paris"}'),
        ("time", "{}"),
    ]
    assert len({call.id for call in calls}) == 2
    plain = hermes.chat.completions.create(model="base", messages=say("No call."), tools=TOOLS).choices[0]
    assert (plain.finish_reason, plain.message.content, plain.message.tool_calls) == ("stop", "No call.", None)


def test_a_stream_brings_the_name_first_and_arguments_in_pieces(hermes: openai.OpenAI) -> None:
    stream = hermes.chat.completions.create(model="base", messages=say(TWO), tools=TOOLS, stream=True)
    choices = [chunk.choices[0] for chunk in stream]
    assert choices[0].delta.role == "assistant"
    assert choices[-1].finish_reason == "tool_calls"
    assert "".join(choice.delta.content or "" for choice in choices) == "Let me see."
    deltas = [call for choice in choices for call in choice.delta.tool_calls or []]
    for index, (name, arguments) in enumerate([("weather", '{"city": "Paris"}'), ("time", "{}")]):
        first, *others = [delta for delta in deltas if delta.index == index]
        assert first.id
        assert first.function
        assert (first.type, first.function.name) == ("function", name)
        assert all(delta.id is None and delta.function and delta.function.name is None for delta in others)
        assert "".join(delta.function.arguments or "" for delta in (first, *others) if delta.function) == arguments
    assert len([delta for delta in deltas if delta.index == 0]) > 3


def test_the_clients_stream_helper_and_parser_understand_the_calls(hermes: openai.OpenAI) -> None:
    class Weather(BaseModel):
        city: str

    tools: Any = [openai.pydantic_function_tool(Weather)]
    text = CALL.replace("weather", "Weather")
    with hermes.chat.completions.stream(model="base", messages=say(text), tools=tools) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0].message
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    parsed = hermes.beta.chat.completions.parse(model="base", messages=say(text), tools=tools).choices[0].message
    for message in (final, parsed):
        [call] = message.tool_calls or []
        assert call.function.parsed_arguments == Weather(city="Paris")  # type: ignore[union-attr]


def test_without_parallel_calls_there_is_one(hermes: openai.OpenAI) -> None:
    def create(**more: Any) -> Any:
        return hermes.chat.completions.create(
            model="base", messages=say(TWO), tools=TOOLS, parallel_tool_calls=False, **more
        )

    assert len(create().choices[0].message.tool_calls) == 1
    assert {call.index for chunk in create(stream=True) for call in chunk.choices[0].delta.tool_calls or []} == {0}


def test_with_choice_none_calls_are_text(hermes: openai.OpenAI) -> None:
    choice = hermes.chat.completions.create(model="base", messages=say(CALL), tools=TOOLS, tool_choice="none").choices[
        0
    ]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")


def test_forced_calls_need_no_parser(serve: Callable[..., openai.OpenAI]) -> None:
    with serve() as client:
        listed = '[{"name": "weather", "parameters": {"city": "Paris"}}, {"name": "time", "parameters": {}}]'
        for stream in (False, True):
            required: Any = {"tools": TOOLS, "tool_choice": "required", "stream": stream}
            named: Any = {**required, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
            answers = []
            for text, options in ((listed, required), ('{"city": "Rome"}', named)):
                answer = client.chat.completions.create(model="base", messages=say(text), **options)
                answers.append(_gather(answer) if stream else _whole(answer))
            assert answers == [
                ([("weather", '{"city": "Paris"}'), ("time", "{}")], "tool_calls"),
                ([("weather", '{"city": "Rome"}')], "stop"),
            ]


def test_the_parser_is_that_of_the_format_which_the_template_shows(serve: Callable[..., openai.OpenAI]) -> None:
    mistral = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}]'
    with serve(trust_request_chat_template=True) as client:
        for text, shown, is_read in (
            (CALL, "<tool_call>", True),
            (mistral, "[TOOL_CALLS]", True),
            (CALL, "", False),
            (CALL, "[TOOL_CALLS]", False),
        ):
            template = {"chat_template": TEMPLATE + f"{{# {shown} #}}"}
            answer = client.chat.completions.create(
                model="base", messages=say(text), tools=TOOLS, tool_choice="auto", extra_body=template
            )
            choice = answer.choices[0]
            if is_read:
                assert _whole(answer) == ([("weather", '{"city": "Paris"}')], "tool_calls")
            else:
                assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


def test_every_parser_but_the_twins_is_found_by_a_template() -> None:
    shown = {
        "[TOOL_CALLS]": "mistral",
        "<tool_call>": "qwen",
        "[func_name1(params_name1=params_value1)]": "pythonic",
        "<|python_tag|>": "llama3_json",
    }
    for mark, name in shown.items():
        assert parser_of_template(f"{{% if tools %}}{mark}{{% endif %}}") is TOOL_PARSERS[name]
    assert parser_of_template(TEMPLATE) is None


def test_reasoning_effort_is_for_templates_that_read_it(
    serve: Callable[..., openai.OpenAI], caplog: pytest.LogCaptureFixture
) -> None:
    with serve(trust_request_chat_template=True) as client:
        ask = partial(client.chat.completions.create, model="base", messages=say("no"), reasoning_effort="low")
        reads: Any = {"chat_template": "<user>say:effort {{ reasoning_effort }}</user><assistant>"}
        assert ask(extra_body=reads).choices[0].message.content == "effort low"
        own = {**reads, "chat_template_kwargs": {"reasoning_effort": "high"}}
        assert ask(extra_body=own).choices[0].message.content == "effort high"
        for _ in range(2):
            assert ask(extra_body={"chat_template": TEMPLATE}).choices[0].message.content == "no"
    assert caplog.text.count("reasoning_effort_ignored") <= 1


def _whole(answer: Any) -> tuple[list[tuple[str, str]], str]:
    choice = answer.choices[0]
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls], choice.finish_reason


def _gather(stream: Any) -> tuple[list[tuple[str, str]], str]:
    calls: dict[int, list[str]] = {}
    finish = ""
    for chunk in stream:
        finish = chunk.choices[0].finish_reason or finish
        for call in chunk.choices[0].delta.tool_calls or []:
            one = calls.setdefault(call.index, [call.function.name, ""])
            one[1] += call.function.arguments
    return [(name, arguments) for name, arguments in calls.values()], finish


def test_the_template_sees_tools_calls_and_results(hermes: openai.OpenAI) -> None:
    first = hermes.chat.completions.create(model="base", messages=say(CALL), tools=TOOLS).choices[0].message
    [call] = first.tool_calls or []
    history = [*say(CALL), first, {"role": "tool", "tool_call_id": call.id, "content": "say:Rain."}]
    answer = hermes.chat.completions.create(model="base", messages=history, tools=TOOLS)
    assert answer.choices[0].message.content == f"Rain.({call.id})"
    answer = hermes.chat.completions.create(model="base", messages=history[:2], tools=TOOLS, max_tokens=1)
    assert answer.usage
    url = str(hermes.base_url).removesuffix("/v1/")
    body = {"messages": [message if isinstance(message, dict) else message.to_dict() for message in history]}
    tokens = httpx.post(f"{url}/tokenize", json=body).json()["tokens"]
    shown = f"<assistant>[{call.id} weather Paris]</assistant><tool>say:Rain.({call.id})</tool>"
    assert shown in bytes(tokens).decode()


def test_the_template_sees_the_tools(hermes: openai.OpenAI) -> None:
    def num_prompt(**tools: Any) -> int:
        usage = hermes.chat.completions.create(model="base", messages=say("x"), **tools).usage
        assert usage
        return usage.prompt_tokens

    shown = len(f"<tools>{json.dumps(TOOLS)}</tools>")
    assert num_prompt(tools=TOOLS) == num_prompt(tools=TOOLS, tool_choice="none") == num_prompt() + shown


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "always"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}),
        ("tools", {"tools": [TOOLS[0], TOOLS[0]]}),
        ("tools", {"tools": [{"type": "custom", "function": {"name": "x"}}]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "array"}}}]}),
        (
            "tools",
            {
                "tools": [{"type": "function", "function": {"name": "x", "parameters": {"properties": 3}}}],
                "tool_choice": "required",
            },
        ),
        (
            "tool_choice",
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        ),
        (
            "messages",
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": "[]"}}],
                    }
                ]
            },
        ),
        ("functions", {"functions": [{"name": "x"}]}),
    ],
)
def test_a_mistake_is_refused_by_name(hermes: openai.OpenAI, param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        hermes.chat.completions.create(**{"model": "base", "messages": say("x"), **fields})
    assert refused.value.param == param


def test_reasoning_is_apart_from_content_and_calls(serve: Callable[..., openai.OpenAI]) -> None:
    with serve(reasoning_parser="qwen3", tool_call_parser="qwen") as client:
        messages = say(f"<think>hm</think>\n\n{CALL}")
        message = client.chat.completions.create(model="base", messages=messages, tools=TOOLS).choices[0].message
        assert (message.to_dict()["reasoning_content"], message.content) == ("hm", None)
        assert len(message.tool_calls or []) == 1
        stream = client.chat.completions.create(model="base", messages=say("<think>hm</think>so"), stream=True)
        deltas = [chunk.choices[0].delta.to_dict() for chunk in stream]
        assert "".join(str(delta.get("reasoning_content", "")) for delta in deltas) == "hm"
        assert "".join(str(delta.get("content", "")) for delta in deltas) == "so"
        constrained = client.chat.completions.create(
            model="base", messages=say("{}"), response_format={"type": "json_object"}
        )
        assert constrained.choices[0].message.content == "{}"


def test_tokenize_counts_the_tools_of_a_chat(serve: Callable[..., openai.OpenAI]) -> None:
    client = serve(tool_call_parser="hermes")
    chat = client.chat.completions.create(model="base", messages=say("Hello."), tools=TOOLS)
    url = str(client.base_url).removesuffix("v1/") + "tokenize"
    counted = httpx.post(url, json={"messages": say("Hello."), "tools": TOOLS}, timeout=60).json()
    assert b"<tools>" in bytes(counted["tokens"])
    assert chat.usage
    assert counted["count"] == chat.usage.prompt_tokens


def test_template_variables_reach_chats_responses_and_tokenize(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, "{{ style }}" + TEMPLATE)
    config = ServerConfig(port=0, in_process=True)
    extra = {"chat_template_kwargs": {"style": "terse"}}
    with (
        BackgroundServer(engine_config(tokenizer), config, [], builder="reciter:scripted_parts") as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        chat = client.chat.completions.create(model="base", messages=say("Hello."), extra_body=extra)
        response = client.responses.create(model="base", input="say:Hello.", extra_body=extra)
        tokens = httpx.post(server.url + "/tokenize", json={"messages": say("Hello."), **extra}).json()["tokens"]
    assert bytes(tokens).startswith(b"terse<user>")
    assert chat.usage and response.usage
    assert chat.usage.prompt_tokens == response.usage.input_tokens == len(tokens)
