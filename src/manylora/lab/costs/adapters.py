"""Prices of adapters: the time that they add to a step, by kernel family, and the time of their copies to the device.

A step pays for its reads of weights, operations and launches::

    family    weights read                     operations             launches per step
    --------  -------------------------------  ---------------------  -----------------------------------
    naive     once per adapter                 tokens x own rank      2 per adapter, module and layer
    grouped   3 x per adapter (gather, write,  tokens x own rank      2 per distinct rank, module, layer
              read as one operand per rank)
    padded    largest rank, once per sequence  tokens x largest rank  2 per module and layer
    ragged    once per adapter                 tokens x own rank      2 per group of modules and layer

Reads and writes of inputs and outputs are added. ``padded`` is Punica's BGMV. ``ragged`` is manylora's own (rows
sorted by adapter, q/k/v and gate/up stacked). S-LoRA's MBGMV is between them: unpadded, but each sequence reads its own
adapter. Padded work grows with the batch times the largest rank and unpadded work with the sum of the ranks, as
CaraServe measured (section "Challenge 2").

The least time of a copy is bytes over bandwidth; each separate copy adds to it, and the executor adds waits for the
link. manylora copies whole pages of an adapter's image from page-locked memory. S-LoRA copies every matrix of every
layer by itself; on several devices it first cuts each matrix and waits for all devices, matrix by matrix. CaraServe's
on-demand baseline also copies every matrix by itself, from pageable memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manylora.core.costs.features import StepFeatures
from manylora.core.errors import ConfigError
from manylora.core.options import CheckedOptions, option
from manylora.core.types import AdapterVersion
from manylora.lab.catalog.dims import ModelDims
from manylora.lab.catalog.hardware import Hardware

__all__ = [
    "COPY_PATHS",
    "LORA_KERNELS",
    "S_LORA_FLOPS_SHARE",
    "TABLE_KERNELS",
    "AdapterTargets",
    "CopyPath",
    "DeviceRates",
    "LoraKernel",
    "adapter_targets",
    "copy_time_s",
    "find_copy_path",
]

S_LORA_FLOPS_SHARE = 0.0113
"""Part of the *peak* that S-LoRA's prompt kernel reaches. Set by Chameleon's figure 2 alone: at rank 128 an adapter's
computation takes 42.5 % of the time to first token and the base 40 %: `tests/lab/costs/test_costs_published.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """Rates of all devices of a replica together."""

    peak_flops_per_s: float  # peak rate by the data sheet
    flops_per_s: float  # rate that large products reach
    bytes_per_s: float  # rate that streaming reads reach
    launch_s: float  # seconds per kernel; devices launch in parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTargets:
    """The modules that adapters change, summed over layers; of experts, those that one token is routed to."""

    weights: int  # weights per unit of rank
    weight_bytes: int  # bytes per unit of rank
    row_bytes: int  # bytes of activations read and written per adapted token, independent of the rank
    num_modules: int
    num_groups: int  # groups of modules with one input
    expert_bytes: int = 0  # bytes of experts among them
    experts_share: float = 1.0  # part of all experts that a token is routed to

    def read_bytes(self, step: StepFeatures) -> float:
        """Return the bytes per unit of rank that are read of an adapter, with the mean number of tokens of the step's.

        ``T`` tokens touch ``E (1 - (1 - k / E)^T)`` experts, as of the base.
        """
        if not self.expert_bytes:
            return self.weight_bytes
        untouched: float = (1 - self.experts_share) ** (step.num_adapted_tokens / step.num_adapters)
        return self.weight_bytes + self.expert_bytes * ((1 - untouched) / self.experts_share - 1)


def adapter_targets(dims: ModelDims, targets: tuple[str, ...]) -> AdapterTargets:
    """Return the sums for adapters on these modules (by last name) of every layer.

    ``ConfigError`` if the model has no such module.
    """
    chosen = dims.experts_per_token
    weights = dims.adapter_elements(targets, num_experts=chosen)
    groups = [group for group in dims.groups if set(group) & set(targets)]

    def times(target: str) -> int:
        return chosen if dims.is_of_experts(target) else 1

    inputs = sum(dims.module_shape(group[0])[0] * times(group[0]) for group in groups)
    outputs = sum(dims.module_shape(target)[1] * times(target) for target in targets)
    return AdapterTargets(
        weights=weights,
        weight_bytes=weights * dims.element_bytes,
        row_bytes=dims.num_layers * (inputs + 2 * outputs) * dims.element_bytes,  # outputs are added into
        num_modules=dims.num_layers * len(targets),
        num_groups=dims.num_layers * len(groups),
        expert_bytes=(weights - dims.adapter_elements(targets, num_experts=0)) * dims.element_bytes,
        experts_share=chosen / dims.num_experts if dims.num_experts else 1.0,
    )


LoraKernel = Callable[[StepFeatures, AdapterTargets, DeviceRates], float]
"""Returns the seconds that adapters add to a step with at least one adapted sequence; see the module's table."""


def _none(step: StepFeatures, targets: AdapterTargets, rates: DeviceRates) -> float:
    return 0.0


def _naive(step: StepFeatures, targets: AdapterTargets, rates: DeviceRates) -> float:
    computing = 2 * step.row_rank * targets.weights / rates.flops_per_s
    moving = step.sum_rank * targets.read_bytes(step) + step.num_adapted_tokens * targets.row_bytes
    launches = 2 * step.num_adapters * targets.num_modules
    # Calls this small end before the next is launched, so launches and work do not overlap.
    return max(computing, moving / rates.bytes_per_s) + launches * rates.launch_s


def _grouped(step: StepFeatures, targets: AdapterTargets, rates: DeviceRates) -> float:
    computing = 2 * step.row_rank * targets.weights / rates.flops_per_s
    moving = 3 * step.sum_rank * targets.read_bytes(step) + step.num_adapted_tokens * targets.row_bytes
    launches = 2 * step.num_ranks * targets.num_modules
    return max(computing, moving / rates.bytes_per_s) + launches * rates.launch_s


def _padded(step: StepFeatures, targets: AdapterTargets, rates: DeviceRates) -> float:
    computing = 2 * step.num_adapted_tokens * step.max_rank * targets.weights / rates.flops_per_s
    read = step.num_adapted * step.max_rank * targets.weight_bytes
    moving = read + step.num_adapted_tokens * targets.row_bytes
    return max(computing, moving / rates.bytes_per_s) + 2 * targets.num_modules * rates.launch_s


def _ragged(step: StepFeatures, targets: AdapterTargets, rates: DeviceRates) -> float:
    computing = 2 * step.row_rank * targets.weights / rates.flops_per_s
    moving = step.sum_rank * targets.read_bytes(step) + step.num_adapted_tokens * targets.row_bytes
    return max(computing, moving / rates.bytes_per_s) + 2 * targets.num_groups * rates.launch_s


def _s_lora(step: StepFeatures, targets: AdapterTargets, rates: DeviceRates) -> float:
    computing = 2 * step.row_rank * targets.weights / (rates.peak_flops_per_s * S_LORA_FLOPS_SHARE)
    moving = step.sequence_rank * targets.weight_bytes + step.num_adapted_tokens * targets.row_bytes
    return max(computing, moving / rates.bytes_per_s) + 2 * targets.num_modules * rates.launch_s


LORA_KERNELS: dict[str, LoraKernel] = {
    "none": _none,
    "naive": _naive,
    "grouped": _grouped,
    "padded": _padded,
    "ragged": _ragged,
    "s-lora-mbgmm": _s_lora,
}
"""Families by name; ``s-lora-mbgmm`` is S-LoRA's, with the rate in Chameleon's figure 2."""


TABLE_KERNELS = ("padded", "ragged")  # families that find weights by table


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPath(CheckedOptions):
    """A way of copying adapters from host to device."""

    name: str
    link_share: float = option(above=0, at_most=1, help="Part of the link's bandwidth that the copies reach.")
    is_by_page: bool  # whether an adapter is copied by pages; otherwise as two matrices per module
    copy_s: float = option(at_least=0, unit="s", help="Fixed time of each copy.")
    # Rate at which matrices are cut and copied to several devices in turn; ``None`` if they are cut beforehand and the
    # devices copy their parts at the same time.
    sharded_bytes_per_s: float | None = None


COPY_PATHS: dict[str, CopyPath] = {
    path.name: path
    for path in (
        # Asynchronous copies of 2 MiB from page-locked memory: the driver queues them faster than the link drains
        # them, so the fixed time is a few microseconds of set-up on the copy engine.
        CopyPath(name="pages", link_share=1.0, is_by_page=True, copy_s=2e-6),
        # 10 us is an asynchronous copy without overlap. The share is set by Chameleon's section 3.2 (loading takes
        # 17.5 % of the time to first token at rank 128), the sharded rate by its figure 5 (68 % at rank 32 on four).
        CopyPath(name="s-lora", link_share=0.35, is_by_page=False, copy_s=10e-6, sharded_bytes_per_s=1.11e9),
        # Assumed: the driver stages pageable memory at a quarter of the link, and each matrix costs a call and an
        # append on the device. It gives 22 ms for rank 64 on q, k and v of Llama-2-7B; CaraServe has some tens.
        CopyPath(name="pageable", link_share=0.25, is_by_page=False, copy_s=30e-6),
    )
}
"""Paths by name."""


def find_copy_path(path: str | CopyPath | None, lora_kernel: str) -> CopyPath:
    """Return a path, by name or by default the kernel family's own, or raise ``ConfigError``."""
    if isinstance(path, CopyPath):
        return path
    name = path or ("s-lora" if lora_kernel.startswith("s-lora") else "pages")
    if name not in COPY_PATHS:
        raise ConfigError(f"Got copies = {name!r}, expected one of {', '.join(COPY_PATHS)}")
    return COPY_PATHS[name]


def copy_time_s(version: AdapterVersion, path: CopyPath, hardware: Hardware, num_devices: int = 1) -> float:
    """Return the duration of an adapter's copy from host to ``num_devices`` devices over idle links, in seconds."""
    if path.is_by_page:
        num_bytes, num_copies = version.host_bytes, version.num_pages
    else:
        num_bytes, num_copies = version.weight_bytes, 2 * version.num_modules
    if num_devices > 1 and path.sharded_bytes_per_s is not None:
        return num_bytes / path.sharded_bytes_per_s + num_copies * num_devices * path.copy_s
    link = hardware.link_bytes_per_s * path.link_share
    return num_bytes / num_devices / link + num_copies * path.copy_s
