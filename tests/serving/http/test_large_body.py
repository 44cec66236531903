"""Bodies decoded in slices are the bodies decoded at once, and JSON made in parts is the JSON made at once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.core.errors import RequestError
from manylora.serving.api.completions import decode_prompts
from manylora.serving.api.json_body import SLICE_BYTES, parse
from manylora.serving.api.prompt_part import JsonParts, encode_parts
from manylora.serving.api.schemas import ChatBody, CompletionBody, TokenizeBody
from manylora.serving.http.turns import SHARE_S, LoopTurns, next_turn

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES = [
    {"role": "user", "content": "x" * 70_000},
    {"role": "user", "content": [{"type": "text", "text": "y" * 50}] * 2_000},
    {"role": "assistant", "content": None, "tool_calls": [CALL] * 1_000},
    *[{"role": "user", "content": "z"}] * 1_000,
]
BODIES = [
    (ChatBody, {"model": "m", "messages": MESSAGES, "stop": ["a"], "max_tokens": 3}),
    (CompletionBody, {"model": "m", "prompt": "p" * 70_000, "allowed_token_ids": list(range(40_000)), "n": 2}),
    (TokenizeBody, {"messages": MESSAGES, "return_token_strs": True}),
]


def body_of(kind: type[Any], fields: dict[str, Any]) -> Any:
    return asyncio.run(parse(json.dumps(fields, indent=1).encode(), kind))


@pytest.mark.parametrize(("kind", "fields"), BODIES)
def test_a_large_body_is_the_same_in_slices(kind: type[msgspec.Struct], fields: dict[str, Any]) -> None:
    data = json.dumps(fields, indent=1).encode()
    assert len(data) > SLICE_BYTES
    made = asyncio.run(parse(data, kind))
    expected = msgspec.json.decode(data, type=kind)
    assert type(made) is kind and msgspec.json.encode(made) == msgspec.json.encode(expected)


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"model": 5}, "model"),
        ({"messages": [*MESSAGES, {"role": 5, "content": "a"}]}, f"messages[{len(MESSAGES)}].role"),
        ({"messages": [{}] * 40_000}, "messages"),
        ({"messages": [*MESSAGES, {"role": "user", "content": [{}] * 40_000}]}, "messages"),
        ({"stop_token_ids": [1] * 40_000 + ["a"]}, "stop_token_ids"),
        ({"suffix": "a"}, "suffix"),
        ({"n": 0}, "n"),
        ({"max_tokens": 2**70}, "max_tokens"),
    ],
)
def test_a_large_body_is_refused_by_field(changed: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as found:
        body_of(ChatBody, BODIES[0][1] | changed)
    assert (found.value.param or "").startswith(param) and len(str(found.value)) < 500


def test_a_field_that_is_missing_is_named() -> None:
    with pytest.raises(RequestError, match="model"):
        body_of(ChatBody, {"messages": MESSAGES})
    with pytest.raises(RequestError, match="expected a JSON object"):
        asyncio.run(parse(json.dumps(MESSAGES).encode(), ChatBody))


@pytest.mark.parametrize("prompt", [list(range(50_000)), ["a" * 9] * 9_000, [[1, 2, 3]] * 9_000, "a" * 70_000])
def test_prompts_are_the_same_in_slices(prompt: Any) -> None:
    raw = msgspec.Raw(json.dumps(prompt).encode())
    found = asyncio.run(decode_prompts(raw, 10_000, 100_000))
    assert found == ([prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt)


@given(st.recursive(st.none() | st.integers(-5, 5) | st.text(max_size=3), lambda inner: st.lists(inner, max_size=4)))
def test_parts_add_up_to_the_whole(value: Any) -> None:
    items = value if isinstance(value, list) else [value]
    in_parts = JsonParts.of_list([b"", *(msgspec.json.encode(one) for one in items), b""])
    parts = encode_parts({"a": value, "b": [in_parts, {"c": JsonParts([b"null"])}], "d": in_parts})
    assert json.loads(b"".join(parts)) == {"a": value, "b": [items, {"c": None}], "d": items}


def test_bodies_at_once_leave_passes_of_the_loop_to_others() -> None:
    """However many there are, a pass has the pieces of a share of it, here one piece."""
    num_bodies, num_seen, clock = 40, 0, 0.0
    data = json.dumps({"model": "m", "prompt": "a", "allowed_token_ids": [1] * 200_000}).encode()
    num_slices = len(data) // SLICE_BYTES

    def now_s() -> float:
        nonlocal clock
        clock += SHARE_S
        return clock

    async def main() -> None:
        nonlocal num_seen
        turns = LoopTurns(now_s)

        async def read() -> None:
            turns.enter(lambda: "a")
            await next_turn()
            await parse(data, CompletionBody)

        reading = asyncio.gather(*(read() for _ in range(num_bodies)))
        while not reading.done():
            num_seen += 1
            await asyncio.sleep(0)
        await reading

    asyncio.run(main())
    assert num_seen >= num_bodies * num_slices
