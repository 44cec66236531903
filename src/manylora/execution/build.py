"""Build a live engine's parts, stage by stage.

::

    weights     loaded, fused, packed and frozen; or mapped from another process     model/freeze, model/base_weights
    model       a module tree over them, its linears replaced for LoRA               model/modules
    pages       as many as fit beside it                                             page_budget, storage
    attention   with fused launches, and decode steps as captured graphs             attention, fusion, decode_graphs
    assistant   workers for adapters that are not on the device yet                  assist
    runner      runs one step; checked on two sequences                              runner, self_check
    executor    threads for steps, copies and reads                                  executor
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from manylora.core.adapters.shape import BaseShape
from manylora.core.clock import Clock
from manylora.core.config import DEFAULT_HOST_BYTES, EngineConfig, ModelConfig
from manylora.core.errors import ConfigError
from manylora.core.ports import EngineParts
from manylora.core.types import AdapterKey
from manylora.execution.assist import start as assistants
from manylora.execution.assist.start import OpenAssistant
from manylora.execution.attention.step import (
    AttentionKernel,
    TorchAttentionKernel,
    TritonAttentionKernel,
    choose_attention,
)
from manylora.execution.decode_graphs import DecodeGraphs
from manylora.execution.device import DeviceOps, describe_machine, make_device_ops
from manylora.execution.executor import TorchExecutor
from manylora.execution.fusion.step import fuse_launches
from manylora.execution.kernels.cpu.runtime import release_threads
from manylora.execution.kernels.linear import bound_caches
from manylora.execution.lora.batch import LORA_KERNELS, TABLE_KERNELS, StepContext, choose_kernel
from manylora.execution.lora.grouped import prepare_grouped
from manylora.execution.lora.tables import LoraSpace
from manylora.execution.model.base_weights import BaseWeights, check_complete, share_weights
from manylora.execution.model.describe import describe_model
from manylora.execution.model.device_memory import DeviceMemory
from manylora.execution.model.freeze import load_weights
from manylora.execution.model.load import LoadedModel, context_limit, load_model, load_skeleton
from manylora.execution.model.modules import adapt_modules
from manylora.execution.page_budget import count_pages, fit_context
from manylora.execution.runner import ModelRunner, TokenSampler
from manylora.execution.sampling.sampler import Sampler
from manylora.execution.self_check import check_sequences_are_separate
from manylora.execution.stages import StageLog
from manylora.execution.storage.host_memory import HOST_SHARE, available_bytes
from manylora.execution.storage.host_tier import HostTier
from manylora.execution.storage.link import Link
from manylora.execution.storage.page_tensor import PageTensor
from manylora.execution.storage.reader import FileReader, HostReader, open_processes
from manylora.execution.storage.reader_messages import ReaderSettings
from manylora.execution.storage.resident import ResidentAdapter
from manylora.execution.storage.tile_tables import GroupDirectory

__all__ = ["build_parts"]

logger = logging.getLogger(__name__)

READER_BYTES = 1024**3
"""Memory for a reader's work, beside the largest adapter: its file in a wider type, and its image."""

HASHES_FILE = "adapter-hashes-1"
"""Name of the hash cache; another number for other content hashes or another format."""


def build_parts(
    config: EngineConfig,
    clock: Clock,
    *,
    make_sampler: Callable[[BaseShape], TokenSampler] | None = None,
    load: Callable[[ModelConfig], LoadedModel] = load_model,
    weights: BaseWeights | None = None,
    open_assistant: OpenAssistant | None = None,
    readers: Sequence[FileReader] = (),
    is_checked: bool = False,
) -> EngineParts:
    """Load the model and build everything a live ``EngineCore`` needs.

    Args:
        config: ``model.model`` is a directory or hub name (``demo`` is resolved by the caller).
        clock: Woken when steps and loads complete.
        make_sampler: Builds the sampler from the base's shape; by default a sampler without grammars.
        load: Loads the model; another function for a model without a folder.
        weights: Base weights that another process froze; loaded when ``None``.
        open_assistant: Starts workers for adapters in host memory, where the device can exchange rows with them; by
            default ``assist.start.open_assistant``.
        readers: Read adapters; processes by default.
        is_checked: Whether the runner was checked on this model already, by the process that this one is a fork of.

    Raises:
        ConfigError: The model cannot be served, or the pages cannot hold one sequence of ``max_model_len``.
    """
    bound_caches()
    readers = readers or open_processes()
    try:
        start_assistant = open_assistant or partial(assistants.open_assistant, num_engines=config.num_engines)
        return _build(config, clock, readers, make_sampler, load, weights, start_assistant, is_checked)
    except BaseException:
        for reader in readers:
            reader.close()
        raise


def _build(
    config: EngineConfig,
    clock: Clock,
    readers: Sequence[FileReader],
    make_sampler: Callable[[BaseShape], TokenSampler] | None,
    load: Callable[[ModelConfig], LoadedModel],
    weights: BaseWeights | None,
    start_assistant: OpenAssistant,
    is_checked: bool,
) -> EngineParts:
    """Build the parts, with readers that may be starting; the stages of the picture, in order."""
    stages = StageLog()
    loaded, weights = _weights(config.model, load, weights)
    stages.done("weights", then="modules and memory")
    device, model = loaded.device, loaded.model
    base = describe_model(
        loaded,
        weights.manifest.probe,
        block_size=config.memory.block_size,
        max_model_len=_context(config.model, loaded),
    )
    kernel = choose_kernel(config.model.lora_kernel, device)
    step = StepContext(LORA_KERNELS[kernel])
    weights.install(model)
    adapt_modules(model, weights.tensors, base, step)
    check_complete(model)

    memory_of_base = weights.memory if isinstance(weights.memory, DeviceMemory) else None
    num_pages = count_pages(config, base, loaded, memory_of_base)
    base = fit_context(base, num_pages, is_asked=config.model.max_model_len is not None)
    pages = PageTensor(base.page, num_pages, device)
    directory = GroupDirectory.of(base) if kernel in TABLE_KERNELS else None
    space = LoraSpace(directory, pages.flat, TABLE_KERNELS[kernel]) if directory is not None else None

    ops = make_device_ops(device)
    attention = _attention(config, base, model, pages, ops)
    graphs = None
    wanted = config.model.decode_graphs
    is_replayed = wanted == "on" or (wanted == "auto" and device.type == "cuda")
    if isinstance(attention, TritonAttentionKernel) and is_replayed:
        graphs = DecodeGraphs(
            ops=ops,
            model=model,
            step=step,
            pages=pages,
            tables=attention.tables,
            vocab_size=base.vocab_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            space=space,
        )
    sampler = make_sampler(base) if make_sampler is not None else Sampler(base.vocab_size, base.eos_token_ids, device)
    resident: dict[AdapterKey, ResidentAdapter] = {}
    assistant = start_assistant(device, base)
    runner = ModelRunner(model, step, pages, sampler, resident, space, attention, ops, graphs, assistant)
    stages.done("modules", then="kernels, compiled at the first start on a machine, and a check of the model")
    if not is_checked:
        check_sequences_are_separate(runner, base, num_pages)
    if graphs is not None and device.type == "cuda":
        stages.done("check", then="graphs of decode steps")
        graphs.warm()
    stages.done("graphs" if graphs is not None else "check", then="adapters")

    host = HostTier(is_pinned=device.type == "cuda", directory=directory)
    reader = HostReader(_reader_settings(config, base, num_pages, kernel), host, readers)
    executor = TorchExecutor(
        runner=runner,
        pages=pages,
        link=Link(pages, config.adapters.link_bytes_per_s),
        host=host,
        reader=reader,
        resident=resident,
        clock=clock,
        # Tables hold places in the pool alone: without an assistant, they cannot name an image.
        reads_host=assistant is not None or (device.type == "cpu" and directory is None),
        prepare=assistant.prepare if assistant is not None else _preparation(kernel, device.type),
    )

    def close() -> None:
        executor.close()
        if assistant is not None:
            assistant.close()

    logger.info(
        "model_loaded name=%s architecture=%s device=%s dtype=%s num_pages=%d page_bytes=%d max_model_len=%d",
        base.name,
        base.architecture,
        device,
        base.page.dtype,
        num_pages,
        base.page.num_bytes,
        base.max_model_len,
    )
    release_threads()  # steps run on a thread of their own, and so on OpenMP threads of their own
    return EngineParts(
        base=base,
        num_pages=num_pages,
        executor=executor,
        reader=reader,
        close=close,
        machine=describe_machine(device),
        is_accelerated=device.type != "cpu",
        reads_host=executor.reads_host,
        host_bytes=_host_bytes(config.num_engines),
        waits_by_layer=True,
        shared=share_weights(weights),
        prepare=sampler.prepare,
    )


def _weights(
    config: ModelConfig, load: Callable[[ModelConfig], LoadedModel], weights: BaseWeights | None
) -> tuple[LoadedModel, BaseWeights]:
    """Return a model without its weights, and the weights: loaded, or those that another process froze."""
    if weights is None:
        return load_weights(config, load)
    if weights.manifest.model != config.model:
        raise ConfigError(f"Got weights of {weights.manifest.model!r}, expected those of {config.model!r}")
    loaded = load_skeleton(config)
    if (weights.device.type, weights.device.index or 0) != (loaded.device.type, loaded.device.index or 0):
        raise ConfigError(f"Got weights on {weights.device}, expected them on {loaded.device}")
    return loaded, weights


def _attention(
    config: EngineConfig, base: BaseShape, model: nn.Module, pages: PageTensor, ops: DeviceOps
) -> AttentionKernel:
    """Return attention over the pages; with Triton's, the model's launches are fused too."""
    if choose_attention(config.model.attention_kernel, pages.flat.device) != "triton":
        return TorchAttentionKernel(pages)
    fuse_launches(model)
    max_num_seqs = config.scheduler.max_num_seqs
    return TritonAttentionKernel(ops, pages, max_num_seqs=max_num_seqs, max_model_len=base.max_model_len)


def _reader_settings(config: EngineConfig, base: BaseShape, num_pages: int, kernel: str) -> ReaderSettings:
    """Return the bounds and formats by which reader processes read adapters."""
    adapters = config.adapters
    return ReaderSettings(
        base=base,
        max_bytes=adapters.max_adapter_bytes,
        max_pages=adapters.most_pages(num_pages),
        roots=adapters.real_roots,
        registries=adapters.registries,
        dtype=_adapter_dtype(adapters.adapter_dtype, base.page.dtype, kernel),
        hashes=None if config.cache_dir is None else os.path.join(config.cache_dir, HASHES_FILE),
        limit_s=adapters.read_timeout_s,
        memory_bytes=READER_BYTES + 4 * min(adapters.max_adapter_bytes, num_pages * base.page.num_bytes),
    )


def _context(config: ModelConfig, loaded: LoadedModel) -> int:
    """Return the longest context to serve, in tokens; refuse more than the model has."""
    limit = context_limit(loaded.text_config)
    wanted = config.max_model_len
    if wanted is not None and wanted > limit:
        raise ConfigError(f"Got max_model_len = {wanted}, but the model's context is {limit} tokens")
    return limit if wanted is None else wanted


def _preparation(kernel: str, device_type: str) -> Callable[[ResidentAdapter], None]:
    """Return the kernel's work for each adapter that is brought to the device."""
    return prepare_grouped if kernel == "grouped" and device_type == "cpu" else lambda adapter: None


def _host_bytes(num_engines: int) -> int:
    """Return the bytes of one engine's host tier by default, beside the model that is loaded."""
    available = available_bytes()
    return DEFAULT_HOST_BYTES if available is None else max(1, int(available * HOST_SHARE / num_engines))


def _adapter_dtype(wanted: str, page_dtype: str, kernel: str) -> str:
    """Return the type to keep adapters in, ``auto`` where each may have its own; refuse a type no kernel here reads."""
    if page_dtype == "float32" and kernel not in TABLE_KERNELS:
        return wanted
    if wanted not in ("auto", page_dtype):
        raise ConfigError(f"Got adapter_dtype = {wanted!r}, but here adapters have the base's type, {page_dtype}")
    return page_dtype
