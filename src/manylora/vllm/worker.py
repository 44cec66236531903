"""The slots of a vLLM worker: read, packed and copied by threads, while the engine's thread runs the model.

vLLM does it between two steps. Here one thread reads and one copies, each first in, first out, and the engine's thread
only points a number to a slot once the copy is complete. No step reads a slot while it is written: the gate gives a
load a slot that no request in flight uses. On a GPU the copy is ordered behind the steps that were launched before, on
a stream of its own.

vLLM's warm-up, with synthetic adapters, is vLLM's own. After it the slots are the gate's alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import torch
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from manylora.core.errors import AdapterError, ConfigError
from manylora.core.types import Tier
from manylora.vllm.messages import Order, Report
from manylora.vllm.plugin import check_failures, chosen_options
from manylora.vllm.threads import LoadThreads
from manylora.vllm.versions import AdapterRef, file_key

__all__ = ["SlotManager", "current", "make_manager"]

SWITCH_S = 0.0002
"""Longest time for which a thread that reads an adapter keeps the interpreter from the engine's."""
current: list[SlotManager] = []
"""The manager of this process's worker."""


def make_manager(vllm_config: Any, *args: Any, **kwargs: Any) -> LRUCacheWorkerLoRAManager:
    """Make the manager of a worker's adapters: vLLM's own, where the plug-in is installed and not asked for."""
    if chosen_options(vllm_config.kv_transfer_config) is None:
        return LRUCacheWorkerLoRAManager(vllm_config, *args, **kwargs)
    check_failures(vllm_config.kv_transfer_config)  # with several connectors, theirs is not asked
    current[:] = [SlotManager(vllm_config, *args, **kwargs)]
    return current[0]


class SlotManager(LRUCacheWorkerLoRAManager):  # type: ignore[misc]
    """Carries out the gate's orders; in place of vLLM's cache of adapters by last use.

    Attributes:
        is_blocking: Whether steps wait for loads, as in vLLM; for comparison.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_blocking = False
        self._packed: dict[int, Any] = {}  # vLLM's LoRAModel by number, as the next
        self._reads: dict[int, Future[None]] = {}
        self.threads = LoadThreads()
        self._num_blocking = 0
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))

    def begin(self, orders: Iterable[Order]) -> None:
        """Start the work of orders, in their order."""
        for order in orders:
            number = order.adapter.number
            self.threads.num_under_way += order.work == "load"
            if order.work == "drop" and order.tier is Tier.HOST:
                self._packed.pop(number, None)
            elif order.work == "drop":
                self._point(number, None)
            elif order.tier is Tier.HOST:
                self._reads[number] = self._submit(order, self._read)
            else:
                self._begin_copy(order)

    def _begin_copy(self, order: Order) -> None:
        ready = torch.cuda.current_stream(self.device).record_event() if self._stream is not None else None
        read = self._reads.get(order.adapter.number)
        if read is None or read.done():
            self._submit(order, self._copy, ready)
        else:
            read.add_done_callback(lambda _: self._submit(order, self._copy, ready))

    def _submit(self, order: Order, work: Callable[..., None], *args: Any) -> Future[None]:
        future = self.threads.submit(order, work, *args)
        if self.is_blocking:
            future.result()
            self._num_blocking += 1
        return future

    def report(self, *, waits: bool = False) -> Report:
        """Return what is done since the last call; a copy that is complete may be read from now on."""
        report, self._num_blocking = Report(num_blocking=self._num_blocking), 0
        for order, error in self.threads.done(waits=waits):
            if order.tier is Tier.HOST:
                del self._reads[order.adapter.number]
            elif error is None:
                self._point(order.adapter.number, order.slot)
            report.done[order.number] = (error,)
        return report

    def _point(self, number: int, slot: int | None) -> None:
        """Let a number mean a slot, or none."""
        manager = self._adapter_manager
        if number in manager.lora_index_to_id:
            manager.lora_index_to_id[manager.lora_index_to_id.index(number)] = None
        if slot is not None:
            manager.lora_index_to_id[slot] = number
        manager._last_mapping = None  # it was computed from the slots

    # -- work of the threads -----------------------------------------------------------------------------------------

    def _read(self, order: Order) -> None:
        """Read an adapter, check it, and pack it as vLLM does."""
        ref, manager = order.adapter, self._adapter_manager
        _check_unchanged(ref)
        lora = self._load_adapter(LoRARequest(ref.name, ref.number, ref.path))
        for weights in lora.loras.values():
            # Views of the mapped file: its pages would be read by the copy, or change with it.
            weights.lora_a, weights.lora_b = _own(weights.lora_a), _own(weights.lora_b)
        _check_unchanged(ref)
        manager._create_merged_loras_inplace(lora)
        if not any(manager._get_lora_layer_weights(lora, name) for name in manager.modules):
            raise AdapterError(ref.name, "none of its weights is of a module of this model")
        self._packed[ref.number] = lora

    def _copy(self, order: Order, ready: Any) -> None:
        """Copy an adapter from host memory to its slot, module by module."""
        manager, stream = self._adapter_manager, self._stream
        if (lora := self._packed.get(order.adapter.number)) is None:
            raise AdapterError(order.adapter.name, "its read failed")
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            if stream is not None:
                stream.wait_event(ready)
            for name, module in manager.modules.items():
                if (weights := manager._get_lora_layer_weights(lora, name)) is None:
                    module.reset_lora(order.slot)
                else:
                    module.set_lora(order.slot, weights.lora_a, weights.lora_b)
        if stream is not None:
            stream.synchronize()

    # -- vLLM's interface --------------------------------------------------------------------------------------------

    def _apply_adapters(self, lora_requests: set[LoRARequest]) -> None:
        """Make sure that the adapters of a step are in slots."""
        slots, synthetic = self._adapter_manager.lora_index_to_id, set(self._adapter_manager.list_adapters())
        missing = {request.lora_int_id for request in lora_requests if request} - set(slots)
        if missing - synthetic:
            raise RuntimeError(f"a step needs the adapters {sorted(missing)}, which are in no slot")
        if missing:
            super()._apply_adapters(lora_requests)

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        """Check an adapter that vLLM's API registers; it is read when a request needs it, beside the steps."""
        path = get_adapter_absolute_path(lora_request.lora_path)
        try:
            PEFTHelper.from_local_dir(path, self.max_position_embeddings).validate_legal(self.lora_config)
            file_key(lora_request.lora_name, path)
        except (FileNotFoundError, AdapterError) as error:
            raise LoRAAdapterNotFoundError(lora_request.lora_name, lora_request.lora_path) from error
        return True

    def remove_adapter(self, adapter_id: int) -> bool:
        """Leave an adapter that vLLM's API forgets to the gate: its memory goes to others when they need it."""
        return True

    def remove_all_adapters(self) -> None:
        """End vLLM's warm-up; later, when base weights are replaced, refuse: the gate knows what is in slots."""
        if self._packed or self._reads:
            raise ConfigError("manylora's plug-in cannot serve on after base weights are replaced: start again")
        super().remove_all_adapters()

    def pin_adapter(self, adapter_id: int) -> bool:
        """Refuse by name: adapters are pinned by the gate, which knows them by name."""
        raise ConfigError("with manylora's plug-in, name pinned adapters in kv_connector_extra_config: 'pin'")

    def list_adapters(self) -> set[int]:
        """Return the numbers in host memory."""
        return {*self._packed, *super().list_adapters()}


def _check_unchanged(ref: AdapterRef) -> None:
    if file_key(ref.name, ref.path) != ref.file_key:
        raise AdapterError(ref.name, "its files changed while its request waited")


def _own(weights: Any) -> Any:
    return weights.clone() if isinstance(weights, torch.Tensor) and not weights.is_pinned() else weights
