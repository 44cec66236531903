"""The offline API on made-up tokens: batching, adapters, endings, threads, and what is left after an error."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from text_tokenizers import make_huggingface

import manylora
from manylora import Engine, Generation, SamplingParams
from manylora.core.adapters.shape import BaseShape, PageShape
from manylora.core.clock import Clock
from manylora.core.config import EngineConfig
from manylora.core.errors import AdapterError, AdapterExists, AdapterNotFound, ConfigError, EngineDead
from manylora.core.plan import PlannedSequence
from manylora.core.ports import EngineParts, check_each
from manylora.core.types import AdapterKey, AdapterVersion, Constraint, SampledToken, Tier
from manylora.lab.costs.model import FixedCost
from manylora.lab.sim.run.executor import SimulatedExecutor
from manylora.serving.text import Tokenizer

LINE = "the quick brown fox STOP here"


class Reader:
    """Reads an adapter whose one file says which version it is."""

    def read(self, name: str, path: str) -> AdapterVersion:
        file = Path(path) / "version"
        if not file.exists():
            raise AdapterNotFound(name, f"no such path: {path}")
        return AdapterVersion(
            key=AdapterKey(file.read_text()),
            source=path,
            rank=8,
            num_modules=1,
            target_modules=("q_proj",),
            num_pages=1,
            weight_bytes=100,
            host_bytes=100,
            disk_bytes=100,
        )

    def check(self, adapters: Sequence[tuple[str, str]]) -> list[AdapterVersion | AdapterError]:
        return check_each(self.read, adapters)


SLOW_S = 0.02
"""A step of tests that act while answers are under way: 240 tokens take five seconds."""


def parts_builder(
    tokenizer: Tokenizer, closed: list[bool], step_s: float = 0.0005
) -> Callable[[EngineConfig, Clock], EngineParts]:
    """Answers are ``<adapter or base> LINE`` and an end-of-sequence token; the prompt "x" breaks the device."""

    def choose(part: PlannedSequence) -> SampledToken:
        if list(part.tokens[:2]) == tokenizer.encode("x") and part.num_prompt_tokens == 2:
            raise RuntimeError("the device fell over")
        line = [*tokenizer.encode(f"{part.adapter or 'base'} {LINE}", add_special_tokens=False), eos]
        done = len(part.tokens) - part.num_prompt_tokens
        logprob = -0.5 if part.sampling.logprobs is not None else None
        return SampledToken(token_id=line[min(done, len(line) - 1)], logprob=logprob)

    (eos,) = tokenizer.eos_token_ids
    page = PageShape(block_size=16, num_layers=1, num_kv_heads=1, head_dim=8, element_bytes=4, dtype="float32")
    base = BaseShape(
        name="tiny",
        architecture="llama",
        fingerprint="f",
        vocab_size=tokenizer.vocab_size,
        hidden_size=8,
        num_layers=1,
        max_model_len=256,
        page=page,
        modules=(),
        all_linear=(),
        eos_token_ids=(eos,),
    )

    def build(config: EngineConfig, clock: Clock) -> EngineParts:
        cost = FixedCost(step_s=step_s, token_s=0.0, copy_bytes_per_s=1e9)
        executor = SimulatedExecutor(cost, vocab_size=base.vocab_size, choose=choose)
        return EngineParts(
            base=base, num_pages=200, executor=executor, reader=Reader(), close=lambda: closed.append(True)
        )

    return build


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_huggingface("byte_level").save_pretrained(folder)
    return folder


@pytest.fixture
def adapter_paths(tmp_path: Path) -> dict[str, Path]:
    paths = {}
    for name in ("one", "two"):
        paths[name] = tmp_path / name
        paths[name].mkdir()
        (paths[name] / "version").write_text(f"hash-{name}")
    return paths


@pytest.fixture
def make(tokenizer_path: Path, adapter_paths: dict[str, Path]) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []
    closed: list[bool] = []
    tokenizer = Tokenizer.load(tokenizer_path)

    def make(step_s: float = 0.0005, **options) -> Engine:
        build = parts_builder(tokenizer, closed, step_s)
        engine = Engine(tokenizer_path, **{"adapters": adapter_paths, "build": build} | options)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
    assert len(closed) == len(engines), "parts must be closed exactly once"


@pytest.fixture
def engine(make: Callable[..., Engine]) -> Engine:
    return make()


def test_a_mixed_batch_is_answered_in_order(engine: Engine) -> None:
    prompts = ["hello", [5, 6, 7], "world"] * 20
    adapters = ["one", None, "two"] * 20
    answers = engine.generate(prompts, adapter=adapters)
    assert [answer.adapter for answer in answers] == adapters
    for prompt, adapter, answer in zip(prompts, adapters, answers, strict=True):
        assert answer.prompt == (tuple(prompt) if isinstance(prompt, list) else prompt)
        assert answer.text == f"{'hash-' + adapter if adapter else 'base'} {LINE}"
        assert (answer.finish_reason, answer.error, answer.logprobs) == ("stop", None, None)
        assert answer.token_ids[-1:] == engine.tokenizer.eos_token_ids
        assert engine.tokenizer.decode(answer.token_ids) == answer.text
    (replica,) = engine._fleet.engines.replicas()
    assert replica.num_in_flight == 0, "kept for requests that are over"
    assert answers[0].num_prompt_tokens == len(engine.tokenizer.encode("hello"))


def test_one_prompt_is_a_list_of_one(engine: Engine) -> None:
    assert [a.text for a in engine.generate("hello", adapter="one")] == [f"hash-one {LINE}"]
    assert [a.prompt for a in engine.generate([5, 6, 7])] == [(5, 6, 7)]
    assert engine.generate([]) == []


def test_answers_are_as_long_as_the_model_recommends(make: Callable[..., Engine], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 3}')
    engine = make(generation_config=str(tmp_path))
    (answer,) = engine.generate("hello")
    assert (len(answer.token_ids), answer.finish_reason) == (3, "length")
    assert engine.generate("hello", sampling=SamplingParams())[0].finish_reason == "stop"


def test_each_prompt_can_have_its_own_sampling(engine: Engine) -> None:
    short, stopped, told = engine.generate(
        ["hello"] * 3,
        sampling=[
            SamplingParams(max_tokens=3),
            SamplingParams(stop=("STOP",)),
            SamplingParams(logprobs=0, max_tokens=2),
        ],
    )
    assert (short.finish_reason, len(short.token_ids)) == ("length", 3)
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "STOP")
    assert stopped.text == "base the quick brown fox " and stopped.error is None
    assert told.logprobs is not None and [entry.logprob for entry in told.logprobs] == [-0.5, -0.5]
    assert tuple(entry.token_id for entry in told.logprobs) == told.token_ids
    with pytest.raises(ValueError, match="Got 2 samplings for 1 prompts"):
        engine.generate(["hello"], sampling=[SamplingParams()] * 2)
    with pytest.raises(ValueError, match="Got 3 adapters for 1 prompts"):
        engine.generate(["hello"], adapter=["one", "two", None])


def tokens_in_the_end(engine: Engine) -> int:
    """Wait until nothing runs; return how many tokens were generated."""
    while engine.stats().num_running + engine.stats().num_waiting:
        time.sleep(0.005)
    return engine.stats().num_generated_tokens


def test_what_a_stop_string_ended_runs_no_further(make: Callable[..., Engine]) -> None:
    engine = make(SLOW_S)
    sampling = SamplingParams(stop=("quick",), ignore_eos=True, max_tokens=240)
    answers = engine.generate(["hello"] * 10, sampling=sampling)
    assert [answer.text for answer in answers] == ["base the "] * 10
    assert tokens_in_the_end(engine) < 10 * 240 / 2
    assert engine.stats().num_answers == 10, "their lengths are learnt, as those of other answers"


def test_chats_go_through_the_template(engine: Engine) -> None:
    chat = [{"role": "user", "content": "hello"}]
    one, other = engine.chat([chat, chat], adapter=["one", None])
    assert one.prompt == "<|user|>hello</s><|assistant|>"
    assert (one.text, other.text) == (f"hash-one {LINE}", f"base {LINE}")
    (single,) = engine.chat(chat)
    assert single.prompt == one.prompt


def test_errors_of_one_request_do_not_lose_the_others(engine: Engine) -> None:
    good, long, foreign, negative, huge, bad_schema = engine.generate(
        ["hello", list(range(3, 300)), [10**6], [5, -1], [2**70], "hello"],
        adapter=["one", *[None] * 5],
        sampling=[SamplingParams()] * 5 + [SamplingParams(constraint=Constraint("json", "{broken"))],
    )
    assert good.error is None and good.text
    for answer, part in [
        (long, "297 input tokens"),
        (foreign, "token ids outside"),
        (negative, "token ids outside"),
        (huge, "token ids outside"),
        (bad_schema, "cannot be followed"),
    ]:
        assert answer.finish_reason == "error" and answer.text == "" and answer.token_ids == ()
        assert answer.error is not None and part in answer.error
    refused, fine = engine.chat([[{"role": "pirate", "content": "arr"}], [{"role": "user", "content": "hi"}]])
    assert "unknown role" in str(refused.error) and fine.error is None


@pytest.mark.parametrize("name", ["nope", "", "base:nope"])
def test_an_unknown_adapter_is_an_error_of_the_call(engine: Engine, name: str) -> None:
    with pytest.raises(AdapterNotFound, match=r"not loaded; 2 are: one, two"):
        engine.generate(["hello", "hello"], adapter=["one", name])
    with pytest.raises(AdapterNotFound):
        engine.chat([{"role": "user", "content": "hi"}], adapter=name)
    assert engine.stats().num_generated_tokens == 0


def test_more_prompts_than_the_queue_holds_all_get_answers(make: Callable[..., Engine]) -> None:
    engine = make(max_num_seqs=2, max_waiting=3)
    with ThreadPoolExecutor(4) as pool:
        batches = list(pool.map(lambda i: engine.generate(["hello"] * 25, adapter="one"), range(4)))
    assert [answer.text for batch in batches for answer in batch] == [f"hash-one {LINE}"] * 100


def test_adapters_come_and_go(engine: Engine, adapter_paths: dict[str, Path], tmp_path: Path) -> None:
    assert [status.name for status in engine.adapters()] == ["one", "two"]
    with pytest.raises(AdapterExists):
        engine.load_adapter("one", adapter_paths["two"])
    assert engine.load_adapter("one", adapter_paths["two"], replace=True).generation == 2
    assert engine.generate("hello", adapter="one")[0].text == f"hash-two {LINE}"
    with pytest.raises(AdapterNotFound):
        engine.load_adapter("three", tmp_path / "nowhere")
    engine.unload_adapter("one")
    with pytest.raises(AdapterNotFound):
        engine.unload_adapter("one")
    with pytest.raises(AdapterNotFound, match="'one'"):
        engine.generate("hello", adapter="one")
    assert engine.stats().num_registered == 1


def test_a_bad_adapter_at_the_start_closes_the_engine(tokenizer_path: Path, tmp_path: Path) -> None:
    closed: list[bool] = []
    build = parts_builder(Tokenizer.load(tokenizer_path), closed)
    (tmp_path / "empty").mkdir()
    before = set(threading.enumerate())
    with pytest.raises(AdapterNotFound, match="'empty'"):
        Engine(tokenizer_path, adapters={"empty": tmp_path / "empty"}, build=build)
    assert closed == [True]
    with pytest.raises(AdapterNotFound, match="'gone'"):  # known before anything is built
        Engine(tokenizer_path, adapters={"gone": "/nowhere"}, build=build)
    assert closed == [True]
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {"manylora-engine", "manylora-client"} & left


def test_an_interrupted_call_leaves_the_engine_usable(make: Callable[..., Engine]) -> None:
    engine = make(SLOW_S)

    def interrupt() -> None:
        while engine.stats().num_generated_tokens < 30:
            time.sleep(SLOW_S)
        os.kill(os.getpid(), signal.SIGINT)

    # A shell starts its background jobs with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["hello"] * 10, sampling=SamplingParams(ignore_eos=True, max_tokens=240))
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert tokens_in_the_end(engine) < 10 * 240 / 2, "requests of a call that is over run on"
    assert engine.generate("hello")[0].text == f"base {LINE}"


def test_a_broken_device_ends_every_call(engine: Engine) -> None:
    with pytest.raises(EngineDead, match="the device fell over"):
        engine.generate(["hello"] * 3 + ["x"])
    for call in (engine.stats, engine.adapters, lambda: engine.generate("hello"), lambda: engine.unload_adapter("one")):
        with pytest.raises(EngineDead, match="the device fell over"):
            call()


def test_closing_ends_calls_in_other_threads(make: Callable[..., Engine]) -> None:
    engine = make(SLOW_S)
    endless = SamplingParams(ignore_eos=True, max_tokens=240)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.generate, ["hello"] * 50, sampling=endless)
        while engine.stats().num_running == 0:
            time.sleep(0.001)
        engine.close()
        with pytest.raises(EngineDead, match="closed"):
            waiting.result(timeout=60)
    engine.close()
    with pytest.raises(EngineDead, match="closed"):
        engine.generate([])


def test_a_closed_engine_leaves_nothing_to_gc(tokenizer_path: Path, adapter_paths: dict[str, Path]) -> None:
    """Its pages and weights would stay beside those of the next one."""
    inner = parts_builder(Tokenizer.load(tokenizer_path), [])
    executors: list[weakref.ref[Any]] = []

    def build(config: EngineConfig, clock: Clock) -> EngineParts:
        parts = inner(config, clock)
        executors.append(weakref.ref(parts.executor))
        return parts

    gc.disable()
    try:
        with Engine(tokenizer_path, adapters=adapter_paths, build=build) as engine:
            assert engine.generate("hello", adapter="one")[0].text == f"hash-one {LINE}"
        (executor,) = executors
        assert executor() is None
    finally:
        gc.enable()


def test_adapters_can_be_pinned_and_warmed(engine: Engine) -> None:
    def state() -> dict[str, tuple[bool, Tier]]:
        return {status.name: (status.is_pinned, status.tier) for status in engine.adapters()}

    assert {name: is_pinned for name, (is_pinned, _) in state().items()} == {"one": False, "two": False}
    assert engine.pin_adapter("one").is_pinned
    engine.warm_adapter("two")
    deadline = time.monotonic() + 60
    while state() != {"one": (True, Tier.DEVICE), "two": (False, Tier.DEVICE)}:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert not engine.pin_adapter("one", False).is_pinned
    for act in (engine.pin_adapter, engine.warm_adapter):
        with pytest.raises(AdapterNotFound):
            act("three")


def test_steps_are_logged_where_asked(make: Callable[..., Engine], tmp_path: Path) -> None:
    steps = tmp_path / "steps.jsonl"
    engine = make(step_log=steps)
    engine.generate(["hello", "world"], adapter=["one", None], sampling=SamplingParams(max_tokens=3))
    engine.close()
    assert steps.read_text().count("\n") > 3


def test_an_engine_can_be_simulated(tokenizer_path: Path) -> None:
    with Engine(tokenizer_path, simulate="a40:llama-7b") as engine:
        (answer,) = engine.generate("hello", sampling=SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(answer.token_ids) == 3


def test_options_are_fields_of_the_configuration(make: Callable[..., Engine]) -> None:
    assert make(served_model_name="llama", seed=3, eviction="lru").generate("hello", adapter="llama")[0].error is None
    with pytest.raises(ConfigError, match=r"unknown option 'max_num_sequences', did you mean 'max_num_seqs'\?"):
        Engine("x", max_num_sequences=3)
    with pytest.raises(ConfigError, match=r"unknown option 'adapter', did you mean 'adapters'\?"):
        Engine("x", adapter={})
    with pytest.raises(ConfigError, match="max_num_seqs = 0"):
        Engine("x", max_num_seqs=0)


def test_progress_is_shown_when_asked(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.generate(["hello"] * 3)
    assert capsys.readouterr().out == ""
    engine.generate(["hello"] * 3, progress=True)
    assert "generating" in capsys.readouterr().out


def test_the_public_names_are_exact_and_cheap_to_import() -> None:
    names = ["Constraint", "Engine", "Generation", "SamplingParams", "__version__"]
    assert sorted(manylora.__all__) == manylora.__all__ == names
    assert dir(manylora) == manylora.__all__
    assert manylora.Generation is Generation
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = manylora.nothing  # type: ignore[attr-defined]
    code = "import sys, json, manylora; print(json.dumps([m for m in sys.modules if '.' not in m]))"
    loaded = json.loads(subprocess.check_output([sys.executable, "-c", code]))
    assert not {"torch", "transformers", "numpy", "starlette"} & set(loaded)
