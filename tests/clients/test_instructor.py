"""instructor in its default mode (a named function), as a stream, and by JSON schema."""

from __future__ import annotations

from typing import Any, Literal

import pytest

instructor = pytest.importorskip("instructor")
import openai  # noqa: E402
from pydantic import BaseModel  # noqa: E402

HELLO: Any = [{"role": "user", "content": "hello world"}]


class Weather(BaseModel, extra="forbid"):
    city: Literal["Paris", "Rome"]
    degrees: Literal[18, 21]


def client(url: str, **options: Any) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), **options)


def test_the_default_mode(url: str) -> None:
    found, whole = client(url).chat.completions.create_with_completion(
        model="demo", messages=HELLO, response_model=Weather, max_retries=0
    )
    assert isinstance(found, Weather)
    assert whole.choices[0].message.tool_calls[0].function.name == "Weather"


def test_a_stream_of_a_partial_object(url: str) -> None:
    states = list(client(url).chat.completions.create_partial(model="demo", messages=HELLO, response_model=Weather))
    Weather.model_validate(states[-1].model_dump())


def test_the_mode_of_json_schemas(url: str) -> None:
    asked = client(url, mode=instructor.Mode.JSON_SCHEMA).chat.completions
    found = asked.create(model="demo", messages=HELLO, response_model=Weather, max_retries=0)
    assert isinstance(found, Weather)
