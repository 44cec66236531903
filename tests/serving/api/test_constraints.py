"""A constraint is compiled beside the engine's loop: other requests go on, and a cancelled one is never added."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from reciter import engine_config, reciter_parts
from serving import wait_for

from manylora.core.clock import Clock
from manylora.core.config import EngineConfig, ServerConfig
from manylora.core.errors import RequestError
from manylora.core.ports import EngineParts
from manylora.core.types import Constraint
from manylora.serving.server import BackgroundServer

begun = threading.Semaphore(0)
go_on = threading.Event()


class Panic(BaseException):
    """As a compiler in Rust raises it."""


def compiling_parts(config: EngineConfig, clock: Clock) -> EngineParts:
    """Build an engine that recites and whose compiler waits for the test."""

    def prepare(constraint: Constraint) -> None:
        begun.release()
        go_on.wait()
        if constraint.kind == "choice":
            raise RequestError("The choice cannot be followed by these tokens", param="structured_outputs")
        if constraint.kind == "grammar":
            raise Panic

    return replace(reciter_parts(config, clock), prepare=prepare)


@pytest.fixture
def server(tokenizer: Path) -> Iterator[BackgroundServer]:
    go_on.clear()
    config = ServerConfig(port=0, in_process=True)
    with BackgroundServer(engine_config(tokenizer), config, builder="test_constraints:compiling_parts") as running:
        yield running
        go_on.set()


def test_no_request_waits_for_the_constraint_of_another(server: BackgroundServer) -> None:
    body: dict[str, Any] = {"model": "base", "prompt": "say", "max_tokens": 3}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        answers: list[str] = []

        def ask() -> None:
            found = client.completions.create(**body, extra_body={"guided_regex": "a"})
            answers.append(found.choices[0].text)

        asking = threading.Thread(target=ask)
        asking.start()
        assert begun.acquire(timeout=60)
        assert client.completions.create(**body).choices[0].text == "abc"
        with pytest.raises(httpx.ReadTimeout):  # a client that leaves
            httpx.post(server.url + "/v1/completions", json={**body, "guided_json": {}}, timeout=0.2)
        assert begun.acquire(timeout=60)
        assert not answers
        go_on.set()
        asking.join()
        assert answers == ["abc"]
        for name, part in (("choice", "by these tokens"), ("grammar", "could not be compiled")):
            asked = {f"guided_{name}": {"choice": ["a"], "grammar": 'start: "a"'}[name]}
            with pytest.raises(openai.BadRequestError, match=part):
                client.completions.create(**body, extra_body=asked)
        wait_for(lambda: httpx.get(server.url + "/status").json()["num_in_flight"] == 0)
        assert httpx.get(server.url + "/status").json()["engine"]["num_running"] == 0
