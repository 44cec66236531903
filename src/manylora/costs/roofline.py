"""What a step costs from first principles: operations over what the device computes, bytes over what it reads.

One flat batch goes through the layers, prompts and decoding alike, so a step is the sum of its parts::

    layers     max(tokens x operations, weights read once)        a mixture reads the experts it touches
    attention  max(scores x operations, KV read)
    adapters   by kernel family, see `costs/lora.py`
    head       max(sampled x operations, weights read once), and its logits read by the sampler
    network    two all-reduces per layer between the devices of a replica
    launches   per kernel of a layer, what the device idles between two
    host       a constant: what the device waits for between two steps

Left out, because they are small beside what is unknown about a device: tile quantisation of small products, activations
that miss the cache, and the memory bandwidth that a copy beside the step takes (at most link over memory: 3.6 % of an
A40's while a copy runs, 1 to 2 % of an H100's).
"""

from __future__ import annotations

from typing import NamedTuple

from manylora.catalog.dims import ATTENTION_TARGETS, ModelDims
from manylora.catalog.hardware import Hardware, find_hardware
from manylora.catalog.models import find_dims
from manylora.costs.copies import CopyPath, copies_of_kernel, copy_time_s, find_copy_path
from manylora.costs.features import StepFeatures, step_features
from manylora.costs.lora import LORA_KERNELS, DeviceRates, adapter_targets
from manylora.errors import ConfigError
from manylora.plan import AdapterLoad, StepPlan
from manylora.types import Tier

__all__ = ["RooflineCost", "StepParts", "make_cost", "memory_for_pool"]

DENSE_LAUNCHES = 10  # two norms, qkv, rotation, KV write, attention, o, gate/up, activation, down
MIXTURE_LAUNCHES = 14  # and: router, sorting of tokens, their gather, the weighted sum
SAMPLER_PASSES = 4  # over float32 logits: scale, filter, normalise, draw


class StepParts(NamedTuple):
    """A step's time by what takes it, in seconds."""

    layers_s: float
    attention_s: float
    adapters_s: float
    head_s: float
    network_s: float
    launches_s: float
    host_s: float


class RooflineCost:
    """Prices steps and loads of one model on one kind of device.

    Adapters are priced by the rank that the plan names and by ``targets``: every adapter of a run is taken to change
    the same modules, each with its largest rank.

    Args:
        dims: The base model.
        hardware: Each device of the replica.
        lora_kernel: A name of `LORA_KERNELS`.
        tensor_parallel: Devices that share each layer; base, KV and adapters are split evenly.
        targets: Modules that adapters change.
        copies: How adapters are copied.
        host_s: Time the device waits for the host between two steps, in seconds.
    """

    def __init__(
        self,
        dims: ModelDims,
        hardware: Hardware,
        *,
        lora_kernel: str = "ragged",
        tensor_parallel: int = 1,
        targets: tuple[str, ...] = ATTENTION_TARGETS,
        copies: str | CopyPath = "pages",
        host_s: float = 1e-3,
    ) -> None:
        if lora_kernel not in LORA_KERNELS:
            raise ConfigError(f"Got {lora_kernel = }, expected one of {', '.join(LORA_KERNELS)}")
        if tensor_parallel < 1 or dims.num_heads % tensor_parallel:
            raise ConfigError(f"Got {tensor_parallel = }, expected a divisor of {dims.num_heads} heads")
        self.dims = dims
        self.hardware = hardware
        self.tensor_parallel = tensor_parallel
        self.rates = DeviceRates(
            peak_flops_per_s=hardware.flops_per_s * tensor_parallel,
            flops_per_s=hardware.flops_per_s * hardware.flops_share * tensor_parallel,
            bytes_per_s=hardware.memory_bytes_per_s * hardware.memory_share * tensor_parallel,
            launch_s=hardware.launch_s,
        )
        self._copies = find_copy_path(copies)
        self._lora = LORA_KERNELS[lora_kernel]
        self._targets = adapter_targets(dims, targets)
        self._set_constants(host_s)

    def _set_constants(self, host_s: float) -> None:
        dims, hardware, rates = self.dims, self.hardware, self.rates
        self._token_s = 2 * dims.active_weights / rates.flops_per_s
        self._shared_s = dims.shared_weights * dims.layer_element_bytes / rates.bytes_per_s
        experts = dims.num_layers * dims.num_experts * dims.expert_weights
        self._experts_s = experts * dims.layer_element_bytes / rates.bytes_per_s
        self._untouched = 1 - dims.experts_per_token / dims.num_experts if dims.num_experts else 0.0
        self._score_s = 4 * dims.num_layers * dims.q_size / rates.flops_per_s
        # Heads of KV cannot be cut: with more devices than heads, several keep the same one.
        copies_of_kv = max(1.0, self.tensor_parallel / dims.num_kv_heads)
        self._context_s = dims.kv_bytes_per_token * copies_of_kv / rates.bytes_per_s
        self._head_row_s = 2 * dims.head_weights / rates.flops_per_s
        self._head_s = dims.head_weights * dims.element_bytes / rates.bytes_per_s
        self._logits_row_s = SAMPLER_PASSES * 4 * dims.vocab_size / rates.bytes_per_s
        self._launches_s = dims.num_layers * hardware.launch_s
        self._launches_s *= MIXTURE_LAUNCHES if dims.num_experts else DENSE_LAUNCHES
        self._network_s = self._network_token_s = 0.0
        if self.tensor_parallel > 1:
            ring = 2 * (self.tensor_parallel - 1) / self.tensor_parallel
            row_bytes = dims.hidden_size * dims.element_bytes
            self._network_s = 2 * dims.num_layers * hardware.all_reduce_latency_s
            self._network_token_s = 2 * dims.num_layers * ring * row_bytes / hardware.all_reduce_bytes_per_s
        self._host_s = host_s

    def step_time_s(self, plan: StepPlan) -> float:
        """Return how long a step takes, in seconds."""
        return sum(self.price(step_features(plan)))

    def price(self, step: StepFeatures) -> StepParts:
        """Return what takes how long in a step."""
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
            self._network_s + tokens * self._network_token_s,
            self._launches_s,
            self._host_s,
        )

    def load_time_s(self, load: AdapterLoad) -> float:
        """Return how long a load takes on an idle link, in seconds."""
        if load.tier is Tier.HOST:
            return load.version.disk_bytes / self.hardware.disk_bytes_per_s
        return copy_time_s(load.version, self._copies, self.hardware, self.tensor_parallel)


def make_cost(
    model: str | ModelDims,
    hardware: str | Hardware,
    *,
    lora_kernel: str = "ragged",
    tensor_parallel: int = 1,
    targets: tuple[str, ...] = ATTENTION_TARGETS,
    copies: str | CopyPath | None = None,
    host_s: float = 1e-3,
) -> RooflineCost:
    """Return the cost model of a named model on named hardware.

    Args:
        model: A name of `MODELS`, or dimensions.
        hardware: A name of `HARDWARE`, a profile, or the path of a TOML profile.
        lora_kernel: A name of `LORA_KERNELS`.
        tensor_parallel: Devices per replica.
        targets: Modules that adapters change.
        copies: A name of `COPY_PATHS` or a path; by default the one that belongs to the kernel.
        host_s: Time the device waits for the host between two steps, in seconds.

    Raises:
        ConfigError: A name is unknown, or the heads cannot be split over the devices.
    """
    return RooflineCost(
        find_dims(model),
        find_hardware(hardware),
        lora_kernel=lora_kernel,
        tensor_parallel=tensor_parallel,
        targets=targets,
        copies=copies or copies_of_kernel(lora_kernel),
        host_s=host_s,
    )


def memory_for_pool(
    model: str | ModelDims,
    hardware: str | Hardware,
    tensor_parallel: int = 1,
    utilization: float = 0.9,
    *,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 128,
) -> int:
    """Return the bytes left for pages on all devices of a replica, after weights, activations and the driver's share.

    Args:
        model: A name of `MODELS`, or dimensions.
        hardware: A name of `HARDWARE`, a profile, or the path of a TOML profile.
        tensor_parallel: Devices per replica.
        utilization: Part of the memory that the engine may take.
        max_num_batched_tokens: Most tokens in a step.
        max_num_seqs: Most sequences in a step.

    Raises:
        ConfigError: The model does not fit.
    """
    dims, device = find_dims(model), find_hardware(hardware)
    # At the widest point a layer holds its input, the residual, and the MLP's two halves and their product.
    row = 4 * dims.hidden_size + 3 * dims.intermediate_size * max(1, dims.experts_per_token) / tensor_parallel
    activations = max_num_batched_tokens * row * dims.element_bytes + 2 * max_num_seqs * dims.vocab_size * 4
    fixed = dims.weight_bytes / tensor_parallel + activations + device.context_bytes
    left = int(tensor_parallel * (utilization * device.memory_bytes - fixed))
    if left <= 0:
        raise ConfigError(
            f"{dims.name} on {tensor_parallel} x {device.name} needs {fixed / 1e9:.1f} GB on each for weights and "
            f"activations, and {utilization:.0%} of its {device.memory_bytes / 1e9:.0f} GB may be used"
        )
    return left
