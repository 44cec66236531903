"""An engine that recites the alphabet, for tests; it imports little, so that engine processes start at once."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from manylora.core.adapters.shape import BaseShape, PageShape
from manylora.core.clock import Clock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.errors import AdapterError, AdapterNotFound, ConfigError
from manylora.core.plan import PlannedSequence, StepPlan, StepResult
from manylora.core.ports import EngineParts, check_each
from manylora.core.types import AdapterKey, AdapterVersion, SampledToken
from manylora.lab.costs.model import FixedCost
from manylora.lab.sim.run.executor import SimulatedExecutor, SimulatedWork

HOLD = "RECITER_HOLD"
"""Variable of the environment that names a file: while there is one, answers of ``held_parts`` do not go on."""

EOS = 256
MAX_MODEL_LEN = 256


def base_shape() -> BaseShape:
    """Return a base whose vocabulary is the tokenizer's."""
    return BaseShape(
        name="tiny",
        architecture="llama",
        fingerprint="tiny",
        vocab_size=257,
        hidden_size=16,
        num_layers=2,
        max_model_len=MAX_MODEL_LEN,
        page=PageShape(block_size=16, num_layers=2, num_kv_heads=1, head_dim=8, element_bytes=4, dtype="float32"),
        modules=(),
        all_linear=(),
        eos_token_ids=(EOS,),
    )


def recite(part: PlannedSequence) -> SampledToken:
    """Make up the next token: the alphabet, begun at ``a`` by the base and at its own letter by an adapter.

    So every answer shows which adapter version gave it. A prompt that ends with ``!`` is answered with five letters
    and the end of sequence.
    """
    position = part.start + part.num_tokens - part.num_prompt_tokens
    shift = 0 if part.adapter is None else ord(part.adapter[0]) - ord("a")
    token = ord("a") + (shift + position) % 26
    if part.tokens[part.num_prompt_tokens - 1] == ord("!") and position == 5:
        token = EOS
    if part.sampling.logprobs is None:
        return SampledToken(token_id=token)
    likely = [ord("a") + (shift + position + rank) % 26 for rank in range(part.sampling.logprobs)]
    top = tuple((token_id, -0.5 - rank) for rank, token_id in enumerate(part.sampling.logprob_token_ids or likely))
    return SampledToken(token_id=token, logprob=-0.5, top=top)


class ReciterReader:
    """Reads folders that ``write_reciter`` wrote."""

    def read(self, name: str, path: str) -> AdapterVersion:
        file = Path(path) / "adapter_config.json"
        if not file.exists():
            raise AdapterNotFound(name, f"{path} holds no adapter_config.json")
        config = json.loads(file.read_text())
        if "letter" not in config:
            raise AdapterError(name, "its configuration names no letter")
        return AdapterVersion(
            key=AdapterKey(config["letter"] + hashlib.sha256(file.read_bytes()).hexdigest()[:15]),
            source=path,
            rank=config["rank"],
            num_modules=1,
            target_modules=("q_proj",),
            num_pages=config["num_pages"],
            weight_bytes=1000,
            host_bytes=1024,
            disk_bytes=1000,
        )

    def check(self, adapters: Sequence[tuple[str, str]]) -> list[AdapterVersion | AdapterError]:
        return check_each(self.read, adapters)


def write_reciter(directory: Path, letter: str, *, rank: int = 8, num_pages: int = 2) -> Path:
    """Write an adapter that begins the alphabet at ``letter``."""
    directory.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"letter": letter, "rank": rank, "num_pages": num_pages})
    (directory / "adapter_config.json").write_text(content)
    return directory


def reciter_parts(config: EngineConfig, clock: Clock, *, step_s: float = 0.001) -> EngineParts:
    """Build an engine that recites; ``step_s`` is how long a step takes."""
    cost = FixedCost(step_s=step_s, token_s=0.0)
    executor = SimulatedExecutor(cost, vocab_size=257, choose=recite)
    return EngineParts(
        base=base_shape(),
        num_pages=config.memory.num_pages or 512,
        executor=executor,
        reader=ReciterReader(),
        close=lambda: None,
    )


def slow_reciter_parts(config: EngineConfig, clock: Clock) -> EngineParts:
    """Build an engine that recites at ten tokens a second."""
    return reciter_parts(config, clock, step_s=0.1)


@dataclass(slots=True)
class HeldStep:
    """A step that completes when a file is gone.

    Args:
        work: The step, had it not to wait.
        gate: The file.
        ready_at: When to look again, in seconds.
    """

    work: SimulatedWork
    gate: Path
    ready_at: float

    def poll(self, now: float) -> StepResult | None:
        if self.gate.exists():
            self.ready_at = now + 0.005
            return None
        return self.work.result  # type: ignore[return-value]


class HeldExecutor(SimulatedExecutor):
    """Recites, but no answer gets beyond its first token before the gate is open: tests act in the middle of it."""

    def launch(self, plan: StepPlan, now: float) -> SimulatedWork | HeldStep:  # type: ignore[override]
        work = super().launch(plan, now)
        if all(len(part.tokens) <= part.num_prompt_tokens for part in plan.sequences):
            return work
        return HeldStep(work, Path(os.environ[HOLD]), work.ready_at)


def held_parts(config: EngineConfig, clock: Clock) -> EngineParts:
    """Build an engine whose answers wait for a gate."""
    executor = HeldExecutor(FixedCost(step_s=0.001, token_s=0.0), vocab_size=257, choose=recite)
    return replace(reciter_parts(config, clock), executor=executor)


def follow_script(part: PlannedSequence) -> SampledToken:
    """Answer with the text after the last ``say:`` of the conversation, up to the tag that ends its message."""
    prompt = bytes(part.tokens[: part.num_prompt_tokens])
    script = prompt[prompt.rfind(b"say:") + 4 : prompt.rfind(b"</")]
    position = part.start + part.num_tokens - part.num_prompt_tokens
    token = script[position] if position < len(script) else EOS
    return SampledToken(token_id=token, logprob=None if part.sampling.logprobs is None else -0.5)


def scripted_parts(config: EngineConfig, clock: Clock) -> EngineParts:
    """Build an engine with a long context that answers as the conversation says, a character per step."""
    executor = SimulatedExecutor(FixedCost(step_s=0.0001, token_s=0.0), vocab_size=257, choose=follow_script)
    parts = reciter_parts(config, clock)
    return replace(parts, base=replace(parts.base, max_model_len=4096), executor=executor)


class HangingExecutor(SimulatedExecutor):
    """Recites, but hangs on a prompt that ends with ``?`` (within `launch`) or ``*`` (its step never ends)."""

    def launch(self, plan: StepPlan, now: float) -> SimulatedWork:
        last = {part.tokens[part.num_prompt_tokens - 1] for part in plan.sequences}
        if ord("?") in last:
            time.sleep(3600)
        work = super().launch(plan, now)
        return replace(work, ready_at=math.inf) if ord("*") in last else work


def hanging_parts(config: EngineConfig, clock: Clock) -> EngineParts:
    """Build an engine that can be made to hang."""
    executor = HangingExecutor(FixedCost(step_s=0.001, token_s=0.0), vocab_size=257, choose=recite)
    return replace(reciter_parts(config, clock), executor=executor)


def refusing_parts(config: EngineConfig, clock: Clock) -> EngineParts:
    """Refuse the configuration."""
    raise ConfigError("this engine refuses")


def late_parts(config: EngineConfig, clock: Clock) -> EngineParts:
    """Build an engine that recites, and take half a second over it."""
    time.sleep(0.5)
    return reciter_parts(config, clock)


def breaking_parts(config: EngineConfig, clock: Clock) -> EngineParts:
    """Break."""
    raise RuntimeError("this engine breaks")


def engine_config(tokenizer: Path, **scheduler: int) -> EngineConfig:
    """Return a small engine's configuration; the base is called ``base``."""
    return EngineConfig(
        model=ModelConfig(model=str(tokenizer), served_model_name="base"),
        memory=MemoryConfig(num_pages=512),
        scheduler=SchedulerConfig(**scheduler),
    )
