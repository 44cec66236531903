"""litellm's proxy in front of the server: a wildcard route, so that each adapter is a model of the proxy."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("litellm.proxy")
import openai

HELLO: Any = [{"role": "user", "content": "hello world"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
PROVIDERS = pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])


@pytest.fixture(scope="module")
def proxy(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("proxy")
    models = [
        {
            "model_name": f"{name}/*",
            "litellm_params": {"model": f"{name}/*", "api_base": f"{url}/v1", "api_key": "none"},
        }
        for name in ("openai", "hosted_vllm")
    ]
    (folder / "config.yaml").write_text(json.dumps({"model_list": models, "litellm_settings": {"num_retries": 0}}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("litellm")), "--config", str(folder / "config.yaml")]
    command += ["--port", str(port), "--host", "127.0.0.1", "--telemetry", "False"]
    key = f"sk-{secrets.token_hex(32)}"
    environment = {**os.environ, "LITELLM_MASTER_KEY": key}
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment) as process,
    ):
        try:
            ready, until = f"http://127.0.0.1:{port}/health/liveliness", time.monotonic() + 120
            while True:
                try:
                    urllib.request.urlopen(ready, timeout=5).read()
                    break
                except OSError:
                    assert time.monotonic() < until and process.poll() is None, (folder / "log").read_text()[-3000:]
                    time.sleep(0.5)
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0) as client:
                yield client
        finally:
            process.terminate()


@PROVIDERS
def test_a_chat_whole_and_streamed(proxy: Any, provider: str) -> None:
    asked: Any = {"model": f"{provider}/upper", "messages": HELLO, "temperature": 0}
    assert proxy.chat.completions.create(**asked).choices[0].message.content == "HELLO WORLD"
    chunks = list(proxy.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "HELLO WORLD"
    assert chunks[-1].usage.completion_tokens == len("HELLO WORLD") + 1


@PROVIDERS
def test_a_required_call_whole_and_streamed(proxy: Any, provider: str) -> None:
    asked: Any = {"model": f"{provider}/demo", "messages": HELLO, "tools": TOOLS, "tool_choice": "required"}
    asked["parallel_tool_calls"] = False
    with proxy.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion()
    for answer in (proxy.chat.completions.create(**asked), streamed):
        [call] = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


@PROVIDERS
def test_an_answer_of_a_schema(proxy: Any, provider: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    answer = proxy.chat.completions.create(model=f"{provider}/upper", messages=HELLO, response_format=form)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Rome")


def test_responses_whole_and_streamed(proxy: Any) -> None:
    asked: Any = {"model": "openai/upper", "input": "hello world", "temperature": 0}
    assert proxy.responses.create(**asked).output_text == "HELLO WORLD"
    events = list(proxy.responses.create(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "HELLO WORLD"


@PROVIDERS
def test_errors_keep_their_status(proxy: Any, provider: str) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such"):
        proxy.chat.completions.create(model=f"{provider}/no-such", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        proxy.chat.completions.create(model=f"{provider}/demo", messages=HELLO, temperature=-1)
