"""Build a live engine's parts, stage by stage.

::

    weights     loaded, fused, packed and frozen; or mapped from another process     model/freeze, model/base_weights
    model       a module tree over them, its linears replaced for LoRA               model/modules
    pages       as many as fit beside it                                             page_budget, storage
    attention   with fused launches, and steps as captured graphs                    attention, fusion, step_graphs
    assistant   workers for adapters that are not on the device yet                  assist
    runner      runs one step; checked on two sequences                              runner, self_check
    executor    threads for steps, copies and reads                                  executor
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from manylora.core.adapters.shape import SCALE_BYTES, BaseShape, ModuleKind
from manylora.core.clock import Clock
from manylora.core.config import DEFAULT_HOST_BYTES, EngineConfig, ModelConfig
from manylora.core.errors import ConfigError
from manylora.core.machine import available_bytes, count_cores
from manylora.core.ports import EngineParts, SharedBase
from manylora.execution.attention.call import AttentionKernel, choose_attention
from manylora.execution.attention.paged import TorchAttentionKernel
from manylora.execution.attention.triton import TritonAttentionKernel
from manylora.execution.collectives import Collectives
from manylora.execution.device import DeviceOps, describe_machine, dtype_name, find_device, make_device_ops
from manylora.execution.executor import TorchExecutor
from manylora.execution.fusion.layers import fuse_launches
from manylora.execution.kernels.cpu.support import find_compiled, release_threads
from manylora.execution.kernels.linear import bound_caches
from manylora.execution.lora.batch import StepContext
from manylora.execution.lora.kernels import LORA_KERNELS, TABLE_KERNELS, SharedKernel, choose_kernel
from manylora.execution.lora.tables import LoraSpace
from manylora.execution.model.base_weights import BaseWeights, check_complete, map_weights, share_weights
from manylora.execution.model.describe import describe_model
from manylora.execution.model.device_memory import DeviceMemory
from manylora.execution.model.freeze import load_weights
from manylora.execution.model.load import LoadedModel, context_limit, load_model, load_skeleton
from manylora.execution.model.modules import adapt_modules
from manylora.execution.model.probe import ModelProbe
from manylora.execution.model.recurrent import adapt_mixers
from manylora.execution.model.settle import BaseGroup, BaseNorm, Settling
from manylora.execution.model.share import ModelShare, divide_modules, share_shape
from manylora.execution.page_budget import count_pages, fit_context
from manylora.execution.runner import ModelRunner, SharedLogits
from manylora.execution.sampling.sampler import make_sampler
from manylora.execution.self_check import check_sequences_are_separate
from manylora.execution.step_graphs import StepGraphs
from manylora.execution.storage.host_tier import HostTier
from manylora.execution.storage.kept_images import KeptImages
from manylora.execution.storage.page_tensor import Link, PageTensor
from manylora.execution.storage.reader import FileReader, HostReader, open_processes
from manylora.execution.storage.reader_messages import ReaderSettings
from manylora.execution.storage.registry_process import REGISTRY_FOLDER
from manylora.execution.storage.resident import AdapterMemory
from manylora.execution.storage.tile_tables import GroupDirectory
from manylora.execution.worker_group import WorkerGroup

if TYPE_CHECKING:
    from manylora.execution.assist.exchange import Assistant

__all__ = ["OpenAssistant", "build_parts", "open_assistant_workers"]

logger = logging.getLogger(__name__)

READER_BYTES = 1024**3
"""Memory for a reader's work, beside the largest adapter: its file in a wider type, and its image."""

HOST_SHARE = 0.25
"""Share of the available memory that adapters take by default, in all engines of the machine together; the rest is for
pages, processes and file caches."""

HASHES_FILE = "adapter-hashes-1"  # name of the hash cache; another number for other content hashes or another format

OpenAssistant = Callable[[torch.device, BaseShape], "Assistant | None"]
"""Starts workers for a device and a base, where there can be any."""


def build_parts(
    config: EngineConfig,
    clock: Clock,
    *,
    load: Callable[..., LoadedModel] = load_model,
    weights: BaseWeights | None = None,
    shared: SharedBase | None = None,
    open_assistant: OpenAssistant | None = None,
    readers: Sequence[FileReader] = (),
    is_checked: bool = False,
    workers: Collectives | None = None,
) -> EngineParts:
    """Load the model and build everything a live ``EngineCore`` needs.

    Args:
        config: ``model.model`` is a directory or hub name (``demo`` is resolved by the caller).
        clock: Woken when steps and loads complete.
        load: Loads the model; another function for a model without a folder. It gets the ``workers`` if there are any.
        weights: Base weights that another process froze; loaded when ``None``.
        shared: The place of such weights, to map them from.
        open_assistant: Starts workers for adapters in host memory, where the device can exchange rows with them; by
            default ``open_assistant_workers``.
        readers: Read adapters; processes by default.
        is_checked: Whether the runner was checked on this model already, by the process that this one is a fork of.
        workers: Those that share the model with this one; by default, this is worker 0 and starts any others.

    Raises:
        ConfigError: The model cannot be served, or the pages cannot hold one sequence of ``max_model_len``.
    """
    bound_caches()
    if shared is not None:
        weights = map_weights(shared)
    start_assistant = open_assistant or partial(open_assistant_workers, num_engines=config.num_engines)
    readers = readers or open_processes()
    with ExitStack() as undo:
        for reader in readers:
            undo.callback(reader.close)
        group = _start_others(config, clock, undo) if workers is None else None
        workers = workers if group is None else group.workers
        config = config if workers is None else _of_worker(config, workers)
        stages = StageLog()
        loaded, weights = _weights(config, load, weights, workers)
        stages.done("weights", then="modules and memory")
        model = _adapt(config, loaded, weights, workers)
        assistant = start_assistant(loaded.device, model.base) if workers is None else None
        if assistant is not None:
            undo.callback(assistant.close)
        runner = _runner(config, model, assistant)
        stages.done("modules", then="kernels, compiled at the first start on a machine, and a check of the model")
        if not is_checked:
            check_sequences_are_separate(runner, model.base, model.pages.num_pages)
        if loaded.device.type == "cuda":
            stages.done("check", then="kernels of adapters, and graphs of steps")
            runner.compile(config.scheduler.max_num_batched_tokens)
        stages.done("compilation", then="adapters")
        parts = _parts(config, clock, model, runner, assistant, readers, weights)
        parts = parts if group is None else group.join(parts)
        undo.pop_all()
    release_threads()  # steps run on a thread of their own, and so on OpenMP threads of their own
    return parts


def open_assistant_workers(device: torch.device, base: BaseShape, *, num_engines: int = 1) -> Assistant | None:
    """Start workers for adapters that are not on the device, ``None`` where none can be used: requests then wait.

    A CPU needs none: its kernels read images where they lie. A mixture has none: workers would have to learn which rows
    have chosen an expert. ``num_engines`` engines share the cores.
    """
    if device.type != "cuda" or find_compiled() is None or any(m.kind is ModuleKind.EXPERTS for m in base.modules):
        return None
    from manylora.execution.assist.cuda import open_stream
    from manylora.execution.assist.exchange import Assistant
    from manylora.execution.assist.workers import count_workers

    stream = open_stream(device)
    if stream is None:
        return None
    assistant = Assistant(stream, base, num_workers=count_workers(num_engines))
    logger.info("assistant_started stream=%s workers=%d", type(stream).__name__, assistant.num_workers)
    return assistant


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """The model with its pages."""

    module: nn.Module  # the module tree, whose linears add LoRA
    base: BaseShape  # its shape
    kernel: str  # name of the LoRA kernel
    step: StepContext  # the running step as its modules see it
    pages: PageTensor  # memory for KV and adapters
    dtype: torch.dtype  # type of its activations
    ops: DeviceOps  # operations of its device
    own: Mapping[str, BaseGroup | BaseNorm]  # the base's weights and biases by group
    share: ModelShare | None  # its part of a model that several workers share
    workers: Collectives | None
    probe: ModelProbe  # its behaviour


def _start_others(config: EngineConfig, clock: Clock, undo: ExitStack) -> WorkerGroup | None:
    """Start the workers that share the model with this one, if there are to be any."""
    if config.model.tensor_parallel_size == 1:
        return None
    group = WorkerGroup(config, clock)
    undo.callback(group.close)
    return group


def _of_worker(config: EngineConfig, workers: Collectives) -> EngineConfig:
    """Return the configuration of one of several workers: its device, and its part of the machine's cores and memory.

    ``ConfigError`` if there are fewer devices than workers.
    """
    device = find_device(config.model.device)
    if device.type == "cpu":
        torch.set_num_threads(max(1, count_cores() // workers.size))
    else:
        number, found = (device.index or 0) + workers.rank, torch.cuda.device_count()
        if number >= found:
            raise ConfigError(f"Got tensor_parallel_size = {workers.size} from {device} on, but there are {found} GPUs")
        device = torch.device(device.type, number)
    model = replace(config.model, device=str(device))
    return replace(config, model=model, num_engines=config.num_engines * workers.size)


def _weights(
    config: EngineConfig, load: Callable[..., LoadedModel], weights: BaseWeights | None, workers: Collectives | None
) -> tuple[LoadedModel, BaseWeights]:
    """Return a model without its weights, and the weights: loaded, or those that another process froze."""
    model = config.model
    if workers is not None:
        if weights is not None:
            raise ConfigError(f"Got shared weights, and tensor_parallel_size = {workers.size}, expected one of them")
        return load_weights(model, partial(load, workers=workers))
    if weights is None:
        return load_weights(model, load, cache=None if config.cache_dir is None else Path(config.cache_dir))
    if weights.manifest.model != model.model:
        raise ConfigError(f"Got weights of {weights.manifest.model!r}, expected those of {model.model!r}")
    loaded = load_skeleton(model)
    if (weights.device.type, weights.device.index or 0) != (loaded.device.type, loaded.device.index or 0):
        raise ConfigError(f"Got weights on {weights.device}, expected them on {loaded.device}")
    return loaded, weights


def _adapt(config: EngineConfig, loaded: LoadedModel, weights: BaseWeights, workers: Collectives | None) -> _Model:
    """Put the weights into the model, replace its linears, and make as many pages as fit beside it."""
    device, model, ops = loaded.device, loaded.model, make_device_ops(loaded.device)
    ops.enter_thread()
    kernel = choose_kernel(config.model.lora_kernel, device)
    base = describe_model(
        loaded,
        weights.manifest.probe,
        block_size=config.memory.block_size,
        max_model_len=_context(config.model, loaded),
        kv_dtype=_kv_dtype(config.memory.kv_cache_dtype, loaded, weights),
        adapts_experts=device.type == "cpu" or kernel in TABLE_KERNELS,
    )
    if loaded.share is not None:
        base = share_shape(base, loaded.share)
    step = StepContext(
        LORA_KERNELS[kernel] if workers is None else SharedKernel(workers, is_by_table=kernel in TABLE_KERNELS)
    )
    weights.install(model)
    own = adapt_modules(model, weights.tensors, base, step, loaded.dtype)
    check_complete(model)
    memory_of_base = weights.memory if isinstance(weights.memory, DeviceMemory) else None
    num_pages = count_pages(config, base, loaded, memory_of_base)
    if workers is not None:
        workers.open(device)
        num_pages = workers.least(num_pages)
    base = fit_context(base, num_pages, is_asked=config.model.max_model_len is not None)
    pages = PageTensor(base.page, num_pages, device)
    if kernel in TABLE_KERNELS:
        step.space = LoraSpace(GroupDirectory.of(base), pages.flat, TABLE_KERNELS[kernel])
    return _Model(
        module=model,
        base=base,
        kernel=kernel,
        step=step,
        pages=pages,
        dtype=loaded.dtype,
        ops=ops,
        own=own,
        share=loaded.share,
        workers=workers,
        probe=weights.manifest.probe,
    )


def _runner(config: EngineConfig, model: _Model, assistant: Assistant | None) -> ModelRunner:
    """Return the runner, with graphs of steps where there are any; Triton's attention fuses launches too."""
    base, device, scheduler, workers = model.base, model.ops.device, config.scheduler, model.workers
    attention: AttentionKernel = TorchAttentionKernel(model.pages, model.dtype)
    graphs = None
    if choose_attention(config.model.attention_kernel, device) == "triton":
        fuse_launches(model.module)
        attention = triton = TritonAttentionKernel(
            model.ops, model.pages, max_num_seqs=scheduler.max_num_seqs, max_model_len=base.max_model_len
        )
        wanted = config.model.decode_graphs
        if wanted == "on" or (wanted == "auto" and device.type == "cuda"):
            graphs = StepGraphs(
                ops=model.ops,
                model=model.module,
                step=model.step,
                attention=triton,
                vocab_size=base.vocab_size if workers is None else -(-base.vocab_size // workers.size),
                max_num_seqs=scheduler.max_num_seqs,
                max_num_tokens=scheduler.max_num_batched_tokens,
            )
    if model.share is not None and workers is not None:
        divide_modules(model.module, model.share, workers)
    if model.probe.mixers:
        if model.share is not None:
            raise ConfigError(
                f"Got tensor_parallel_size = {config.model.tensor_parallel_size} for a model of type "
                f"{base.architecture!r}: layers with a state of each sequence are not divided"
            )
        attention = adapt_mixers(model.module, model.probe.mixers, model.probe.kv_layers, model.pages, base, attention)
    sampler = make_sampler(config.model, base)
    runner = ModelRunner(model.module, model.step, attention, sampler, model.ops, graphs, assistant)
    runner.share = None if workers is None else SharedLogits(workers, base.vocab_size)
    return runner


def _parts(
    config: EngineConfig,
    clock: Clock,
    model: _Model,
    runner: ModelRunner,
    assistant: Assistant | None,
    readers: Sequence[FileReader],
    weights: BaseWeights,
) -> EngineParts:
    """Return the executor over the runner, and all that its core needs to know of it."""
    base, device, pages, space = model.base, model.ops.device, model.pages, model.step.space
    directory = None if space is None else space.directory
    host = HostTier(is_pinned=device.type == "cuda", directory=directory, settle=partial(Settling.of, model.own))
    most_kept = config.adapters.image_cache_bytes // config.num_engines
    kept = KeptImages.open(config.cache_dir, most_kept, base.page)
    reader = HostReader(_reader_settings(config, model), host, readers, kept)
    executor = TorchExecutor(
        runner=runner,
        link=Link(pages, config.adapters.link_bytes_per_s),
        reader=reader,
        clock=clock,
        # Tables hold places in the pool only: without an assistant, they cannot name an image.
        reads_host=assistant is not None or (device.type == "cpu" and space is None),
        prepare=assistant.prepare if assistant is not None else _preparation(model.kernel, device),
    )
    closing = ExitStack()  # in reverse
    if kept is not None:
        closing.callback(kept.close)
    if assistant is not None:
        closing.callback(assistant.close)
    closing.callback(executor.close)
    base_weights = weights.describe()
    for line in base_weights:
        logger.info("base_weights %s", line)
    logger.info(
        "model_loaded name=%s architecture=%s device=%s dtype=%s num_pages=%d page_bytes=%d max_model_len=%d",
        *(base.name, base.architecture, device, base.page.dtype),
        *(pages.num_pages, base.page.num_bytes, base.max_model_len),
    )
    return EngineParts(
        base=base,
        num_pages=pages.num_pages,
        executor=executor,
        reader=reader,
        close=closing.close,
        machine=describe_machine(device),
        is_accelerated=device.type != "cpu",
        reads_host=executor.reads_host,
        host_bytes=_host_bytes(config.num_engines),
        base_weights=base_weights,
        base_bytes=weights.manifest.num_bytes,
        waits_by_layer=True,
        shared=share_weights(weights),
        prepare=runner.sampler.prepare,
    )


def _reader_settings(config: EngineConfig, model: _Model) -> ReaderSettings:
    """Return the bounds and formats by which reader processes read adapters."""
    adapters, base, num_pages = config.adapters, model.base, model.pages.num_pages
    return ReaderSettings(
        base=base,
        max_bytes=adapters.max_adapter_bytes,
        max_pages=adapters.most_pages(num_pages),
        roots=adapters.real_roots,
        urgent_root=adapters.published_root,
        registries=adapters.registries,
        registry_cache=None if config.cache_dir is None else os.path.join(config.cache_dir, REGISTRY_FOLDER),
        registry_cache_bytes=adapters.registry_cache_bytes,
        is_offline=adapters.is_offline,
        dtype=_adapter_dtype(adapters.adapter_dtype, model.dtype, model.kernel),
        hashes=None if config.cache_dir is None else os.path.join(config.cache_dir, HASHES_FILE),
        limit_s=adapters.read_timeout_s,
        memory_bytes=READER_BYTES + 4 * min(adapters.max_adapter_bytes, num_pages * base.page.num_bytes),
    )


def _kv_dtype(wanted: str, loaded: LoadedModel, weights: BaseWeights) -> torch.dtype:
    """Return the type of KV in pages; refuse one that no kernel here reads.

    ``ConfigError`` if ``wanted`` is another type than the model's, and attention reads no other.
    """
    is_free = loaded.device.type == "cpu" and loaded.dtype is torch.float32
    if wanted == "auto":
        if not (is_free and weights.is_narrow):
            return loaded.dtype
        own = loaded.text_config.dtype
        return own if own in (torch.bfloat16, torch.float16) else torch.float16
    probe = weights.manifest.probe
    if wanted == "int8" and (probe.head_dim % SCALE_BYTES or probe.value_dim % SCALE_BYTES):
        raise ConfigError(
            f"Got kv_cache_dtype = 'int8', but the sizes of keys and values, {probe.head_dim} and {probe.value_dim}, "
            f"are not multiples of {SCALE_BYTES}, the bytes of the scale behind each"
        )
    if not is_free and getattr(torch, wanted) is not loaded.dtype:
        raise ConfigError(f"Got kv_cache_dtype = {wanted!r}, but here KV has the type of the model, {loaded.dtype}")
    return cast(torch.dtype, getattr(torch, wanted))


def _context(config: ModelConfig, loaded: LoadedModel) -> int:
    """Return the longest context to serve, in tokens; refuse more than the model has."""
    limit = context_limit(loaded.text_config)
    wanted = config.max_model_len
    if wanted is not None and wanted > limit:
        raise ConfigError(f"Got max_model_len = {wanted}, but the model's context is {limit} tokens")
    return limit if wanted is None else wanted


def _preparation(kernel: str, device: torch.device) -> Callable[[AdapterMemory], object]:
    """Return the kernel's work for each adapter that is brought to the device; else its first step would do it."""
    compiled = find_compiled() if kernel == "grouped" and device.type == "cpu" else None
    return (lambda adapter: None) if compiled is None else compiled.prepare


def _host_bytes(num_engines: int) -> int:
    """Return the bytes of one engine's host tier by default, beside the model that is loaded."""
    available = available_bytes()
    return DEFAULT_HOST_BYTES if available is None else max(1, int(available * HOST_SHARE / num_engines))


def _adapter_dtype(wanted: str, dtype: torch.dtype, kernel: str) -> str:
    """Return the type to keep adapters in, ``auto`` where each may have its own; refuse a type no kernel here reads."""
    if dtype is torch.float32 and kernel not in TABLE_KERNELS:
        return wanted
    name = dtype_name(dtype)
    if wanted not in ("auto", name):
        raise ConfigError(f"Got adapter_dtype = {wanted!r}, but here adapters have the type of activations, {name}")
    return name


class StageLog:
    """Logs the end of each stage, its duration, and the stage that begins: a start can take minutes."""

    def __init__(self) -> None:
        self._began_at = time.perf_counter()

    def done(self, stage: str, *, then: str) -> None:
        """End a stage, and begin another."""
        now = time.perf_counter()
        logger.info("engine_start stage=%s took_s=%.2f next=%r", stage, now - self._began_at, then)
        self._began_at = now
