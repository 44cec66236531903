"""Put a live engine's parts together: model, pages, sampler, threads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from manylora.adapters.shape import BaseShape
from manylora.clock import Clock
from manylora.config import GIB, EngineConfig, MemoryConfig, ModelConfig
from manylora.errors import ConfigError
from manylora.execution.attention.step import (
    AttentionKernel,
    TorchAttentionKernel,
    TritonAttentionKernel,
    choose_attention,
)
from manylora.execution.decode_graphs import DecodeGraphs
from manylora.execution.device import make_device_ops
from manylora.execution.executor import TorchExecutor
from manylora.execution.fusion.step import fuse_launches
from manylora.execution.lora.batch import LORA_KERNELS, TABLE_KERNELS, StepContext, choose_kernel
from manylora.execution.lora.tables import LoraSpace
from manylora.execution.machine import describe_machine
from manylora.execution.model.describe import describe_model
from manylora.execution.model.load import LoadedModel, context_limit, load_model
from manylora.execution.model.modules import adapt_modules
from manylora.execution.model.probe import measure_activations, probe_model
from manylora.execution.runner import ModelRunner, TokenSampler
from manylora.execution.sampling.sampler import Sampler
from manylora.execution.self_check import check_sequences_are_separate
from manylora.execution.storage.host_tier import HostTier
from manylora.execution.storage.page_tensor import PageTensor
from manylora.execution.storage.reader import HostReader
from manylora.execution.storage.resident import ResidentAdapter
from manylora.execution.storage.tile_tables import GroupDirectory
from manylora.ports import EngineParts
from manylora.types import AdapterKey

__all__ = ["build_parts"]

logger = logging.getLogger(__name__)

DEFAULT_CPU_BYTES = GIB


def build_parts(
    config: EngineConfig,
    clock: Clock,
    *,
    make_sampler: Callable[[BaseShape], TokenSampler] | None = None,
    load: Callable[[ModelConfig], LoadedModel] = load_model,
) -> EngineParts:
    """Load the model and build everything a live ``EngineCore`` needs.

    Args:
        config: What to build; ``model.model`` is a directory or hub name (``demo`` is resolved by the caller).
        clock: Woken when steps and loads complete.
        make_sampler: Builds the sampler from the base's shape; the plain one, without grammars, when ``None``.
        load: Loads the model; for models that lie in no folder.

    Raises:
        ConfigError: The model cannot be served, or the pool cannot hold one sequence of ``max_model_len``.
    """
    loaded = load(config.model)
    text_config = loaded.text_config
    probe = probe_model(
        loaded.model, architecture=str(text_config.model_type), num_layers=int(text_config.num_hidden_layers)
    )
    limit = context_limit(text_config)
    asked = config.model.max_model_len
    if asked is not None and asked > limit:
        raise ConfigError(f"Got max_model_len = {asked}, but the model's context is {limit} tokens")
    base = describe_model(
        loaded, probe, block_size=config.memory.block_size, max_model_len=limit if asked is None else asked
    )
    kernel = choose_kernel(config.model.lora_kernel, loaded.device)
    step = StepContext(LORA_KERNELS[kernel])
    adapt_modules(loaded.model, base, step)
    num_pages = _num_pages(config, base, loaded.model, loaded.device)
    base = _fit_context(base, num_pages, is_asked=asked is not None)
    storage = PageTensor(base.page, num_pages, loaded.device)
    sampler = make_sampler(base) if make_sampler is not None else _plain_sampler(base, loaded.device)
    resident: dict[AdapterKey, ResidentAdapter] = {}
    directory = GroupDirectory.of(base) if kernel in TABLE_KERNELS else None
    space = LoraSpace(directory, storage.flat, TABLE_KERNELS[kernel]) if directory is not None else None
    ops = make_device_ops(loaded.device)
    attention: AttentionKernel = TorchAttentionKernel(storage)
    if choose_attention(config.model.attention_kernel, loaded.device) == "triton":
        fuse_launches(loaded.model)
        attention = TritonAttentionKernel(
            ops, storage, max_num_seqs=config.scheduler.max_num_seqs, max_model_len=base.max_model_len
        )
    graphs = None
    if isinstance(attention, TritonAttentionKernel) and _wants_graphs(config.model.decode_graphs, loaded.device):
        graphs = DecodeGraphs(
            ops=ops,
            model=loaded.model,
            step=step,
            pool=storage,
            tables=attention.tables,
            vocab_size=base.vocab_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            space=space,
        )
    runner = ModelRunner(loaded.model, step, storage, sampler, resident, space, attention, ops, graphs)
    check_sequences_are_separate(runner, base, num_pages)
    if graphs is not None and loaded.device.type == "cuda":
        graphs.warm()
    store = HostTier(is_pinned=loaded.device.type == "cuda", directory=directory)
    dtype = _adapter_dtype(config.adapters.adapter_dtype, base.page.dtype, kernel)
    reader = HostReader(base, store, max_bytes=config.adapters.max_adapter_bytes, dtype=dtype)
    executor = TorchExecutor(runner=runner, pool=storage, store=store, reader=reader, resident=resident, clock=clock)
    logger.info(
        "model_loaded name=%s architecture=%s device=%s dtype=%s num_pages=%d page_bytes=%d max_model_len=%d",
        base.name,
        base.architecture,
        loaded.device,
        base.page.dtype,
        num_pages,
        base.page.num_bytes,
        base.max_model_len,
    )
    return EngineParts(
        base=base,
        num_pages=num_pages,
        executor=executor,
        reader=reader,
        close=executor.close,
        machine=describe_machine(loaded.device),
        is_accelerated=loaded.device.type != "cpu",
    )


def _adapter_dtype(asked: str, page_dtype: str, kernel: str) -> str:
    """Return the type to keep adapters in, ``auto`` where each may have its own.

    Raises:
        ConfigError: The kernels here read weights of the base's type only.
    """
    if page_dtype == "float32" and kernel not in TABLE_KERNELS:
        return asked
    if asked not in ("auto", page_dtype):
        raise ConfigError(f"Got adapter_dtype = {asked!r}, but here adapters have the base's type, {page_dtype}")
    return page_dtype


def _wants_graphs(choice: str, device: torch.device) -> bool:
    return choice == "on" or (choice == "auto" and device.type == "cuda")


def _plain_sampler(base: BaseShape, device: torch.device) -> TokenSampler:
    return Sampler(base.vocab_size, base.eos_token_ids, device)


def _num_pages(config: EngineConfig, base: BaseShape, model: torch.nn.Module, device: torch.device) -> int:
    """Return how many pages the configuration asks for, or the device has room for."""
    memory: MemoryConfig = config.memory
    if memory.num_pages is not None:
        return memory.num_pages
    num_bytes = memory.memory_bytes
    if num_bytes is None and device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        activations = measure_activations(
            model,
            num_tokens=_most_tokens_in_a_step(config, base),
            num_sampled=min(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens),
        )
        num_bytes = int(total * memory.gpu_memory_utilization) - (total - free) - activations
    if num_bytes is None:
        num_bytes = DEFAULT_CPU_BYTES
    num_pages = num_bytes // base.page.num_bytes
    if num_pages < 2:
        raise ConfigError(
            f"Got room for {max(num_bytes, 0)} bytes of pages, expected at least two pages of "
            f"{base.page.num_bytes} bytes: raise memory_bytes or gpu_memory_utilization, or lower block_size"
        )
    return num_pages


def _most_tokens_in_a_step(config: EngineConfig, base: BaseShape) -> int:
    budget = config.scheduler.max_num_batched_tokens
    return budget if config.scheduler.chunked_prefill else max(budget, base.max_model_len)


def _fit_context(base: BaseShape, num_pages: int, *, is_asked: bool) -> BaseShape:
    """Return ``base`` with a context that the pool can hold; one that was asked for is not cut in silence."""
    room = num_pages * base.page.block_size
    if base.max_model_len <= room:
        return base
    if is_asked:
        raise ConfigError(
            f"Got max_model_len = {base.max_model_len}, but {num_pages} pages hold {room} tokens: "
            "lower it or give the pool more memory"
        )
    logger.warning("context_limited num_pages=%d max_model_len=%d model_limit=%d", num_pages, room, base.max_model_len)
    return replace(base, max_model_len=room)
