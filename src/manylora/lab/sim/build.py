"""The parts of a simulated engine; no model is loaded.

It imitates a machine that was measured, or one given by its data sheet. Its vocabulary comes from the checkpoint
folder, as the tokenizer does; costs do not depend on it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

from manylora.core.adapters.layout import lay_out, make_version
from manylora.core.adapters.shape import BaseShape
from manylora.core.adapters.sources import is_url
from manylora.core.adapters.tensors import VectorKind
from manylora.core.clock import Clock
from manylora.core.config import EngineConfig
from manylora.core.errors import AdapterError, AdapterForbidden, AdapterNotFound, ConfigError
from manylora.core.plan import PlannedSequence
from manylora.core.ports import EngineParts, check_each
from manylora.core.types import AdapterVersion, SampledToken
from manylora.lab.costs.profile import read_profile
from manylora.lab.costs.roofline import RooflineCost
from manylora.lab.sim.run.cold_steps import ColdSteps
from manylora.lab.sim.run.contents import synthetic_token
from manylora.lab.sim.run.executor import SimulatedExecutor
from manylora.lab.sim.run.simulation import SimulationConfig
from manylora.lab.sim.setup import Setup, make_config

__all__ = ["SimulatedReader", "build_simulated_parts", "find_target", "simulated_parts"]

MEAN_ANSWER_TOKENS = 200  # mean length of synthetic answers without a cap


class SimulatedReader:
    """Makes adapter versions from ``adapter_config.json``; no weights are needed.

    The identity is the hash of the configuration and of the weight file, if there is one, so a changed adapter is a new
    version here as well.
    """

    def __init__(self, base: BaseShape) -> None:
        self._base = base

    def read(self, name: str, path: str) -> AdapterVersion:
        """Return the version of an adapter with this rank and these targets.

        ``AdapterNotFound`` if there is no ``adapter_config.json``; ``AdapterForbidden`` if the adapter is in a
        registry; ``AdapterError`` if the configuration has no rank, or no module of this base.
        """
        if is_url(path):
            raise AdapterForbidden(name, "a simulated engine reads no registry; give a folder with its configuration")
        config_file = Path(path) / "adapter_config.json"
        if not config_file.is_file():
            raise AdapterNotFound(name, f"no adapter_config.json in {path}")
        content = config_file.read_bytes()
        try:
            settings = json.loads(content)
            rank, targets = _rank_in_memory(settings), settings["target_modules"] or []
            invocation = tuple(map(int, settings.get("alora_invocation_tokens") or ()))
            parameters = settings.get("target_parameters") or []
        except (ValueError, KeyError, TypeError) as error:
            raise AdapterError(name, f"adapter_config.json is not usable: {error!r}") from error
        if targets == "all-linear":
            ranks = dict.fromkeys(self._base.all_linear, rank)
        else:
            suffixes = {str(name).rpartition(".")[2] for name in [*targets, *parameters]}
            ranks = {
                one.name: rank * one.num_experts
                for one in self._base.modules
                if one.name.rpartition(".")[2] in suffixes
            }
        if not ranks or rank < 1:
            raise AdapterError(name, f"rank {rank} on {targets} applies to no module of {self._base.name}")
        weight_file = config_file.with_name("adapter_model.safetensors")
        weights = weight_file.read_bytes() if weight_file.is_file() else b""
        key = hashlib.blake2b(self._base.fingerprint.encode() + content + weights, digest_size=16).hexdigest()
        kinds = tuple(kind for key, kind in _VECTORS.items() if settings.get(key))
        vectors = tuple((module, kinds) for module in ranks) if kinds else ()
        layout, page = lay_out(ranks, self._base, vectors=vectors), self._base.page
        return make_version(
            layout, page, key=key, source=str(path), disk_bytes=len(weights) or None, invocation=invocation
        )

    def check(self, adapters: Sequence[tuple[str, str]]) -> list[AdapterVersion | AdapterError]:
        """Return the version of each adapter, or the reason against it."""
        return check_each(self.read, adapters)


_VECTORS = {"use_dora": VectorKind.MAGNITUDE, "lora_bias": VectorKind.SHIFT}  # settings that give each module a vector


def _rank_in_memory(settings: Mapping[str, Any]) -> int:
    """Return the rank that a module takes in pages, as far as a configuration shows."""
    if settings.get("peft_type") == "ADALORA":
        return int(settings["init_r"])
    rank = int(settings["r"])
    return rank * rank if settings.get("peft_type") == "LOHA" else rank


def build_simulated_parts(config: EngineConfig, clock: Clock) -> EngineParts:
    """Build the parts of an engine that imitates the target ``config.simulate``.

    Simulated work ends by time, so nothing wakes ``clock``; the builder takes it as the torch builder does.
    ``ConfigError`` if ``simulate`` names no target.
    """
    assert config.simulate is not None
    return simulated_parts(*find_target(config.simulate, config))


def simulated_parts(target: SimulationConfig, machine: str) -> EngineParts:
    """Return parts whose executor makes synthetic tokens, at the speed of a target; ``machine`` is its name."""
    base = target.base
    return EngineParts(
        base=base,
        num_pages=target.num_pages,
        executor=SimulatedExecutor(
            target.cost,
            vocab_size=base.vocab_size,
            choose=_make_token_source(base),
            interference=target.interference,
            speed=target.speed(0) if target.speed is not None else None,
            cold_steps=ColdSteps(target.cost, base.num_layers),
        ),
        reader=SimulatedReader(base),
        close=lambda: None,
        machine=f"simulated: {machine}",
        base_bytes=target.cost.weight_bytes if isinstance(target.cost, RooflineCost) else 0,
        reads_host=target.reads_host,
        waits_by_layer=target.waits_by_layer,
    )


def find_target(name: str, config: EngineConfig) -> tuple[SimulationConfig, str]:
    """Return the engine that ``--simulate NAME`` imitates, and the name of its machine.

    Args:
        name: The file of a cost profile, or ``hardware:model``, each a known name or a file (``a40:llama-7b``).
        config: Gives the sizes of memory, the devices that share the model, and the model's folder.

    ``ConfigError`` if the name is neither.
    """
    memory = config.memory
    hardware, colon, model = name.rpartition(":")
    size = config.model.tensor_parallel_size
    if Path(name).is_file():
        setup, machine = Setup(profile=name, tensor_parallel_size=size), read_profile(name).machine
    elif colon:
        kv_dtype = None if memory.kv_cache_dtype == "auto" else memory.kv_cache_dtype
        setup = Setup(hardware=hardware, model=model, tensor_parallel_size=size, kv_cache_dtype=kv_dtype)
        machine = hardware if size == 1 else f"{size} x {hardware}"
    else:
        raise ConfigError(
            f"Got simulate = {name!r}, expected the file of a profile that `manylora calibrate` wrote, "
            "or hardware:model, such as a40:llama-7b"
        )
    setup = replace(setup, utilization=memory.gpu_memory_utilization, scheduler=config.scheduler)
    made = make_config(setup, seed=config.seed)
    base = replace(made.base, page=replace(made.base.page, block_size=memory.block_size))
    num_bytes = size * (memory.memory_bytes or 0) or made.num_pages * made.base.page.num_bytes
    target = replace(
        made,
        base=_with_vocabulary(base, config),
        num_pages=memory.num_pages or max(2, num_bytes // base.page.num_bytes),
        memory=replace(made.memory, block_size=memory.block_size),
    )
    return target, machine


def _with_vocabulary(base: BaseShape, config: EngineConfig) -> BaseShape:
    """Return the base with the vocabulary of the configured model folder, and the configured context."""
    path, limit = Path(config.model.model) / "config.json", config.model.max_model_len
    if limit is not None:
        base = replace(base, max_model_len=min(limit, base.max_model_len))
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        settings = settings.get("text_config", settings)
        vocab_size, eos = settings["vocab_size"], settings.get("eos_token_id")
    except (OSError, ValueError, KeyError):
        return base  # no folder, or one with only a tokenizer
    eos_token_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return replace(base, vocab_size=int(vocab_size), eos_token_ids=eos_token_ids)


def _make_token_source(base: BaseShape) -> Callable[[PlannedSequence], SampledToken]:
    """Return the token source of answers for clients.

    An answer runs to its ``max_tokens``. Without one it ends after a length drawn by its seed from an exponential
    distribution, so that a chat without a cap does not run to the end of the context.
    """
    avoid = base.eos_token_ids

    def next_token(part: PlannedSequence) -> SampledToken:
        sampling = part.sampling
        if sampling.max_tokens is None and not sampling.ignore_eos and avoid:
            share = (crc32(f"{part.seed}/{part.num_prompt_tokens}".encode()) + 1) / 2**32
            length = max(1 + sampling.min_tokens, round(-MEAN_ANSWER_TOKENS * math.log(share)))
            if part.start + part.num_tokens - part.num_prompt_tokens >= length - 1:
                return SampledToken(token_id=avoid[0])
        return synthetic_token(part, base.vocab_size, avoid)

    return next_token
