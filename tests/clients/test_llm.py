"""Simon Willison's `llm`, by its command and its library, with models of `extra-openai-models.yaml`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

llm = pytest.importorskip("llm")

KINDS = {"chat": {}, "completion": {"completion": True}, "responses": {"responses": True}}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
PROMPT = "<|bos|><|user|>hello world<|end|><|assistant|>"


@pytest.fixture(autouse=True, scope="module")
def user_path(url: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("llm")
    models = [
        {"model_id": f"{kind}-{name}", "model_name": name, "api_base": f"{url}/v1", "supports_schema": True}
        | {"supports_tools": True, **options}
        for kind, options in KINDS.items()
        for name in ("upper", "no-such")
    ]
    (folder / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML
    before = os.environ.get("LLM_USER_PATH")
    os.environ["LLM_USER_PATH"] = str(folder)
    yield folder
    os.environ.pop("LLM_USER_PATH") if before is None else os.environ.update(LLM_USER_PATH=before)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("llm")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_the_command(kind: str, streamed: bool) -> None:
    prompt = PROMPT if kind == "completion" else "hello world"
    done = run("-m", f"{kind}-upper", "-o", "temperature", "0", *([] if streamed else ["--no-stream"]), prompt)
    assert done.stdout.strip() == "HELLO WORLD", done.stderr


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_a_schema(kind: str) -> None:
    done = run("-m", f"{kind}-upper", "--schema", json.dumps(SCHEMA), "hello world")
    assert json.loads(done.stdout)["city"] in ("Paris", "Rome"), done.stderr


def test_a_conversation(url: str) -> None:
    conversation = llm.get_model("chat-upper").conversation()
    assert conversation.prompt("hello world", temperature=0).text() == "HELLO WORLD"
    assert conversation.prompt("tiny llama", temperature=0).text() == "TINY LLAMA"


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_tools_that_are_offered(kind: str) -> None:
    def weather(city: str) -> str:
        """The weather."""
        return "tiny llama"

    chain = llm.get_model(f"{kind}-upper").chain("hello world", tools=[weather], options={"temperature": 0})
    assert chain.text() == "HELLO WORLD"


def test_an_unknown_model_is_its_error() -> None:
    done = run("-m", "chat-no-such", "hello world")
    assert done.returncode != 0
    assert "no-such" in done.stderr
