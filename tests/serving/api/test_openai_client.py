"""The unmodified openai client against the server: what it asks for is what it gets."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from reciter import MAX_MODEL_LEN

HELLO = [{"role": "user", "content": "hello"}]


def test_models_are_the_base_and_then_its_adapters(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["base", "m", "n"]
    base, adapter = models[0].to_dict(), models[1].to_dict()
    assert base["parent"] is None
    assert base["max_model_len"] == MAX_MODEL_LEN
    assert adapter["parent"] == "base"
    assert str(adapter["root"]).endswith("/m")
    assert client.models.retrieve("m").id == client.models.retrieve("base:m").id == "m"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


@pytest.mark.parametrize(("model", "answer"), [("base", "abcde"), ("m", "mnopq"), ("base:m", "mnopq"), ("n", "nopqr")])
def test_the_model_named_is_the_one_that_answers(client: openai.OpenAI, model: str, answer: str) -> None:
    completion = client.completions.create(model=model, prompt="say", max_tokens=5)
    assert completion.choices[0].text == answer
    assert completion.model == model
    chat = client.chat.completions.create(model=model, messages=HELLO, max_completion_tokens=5)
    assert chat.choices[0].message.content == answer
    assert chat.choices[0].message.role == "assistant"


def test_the_fingerprint_tells_adapter_versions_apart(client: openai.OpenAI) -> None:
    seen = [
        client.completions.create(model=model, prompt="say", max_tokens=1).system_fingerprint
        for model in ("base", "m", "n", "m")
    ]
    assert len(set(seen)) == 3
    assert seen[1] == seen[3]


def test_usage_counts_prompt_answer_and_cache(client: openai.OpenAI) -> None:
    prompt = "a prompt of exactly 2 blocks:" + "." * 4
    for cached in (0, 32):
        usage = client.completions.create(model="n", prompt=prompt, max_tokens=7, n=2).usage
        assert usage is not None
        assert usage.prompt_tokens == len(prompt)
        assert usage.completion_tokens == 14
        assert usage.total_tokens == len(prompt) + 14
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == cached


@pytest.mark.parametrize(
    ("prompt", "num_choices"),
    [("one", 1), (["one", "two"], 2), ([104, 105], 1), ([[104, 105], [106]], 2), ([[104]] * 3, 3)],
)
def test_every_shape_of_prompt(client: openai.OpenAI, prompt: object, num_choices: int) -> None:
    completion = client.completions.create(model="base", prompt=prompt, max_tokens=3, echo=True)  # type: ignore[arg-type]
    assert [choice.index for choice in completion.choices] == list(range(num_choices))
    first = {"one": "one", 104: "hi", (104, 105): "hi", (104,): "h"}
    item = prompt if isinstance(prompt, str) else prompt[0]  # type: ignore[index]
    expected = first[tuple(item) if isinstance(item, list) else item]
    assert completion.choices[0].text == expected + "abc"


def test_default_lengths_are_openais(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="base", prompt="say")
    assert completion.choices[0].finish_reason == "length"
    assert len(completion.choices[0].text) == 16
    chat = client.chat.completions.create(model="base", messages=HELLO)
    assert chat.usage is not None
    assert chat.usage.total_tokens == MAX_MODEL_LEN


def test_end_of_sequence_stops_and_is_no_text(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="base", prompt="stop!", max_tokens=50)
    assert completion.choices[0].text == "abcde"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 6
    on = client.completions.create(model="base", prompt="stop!", max_tokens=10, extra_body={"ignore_eos": True})
    assert on.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("extra", "text", "reason"),
    [
        ({"stop": "def"}, "abc", "def"),
        ({"stop": ["xyz", "de", "z"]}, "abc", "de"),
        ({"stop": ["de"], "include_stop_str_in_output": True}, "abcde", "de"),
        ({"stop_token_ids": [ord("d")]}, "abc", ord("d")),
        ({"stop": ["b"], "min_tokens": 5}, "abcdefghijklmnopqrstuvwxyza", "b"),
    ],
)
def test_stop_strings(http: httpx.Client, stream: bool, extra: dict[str, object], text: str, reason: str | int) -> None:
    body = {"model": "base", "prompt": "say", "max_tokens": 60, "stream": stream, **extra}
    answer = http.post("/v1/completions", json=body)
    if stream:
        chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
        choice = chunks[-1]["choices"][0]
    else:
        choice = answer.json()["choices"][0]
        assert choice["text"] == text
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == reason


def test_a_chat_stream_begins_with_the_role_and_ends_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="m", messages=HELLO, max_tokens=5, n=2, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for index in (0, 1):
        deltas = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert deltas[0].delta.role == "assistant"
        assert all(delta.delta.role is None for delta in deltas[1:])
        assert "".join(delta.delta.content or "" for delta in deltas) == "mnopq"
        assert [delta.finish_reason for delta in deltas][-1] == "length"
        assert [delta.finish_reason for delta in deltas][:-1] == [None] * (len(deltas) - 1)


def test_a_stream_without_usage_has_none(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="base", prompt="say", max_tokens=5, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abcde"
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_on_every_chunk_when_asked(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.completions.create(
        model="base",
        prompt="say",
        max_tokens=5,
        stream=True,
        stream_options=options,  # type: ignore[arg-type]
    )
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_a_stream_is_events_whatever_the_client_accepts(http: httpx.Client) -> None:
    body = {"model": "base", "prompt": "say", "max_tokens": 2, "stream": True}
    answer = http.post("/v1/completions", json=body, headers={"accept": "application/json"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")


def test_completion_logprobs(client: openai.OpenAI) -> None:
    logprobs = client.completions.create(model="base", prompt="say", max_tokens=3, logprobs=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[1] == {"b": -0.5, "c": -1.5}


def test_chat_logprobs(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="m", messages=HELLO, max_tokens=2, logprobs=True, top_logprobs=2)
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None
    assert [(entry.token, entry.logprob, entry.bytes) for entry in content] == [("m", -0.5, [109]), ("n", -0.5, [110])]
    assert [top.token for top in content[1].top_logprobs] == ["n", "o"]
    bare = client.chat.completions.create(model="m", messages=HELLO, max_tokens=2, logprobs=True)
    assert bare.choices[0].logprobs is not None
    assert bare.choices[0].logprobs.content is not None
    assert bare.choices[0].logprobs.content[0].top_logprobs == []
    none = client.chat.completions.create(model="m", messages=HELLO, max_tokens=2, logprobs=False, top_logprobs=0)
    assert none.choices[0].logprobs is None  # vLLM's defaults, written out
    with pytest.raises(openai.BadRequestError, match="`logprobs` must be set to true"):
        client.chat.completions.create(model="m", messages=HELLO, max_tokens=2, top_logprobs=1)


def test_content_parts_are_joined(http: httpx.Client) -> None:
    def count(content: object) -> int:
        body = {"model": "base", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        return int(http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"])

    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert count(parts) == count("one\ntwo")


def test_tokens_and_back(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "héy", "return_token_strs": True}).json()
    assert answer["tokens"] == list("héy".encode())
    assert (answer["count"], answer["max_model_len"]) == (4, MAX_MODEL_LEN)
    assert answer["token_strs"] == ["h", "\u00c3", "\u00a9", "y"]  # as the vocabulary writes the two bytes
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "héy"}
    chat = http.post("/tokenize", json={"messages": HELLO}).json()
    assert bytes(chat["tokens"]) == b"<user>hello</user><assistant>"


def test_fields_that_change_nothing_are_ignored(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="base",
        messages=HELLO,
        max_tokens=2,
        user="someone",
        store=False,
        metadata={"a": "b"},
        tools=[],
        tool_choice="auto",
        extra_body={"no_such_field": 1, "suffix": None, "top_k": -1, "cache_salt": "s", "priority": 3},
    )
    assert chat.choices[0].message.content == "ab"


def test_health_and_version(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "serving"}
    assert http.get("/ping").status_code == 200
    assert http.get("/version").json()["version"]


@pytest.mark.parametrize("stream", [False, True])
def test_sagemakers_route_is_a_chat_or_a_completion_by_its_fields(http: httpx.Client, stream: bool) -> None:
    def invoke(adapter: str | None = None, **body: Any) -> httpx.Response:
        headers = {} if adapter is None else {"X-Amzn-SageMaker-Adapter-Identifier": adapter}
        return http.post("/invocations", json={"max_tokens": 2, "stream": stream, **body}, headers=headers)

    for adapter, model, text in ((None, None, "ab"), ("m", None, "mn"), ("m", "n", "mn"), (None, "n", "no")):
        named = {} if model is None else {"model": model}
        assert text in invoke(adapter, prompt="x", **named).text.replace('"},"', "").replace('"}', "") or stream
        answer = invoke(adapter, messages=HELLO, **named)
        assert f'"model":"{adapter or model or "base"}"' in answer.text
        assert "chat.completion" in answer.text
    assert invoke("nobody", prompt="x").status_code == invoke("x" * 700, prompt="x").status_code == 404
    refused = invoke(input="x")
    assert (refused.status_code, "Cannot find suitable handler" in refused.text) == (400, True)
    assert http.post("/v1/completions", json={"prompt": "x"}).json()["error"]["param"] == "model"


def test_the_last_message_is_continued_when_asked(http: httpx.Client, client: openai.OpenAI) -> None:
    messages: list[Any] = [*HELLO, {"role": "assistant", "content": "well"}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    assert bytes(tokens) == b"<user>hello</user><assistant>well"
    extra = {"add_generation_prompt": False, "continue_final_message": True}
    chat = client.chat.completions.create(model="base", messages=messages, max_tokens=2, extra_body=extra)
    assert chat.usage is not None and chat.usage.prompt_tokens == len(tokens)
    with pytest.raises(openai.BadRequestError, match="expected one of them"):
        client.chat.completions.create(
            model="base", messages=messages, extra_body={**extra, "add_generation_prompt": True}
        )
