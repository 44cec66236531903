"""The cost of adapters in a decode step, by kernel, against the time to read their weights.

One step's worth of LoRA over a whole model, without the model: every group of every layer, one row per sequence,
weights where they lie in service, in pages. All weights of all adapters in the step are read once, so the floor is
their bytes over what the same memory yields to a plain sum. More bytes than any cache holds, or it would mean nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from manylora.core.adapters.layout import AdapterLayout, lay_out
from manylora.core.adapters.shape import BaseShape
from manylora.execution.device import find_device
from manylora.execution.lora.batch import LoraBatch, LoraSegment
from manylora.execution.lora.kernels import LORA_KERNELS, TABLE_KERNELS
from manylora.execution.lora.parts import GroupParts
from manylora.execution.storage.page_tensor import PageTensor
from manylora.execution.storage.resident import make_resident
from manylora.lab.bench.rounds import Ratio, ratio_by_round, time_in_turns
from manylora.lab.measure.tables import FigureTable

__all__ = ["TABLELESS", "KernelCost", "KernelsResult", "kernel_table", "measure_kernels"]

TABLELESS = tuple(sorted(LORA_KERNELS.keys() - TABLE_KERNELS))
"""Kernels that run anywhere; those that go by tables are Triton's, and `bench/gpu.sh` measures them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCost:
    """One kernel over a step."""

    kernel: str
    step_s: float  # median seconds for all groups of all layers
    bytes_per_s: float  # adapter weights read in that time, per second
    floor_share: Ratio  # the floor over its time: 1 is as fast as memory allows


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsResult:
    """A run."""

    num_adapters: int
    rows_each: int
    num_bytes: int  # their weights together
    floor_s: float  # median seconds that a plain sum over as many bytes took
    costs: tuple[KernelCost, ...]  # cost of every kernel


def measure_kernels(
    base: BaseShape,
    *,
    num_adapters: int,
    ranks: Sequence[int],
    rows_each: int = 1,
    rounds: int = 5,
    device: str = "cpu",
) -> KernelsResult:
    """Time every kernel and the floor in turns, after a round that does not count.

    Every linear layer of the base gets the adapters, whose ranks are assigned in turn; with ``rows_each`` of 1 they
    decode.
    """
    place = find_device(device)
    layouts = [
        lay_out(dict.fromkeys(base.all_linear, ranks[index % len(ranks)]), base) for index in range(num_adapters)
    ]
    seconds = _seconds(base, layouts, rows_each, rounds, place)
    element_bytes = base.page.element_bytes
    num_bytes = sum(layout.used_elements for layout in layouts) * element_bytes
    return KernelsResult(
        num_adapters=num_adapters,
        rows_each=rows_each,
        num_bytes=num_bytes,
        floor_s=statistics.median(seconds[""]),
        costs=tuple(
            KernelCost(
                kernel=kernel,
                step_s=statistics.median(seconds[kernel]),
                bytes_per_s=num_bytes / statistics.median(seconds[kernel]),
                floor_share=ratio_by_round(seconds[""], seconds[kernel]),
            )
            for kernel in TABLELESS
        ),
    )


def kernel_table(result: KernelsResult, title: str) -> FigureTable:
    """Return a run as a table, the floor first."""
    rows = [("a plain sum over the bytes", f"{result.floor_s * 1e3:.2f}", f"{_gb(result, result.floor_s):.1f}", "1.00")]
    rows += [
        (cost.kernel, f"{cost.step_s * 1e3:.2f}", f"{cost.bytes_per_s / 1e9:.1f}", f"{cost.floor_share}")
        for cost in sorted(result.costs, key=lambda cost: cost.step_s)
    ]
    columns = ("kernel", "ms a step", "GB/s of weights", "of the floor's speed")
    return FigureTable(title=title, columns=columns, rows=tuple(rows))


def _gb(result: KernelsResult, seconds: float) -> float:
    return result.num_bytes / seconds / 1e9


def _seconds(
    base: BaseShape,
    layouts: Sequence[AdapterLayout],
    rows_each: int,
    rounds: int,
    place: torch.device,
) -> dict[str, list[float]]:
    """Return the seconds of every round, by kernel; the empty name is a plain sum over as many elements."""
    storage = PageTensor(base.page, sum(layout.num_pages for layout in layouts), place)
    torch.manual_seed(0)
    storage.flat.normal_(std=0.01)
    batch = _in_pages(layouts, storage, rows_each)
    work = _work(base, batch, num_rows=len(layouts) * rows_each, storage=storage)
    plain = torch.ones(sum(layout.used_elements for layout in layouts), dtype=storage.dtype, device=place)

    def run(kernel: str) -> None:
        apply = LORA_KERNELS[kernel]
        for x, out, parts in work:
            apply(x, out, parts)

    def waited_for(system: Callable[[], object]) -> Callable[[], None]:
        def run_and_wait() -> None:
            system()
            if place.type == "cuda":
                torch.cuda.synchronize(place)

        return run_and_wait

    systems = {"": waited_for(plain.sum)}
    systems |= {kernel: waited_for(partial(run, kernel)) for kernel in TABLELESS}
    with torch.inference_mode():
        return time_in_turns(systems, rounds)


def _in_pages(layouts: Sequence[AdapterLayout], storage: PageTensor, rows_each: int) -> LoraBatch:
    """Return a batch of adapters that lie in the pages one after another, each with its own rows."""
    segments, first_page = [], 0
    for index, layout in enumerate(layouts):
        pages = range(first_page, first_page + layout.num_pages)
        first_page += layout.num_pages
        rows = index * rows_each, (index + 1) * rows_each
        segments.append(LoraSegment(make_resident(layout, pages, storage), *rows, *rows))
    return LoraBatch(tuple(segments))


def _work(
    base: BaseShape, batch: LoraBatch, *, num_rows: int, storage: PageTensor
) -> list[tuple[torch.Tensor, torch.Tensor, GroupParts]]:
    """Return inputs, outputs and parts of every group, layer by layer."""
    sizes: dict[str, tuple[int, int]] = {}
    for module in base.modules:
        if module.name in base.all_linear:
            width = sizes.get(module.group, (0, 0))[1]
            sizes[module.group] = module.in_features, max(width, module.offset + module.out_features)
    dtype, device = storage.dtype, storage.flat.device
    work = []
    for group, (in_features, out_features) in sizes.items():
        parts = batch.parts(group)
        assert parts is not None
        x = torch.randn(num_rows, in_features, dtype=dtype, device=device)
        out = torch.zeros(num_rows, out_features, dtype=dtype, device=device)
        work.append((x, out, parts))
    return work
