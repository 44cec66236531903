"""Duration of a step from first principles: operations over compute rate, bytes over memory rate.

Prompts and decodes go through the layers in one flat batch, so a step is the sum of its parts::

    layers     max(tokens x operations, weights read once)        a mixture reads the experts it touches
    attention  max(scores x operations, KV read)
    adapters   by kernel family, see `lab/costs/adapters.py`
    head       max(sampled x operations, weights read once), and reads of the logits by the sampler
    network    collectives between the devices of a replica, see `lab/costs/collectives.py`
    launches   idle time of the device between the kernels of a layer
    host       a constant: wait of the device for the host between two steps

Left out, because they are smaller than the uncertainty of a device's rates: tile quantisation of small products,
activations that miss the cache, and the memory bandwidth of a concurrent copy (at most link over memory: 3.6 % of an
A40's while a copy runs, 1 to 2 % of an H100's).
"""

from __future__ import annotations

from typing import NamedTuple

from manylora.core.costs.features import StepFeatures, step_features
from manylora.core.errors import ConfigError, ModelTooLarge
from manylora.core.plan import AdapterLoad, StepPlan
from manylora.core.types import Tier
from manylora.lab.catalog.dims import ModelDims
from manylora.lab.catalog.hardware import Hardware, find_hardware
from manylora.lab.catalog.models import find_dims
from manylora.lab.costs.adapters import (
    LORA_KERNELS,
    TABLE_KERNELS,
    CopyPath,
    DeviceRates,
    adapter_targets,
    copy_time_s,
    find_copy_path,
)
from manylora.lab.costs.collectives import CollectiveCost
from manylora.lab.costs.model import CostModel

__all__ = ["PARTS", "PriceMeter", "RooflineCost", "StepParts", "memory_for_pool"]

DENSE_LAUNCHES = 10  # two norms, qkv, rotation, KV write, attention, o, gate/up, activation, down
MIXTURE_LAUNCHES = 14  # and: router, sorting of tokens, their gather, the weighted sum
SAMPLER_PASSES = 4  # over float32 logits: scale, filter, normalise, draw


PARTS = ("compute", "bandwidth", "adapters", "network", "host")
"""Parts of the time of steps: arithmetic of the base, reading its weights and the KV, adapters' arithmetic, all-reduces
between devices, and the host (launches and the gap between two steps)."""


class StepParts(NamedTuple):
    """The parts of a step's duration, in seconds."""

    layers_s: float
    attention_s: float
    adapters_s: float
    head_s: float
    network_s: float
    launches_s: float
    host_s: float


class RooflineCost:
    """Prices steps and loads of one model on one kind of device.

    Adapters are priced by the rank in the plan and by ``targets``: all adapters of a run are assumed to change the same
    modules, each with its largest rank.

    Args:
        model: A name of `MODELS`, or dimensions.
        hardware: Each device of the replica: a name of `HARDWARE`, a profile, or the path of a TOML profile.
        lora_kernel: A name of `LORA_KERNELS`.
        tensor_parallel_size: Devices that share each layer: base, KV and adapters are divided, routers are not.
        targets: Modules that adapters change; by default the linears of attention.
        copies: Copy path of adapters: a name of `COPY_PATHS` or a path; by default the kernel's own.
        host_s: Wait of the device for the host between two steps, in seconds.

    ``ConfigError`` if a name is unknown, or the devices cannot divide the model.
    """

    def __init__(
        self,
        model: str | ModelDims,
        hardware: str | Hardware,
        *,
        lora_kernel: str = "ragged",
        tensor_parallel_size: int = 1,
        targets: tuple[str, ...] | None = None,
        copies: str | CopyPath | None = None,
        host_s: float = 1e-3,
    ) -> None:
        dims = find_dims(model)
        if lora_kernel not in LORA_KERNELS:
            raise ConfigError(f"Got {lora_kernel = }, expected one of {', '.join(LORA_KERNELS)}")
        dims.check_divides(size := tensor_parallel_size)
        self.dims = dims
        self.hardware = hardware = find_hardware(hardware)
        self.tensor_parallel_size = size
        self.rates = rates = DeviceRates(
            peak_flops_per_s=hardware.flops_per_s * size,
            flops_per_s=hardware.flops_per_s * hardware.flops_share * size,
            bytes_per_s=hardware.memory_bytes_per_s * hardware.memory_share * size,
            launch_s=hardware.launch_s,
        )
        self._copies = find_copy_path(copies, lora_kernel)
        self._lora = LORA_KERNELS[lora_kernel]
        self.targets = tuple(dims.attention_modules) if targets is None else targets
        self._targets = adapter_targets(dims, self.targets)
        repeated = dims.repeated_weights(size)
        self._token_s = 2 * (dims.active_weights + repeated) / rates.flops_per_s
        self._shared_s = (dims.shared_weights + repeated) * dims.layer_element_bytes / rates.bytes_per_s
        self._experts_s = dims.routed_weights * dims.layer_element_bytes / rates.bytes_per_s
        self._untouched = 1 - dims.experts_per_token / dims.num_experts if dims.num_experts else 0.0
        self._score_s = dims.score_operations / rates.flops_per_s
        # Heads of KV are not split: with more devices than heads, several devices keep the same head.
        self._context_s = dims.kv_bytes_per_token * dims.kv_copies(size) / rates.bytes_per_s
        self._head_row_s = 2 * dims.head_weights / rates.flops_per_s
        self._head_s = dims.head_weights * dims.element_bytes / rates.bytes_per_s
        # One of the devices samples.
        self._logits_row_s = SAMPLER_PASSES * 4 * dims.vocab_size * size / rates.bytes_per_s
        self._launches_s = dims.num_layers * hardware.launch_s
        self._launches_s *= MIXTURE_LAUNCHES if dims.num_experts else DENSE_LAUNCHES
        self._collectives = None
        if size > 1:
            if undivided := [target for target in self.targets if dims.is_of_experts(target)]:
                raise ConfigError(
                    f"Got tensor_parallel_size = {size}, targets {undivided}: LoRA of experts is not divided"
                )
            changed = () if lora_kernel == "none" else self.targets
            is_by_table = lora_kernel in TABLE_KERNELS
            self._collectives = CollectiveCost(dims, hardware, size, changed, is_by_table=is_by_table)
        self._host_s = host_s

    @property
    def weight_bytes(self) -> int:
        """Bytes of the base in the memory of all devices of a replica."""
        return self.dims.weight_bytes_on(self.tensor_parallel_size)

    def step_time_s(self, plan: StepPlan) -> float:
        """Return the duration of a step, in seconds."""
        return sum(self.price(step_features(plan)))

    def price(self, step: StepFeatures) -> StepParts:
        """Return the parts of a step's duration."""
        tokens, sampled = step.num_tokens, step.num_sampled
        scores = step.context_tokens + step.prompt_pairs
        context = step.context_tokens + step.prompt_context_tokens
        read = self._shared_s
        if self._experts_s:
            read += self._experts_s * (1 - self._untouched**tokens)
        return StepParts(
            max(tokens * self._token_s, read),
            max(scores * self._score_s, context * self._context_s),
            self._lora(step, self._targets, self.rates) if step.num_adapted else 0.0,
            max(sampled * self._head_row_s, self._head_s) + sampled * self._logits_row_s if sampled else 0.0,
            self._collectives.step_time_s(step) if self._collectives is not None else 0.0,
            self._launches_s,
            self._host_s,
        )

    def load_time_s(self, load: AdapterLoad) -> float:
        """Return the duration of a load on an idle link, in seconds."""
        if load.tier is Tier.HOST:
            return load.version.disk_bytes / self.hardware.disk_bytes_per_s
        return copy_time_s(load.version, self._copies, self.hardware, self.tensor_parallel_size)


class PriceMeter:
    """Returns the prices of another cost model, and adds up the time of all steps by part.

    Layers and attention take the longer of computing and reading, so their time is attributed to one of the two. A
    fitted model knows only the sum, and its parts stay 0.
    """

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.parts_s = dict.fromkeys(PARTS, 0.0)

    def step_time_s(self, plan: StepPlan) -> float:
        """Return the duration of a step, in seconds."""
        if isinstance(self.cost, RooflineCost):
            return self._split(self.cost, step_features(plan))
        return self.cost.step_time_s(plan)

    def load_time_s(self, load: AdapterLoad) -> float:
        """Return the duration of a load on an idle link, in seconds."""
        return self.cost.load_time_s(load)

    def _split(self, cost: RooflineCost, step: StepFeatures) -> float:
        priced = cost.price(step)
        dims, rates = cost.dims, cost.rates
        scores = step.context_tokens + step.prompt_pairs
        computing_s = (
            (priced.layers_s, 2 * dims.active_weights * step.num_tokens / rates.flops_per_s),
            (priced.attention_s, dims.score_operations * scores / rates.flops_per_s),
            (priced.head_s, 2 * dims.head_weights * step.num_sampled / rates.flops_per_s),
        )
        parts = self.parts_s
        for seconds, least_s in computing_s:
            parts["compute" if least_s > 0.9 * seconds else "bandwidth"] += seconds
        parts["adapters"] += priced.adapters_s
        parts["network"] += priced.network_s
        parts["host"] += priced.launches_s + priced.host_s
        return sum(priced)


def memory_for_pool(
    model: str | ModelDims,
    hardware: str | Hardware,
    tensor_parallel_size: int = 1,
    utilization: float = 0.9,
    *,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 128,
) -> int:
    """Return the bytes left for pages on all devices of a replica, after weights, activations and the driver's share.

    Model and hardware are given as for ``RooflineCost``; ``utilization`` is the part of the memory that the engine may
    use. ``ModelTooLarge`` if the model does not fit.
    """
    dims, device, size = find_dims(model), find_hardware(hardware), tensor_parallel_size
    # At its peak a layer holds its input, the residual, and the MLP's two halves and their product.
    row = 4 * dims.hidden_size + 3 * dims.intermediate_size * max(1, dims.experts_per_token) / size
    activations = max_num_batched_tokens * row * dims.element_bytes + 2 * max_num_seqs * dims.vocab_size * 4
    fixed = dims.weight_bytes_on(size) / size + activations + device.context_bytes
    left = int(size * (utilization * device.memory_bytes - fixed))
    if left <= 0:
        raise ModelTooLarge(
            f"{dims.name} on {size} x {device.name} needs {fixed / 1e9:.1f} GB on each for weights and "
            f"activations, and {utilization:.0%} of its {device.memory_bytes / 1e9:.0f} GB may be used"
        )
    return left
