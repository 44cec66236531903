"""Details beside the text of answers: log-probabilities of prompts, token ids, null keys; and cuts of prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from reciter import EOS, MAX_MODEL_LEN, engine_config
from serving import Gate
from tokenizers import processors
from transformers import AutoTokenizer

from manylora.core.config import ServerConfig, WebConfig
from manylora.serving.api import prompt_part
from manylora.serving.server import BackgroundServer

HELLO = [{"role": "user", "content": "hello"}]


def ask(http: httpx.Client, path: str = "completions", status: int = 200, **fields: Any) -> dict[str, Any]:
    given = {"messages": HELLO} if "chat" in path else {"prompt": "say"}
    answer = http.post(f"/v1/{path}", json={"model": "base", "max_tokens": 3, **given, **fields})
    assert answer.status_code == status, answer.text
    body: dict[str, Any] = answer.json()
    return body


def stream(http: httpx.Client, path: str = "completions", **fields: Any) -> list[dict[str, Any]]:
    given = {"messages": HELLO} if "chat" in path else {"prompt": "say"}
    body = {"model": "base", "max_tokens": 3, "stream": True, **given, **fields}
    with http.stream("POST", f"/v1/{path}", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def row(text: str, num_top: int) -> dict[str, Any]:
    """Return the row of a token that is its own most likely one, as the simulated engine makes them."""
    tokens = [(ord(text) + rank, rank) for rank in range(num_top)] or [(ord(text), 0)]
    return {
        str(token): {"logprob": pytest.approx(-0.1 - rank), "rank": rank + 1, "decoded_token": chr(token)}
        for token, rank in tokens
    }


@pytest.mark.parametrize("num_top", [0, 2])
def test_prompt_logprobs_have_vllms_shape(http: httpx.Client, num_top: int) -> None:
    expected = [None, row("a", num_top), row("y", num_top)]
    body = ask(http, prompt=["say", "s"], n=2, prompt_logprobs=num_top)
    assert [choice["prompt_logprobs"] for choice in body["choices"]] == [expected, expected, [None], [None]]
    chat = ask(http, "chat/completions", prompt_logprobs=num_top)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert chat["prompt_logprobs"][:3] == [None, row("u", num_top), row("s", num_top)]


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_echo_with_logprobs_has_openais_shape(http: httpx.Client, is_stream: bool) -> None:
    def logprobs(index: int, **fields: Any) -> tuple[str, dict[str, list[Any]]]:
        asked = {"prompt": ["say", "hi"], "echo": True, "logprobs": 2, **fields}
        chunks = stream(http, **asked) if is_stream else [ask(http, **asked)]
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        parts = [choice["logprobs"] for choice in choices]
        lists = {name: [item for part in parts for item in part[name]] for name in parts[0]}
        return "".join(choice["text"] for choice in choices), lists

    text, lists = logprobs(0)
    assert text == "sayabc"
    assert lists["tokens"] == list("sayabc")
    assert lists["token_logprobs"] == [None, *[pytest.approx(-0.1)] * 2, *[-0.5] * 3]
    assert lists["top_logprobs"][0] is None
    assert lists["top_logprobs"][2] == {"y": pytest.approx(-0.1), "z": pytest.approx(-1.1)}
    assert lists["top_logprobs"][3] == {"a": -0.5, "b": -1.5}
    assert lists["text_offset"] == [0, 1, 2, 3, 4, 5]

    text, lists = logprobs(1, max_tokens=0, logprobs=1)
    assert (text, lists["tokens"], lists["text_offset"]) == ("hi", ["h", "i"], [0, 1])
    assert lists["top_logprobs"] == [None, {"i": pytest.approx(-0.1)}]
    text, lists = logprobs(1, max_tokens=0, logprobs=1, return_tokens_as_token_ids=True)
    assert (lists["tokens"], lists["top_logprobs"][1]) == (
        ["token_id:104", "token_id:105"],
        {"token_id:105": pytest.approx(-0.1)},
    )


def test_a_prompt_alone_counts_no_answer(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="m", prompt="say", max_tokens=0, echo=True, logprobs=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("say", "length")
    assert answer.usage is not None and answer.usage.completion_tokens == 0
    (alone,) = client.completions.create(model="m", prompt="s", max_tokens=0, echo=True, logprobs=1).choices
    assert alone.logprobs is not None and alone.logprobs.token_logprobs == [None]


def test_long_reports_are_made_in_slices(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = "the quick brown fox jumps over the lazy dog" * 3
    asked: dict[str, Any] = {"prompt": prompt, "echo": True, "logprobs": 2, "prompt_logprobs": 1}
    whole = ask(http, **asked)["choices"]
    monkeypatch.setattr(prompt_part, "SLICE_NUMBERS", 7)
    assert ask(http, **asked)["choices"] == whole
    assert "".join(whole[0]["logprobs"]["tokens"]) == prompt + "abc"
    assert [len(entry) for entry in whole[0]["prompt_logprobs"][1:]] == [1] * (len(prompt) - 1)


def test_token_ids_of_prompts_and_answers(http: httpx.Client) -> None:
    (choice,) = ask(http, return_token_ids=True)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (list(b"say"), list(b"abc"))
    chat = ask(http, "chat/completions", return_token_ids=True)
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    assert chat["choices"][0]["token_ids"] == list(b"abc")
    for path in ("completions", "chat/completions"):
        chunks = stream(http, path, return_token_ids=True)
        places = [chunk if "chat" in path else chunk["choices"][0] for chunk in chunks]
        assert [("prompt_token_ids" in place) for place in places] == [True] + [False] * (len(places) - 1)
        assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == list(b"abc")


def test_tokens_may_be_named_by_their_ids(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="base",
        messages=HELLO,  # type: ignore[arg-type]
        max_tokens=1,
        logprobs=True,
        top_logprobs=2,
        extra_body={"return_tokens_as_token_ids": True},
    )
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
    (entry,) = chat.choices[0].logprobs.content
    assert entry.token == "token_id:97"
    assert [other.token for other in entry.top_logprobs] == ["token_id:97", "token_id:98"]


def test_given_tokens_are_reported_in_place_of_the_most_likely(http: httpx.Client) -> None:
    given: dict[str, Any] = {"logprob_token_ids": [122, 65, 122], "return_tokens_as_token_ids": True, "max_tokens": 1}
    lists = ask(http, logprobs=1, **given)["choices"][0]["logprobs"]
    assert lists["top_logprobs"] == [{"token_id:97": -0.5, "token_id:122": -0.5, "token_id:65": -1.5}]
    (entry,) = ask(http, "chat/completions", logprobs=True, **given)["choices"][0]["logprobs"]["content"]
    assert [other["token"] for other in entry["top_logprobs"]] == ["token_id:122", "token_id:65"]
    for wrong, words in (
        ({"logprob_token_ids": [257]}, "0 to 256"),
        ({"logprob_token_ids": [-1]}, "0 to 256"),
        ({"logprob_token_ids": [1] * 129}, "length 129, which is greater than max allowed: 128"),
        ({"logprob_token_ids": [1], "echo": True, "max_tokens": 0}, "no output tokens"),
    ):
        error = ask(http, status=400, logprobs=1, **wrong)["error"]
        assert words in error["message"] and error["param"] == "logprob_token_ids"


def test_more_logprobs_where_the_server_gives_them(tokenizer: Path) -> None:
    config = ServerConfig(port=0, in_process=True, web=WebConfig(max_logprobs=-1))
    with (
        BackgroundServer(engine_config(tokenizer), config, builder="reciter:reciter_parts") as running,
        httpx.Client(base_url=running.url, timeout=30) as http,
    ):
        (choice,) = ask(http, logprobs=25, prompt_logprobs=-1, max_tokens=1)["choices"]
        assert len(choice["logprobs"]["top_logprobs"][0]) == 25
        assert [len(row) for row in choice["prompt_logprobs"][1:]] == [257] * 2
        chat = ask(http, "chat/completions", logprobs=True, top_logprobs=30, max_tokens=1)
        assert len(chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 30
        error = ask(http, status=400, logprobs=1025)["error"]
        assert "sample logprobs of 1025, which is greater than max allowed: 1024" in error["message"]


def test_keys_that_vllm_sends_as_null_are_null(http: httpx.Client) -> None:
    completion, chat = ask(http), ask(http, "chat/completions")
    for body in (completion, chat):
        assert (body["service_tier"], body["kv_transfer_params"]) == (None, None)
        assert body["choices"][0]["token_ids"] is body["choices"][0]["stop_reason"] is None
    for place in (completion["choices"][0], chat):
        assert place["prompt_logprobs"] is place["prompt_token_ids"] is None
    message = chat["choices"][0]["message"]
    assert all(message[name] is None for name in ("refusal", "annotations", "audio", "function_call"))
    assert all("token_ids" not in chunk["choices"][0] for chunk in stream(http, "chat/completions"))


def test_prompts_are_cut_to_their_ends(http: httpx.Client) -> None:
    def seen(**fields: Any) -> str:
        (choice,) = ask(http, return_token_ids=True, **fields)["choices"]
        return bytes(choice["prompt_token_ids"]).decode()

    assert seen(prompt="a long story", truncate_prompt_tokens=5) == "story"
    assert seen(prompt=list(b"a long story"), truncate_prompt_tokens=5) == "story"
    assert seen(prompt="ab", truncate_prompt_tokens=5) == "ab"
    for prompt in ("a long story", list(b"a long story")):
        assert seen(prompt=prompt, truncate_prompt_tokens=5, truncation_side="right") == "a lon"
        assert seen(prompt=prompt, truncate_prompt_tokens=5, truncation_side="left") == "story"
    assert len(seen(prompt="x" * 2 * MAX_MODEL_LEN, truncate_prompt_tokens=-1, max_tokens=9)) == MAX_MODEL_LEN - 9
    echoed = ask(http, prompt="a long story", truncate_prompt_tokens=5, echo=True)["choices"][0]["text"]
    assert echoed == "storyabc"
    chat = ask(http, "chat/completions", truncate_prompt_tokens=11, return_token_ids=True)
    assert bytes(chat["prompt_token_ids"]) == b"<assistant>"
    error = ask(http, status=400, truncate_prompt_tokens=5, truncation_side="middle")["error"]
    assert error["param"] == "truncation_side"


def test_special_tokens_of_texts(tokenizer: Path, tmp_path: Path) -> None:
    hf = AutoTokenizer.from_pretrained(tokenizer)
    frame = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", EOS)])
    hf.backend_tokenizer.post_processor = frame
    hf.save_pretrained(tmp_path)
    config = ServerConfig(port=0, in_process=True)
    with (
        BackgroundServer(engine_config(tmp_path), config, builder="reciter:reciter_parts") as running,
        httpx.Client(base_url=running.url, timeout=30) as http,
    ):

        def first(path: str = "completions", **fields: Any) -> int:
            body = ask(http, path, return_token_ids=True, **fields)
            tokens: list[int] = (body if "chat" in path else body["choices"][0])["prompt_token_ids"]
            return tokens[0]

        assert [first(), first(add_special_tokens=True), first(add_special_tokens=False)] == [EOS, EOS, ord("s")]
        assert first(truncate_prompt_tokens=3) == EOS and first(prompt=list(b"say")) == ord("s")
        assert first(truncate_prompt_tokens=2, add_special_tokens=False) == ord("a")
        chats = [first("chat/completions"), first("chat/completions", add_special_tokens=True)]
        assert chats == [ord("<"), EOS]
        for fields, expected in (({}, 4), ({"add_special_tokens": False}, 3)):
            assert http.post("/tokenize", json={"prompt": "say", **fields}).json()["count"] == expected


@pytest.mark.parametrize(
    ("fields", "words", "param"),
    [
        ({"prompt_logprobs": -2}, "a positive value or -1", "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt logprobs of 257, which is greater than max allowed: 20", "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt logprobs of 21, which is greater than max allowed: 20", "prompt_logprobs"),
        ({"logprob_token_ids": [5]}, "`logprobs` must be set", "logprob_token_ids"),
        ({"prompt_logprobs": 0, "stream": True}, "not available when", "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "-1 (all that fit)", "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": MAX_MODEL_LEN}, f"1 to {MAX_MODEL_LEN - 1}", "truncate_prompt_tokens"),
        ({"bad_words": [" "]}, "empty word", "bad_words"),
        ({"bad_words": ["x"] * 129}, "at most 128", "bad_words"),
        ({"bad_words": ["x" * 4001]}, "4001 characters", "bad_words"),
    ],
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_wrong_detail_is_refused_by_name(
    http: httpx.Client, path: str, fields: dict[str, Any], words: str, param: str
) -> None:
    error = ask(http, path, status=400, **fields)["error"]
    assert words in error["message"] and error["param"] == param


def test_reports_are_bounded(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prompt_part.MAX_PROMPT_LOGPROBS > 17
    monkeypatch.setattr(prompt_part, "MAX_PROMPT_LOGPROBS", 17)
    ask(http, prompt=["say", "so"], prompt_logprobs=2)
    error = ask(http, status=400, prompt=["say", "say"], prompt_logprobs=2)["error"]
    assert "18 log-probabilities, expected at most 17" in error["message"]


def test_templates_of_requests_need_trust(tokenizer: Path, http: httpx.Client) -> None:
    mine: dict[str, Any] = {"chat_template": "{{ messages[0].content }}?", "return_token_ids": True}
    error = ask(http, "chat/completions", status=400, **mine)["error"]
    assert "--trust-request-chat-template" in error["message"] and error["param"] == "chat_template"
    config = ServerConfig(port=0, in_process=True, trust_request_chat_template=True)
    with (
        BackgroundServer(engine_config(tokenizer), config, builder="reciter:reciter_parts") as running,
        httpx.Client(base_url=running.url, timeout=30) as other,
    ):
        assert bytes(ask(other, "chat/completions", **mine)["prompt_token_ids"]) == b"hello?"
        refused = ask(other, "chat/completions", status=400, **{**mine, "chat_template": "{% x"})["error"]
        assert "template" in refused["message"]
        ask(other, "chat/completions", status=400, chat_template="x" * 65_537)


@pytest.fixture
def held(tokenizer: Path, gate: Gate) -> Iterator[httpx.Client]:
    config = ServerConfig(port=0)
    with (
        BackgroundServer(engine_config(tokenizer), config, builder="reciter:held_parts") as running,
        httpx.Client(base_url=running.url, timeout=30) as opened,
    ):
        yield opened


def test_reports_cross_processes(held: httpx.Client, gate: Gate) -> None:
    gate.open()
    body = ask(held, prompt_logprobs=1)
    assert body["choices"][0]["prompt_logprobs"] == [None, row("a", 1), row("y", 1)]
