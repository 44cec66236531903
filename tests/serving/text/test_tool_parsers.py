"""Tool calls and reasoning: any cuts of a text give the same message, and no text makes a parser fail."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.serving.text.message_reader import REASONING_PARSERS, MessageReader, ReasoningSplitter
from manylora.serving.text.tools import TOOL_PARSERS, EventKind, ToolParser
from manylora.serving.text.tools.json_formats import NamedCall, RequiredCalls

SCHEMAS = {"get": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "on": {"type": "boolean"}}}}
Message = tuple[str, str, list[tuple[str, str]]]


def parser_of(name: str) -> ToolParser:
    if name == "named":
        return NamedCall("get")
    return RequiredCalls(SCHEMAS) if name == "required" else TOOL_PARSERS[name](SCHEMAS)


def read(name: str, pieces: list[str], *, reasoning: str | None = None, max_calls: int | None = None) -> Message:
    """Return reasoning, content and calls."""
    splitter = None if reasoning is None else ReasoningSplitter(reasoning, "")
    reader = MessageReader(splitter, parser_of(name), max_calls=max_calls)
    events = [event for piece in pieces for event in reader.feed(piece)] + reader.finish()
    calls: list[tuple[str, str]] = []
    for event in events:
        if event.kind is EventKind.CALL:
            calls.append((event.text, ""))
        elif event.kind is EventKind.ARGUMENTS:
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    texts = ["".join(e.text for e in events if e.kind is kind) for kind in (EventKind.REASONING, EventKind.CONTENT)]
    return texts[0], texts[1], calls


CALL = '{"name": "get", "arguments": {"city": "Pa\\"}ris", "at": [{"x": 1}]}}'
ARGUMENTS = '{"city": "Pa\\"}ris", "at": [{"x": 1}]}'
XML = "<tool_call>\n<function=get>\n<parameter=city>\n7\n</parameter>\n<parameter=days>\n7\n</parameter>\n"
CASES = [
    ("hermes", f"Sure.\n<tool_call>\n{CALL}\n</tool_call>", "Sure.", [("get", ARGUMENTS)]),
    ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n", "", [("get", ARGUMENTS)] * 2),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "get"}</tool_call>bye', "bye", [("get", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "get"}</tool_call>', "", [("get", "{}")]),
    ("hermes", '<tool_call>{"name": "get", "arguments": null}</tool_call>', "", [("get", "{}")]),
    ("hermes", f"<tool_call>no <<tool_call>{CALL}", "<tool_call>no <", [("get", ARGUMENTS)]),
    ("hermes", '<tool_call>{"name": 3}</tool_call> ', '<tool_call>{"name": 3}</tool_call> ', []),
    ("hermes", '<tool_call>{"name": "get", "arguments": {"city": "Pa', "", [("get", '{"city": "Pa')]),
    ("hermes", " 1 < 2, <tool", " 1 < 2, <tool", []),
    ("qwen", f"<tool_call>{CALL}</tool_call>", "", [("get", ARGUMENTS)]),
    ("qwen", XML + "</function>\n</tool_call>", "", [("get", '{"city": "7", "days": 7}')]),
    ("qwen3_coder", "<tool_call><function=get></function></tool_call>", "", [("get", "{}")]),
    ("llama3_json", '{"name": "get", "parameters": {"a": 1}}', "", [("get", '{"a": 1}')]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "get", "parameters": {}}; {"name": "put", "parameters": {"b": 2}}',
        "",
        [("get", "{}"), ("put", '{"b": 2}')],
    ),
    ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", [("get", ARGUMENTS)] * 2),
    (
        "mistral",
        'ok[TOOL_CALLS]get[ARGS]{"a": 1}[TOOL_CALLS]put{"b": {}}',
        "ok",
        [("get", '{"a": 1}'), ("put", '{"b": {}}')],
    ),
    ("mistral", "[TOOL_CALLS]I cannot {do} it", "[TOOL_CALLS]I cannot {do} it", []),
    ("mistral", '[TOOL_CALLS]get[CALL_ID]a1[ARGS]{"a": 1}', "", [("get", '{"a": 1}')]),
    (
        "pythonic",
        "[get(city='it\\'s, (here)', days=[1, {'a': None}], on=true), a.put()]",
        "",
        [("get", '{"city": "it\'s, (here)", "days": [1, {"a": null}], "on": true}'), ("a.put", "{}")],
    ),
    ("pythonic", "[get(x={'a': [true, null]}, y=false)]", "", [("get", '{"x": {"a": [true, null]}, "y": false}')]),
    ("pythonic", "[get(x=[ture])]", "[get(x=[ture])]", []),
    ("pythonic", "[1, 2] and [get(x)]", "[1, 2] and [get(x)]", []),
    (
        "llama3_json",
        '{"name": "get", "parameters": {}}; {"name": "Bob"} said',
        '; {"name": "Bob"} said',
        [("get", "{}")],
    ),
    ("mistral", f'[TOOL_CALLS][{CALL}, {{"name": 3}}] ok', ', {"name": 3}] ok', [("get", ARGUMENTS)]),
    ("pythonic", "[a.put(), no, get(x)] ok", ", no, get(x)] ok", [("a.put", "{}")]),
    ("pythonic", "[a.put(), get(x", "", [("a.put", "{}")]),
    ("required", f"[{CALL}]", "", [("get", ARGUMENTS)]),
    ("named", '{"a": 1}', "", [("get", '{"a": 1}')]),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_found_one_character_at_a_time(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(name, list(text)) == read(name, [text]) == ("", content, calls)


FRAGMENTS = st.sampled_from(
    [
        *(text for _, text, _, _ in CASES),
        *(
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "<function=get>",
            "<parameter=on>",
            "</parameter>",
            "</function>",
        ),
        *(
            '{"name": "get", ',
            '"arguments": ',
            "{",
            "}",
            "[",
            "]",
            '"',
            "\\",
            ",",
            ":",
            "; ",
            "get(",
            "x=",
            "'",
            ")",
            "\\d",
        ),
        *("<think>", "</think>", "</thi", " \n", "True", "9" * 40, "\N{SNOWMAN}", "<"),
    ]
)
TEXTS = st.lists(st.one_of(FRAGMENTS, st.text(max_size=6)), max_size=8).map("".join)


@given(
    st.sampled_from([*TOOL_PARSERS, "required", "named"]),
    TEXTS,
    st.lists(st.integers(0, 200)),
    st.sampled_from([None, *REASONING_PARSERS]),
    st.sampled_from([None, 1]),
)
def test_cuts_do_not_matter(
    name: str, text: str, cuts: list[int], reasoning: str | None, max_calls: int | None
) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    whole = read(name, [text], reasoning=reasoning, max_calls=max_calls)
    assert read(name, pieces, reasoning=reasoning, max_calls=max_calls) == whole
    assert max_calls is None or len(whole[2]) <= max_calls


@given(st.sampled_from(sorted({*TOOL_PARSERS} - {"pythonic"})), st.text(alphabet="ab \n<>{}", max_size=30))
def test_text_without_calls_is_content_as_it_stands(name: str, text: str) -> None:
    assert read(name, [text]) == ("", text, [])


@given(
    st.dictionaries(st.text(max_size=5), st.recursive(st.text() | st.integers() | st.none(), st.lists, max_leaves=5))
)
def test_arguments_arrive_unchanged(arguments: dict[str, object]) -> None:
    for name in ("hermes", "qwen", "mistral", "required", "llama3_json"):
        call = json.dumps({"name": "get", "parameters": arguments})
        text = {
            "mistral": f"[TOOL_CALLS][{call}]",
            "required": f"[{call}]",
            "llama3_json": call,
        }.get(name, f"<tool_call>{call}</tool_call>")
        _, content, [(_, found)] = read(name, [text])
        assert (content, json.loads(found)) == ("", arguments)


@pytest.mark.parametrize(
    ("name", "prompt_end", "text", "reasoning", "content"),
    [
        ("deepseek_r1", "", "why</think>so", "why", "so"),
        ("deepseek_r1", "", "<think>why</think>so", "why", "so"),
        ("deepseek_r1", "</think>", "so", "", "so"),
        ("deepseek_r1", "<think>\n", "why", "why", ""),
        ("qwen3", "<assistant>", "\n<think>why</think>\n\nso", "why", "\n\nso"),
        ("qwen3", "<assistant>", "  so", "", "  so"),
        ("qwen3", "<think>\n", "why</thi</think>so", "why</thi", "so"),
        ("qwen3", "", "<thin", "", "<thin"),
    ],
)
def test_reasoning_is_split_off(name: str, prompt_end: str, text: str, reasoning: str, content: str) -> None:
    reader = MessageReader(ReasoningSplitter(name, prompt_end), None)
    events = [event for char in text for event in reader.feed(char)] + reader.finish()
    assert "".join(e.text for e in events if e.kind is EventKind.REASONING) == reasoning
    assert "".join(e.text for e in events if e.kind is EventKind.CONTENT) == content
