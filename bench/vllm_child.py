"""A vLLM engine in a process of its own, in vLLM's environment, which serves requests and tells its steps and loads.

The process that starts it needs no vLLM::

    child = Child("vllm", folder, {"max_loras": 8, "max_cpu_loras": 16, "max_lora_rank": 64})
    round = child.serve(requests)           # their arrivals are kept
    child.close()

The base is in ``folder / "base"``, each adapter in a folder of its name beside it. Reads of adapters can be slowed down
to a disk. A step is timed from turn to turn of the engine's loop, its loads included.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from vllm_log import Load, Served, Step

from manylora.core.costs.features import StepFeatures, step_features
from manylora.core.types import AdapterKey
from manylora.lab.costs.model import SyntheticSequence, synthetic_plan
from manylora.lab.workloads import RequestSpec

__all__ = ["Child", "Round", "make_base"]

VOCABULARY = 1024
PAGE = 4096
SAME_TURN_S = 0.01
"""Longest time from the end of a step to the next one that follows it at once."""

IDLE_S = 0.0005
"""Time between two looks at the clock of an engine that has nothing to do."""


class Round(msgspec.Struct, frozen=True):
    """What an engine did: the requests and loads that it served, and its steps."""

    served: Served
    steps: list[Step]


class Order(msgspec.Struct, frozen=True):
    """Requests to be served: time of arrival, adapter, tokens of prompt and answer; bytes a second of reads, or 0."""

    requests: list[tuple[float, str, int, int]]
    bytes_per_s: float
    seed: int


def make_base(folder: Path, *, hidden: int, inner: int, num_layers: int, max_tokens: int) -> None:
    """Write a random Llama with heads of 64, without a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=VOCABULARY,
        max_position_embeddings=max_tokens,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder / "base")


class Child:
    """An engine, and the process that it lives in.

    Args:
        name: Of its log in the folder.
        folder: Has the base and the adapters.
        options: Of ``vllm.LLM``, beside those that all have here.
        python: Of vLLM's environment.
        environment: More variables of the process.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        options: dict[str, Any],
        *,
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
    ) -> None:
        read, write = os.pipe()
        variables = {
            **os.environ,
            "ANSWERS": str(write),
            "PYTHONPATH": str(Path(__file__).parent),
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            **(environment or {}),
        }
        command = [python, "-c", "import vllm_child; vllm_child.main()", str(folder), json.dumps(options)]
        self._log = folder / f"{name}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, env=variables, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, pass_fds=[write]
            )
        os.close(write)
        self._answers = os.fdopen(read)
        if self._answers.readline() != "ready\n":
            sys.exit(self._log.read_text()[-4000:])

    def serve(self, requests: Sequence[RequestSpec], *, bytes_per_s: float = 0.0, seed: int = 0) -> Round:
        """Serve requests at their times, with reads so fast at most (0: as they are), and prompts of a seed."""
        parts = [(one.arrival_s, str(one.adapter), one.num_prompt_tokens, one.num_output_tokens) for one in requests]
        assert self._process.stdin is not None
        order = Order(requests=parts, bytes_per_s=bytes_per_s, seed=seed)
        print(msgspec.json.encode(order).decode(), file=self._process.stdin, flush=True)
        if not (line := self._answers.readline()):
            sys.exit(self._log.read_text()[-4000:])
        return msgspec.json.decode(line, type=Round)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


class LoadLog:
    """Slows vLLM's reads of adapters down, and takes down when which adapter was read and copied.

    Attributes:
        loads: Since they were last taken.
        spent_s: Processor time of the process during loads.
        bytes_per_s: Of a read, at most; 0 for as fast as it goes.
    """

    def __init__(self) -> None:
        self.loads: list[Load] = []
        self.spent_s, self.bytes_per_s = 0.0, 0.0
        self._names: dict[int, str] = {}

    def install(self) -> None:
        """Put itself in place, before the engine is made."""
        from vllm.lora.model_manager import LoRAModelManager
        from vllm.lora.worker_manager import WorkerLoRAManager

        from manylora.vllm.worker import SlotManager

        read = WorkerLoRAManager._load_adapter

        def slow_read(manager: Any, request: Any) -> Any:
            began, spent_s = time.monotonic(), time.process_time()
            file = Path(request.lora_path) / "adapter_model.safetensors"
            num_bytes, lora = file.stat().st_size, read(manager, request)
            self._names[lora.id] = request.lora_name
            for weights in lora.loras.values():  # touch each page of the file: a disk is slow here, not in the copy
                weights.lora_a.view(-1)[:: PAGE // 4].sum(), weights.lora_b.view(-1)[:: PAGE // 4].sum()
            if self.bytes_per_s:
                time.sleep(max(0.0, num_bytes / self.bytes_per_s - (time.monotonic() - began)))
            self.loads.append(("read", request.lora_name, num_bytes, began, time.monotonic()))
            self.spent_s += time.process_time() - spent_s
            return lora

        WorkerLoRAManager._load_adapter = slow_read
        LoRAModelManager.activate_adapter = self._timed(LoRAModelManager.activate_adapter, int)
        SlotManager._copy = self._timed(SlotManager._copy, lambda order: int(order.adapter.number))  # type: ignore[method-assign]

    def _timed(self, method: Callable[..., Any], number_of: Callable[[Any], int]) -> Callable[..., Any]:
        def run(manager: Any, what: Any, *args: Any) -> Any:
            began, spent_s = time.monotonic(), time.process_time()
            result = method(manager, what, *args)
            if result is not False and number_of(what) in self._names:
                self.loads.append(("copy", self._names[number_of(what)], 0, began, time.monotonic()))
                self.spent_s += time.process_time() - spent_s
            return result

        return run


class Engine:
    """vLLM's engine, without a process between it and its scheduler."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._loads = LoadLog()
        self._loads.install()
        llm = LLM(
            str(folder / "base"),
            skip_tokenizer_init=True,
            enable_lora=True,
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=False,
            **options,
        )
        self._folder, self._engine = folder, llm.llm_engine
        self._num_requests = 0
        self._steps: list[Step] = []
        self._ran: set[str] = set()  # the requests of the step before
        self._adapters: dict[str, tuple[int, int]] = {}  # number and rank by name
        self._log_steps(self._engine.engine_core.engine_core.scheduler)

    def _adapter(self, name: str) -> tuple[int, int]:
        if name not in self._adapters:
            told = json.loads((self._folder / name / "adapter_config.json").read_text())
            self._adapters[name] = len(self._adapters) + 1, int(told["r"])
        return self._adapters[name]

    def _features(self, requests: dict[str, Any], num_scheduled: dict[str, int]) -> StepFeatures:
        """Return the content of a step as the simulator counts it."""
        parts, num_sampled = [], 0
        is_changed = not num_scheduled.keys() >= self._ran
        self._ran = set(num_scheduled)
        for key, num_tokens in num_scheduled.items():
            request = requests[key]
            name = request.lora_request.lora_name
            start = request.num_computed_tokens - num_tokens
            parts.append(SyntheticSequence(start, num_tokens, AdapterKey(name), self._adapter(name)[1]))
            num_sampled += request.num_computed_tokens >= request.num_tokens
            is_changed |= num_tokens > 1 or start <= request.num_prompt_tokens
        features = step_features(synthetic_plan(parts))
        return msgspec.structs.replace(features, num_sampled=num_sampled, is_changed=int(is_changed))

    def _log_steps(self, scheduler: Any) -> None:
        """Note begin and end of each step, and its content, from now on."""
        schedule, update, begun = scheduler.schedule, scheduler.update_from_output, {}
        ended, ended_spent = [0.0], [0.0]

        def spent() -> float:
            return time.process_time() - self._loads.spent_s

        def begin(*args: Any, **kwargs: Any) -> Any:
            at, spent_s, output = time.monotonic(), spent(), schedule(*args, **kwargs)
            if output.num_scheduled_tokens:
                begun[id(output)] = at, spent_s, self._features(scheduler.requests, output.num_scheduled_tokens)
            return output

        def end(output: Any, *args: Any, **kwargs: Any) -> Any:
            if (noted := begun.pop(id(output), None)) is not None:
                at, now, spent_s = time.monotonic(), noted[0], spent()
                follows = now - ended[0] < SAME_TURN_S
                turn, turn_spent = (ended[0], ended_spent[0]) if follows else noted[:2]
                self._steps.append(Step(turn, at, at - max(now, ended[0]), spent_s - turn_spent, noted[2]))
                ended[0], ended_spent[0] = at, spent_s
            return update(output, *args, **kwargs)

        scheduler.schedule, scheduler.update_from_output = begin, end

    def serve(self, order: Order) -> Round:
        """Serve requests."""
        self._loads.bytes_per_s = order.bytes_per_s
        rng = random.Random(order.seed)
        began = time.monotonic()
        times: dict[str, list[float]] = {}
        asked: dict[str, tuple[str, float]] = {}
        waiting = list(reversed(order.requests))
        while waiting or self._engine.has_unfinished_requests():
            while waiting and began + waiting[-1][0] <= time.monotonic():
                at, name, num_prompt, num_answer = waiting.pop()
                self._num_requests += 1
                key = str(self._num_requests)
                asked[key], times[key] = (name, began + at), []
                self._ask(key, name, [rng.randrange(10, VOCABULARY) for _ in range(num_prompt)], num_answer)
            if not self._engine.has_unfinished_requests():
                time.sleep(IDLE_S)
                continue
            for output in self._engine.step():
                now, seen = time.monotonic(), times[output.request_id]
                seen += [now] * (len(output.outputs[0].token_ids) - len(seen))
        loads, self._loads.loads = self._loads.loads, []
        steps, self._steps[:] = list(self._steps), []
        return Round(Served(asked, times, loads, time.monotonic() - began), steps)

    def _ask(self, key: str, name: str, prompt: list[int], num_answer: int) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        self._engine.add_request(
            key,
            {"prompt_token_ids": prompt},
            SamplingParams(max_tokens=num_answer, temperature=0, ignore_eos=True, detokenize=False),
            lora_request=LoRARequest(name, self._adapter(name)[0], str(self._folder / name)),
        )


def main() -> None:
    """Serve orders from standard input in the process of a child."""
    engine, answers = Engine(Path(sys.argv[1]), json.loads(sys.argv[2])), os.fdopen(int(os.environ["ANSWERS"]), "w")
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(
            msgspec.json.encode(engine.serve(msgspec.json.decode(line, type=Order))).decode(), file=answers, flush=True
        )
