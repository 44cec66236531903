"""`manylora check`: which tensors apply, and whether a server answers as PEFT does."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from bad_adapters import tiny_base, write_good_adapter
from cli_runs import app
from live_model import VOCAB_SIZE, write_model
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, ServerConfig
from manylora.execution.reference import GivenAnswer, Reference, compare
from manylora.serving.server import BackgroundServer, LoraModule

PROMPT = "a prompt"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checked").resolve()
    write_model(root / "base")
    write_good_adapter(root / "lora", tiny_base(vocab=VOCAB_SIZE), seed=1)
    return root


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", *map(str, arguments)])
    return result.exit_code, result.output


def changed(folder: Path, into: Path, **tensors: np.ndarray[Any, Any] | None) -> Path:
    """Write an adapter with some tensors in place of its own, or without them."""
    into.mkdir()
    (into / "adapter_config.json").write_text((folder / "adapter_config.json").read_text())
    kept = load_file(folder / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        key = next((key for key in kept if key.endswith(name.replace("__", "."))), name.replace("__", "."))
        kept.pop(key, None)
        if tensor is not None:
            kept[key] = tensor
    save_file(kept, into / "adapter_model.safetensors")
    return into


def test_every_module_is_judged_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    base = tiny_base()
    monkeypatch.setattr("manylora.cli.commands.check.describe_base", lambda model: base)
    good = write_good_adapter(tmp_path / "good", base, rank=4, targets=("q_proj", "v_proj"))
    code, said = run(good, "--base", "tiny")
    assert (code, "tensors of 4 of 4 modules apply" in said, "pages of" in said) == (0, True, True)
    assert run(good)[0] == 0

    stem = "base_model__model__model__layers__"
    wrong = changed(
        good,
        tmp_path / "wrong",
        **{
            f"{stem}0__self_attn__q_proj__lora_A__weight": np.zeros((4, 33), np.float32),
            f"{stem}1__self_attn__v_proj__lora_B__weight": None,
            f"{stem}7__self_attn__q_proj__lora_A__weight": np.zeros((4, 32), np.float32),
            f"{stem}7__self_attn__q_proj__lora_B__weight": np.zeros((32, 4), np.float32),
            "base_model__model__lm_head__modules_to_save__weight": np.zeros((64, 32), np.float32),
        },
    )
    code, said = run(wrong, "--base", "tiny", "--json")
    found = json.loads(said)
    reasons = {one["module"].removeprefix("model.layers."): one["problem"] for one in found["modules"]}
    assert (code, found["problem"] is None) == (1, False)
    assert reasons["0.self_attn.v_proj"] is reasons["1.self_attn.q_proj"] is None
    assert "expected [4, 32]" in reasons["0.self_attn.q_proj"]
    assert "has lora_A but no lora_B" in reasons["1.self_attn.v_proj"]
    assert "none of the modules it adapts exists" in reasons["7.self_attn.q_proj"]
    assert reasons["lm_head"] is not None
    code, said = run(wrong, "--base", "tiny")
    assert (code, "tensors of 2 of 6 modules apply" in said, "lm_head" in said) == (1, True, True)

    settings = json.loads((good / "adapter_config.json").read_text()) | {"peft_type": "NO_SUCH"}
    (good / "adapter_config.json").write_text(json.dumps(settings))
    code, said = run(good)
    assert (code, "tensors of 0 of 4 modules apply" in said, "NO_SUCH" in said) == (1, True, True)


@pytest.fixture(scope="module")
def live(root: Path) -> Iterator[BackgroundServer]:
    engine = EngineConfig(
        model=ModelConfig(model=str(root / "base"), served_model_name="base", device="cpu", dtype="float32"),
        memory=MemoryConfig(num_pages=128),
    )
    modules = [LoraModule("lora", str(root / "lora"))]
    with BackgroundServer(engine, ServerConfig(port=0, in_process=True), modules) as running:
        yield running


def check_against(root: Path, url: str, *arguments: str) -> tuple[int, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        given = ("--base", root / "base", "--against", url, "--tolerance", "0.001", "--max-tokens", "12", *arguments)
        return run(root / "lora", *given)


def test_a_server_answers_as_peft_does(live: BackgroundServer, root: Path) -> None:
    code, said = check_against(root, live.url)
    assert code == 0, said
    assert "48 of 48 tokens of lora" in said and "differ by at most" in said


def test_a_server_that_answers_as_the_base_is_found_out(live: BackgroundServer, root: Path) -> None:
    code, said = check_against(root, live.url, "--name", "base", "--prompt", PROMPT)
    assert code == 1, said
    assert "first difference at token" in said
    assert "the server answers as the base without the adapter" in said
    said = check_against(root, live.url, "--name", "base", "--prompt", PROMPT, "--json")[1]
    found = json.loads(said[said.index("{") :])  # behind the remarks on standard error
    assert found["server"]["answers"][0]["first"]["position"] >= 0


def test_a_name_must_be_found(live: BackgroundServer, root: Path, tmp_path: Path) -> None:
    other = write_good_adapter(tmp_path / "other", tiny_base(vocab=VOCAB_SIZE))
    result = CliRunner().invoke(app, ["check", str(other), "--base", str(root / "base"), "--against", live.url])
    assert "give --name" in str(result.exception)


def reference_answer(reference: Reference, prompt: tuple[int, ...], num_tokens: int) -> GivenAnswer:
    """Return the reference's greedy answer with its log-probabilities."""
    tokens: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    for _ in range(num_tokens):
        last = reference.logprobs(GivenAnswer(prompt=prompt, tokens=(*tokens, 0), logprobs=None))[-1]
        tokens, values = (*tokens, int(last.argmax())), (*values, float(last.max()))
    return GivenAnswer(prompt=prompt, tokens=tokens, logprobs=values)


def test_mistakes_are_told_apart(root: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        reference = Reference(str(root / "base"), str(root / "lora"))
    right = reference_answer(reference, tuple(b"hello"), 4)
    assert compare(right, reference.logprobs(right), 1e-4).first is None
    for name, made in reference.mistakes().items():
        with made():
            wrong = reference_answer(reference, tuple(b"hello"), 4)
        assert compare(wrong, reference.logprobs(wrong), 1e-4).first is not None, name
        assert reference.explain([wrong], 1e-4) == name
    assert compare(right, reference.logprobs(right), 1e-4).first is None  # and it is as it was
    assert reference.explain([GivenAnswer(prompt=right.prompt, tokens=(1, 2), logprobs=(-9.0, -9.0))], 1e-4) is None


def test_an_activated_adapter_is_activated_by_the_prompt_alone(root: Path, tmp_path: Path) -> None:
    folder = write_good_adapter(tmp_path / "alora", tiny_base(vocab=VOCAB_SIZE), alora_invocation_tokens=[7, 8])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        reference = Reference(str(root / "base"), str(folder))
    assert reference.invocation == (7, 8)

    def differs(*prompt: int) -> bool:
        answer = GivenAnswer(prompt=prompt, tokens=(7, 8, 9), logprobs=None)
        with_it = reference.logprobs(answer)
        with reference.mistakes()["the base without the adapter"]():
            return float(np.abs(with_it - reference.logprobs(answer)).max()) > 1e-3

    assert differs(5, 7, 8) and not differs(5, 6)


def test_near_ties_are_no_differences() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.05, -3.0], [5.0, 0.0, 0.0, 0.0]])
    reference = logits.log_softmax(-1).numpy()
    answer = GivenAnswer(prompt=(1,), tokens=(1, 0), logprobs=None)
    assert compare(answer, reference, 0.1).first is None
    assert compare(answer, reference, 0.1).num_equal == 1
    first = compare(answer, reference, 0.01).first
    assert first is not None and (first.position, first.token, first.expected) == (0, 1, 2)
    given = GivenAnswer(prompt=(1,), tokens=(2, 0), logprobs=(float(reference[0, 2]), -0.5))
    first = compare(given, reference, 0.1).first
    assert first is not None and (first.position, first.logprob) == (1, -0.5)


class StrictServer(BaseHTTPRequestHandler):
    """A server that knows OpenAI's fields alone, and names tokens by their text."""

    seen: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "lora"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        if "ignore_eos" in body:
            self.reply(422, {"error": "unknown field"})
        else:
            logprobs = {"tokens": ["z", "z"], "token_logprobs": [-1, -1]}
            self.reply(200, {"choices": [{"text": "zz", "logprobs": logprobs}]})

    def reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_arguments: object) -> None:
        """Log nothing."""


def test_any_server_with_openais_api_is_asked(root: Path) -> None:
    StrictServer.seen.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), StrictServer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            code, said = check_against(root, f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()
    assert code == 1, said
    assert "its texts were tokenised again" in said and "server    'z'" in said
    assert [("ignore_eos" in body) for body in StrictServer.seen] == [True, *[False] * 4]
