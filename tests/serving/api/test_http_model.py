"""The HTTP surface against a model of it: adapters come, go and are replaced between requests of every kind.

The model is a dictionary from names to letters: each adapter recites the alphabet from its own. A stream that is open
while its adapter is unloaded or replaced ends on the version that it began with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from reciter import MAX_MODEL_LEN, engine_config
from serving import PATIENCE_S, wait_for

from manylora.core.config import ServerConfig
from manylora.serving.server import BackgroundServer

ROOT, TENANT = {"Authorization": "Bearer root"}, {"Authorization": "Bearer tenant"}
MAX_BODY_BYTES = 100_000
MOST_OPEN = 3

letters = st.sampled_from("mnpq")
names = st.sampled_from(["m", "team/n", "o p"])
models = st.one_of(st.just("base"), names, st.just("absent"))
texts = st.text(max_size=40)

COMPLETION = {"model": "base", "prompt": "say", "max_tokens": 3}
CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
INVALID = [
    ("/v1/completions", {**COMPLETION, "prompt": 7}),
    ("/v1/completions", {**COMPLETION, "prompt": []}),
    ("/v1/completions", {**COMPLETION, "prompt": [257]}),
    ("/v1/completions", {**COMPLETION, "prompt": "x" * MAX_MODEL_LEN}),
    ("/v1/completions", {**COMPLETION, "max_tokens": -1}),
    ("/v1/completions", {**COMPLETION, "max_tokens": 2**70}),
    ("/v1/completions", {**COMPLETION, "n": 0}),
    ("/v1/completions", {**COMPLETION, "temperature": "hot"}),
    ("/v1/completions", {**COMPLETION, "stop": ["x"] * 17}),
    ("/v1/chat/completions", {**CHAT, "messages": []}),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "nobody", "content": "hi"}]}),
    ("/v1/chat/completions", {**CHAT, "top_logprobs": 3}),
    ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"messages": []}}),
    ("/tokenize", {}),
    ("/detokenize", {"tokens": [-1]}),
]


def recited(letter: str, num_tokens: int) -> str:
    return "".join(chr(ord("a") + (ord(letter) - ord("a") + index) % 26) for index in range(num_tokens))


def text_of(lines: Iterator[str]) -> str:
    """Return the text of a stream, which must end with its marker."""
    events = [line[6:] for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert not any('"error"' in event for event in events)
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


class Surface(RuleBasedStateMachine):
    """A client and an administrator; every answer has the status that the model says."""

    def __init__(self, http: httpx.Client, lora_dir: Path) -> None:
        super().__init__()
        self.http, self.lora_dir = http, lora_dir
        self.loaded: dict[str, str] = {}
        self.open: list[tuple[Any, httpx.Response, str]] = []  # streams with their text

    def ask(self, status: int, method: str, path: str, body: Any = None, key: dict[str, str] = TENANT) -> Any:
        answer = self.http.request(method, path, json=body, headers=key)
        assert answer.status_code == status, answer.text
        if status >= 400:
            error = answer.json()["error"]
            assert error["code"] == status
            assert error["message"]
        return answer

    def letter_of(self, model: str) -> str | None:
        return "a" if model == "base" else self.loaded.get(model)

    # -- adapters ----------------------------------------------------------------------------------------------------

    @rule(name=names, letter=letters, in_place=st.booleans())
    def load(self, name: str, letter: str, in_place: bool) -> None:
        body = {"lora_name": name, "lora_path": str(self.lora_dir / letter), "load_inplace": in_place}
        if name in self.loaded and not in_place:
            self.ask(400, "POST", "/v1/load_lora_adapter", body, ROOT)
        else:
            self.ask(200, "POST", "/v1/load_lora_adapter", body, ROOT)
            self.loaded[name] = letter

    @rule(name=names)
    def unload(self, name: str) -> None:
        body = {"lora_name": name}
        self.ask(200 if self.loaded.pop(name, None) else 404, "POST", "/v1/unload_lora_adapter", body, ROOT)

    @rule(
        fault=st.sampled_from([("base", "m", 400), ("new", "gone", 404), ("new", "../..", 403), ("a\nb", "m", 400)]),
    )
    def load_what_cannot_be_loaded(self, fault: tuple[str, str, int]) -> None:
        name, folder, status = fault
        body = {"lora_name": name, "lora_path": str(self.lora_dir / folder)}
        self.ask(status, "POST", "/v1/load_lora_adapter", body, ROOT)

    @rule(name=names, verb=st.sampled_from(["pin", "unpin", "warm"]))
    def act(self, name: str, verb: str) -> None:
        answer = self.ask(200 if name in self.loaded else 404, "POST", f"/adapters/{name}/{verb}", key=ROOT)
        if name in self.loaded and verb != "warm":
            assert answer.json()["pinned"] is (verb == "pin")

    # -- requests ----------------------------------------------------------------------------------------------------

    @rule(model=models, num_tokens=st.integers(1, 30), num_answers=st.integers(1, 3), stream=st.booleans())
    def complete(self, model: str, num_tokens: int, num_answers: int, stream: bool) -> None:
        letter = self.letter_of(model)
        body = {"model": model, "prompt": "say", "max_tokens": num_tokens, "n": num_answers, "stream": stream}
        answer = self.ask(404 if letter is None else 200, "POST", "/v1/completions", body)
        if letter is None:
            return
        if stream:
            assert sorted(text_of(answer.iter_lines())) == sorted(recited(letter, num_tokens) * num_answers)
            return
        choices = answer.json()["choices"]
        assert [choice["text"] for choice in choices] == [recited(letter, num_tokens)] * num_answers
        assert answer.json()["usage"]["completion_tokens"] == num_tokens * num_answers

    @rule(model=models, num_tokens=st.integers(1, 20))
    def chat(self, model: str, num_tokens: int) -> None:
        letter = self.letter_of(model)
        body = {**CHAT, "model": model, "max_tokens": num_tokens}
        answer = self.ask(404 if letter is None else 200, "POST", "/v1/chat/completions", body)
        if letter is not None:
            assert answer.json()["choices"][0]["message"]["content"] == recited(letter, num_tokens)

    @precondition(lambda self: len(self.open) < MOST_OPEN)
    @rule(model=models, num_tokens=st.integers(1, 200))
    def open_stream(self, model: str, num_tokens: int) -> None:
        letter = self.letter_of(model)
        body = {"model": model, "prompt": "say", "max_tokens": num_tokens, "stream": True}
        opening = self.http.stream("POST", "/v1/completions", json=body, headers=TENANT)
        answer = opening.__enter__()
        assert answer.status_code == (404 if letter is None else 200)
        if letter is None:
            opening.__exit__(None, None, None)
        else:
            self.open.append((opening, answer, recited(letter, num_tokens)))

    @precondition(lambda self: self.open)
    @rule(is_read=st.booleans())
    def close_stream(self, is_read: bool) -> None:
        """Read a stream to its end, or leave it."""
        opening, answer, expected = self.open.pop(0)
        try:
            if is_read:
                assert text_of(answer.iter_lines()) == expected
        finally:
            opening.__exit__(None, None, None)

    @rule(text=texts)
    def tokenize(self, text: str) -> None:
        tokens = self.ask(200, "POST", "/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
        assert bytes(tokens) == text.encode()
        assert self.ask(200, "POST", "/detokenize", {"tokens": tokens}).json()["prompt"] == text

    @rule(fault=st.sampled_from(INVALID))
    def send_what_is_invalid(self, fault: tuple[str, dict[str, Any]]) -> None:
        self.ask(400, "POST", *fault)

    @rule(
        content=st.sampled_from([b"", b"{", b"[]", b'"x"', b"\xff", b'{"model":"base","prompt":"\xff"}', b"[" * 5000])
    )
    def send_what_is_no_body(self, content: bytes) -> None:
        headers = {**TENANT, "Content-Type": "application/json"}
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"):
            assert self.http.post(path, content=content, headers=headers).status_code == 400

    @rule()
    def send_another_type_or_too_much(self) -> None:
        content, json_type = json.dumps(COMPLETION).encode(), {"Content-Type": "application/json"}
        assert self.http.post("/v1/completions", content=content, headers=TENANT).status_code == 415
        too_much = b" " * (MAX_BODY_BYTES + 1)
        assert self.http.post("/v1/completions", content=too_much, headers=TENANT | json_type).status_code == 413

    @rule(key=st.sampled_from([{}, {"Authorization": "Bearer other"}, {"Authorization": "Basic tenant"}]))
    def come_without_a_key(self, key: dict[str, str]) -> None:
        for method, path, body in (
            ("POST", "/v1/completions", COMPLETION),
            ("GET", "/v1/models", None),
            ("GET", "/adapters", None),
            ("POST", "/v1/unload_lora_adapter", {"lora_name": "m"}),
        ):
            self.ask(401, method, path, body, key)

    @rule(name=names)
    def use_the_tenants_key_for_adapters(self, name: str) -> None:
        self.ask(403, "POST", "/v1/unload_lora_adapter", {"lora_name": name}, TENANT)
        self.ask(403, "DELETE", f"/adapters/{name}", None, TENANT)

    @rule()
    def miss_the_route(self) -> None:
        self.ask(404, "GET", "/v1/absent")
        self.ask(405, "DELETE", "/v1/completions")

    # -- invariants --------------------------------------------------------------------------------------------------

    @invariant()
    def lists_are_the_models(self) -> None:
        cards = self.ask(200, "GET", "/v1/models").json()["data"]
        assert sorted(card["id"] for card in cards) == sorted(["base", *self.loaded])
        statuses = self.ask(200, "GET", "/adapters", key=ROOT).json()["data"]
        assert [status["name"] for status in statuses] == sorted(self.loaded)
        self.ask(200, "GET", "/health", key={})

    def teardown(self) -> None:
        """Leave every stream, unload every adapter; nothing may be left running."""
        while self.open:
            self.close_stream(False)
        for name in list(self.loaded):
            self.unload(name)
        wait_for(lambda: all(self.ask(200, "GET", "/status", key=ROOT).json()["engine"][key] == 0 for key in RUNNING))


RUNNING = ("num_running", "num_waiting")


@pytest.fixture(scope="module")
def guarded(tokenizer: Path, lora_dir: Path) -> Iterator[httpx.Client]:
    config = ServerConfig(
        port=0,
        in_process=True,
        lora_dirs=(str(lora_dir),),
        max_body_bytes=MAX_BODY_BYTES,
        api_keys=("tenant",),
        admin_key="root",
    )
    with (
        BackgroundServer(engine_config(tokenizer), config, builder="reciter:reciter_parts") as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http,
    ):
        yield http


def test_the_surface_is_as_its_model(guarded: httpx.Client, lora_dir: Path) -> None:
    run_state_machine_as_test(
        lambda: Surface(guarded, lora_dir), settings=settings(max_examples=10, stateful_step_count=30)
    )
