"""The tables in docs/api-fields.md hold: each row is tried, and no route, field or refusal is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import openai.types.responses.response_create_params as response_params
import pytest
from reciter import engine_config, write_reciter
from serving import TEMPLATE, write_tokenizer
from test_tools import TOOLS

from manylora.core.config import ServerConfig, WebConfig
from manylora.serving.api.adapters import LoadBody, SageMakerBody, UnloadBody
from manylora.serving.api.responses import ResponsesBody
from manylora.serving.api.schemas import (
    HARMLESS,
    REFUSED,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Message,
    StreamOptions,
    StructuredOutputs,
    TokenizeBody,
)
from manylora.serving.server import BackgroundServer

PAGE = Path(__file__).parents[3] / "docs" / "api-fields.md"
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object"}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
WRONG = [[{"no": "such"}]]
"""A value that no field takes."""

ROUTES: Mapping[str, tuple[str, type[msgspec.Struct], dict[str, Any]]] = {
    "completions": ("/v1/completions", CompletionBody, {"model": "base", "prompt": "say", "max_tokens": 2}),
    "chat": ("/v1/chat/completions", ChatBody, {"model": "base", "messages": HELLO, "max_tokens": 2}),
    "responses": ("/v1/responses", ResponsesBody, {"model": "base", "input": "hello", "max_output_tokens": 2}),
}
OPENAI: Mapping[str, type] = {
    "completions": completion_params.CompletionCreateParamsBase,
    "chat": chat_params.CompletionCreateParamsBase,
    "responses": response_params.ResponseCreateParamsBase,
}
OTHERS: Mapping[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/tokenize": (TokenizeBody, {"messages": HELLO}),
    "/detokenize": (DetokenizeBody, {"tokens": [104]}),
    "/v1/load_lora_adapter": (LoadBody, {"lora_name": "m", "lora_path": "m", "load_inplace": True}),
    "/v1/unload_lora_adapter": (UnloadBody, {"lora_name": "m"}),
    "/adapters": (SageMakerBody, {"name": "m", "src": "m"}),
}
VALUES: dict[str, Any] = {
    "add_generation_prompt": True,
    "add_special_tokens": True,
    "allowed_token_ids": [104],
    "background": True,
    "bad_words": ["no"],
    "best_of": 1,
    "cache_salt": "s",
    "chat_template": "{{ messages[0].content }}",
    "chat_template_kwargs": {"a": 1},
    "continue_final_message": False,
    "conversation": "conv_1",
    "echo": True,
    "frequency_penalty": 0.5,
    "guided_choice": ["a"],
    "guided_grammar": 'start: "a"',
    "guided_json": SCHEMA,
    "guided_regex": "a",
    "ignore_eos": True,
    "include": ["file_search_call.results"],
    "include_reasoning": False,
    "include_stop_str_in_output": True,
    "input": "hello",
    "instructions": "Be kind.",
    "is_3d_lora_weight": True,
    "logit_bias": {"104": 1.0},
    "logprob_token_ids": [104],
    "logprobs": {"completions": 1, "chat": True},
    "length_penalty": 2.0,
    "lora_int_id": 1,
    "max_completion_tokens": 2,
    "max_output_tokens": 2,
    "max_tokens": 2,
    "max_tool_calls": 1,
    "messages": HELLO,
    "metadata": {"a": "b"},
    "min_p": 0.1,
    "min_tokens": 1,
    "model": "base",
    "n": 2,
    "parallel_tool_calls": True,
    "presence_penalty": 0.5,
    "previous_response_id": "resp_1",
    "priority": 0,
    "prompt": {"completions": "say", "responses": {"id": "pmpt_1"}},
    "prompt_logprobs": 1,
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "repetition_penalty": 1.1,
    "response_format": {"type": "json_object"},
    "return_token_ids": True,
    "return_token_strs": True,
    "return_tokens_as_token_ids": True,
    "seed": 1,
    "skip_special_tokens": False,
    "stop": ["x"],
    "stop_token_ids": [104],
    "stream": True,
    "stream_options": {"include_usage": True},
    "structured_outputs": {"regex": "a"},
    "temperature": 0.5,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": {
        "chat": TOOLS,
        "/tokenize": TOOLS,
        "responses": [{"type": "function", "name": "time"}],
    },
    "top_k": 5,
    "top_logprobs": 1,
    "top_p": 0.5,
    "truncate_prompt_tokens": 2,
    "truncation_side": "right",
    "truncation": "auto",
    "use_beam_search": True,
    "user": "u",
}
"""A value that changes the answer, by field; by route where it differs. Other fields get a text."""

NEEDS: Mapping[str, dict[str, Any]] = {
    "length_penalty": {"use_beam_search": True},
    "logprob_token_ids": {"completions": {"logprobs": 1}, "chat": {"logprobs": True}},  # by route
    "stream_options": {"stream": True},
    "top_logprobs": {"responses": {}, "chat": {"logprobs": True}},
    "tool_choice": {},
    "return_tokens_as_token_ids": {},
}
WITHIN: Mapping[str, Any] = {
    "response_format.type=text": {"type": "text"},
    "response_format.type=json_object": {"type": "json_object"},
    "response_format.type=json_schema": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    "response_format.type=structural_tag": {"type": "structural_tag", **TAG},
    "structured_outputs.json": {"json": SCHEMA},
    "structured_outputs.json_object": {"json_object": True},
    "structured_outputs.regex": {"regex": "a"},
    "structured_outputs.choice": {"choice": ["a"]},
    "structured_outputs.grammar": {"grammar": 'start: "a"'},
    "structured_outputs.structural_tag": {"structural_tag": json.dumps(TAG)},
    "messages.role": [{"role": "user", "content": "x"}],
    "messages.content": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    "messages.name": [{"role": "user", "content": "x", "name": "y"}],
    "messages.tool_calls": [
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]}
    ],
    "messages.tool_call_id": [{"role": "assistant", "content": "x", "tool_call_id": "1"}],
    "messages.reasoning_content": [{"role": "assistant", "content": "x", "reasoning_content": "y"}],
    "messages.function_call": [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}],
}


def tables() -> dict[str, list[tuple[str, list[str]]]]:
    """Return the rows of the section's tables by the first two heads: each name of the first cell, and the cells."""
    found: dict[str, list[tuple[str, list[str]]]] = {}
    for block in re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in block.splitlines()]
        rows = [(name, line) for line in lines[2:] for name in re.findall("`([^`]+)`", line[0])]
        found[" ".join(lines[0][:2])] = rows
    return found


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("table"), TEMPLATE)
    folder = tmp_path_factory.mktemp("table_adapters").resolve()
    write_reciter(folder / "m", "m")
    config = ServerConfig(
        port=0,
        in_process=True,
        lora_dirs=(str(folder),),
        tool_call_parser="hermes",
        trust_request_chat_template=True,
        web=WebConfig(tokenizer_info=True),
    )
    with (
        BackgroundServer(engine_config(tokenizer), config, [], builder="reciter:reciter_parts") as running,
        httpx.Client(base_url=running.url, timeout=60) as opened,
    ):
        yield opened


def value_of(field: str, route: str) -> Any:
    """Return a value for a field of a route."""
    value = VALUES.get(field, "a")
    by_route = isinstance(value, dict) and value.keys() <= {*ROUTES, *OTHERS}
    return value.get(route, "a") if by_route else value


def problem(http: httpx.Client, path: str, body: dict[str, Any], field: str, verdict: str) -> str | None:
    """Return the difference between a row and the answer to a request with its field, in words."""
    answer = http.post(path, json=body)
    if verdict != "refused":
        return None if answer.status_code == 200 else f"{path} {field}: {verdict}, and got {answer.text[:200]}"
    error = answer.json().get("error", {})
    if answer.status_code == 400 and str(error["param"]).startswith(field.partition(".")[0]):
        return None
    return f"{path} {field}: refused, and got {answer.status_code} {answer.text[:200]}"


@pytest.mark.parametrize("route", ROUTES)
def test_fields_of_the_routes_that_answer(http: httpx.Client, route: str) -> None:
    path, body, base = ROUTES[route]
    column = [*ROUTES].index(route) + 1
    rows = {name: row[column] for name, row in tables()["field completions"]}
    needed = {*body.__struct_fields__, *OPENAI[route].__annotations__} - {"response_format"}
    assert not needed - {name for name, verdict in rows.items() if verdict != "-"}
    assert not {*REFUSED, *HARMLESS} - {*rows}
    problems = []
    for field, verdict in rows.items():
        if verdict == "-":
            continue
        needed_too = NEEDS.get(field, {})
        asked = {**base, **needed_too.get(route, needed_too), field: value_of(field, route)}
        problems.append(problem(http, path, asked, field, verdict))
        if verdict == "works":  # it is read: a value of another type is an error
            problems.append(problem(http, path, {**asked, field: WRONG}, field, "refused"))
    assert [one for one in problems if one] == []


def test_fields_within_fields(http: httpx.Client) -> None:
    path, _, base = ROUTES["chat"]
    rows = {name: row[1] for name, row in tables()["field here"]}
    for outer, struct in (("stream_options", StreamOptions), ("messages", Message)):
        assert not {f"{outer}.{name}" for name in struct.__struct_fields__} - {*rows}
    assert not {f"structured_outputs.{name}" for name in StructuredOutputs.__struct_fields__} - {*rows}
    problems = []
    for field, verdict in rows.items():
        outer, _, inner = field.partition(".")
        value = WITHIN.get(field, {inner: "a" if inner == "whitespace_pattern" else True})
        asked = {**base, **NEEDS.get(outer, {}), outer: value}
        problems.append(problem(http, path, asked, field, verdict))
    assert [one for one in problems if one] == []


def test_fields_of_other_routes(http: httpx.Client) -> None:
    rows = {
        (path, field): row[2] for path, row in tables()["route fields"] for field in re.findall("`([^`]+)`", row[1])
    }
    assert {(path, name) for path, (body, _) in OTHERS.items() for name in body.__struct_fields__} == {*rows}
    problems = []
    for (path, field), verdict in rows.items():
        base = dict(OTHERS[path][1])
        if path.endswith("unload_lora_adapter"):
            http.post("/v1/load_lora_adapter", json=OTHERS["/v1/load_lora_adapter"][1])
        elif path == "/adapters":
            http.post("/v1/unload_lora_adapter", json={"lora_name": "m"})
        if field == "prompt":
            base = {}
        asked = base if field in base else {**base, field: value_of(field, path)}
        asked = {"prompt": "say"} if field == "prompt" else asked
        problems.append(problem(http, path, asked, field, verdict))
        if verdict == "works":
            problems.append(problem(http, path, {**asked, field: WRONG}, field, "refused"))
    assert [one for one in problems if one] == []


def test_routes(http: httpx.Client) -> None:
    rows = {tuple(name.split()): row[1] for name, row in tables()["route here"]}
    described = http.get("/openapi.json").json()["paths"]
    ours = {(method.upper(), re.sub(r"\{\w+\}", "{}", path)) for path, verbs in described.items() for method in verbs}
    ours |= {("GET", "/openapi.json"), ("GET", "/docs")}
    listed = {(verb, re.sub(r"\{\w+\}", "{}", path)) for (verb, path), verdict in rows.items() if verdict == "works"}
    assert listed == ours
    for (verb, path), verdict in rows.items():
        if verdict == "refused":
            answer = http.request(verb, path.replace("{id}", "x"), json={} if verb == "POST" else None)
            assert answer.status_code in (404, 405), f"{verb} {path}: {answer.status_code}"
            assert answer.json()["error"]["type"] in ("NotFoundError", "MethodNotAllowedError")
