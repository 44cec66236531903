"""Everything that can be wrong with a call, and the server afterwards.

Each entry says what is sent, the status, and words that the message must hold; the field at fault where there is one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from bad_adapters import BAD_ADAPTERS, BadAdapter, tiny_base, write_good_adapter
from reciter import MAX_MODEL_LEN, engine_config

from manylora.core.config import ServerConfig
from manylora.core.errors import AdapterNotFound
from manylora.serving.server import BackgroundServer

COMPLETION = {"model": "base", "prompt": "say", "max_tokens": 3}
CHAT = {"model": "base", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Bad:
    """A bad call."""

    slug: str
    path: str
    body: bytes
    status: int
    words: str
    param: str | None = None
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: JSON)


BAD: list[Bad] = []


def raw(slug: str, body: bytes, status: int, words: str, path: str = "/v1/completions", **more: Any) -> None:
    BAD.append(Bad(slug, path, body, status, words, **more))


def completion(slug: str, status: int, words: str, param: str | None, **changes: Any) -> None:
    body = {key: value for key, value in {**COMPLETION, **changes}.items() if value is not ...}
    BAD.append(Bad(slug, "/v1/completions", json.dumps(body).encode(), status, words, param))


def chat(slug: str, status: int, words: str, param: str | None, **changes: Any) -> None:
    body = {key: value for key, value in {**CHAT, **changes}.items() if value is not ...}
    BAD.append(Bad("chat-" + slug, "/v1/chat/completions", json.dumps(body).encode(), status, words, param))


def admin(slug: str, path: str, status: int, words: str, param: str | None, body: Any) -> None:
    BAD.append(Bad("admin-" + slug, path, json.dumps(body).encode(), status, words, param))


# What is no JSON object of ours.
raw("empty-body", b"", 400, "not valid JSON")
raw("cut-off", b'{"model": "base", "prompt": "s', 400, "not valid JSON")
raw("trailing", b'{"model": "base", "prompt": "say"} x', 400, "not valid JSON")
raw("not-utf8", b'{"model": "base", "prompt": "\xff\xfe"}', 400, "not valid JSON")
raw("lone-surrogate", b'{"model": "base", "prompt": "\\ud800"}', 400, "not valid JSON")
raw("a-list", b"[1, 2]", 400, "a list")
raw("a-string", b'"hello"', 400, "a str")
raw("null", b"null", 400, "NoneType")
raw("too-deep", b'{"a":' * 5000 + b"1" + b"}" * 5000, 400, "nested too deeply")
raw("deep-lists", b'{"prompt":' + b"[" * 30_000 + b"]" * 30_000 + b"}", 400, "nested too deeply")
raw("nan", b'{"model": "base", "prompt": "say", "temperature": NaN}', 400, "not valid JSON")
raw("infinity", b'{"model": "base", "prompt": "say", "temperature": -Infinity}', 400, "not valid JSON")
raw("huge-float", b'{"model": "base", "prompt": "say", "temperature": 1e999}', 400, "")
raw("huge-int", b'{"model": "base", "prompt": "say", "max_tokens": 1' + b"0" * 400 + b"}", 400, "")
raw("too-large", b'{"model": "base", "prompt": "' + b"x" * 100_001 + b'"}', 413, "larger than 100000 bytes")
raw("form", b"model=base", 415, "application/json", headers={"content-type": "application/x-www-form-urlencoded"})
raw("text", json.dumps(COMPLETION).encode(), 415, "application/json", headers={"content-type": "text/plain"})
raw("no-media-type", json.dumps(COMPLETION).encode(), 415, "application/json", headers={})
raw("no-route", b"{}", 404, "no route", path="/v1/nothing")
raw("malformed-host", b"", 404, "no route", path="/nothing", headers={"host": "["})
raw("wrong-method", b"", 405, "GET is not allowed", method="GET")

# Models.
completion("no-model", 400, "model", "model", model=...)
completion("null-model", 400, "model", "model", model=None)
completion("numeric-model", 400, "model", "model", model=7)
completion("unknown-model", 404, "does not exist", "model", model="nobody")
completion("empty-model", 404, "does not exist", "model", model="")
completion("unknown-adapter-of-base", 404, "does not exist", "model", model="base:nobody")
completion("adapter-of-another-base", 404, "does not exist", "model", model="other:m")
completion("base-by-a-colon", 404, "does not exist", "model", model="base:")
chat("unknown-model", 404, "does not exist", "model", model="nobody")

# Prompts; clients of vLLM know the errors by these words.
LONGEST = f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, "
completion("no-prompt", 400, "prompt", "prompt", prompt=...)
completion("null-prompt", 400, "Either prompt or prompt_embeds must be provided", "prompt", prompt=None)
completion("object-prompt", 400, "prompt", "prompt", prompt={})
completion("empty-prompt", 400, "no tokens", "prompt", prompt="")
completion("empty-prompts", 400, "empty list", "prompt", prompt=[])
completion("one-empty-of-two", 400, "no tokens", "prompt", prompt=["say", ""])
completion("mixed-prompts", 400, "different kinds", "prompt", prompt=["say", 5])
completion("negative-token", 400, "Token id -1 is out of vocabulary", "prompt", prompt=[1, -1])
completion("unknown-token", 400, "Token id 257 is out of vocabulary", "prompt", prompt=[1, 257])
completion("fractional-token", 400, "prompt", "prompt[1]", prompt=[1, 1.5])
completion("long-prompt", 400, LONGEST + "your prompt contains 306", "prompt", prompt="x" * (MAX_MODEL_LEN + 50))
completion("too-many-tokens", 400, LONGEST + "you requested", "max_tokens", max_tokens=MAX_MODEL_LEN)
completion("one-too-many", 400, LONGEST + "you requested", "max_tokens", max_tokens=MAX_MODEL_LEN - 2)

# Sampling.
completion("zero-tokens", 400, "at least 1", "max_tokens", max_tokens=0)
completion("negative-tokens", 400, "at least 1", "max_tokens", max_tokens=-5)
completion("text-tokens", 400, "max_tokens", "max_tokens", max_tokens="10")
completion("fractional-tokens", 400, "max_tokens", "max_tokens", max_tokens=1.5)
completion("bool-tokens", 400, "max_tokens", "max_tokens", max_tokens=True)
completion("min-above-max", 400, "no more than max_tokens", "min_tokens", min_tokens=4)
completion("negative-temperature", 400, "temperature", "temperature", temperature=-0.1)
completion("hot", 400, "temperature", "temperature", temperature=1e6)
completion("top-p-zero", 400, "top_p", "top_p", top_p=0)
completion("top-p-two", 400, "top_p", "top_p", top_p=2)
completion("top-k-negative", 400, "top_k", "top_k", top_k=-2)
completion("min-p-two", 400, "min_p", "min_p", min_p=2)
completion("presence", 400, "presence_penalty", "presence_penalty", presence_penalty=3)
completion("frequency", 400, "frequency_penalty", "frequency_penalty", frequency_penalty=-3)
completion("repetition", 400, "repetition_penalty", "repetition_penalty", repetition_penalty=0)
completion("seed-text", 400, "seed", "seed", seed="1")
completion("n-zero", 400, "n", "n", n=0)
completion("n-huge", 400, "n", "n", n=1000)
completion("best-of", 400, "best_of", "best_of", best_of=3)
completion("empty-stop", 400, "stop", "stop", stop="")
completion("many-stops", 400, "stop", "stop", stop=["x"] * 17)
completion("numeric-stop", 400, "stop", "stop", stop=5)
completion("stop-token", 400, "257", "stop_token_ids", stop_token_ids=[257])
completion("bias-key", 400, "'x'", "logit_bias", logit_bias={"x": 1})
completion("bias-token", 400, "9999", "logit_bias", logit_bias={"9999": 1})
completion("bias-range", 400, "logit_bias", "logit_bias", logit_bias={"5": 101})
completion("logprobs", 400, "logprobs", "logprobs", logprobs=21)
completion("logprobs-bool", 400, "logprobs", "logprobs", logprobs=True)
completion("echo-without-logprobs", 400, "at least 1", "max_tokens", max_tokens=0, logprobs=1)
completion("stream-text", 400, "stream", "stream", stream="yes")
completion("options-without-stream", 400, "stream", "stream_options", stream_options={"include_usage": True})
completion("priority", 400, "priority", "priority", priority="high")

# What would change the answer and cannot be done.
completion("suffix", 400, "suffix is not supported", "suffix", suffix="end")
completion(
    "beams in a stream", 400, "not currently supported with beam search", "stream", use_beam_search=True, stream=True
)
completion("lora-path", 400, "lora_path is not supported", "lora_path", lora_path="/x")
completion("guided", 400, "regex cannot be followed", "guided_regex", guided_regex="(")
completion("format", 400, "xml", "response_format", response_format={"type": "xml"})
completion("no-schema", 400, "json_schema", "response_format", response_format={"type": "json_schema"})
completion(
    "bad-schema",
    400,
    "schema",
    "response_format",
    response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}},
)
chat("functions", 400, "functions is not supported", "functions", functions=[{"name": "f"}])
chat("audio", 400, "modalities is not supported", "modalities", modalities=["text", "audio"])
chat("echo", 400, "echo", "echo", echo=True)
chat("template", 400, "--trust-request-chat-template", "chat_template", chat_template="{{ 1 }}")

# Conversations.
chat("no-messages", 400, "messages", "messages", messages=...)
chat("empty", 400, "messages", "messages", messages=[])
chat("text", 400, "messages", "messages", messages="hello")
chat("no-role", 400, "role", "messages[0].role", messages=[{"content": "hello"}])
chat("unknown-role", 400, "unknown role", "messages", messages=[{"role": "wizard", "content": "hello"}])
chat("no-content", 400, "content is missing", "messages", messages=[{"role": "user"}])
chat("number", 400, "content", "messages[0].content", messages=[{"role": "user", "content": 5}])
chat(
    "image",
    400,
    "'image_url'",
    "messages",
    messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
)
chat("text-part", 400, "no string", "messages", messages=[{"role": "user", "content": [{"type": "text"}]}])
chat(
    "tool-calls",
    400,
    "missing required field `function`",
    "messages[0].tool_calls[0].function",
    messages=[{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
)
chat("top-without", 400, "`logprobs` must be set to true", "top_logprobs", top_logprobs=2)
chat("top-many", 400, "greater than max allowed: 20", "top_logprobs", logprobs=True, top_logprobs=21)
chat("numeric-logprobs", 400, "logprobs", "logprobs", logprobs=2)
chat("template-kwargs", 400, "chat_template", "chat_template_kwargs", chat_template_kwargs={"chat_template": "x"})
chat("too-long", 400, "tokens", "prompt", messages=[{"role": "user", "content": "x" * 500}])

# The routes beside them.
for path, body, words in (
    ("/tokenize", {}, "exactly one"),
    ("/tokenize", {"prompt": "x", "messages": []}, "exactly one"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"messages": [{"role": "wizard", "content": "x"}]}, "unknown role"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "-1"),
    ("/detokenize", {"tokens": [10**12]}, "is out of vocabulary"),
    ("/detokenize", {"tokens": "abc"}, "tokens"),
):
    raw(f"{path[1:]}-{json.dumps(body)}", json.dumps(body).encode(), 400, words, path=path)

# Adapters.
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
admin("nothing", LOAD, 400, "must be provided", "lora_name", {})
admin("no-path", LOAD, 400, "must be provided", "lora_path", {"lora_name": "x"})
admin("no-name", LOAD, 400, "must be provided", "lora_name", {"lora_path": "/x"})
admin("empty-name", LOAD, 400, "must be provided", "lora_name", {"lora_name": "", "lora_path": "/x"})
admin("number-name", LOAD, 400, "lora_name", "lora_name", {"lora_name": 5, "lora_path": "/x"})
admin("control-name", LOAD, 400, "name", "lora_name", {"lora_name": "a\nb", "lora_path": "/x"})
admin("long-name", LOAD, 400, "name", "lora_name", {"lora_name": "a" * 1000, "lora_path": "/x"})
admin("the-bases-name", LOAD, 400, "base model", "lora_name", {"lora_name": "base", "lora_path": "m"})
admin("taken-name", LOAD, 400, "already been loaded", "lora_name", {"lora_name": "m", "lora_path": "m"})
admin("outside", LOAD, 403, "outside", "lora_path", {"lora_name": "x", "lora_path": "/etc"})
admin("upwards", LOAD, 403, "..", "lora_path", {"lora_name": "x", "lora_path": "../../etc"})
admin("home", LOAD, 403, "~", "lora_path", {"lora_name": "x", "lora_path": "~/x"})
admin("nul", LOAD, 403, "printable", "lora_path", {"lora_name": "x", "lora_path": "a\0b"})
admin("long-path", LOAD, 403, "4096", "lora_path", {"lora_name": "x", "lora_path": "a/" * 5000})
admin("missing", LOAD, 404, "none of the directories", "lora_path", {"lora_name": "x", "lora_path": "missing"})
admin("unload-nothing", UNLOAD, 400, "lora_name", "lora_name", {})
admin("unload-unknown", UNLOAD, 404, "cannot be found", "lora_name", {"lora_name": "nobody"})
admin("unload-base", UNLOAD, 404, "cannot be found", "lora_name", {"lora_name": "base"})
admin("sagemaker-nothing", "/adapters", 400, "must be provided", "name", {})
admin("sagemaker-outside", "/adapters", 403, "outside", "src", {"name": "x", "src": "/etc"})
raw("delete-unknown", b"", 404, "cannot be found", path="/adapters/nobody", method="DELETE")
raw("pin-unknown", b"", 404, "cannot be found", path="/adapters/nobody/pin")
raw("adapter-unknown", b"", 404, "cannot be found", path="/adapters/nobody", method="GET")


def assert_serves(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={**COMPLETION, "model": "m"})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "mno"


def test_the_corpus_is_large_and_its_names_are_unique() -> None:
    assert len(BAD) >= 100
    slugs = [bad.slug for bad in BAD]
    assert len(set(slugs)) == len(slugs)


@pytest.mark.parametrize("bad", BAD, ids=[bad.slug for bad in BAD])
def test_a_bad_call_is_refused_by_name(http: httpx.Client, bad: Bad) -> None:
    answer = http.request(bad.method, bad.path, content=bad.body, headers=bad.headers)
    assert answer.status_code == bad.status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert bad.words in error["message"]
    assert len(error["message"]) < 1000
    assert error["code"] == bad.status
    if bad.param is not None:
        assert error["param"] == bad.param


def test_it_serves_after_all_of_them(http: httpx.Client) -> None:
    for bad in BAD:
        http.request(bad.method, bad.path, content=bad.body, headers=bad.headers)
    assert http.get("/health").status_code == 200
    assert_serves(http)
    ours = [adapter["name"] for adapter in http.get("/adapters").json()["data"]]
    assert "x" not in ours


def test_streams_are_refused_with_a_status_too(http: httpx.Client) -> None:
    for changes, status in (({"model": "nobody"}, 404), ({"max_tokens": 10_000}, 400)):
        answer = http.post("/v1/completions", json={**COMPLETION, "stream": True, **changes})
        assert answer.status_code == status


def test_the_openai_client_raises_the_right_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="base", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="base", prompt="x" * 1000)


@pytest.fixture(scope="module")
def packing(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Path]]:
    """A server that reads real adapters, and the directory it may read them from."""
    root = tmp_path_factory.mktemp("corpus").resolve()
    config = ServerConfig(port=0, in_process=True, lora_dirs=(str(root),))
    server = BackgroundServer(engine_config(tokenizer), config, builder="serving:packing_parts")
    with server, httpx.Client(base_url=server.url, timeout=30) as http:
        yield http, root


@pytest.mark.parametrize("bad", BAD_ADAPTERS, ids=[bad.slug for bad in BAD_ADAPTERS])
def test_a_bad_adapter_is_refused_by_name(packing: tuple[httpx.Client, Path], bad: BadAdapter) -> None:
    http, root = packing
    directory = root / bad.slug
    directory.mkdir()
    bad.build(directory, tiny_base())
    answer = http.post(LOAD, json={"lora_name": bad.slug, "lora_path": str(directory)})
    # Links that lead out are refused before anything is read, with another message.
    assert answer.status_code in ((404, 403) if bad.error is AdapterNotFound else (500, 404, 403)), answer.text
    error = answer.json()["error"]
    if answer.status_code == 500:
        assert all(word in error["message"] for word in bad.words), error["message"]
    assert bad.slug in error["message"]
    assert http.post("/v1/completions", json={**COMPLETION, "model": bad.slug}).status_code == 404


def test_good_adapters_load_after_all_the_bad_ones(packing: tuple[httpx.Client, Path]) -> None:
    http, root = packing
    write_good_adapter(root / "good", tiny_base())
    assert http.post(LOAD, json={"lora_name": "good", "lora_path": "good"}).status_code == 200
    assert http.post("/v1/completions", json={**COMPLETION, "model": "good"}).status_code == 200
    assert [adapter["name"] for adapter in http.get("/adapters").json()["data"]] == ["good"]
