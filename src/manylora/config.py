"""Configuration: frozen dataclasses, composed, checked on construction.

Only what a person chooses is here. Sizes that follow from it (pages, bytes per page, largest context)
are computed where they are needed, and the environment is read in ``cli`` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from manylora.errors import ConfigError

__all__ = [
    "GIB",
    "MIB",
    "AdapterConfig",
    "EngineConfig",
    "MemoryConfig",
    "ModelConfig",
    "SchedulerConfig",
    "ServerConfig",
]

MIB = 1024 * 1024
GIB = 1024 * MIB


def _check(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise ConfigError(f"Got {name} = {value!r}, expected {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which base model, and how it is held.

    Args:
        model: A Hugging Face checkpoint directory (or hub name where a network is at hand), or ``demo``.
        tokenizer: Directory or name of the tokenizer; the model's own when ``None``.
        served_model_name: Name in the API; the model's own when ``None``.
        dtype: ``auto`` is float32 on CPU, the checkpoint's 16-bit type on GPU.
        device: ``auto``, ``cpu`` or ``cuda``.
        max_model_len: Longest prompt plus answer in tokens; the model's own limit when ``None``.
        lora_kernel: LoRA implementation: ``auto`` is ``ragged`` on a GPU and ``grouped`` elsewhere; ``naive``,
            ``padded`` and ``reference`` are for comparison.
        attention_kernel: ``auto`` is ``triton`` on a GPU and ``torch`` elsewhere.
        decode_graphs: Replay captured graphs for steps that only decode: ``auto`` is on a GPU; they need ``triton``.
        revision: Hub revision.
        trust_remote_code: Never by default: a checkpoint must not run code.
    """

    model: str
    tokenizer: str | None = None
    served_model_name: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    lora_kernel: str = "auto"
    attention_kernel: str = "auto"
    decode_graphs: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        _check(bool(self.model), "model", self.model, "a checkpoint directory, a hub name or 'demo'")
        _check(
            self.dtype in ("auto", "float32", "bfloat16", "float16"),
            "dtype",
            self.dtype,
            "one of auto, float32, bfloat16, float16",
        )
        _check(self.max_model_len is None or self.max_model_len >= 1, "max_model_len", self.max_model_len, "at least 1")
        kernels = ("auto", "grouped", "naive", "padded", "ragged", "reference")
        _check(self.lora_kernel in kernels, "lora_kernel", self.lora_kernel, f"one of {', '.join(kernels)}")
        attention = ("auto", "torch", "triton")
        _check(self.attention_kernel in attention, "attention_kernel", self.attention_kernel, "auto, torch or triton")
        _check(self.decode_graphs in ("auto", "off", "on"), "decode_graphs", self.decode_graphs, "auto, off or on")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """The one pool of pages that KV, prefix blocks and adapters share.

    Args:
        block_size: Tokens of KV in a page.
        num_pages: Size of the pool in pages; overrides the two below.
        memory_bytes: Size of the pool in bytes (CPU default: 1 GiB).
        gpu_memory_utilization: Share of the device the process may take, when ``memory_bytes`` is not given on a GPU.
        prefix_caching: Keep the KV of finished prompts in idle pages.
    """

    block_size: int = 16
    num_pages: int | None = None
    memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        _check(1 <= self.block_size <= 1024, "block_size", self.block_size, "1 to 1024 tokens")
        _check(self.num_pages is None or self.num_pages >= 2, "num_pages", self.num_pages, "at least 2")
        _check(self.memory_bytes is None or self.memory_bytes > 0, "memory_bytes", self.memory_bytes, "above 0")
        _check(
            0.0 < self.gpu_memory_utilization <= 1.0,
            "gpu_memory_utilization",
            self.gpu_memory_utilization,
            "a share in (0, 1]",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What a step may hold and who goes first.

    Args:
        policy: Order of waiting requests, by name in ``scheduling.POLICIES``; or somebody's own (``plugins.py``).
        max_num_seqs: Most sequences running at once.
        max_num_batched_tokens: Most tokens in one step: what chunks long prompts.
        step_target_s: Seconds a step should take at most: prompts are cut to it, and shorter where pages run short.
            ``None`` cuts them by tokens alone; with a target, tokens bound a step as well.
        max_loras: Most distinct adapters in one step; ``None`` is no limit (there is no slot to run out of).
        max_waiting: Most requests waiting; more are refused with 429.
        chunked_prefill: Cut prompts to the step; otherwise each runs whole, and a step is as long as it makes it.
        mixed_steps: Let prompts share steps with decoding; otherwise decoding waits while prompts run.
        overlap_loads: Copy adapters beside running steps; otherwise a step waits for those its requests were offered
            with (prefetches stay beside).
        reserve_output: Claim pages for the longest answer on admission: nobody is pre-empted, and fewer run.
        steps_between_admissions: Steps that run before anybody else is let in, while anybody runs.
        plan_ahead: Plan the next step while one is in flight, so that the device need not wait for it; ``None`` does so
            where steps run on a GPU.
        predictor: What guesses answer lengths, by name in ``scheduling.PREDICTORS``; or somebody's own.
        predictor_accuracy: 1 less the mean relative error of the ``noisy`` one; for experiments.
        ageing_tokens_per_s: Under ``sjf``, predicted tokens that a second of waiting makes up for.
        request_size: Under ``chameleon``, what a request's size is: ``degree-2`` (prompt and answer, times the
            adapter), ``degree-1`` (their sum) or ``output`` (the answer alone).
        queue_criterion: Under ``chameleon``, how the number of queues is chosen: ``elbow`` stops where another
            queue explains little more, ``wcss`` takes the least sum of squares (in practice always the most).
        refresh_s: Under ``chameleon``, seconds between two settings of queues and quotas.
        slo_s: Under ``chameleon``, seconds a request may take in all; five times the mean seen when ``None``.
    """

    policy: str = "fifo"
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    step_target_s: float | None = None
    max_loras: int | None = None
    max_waiting: int = 2048
    chunked_prefill: bool = True
    mixed_steps: bool = True
    overlap_loads: bool = True
    reserve_output: bool = False
    steps_between_admissions: int = 0
    plan_ahead: bool | None = None
    predictor: str = "quantile"
    predictor_accuracy: float = 0.8
    ageing_tokens_per_s: float = 50.0
    request_size: str = "degree-2"
    queue_criterion: str = "elbow"
    refresh_s: float = 300.0
    slo_s: float | None = None

    def __post_init__(self) -> None:
        _check(
            0.5 < self.predictor_accuracy <= 1.0, "predictor_accuracy", self.predictor_accuracy, "a number in (0.5, 1]"
        )
        _check(self.ageing_tokens_per_s > 0, "ageing_tokens_per_s", self.ageing_tokens_per_s, "above 0: nobody starves")
        sizes = ("degree-2", "degree-1", "output")
        _check(self.request_size in sizes, "request_size", self.request_size, f"one of {', '.join(sizes)}")
        criteria = ("elbow", "wcss")
        _check(self.queue_criterion in criteria, "queue_criterion", self.queue_criterion, "elbow or wcss")
        _check(self.refresh_s > 0, "refresh_s", self.refresh_s, "above 0")
        _check(self.slo_s is None or self.slo_s > 0, "slo_s", self.slo_s, "above 0")
        _check(self.max_num_seqs >= 1, "max_num_seqs", self.max_num_seqs, "at least 1")
        _check(self.max_num_batched_tokens >= 1, "max_num_batched_tokens", self.max_num_batched_tokens, "at least 1")
        _check(self.step_target_s is None or self.step_target_s > 0, "step_target_s", self.step_target_s, "above 0")
        _check(self.max_loras is None or self.max_loras >= 1, "max_loras", self.max_loras, "at least 1")
        _check(self.max_waiting >= 1, "max_waiting", self.max_waiting, "at least 1")
        gap = self.steps_between_admissions
        _check(gap >= 0, "steps_between_admissions", gap, "0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """How adapters are cached.

    Args:
        eviction: Which idle thing goes first when pages run short, by name in ``memory.EVICTION_POLICIES``; or
            somebody's own (``plugins.py``).
        host_bytes: Limit of the host tier; adapters beyond it are read from disk again when asked for.
        max_cpu_loras: Limit of the host tier in adapters.
        max_registered: Most adapters registered at once.
        max_adapter_bytes: Largest weight file accepted.
        adapter_dtype: Type adapters are kept in. On a CPU ``auto`` is, for each, the narrowest that holds its weights
            exactly, and ``bfloat16`` or ``float16`` round where they must; elsewhere it is the base's own type.
        look_ahead: Waiting requests whose adapters are brought to the device before their turn; 0 for none.
        forecast: Bring adapters as well that nobody waits for but whose usual gap between requests is over.
    """

    eviction: str = "price"
    host_bytes: int = 4 * GIB
    max_cpu_loras: int | None = None
    max_registered: int = 100_000
    max_adapter_bytes: int = 16 * GIB
    adapter_dtype: str = "auto"
    look_ahead: int = 10
    forecast: bool = False

    def __post_init__(self) -> None:
        _check(self.host_bytes > 0, "host_bytes", self.host_bytes, "above 0")
        _check(self.max_cpu_loras is None or self.max_cpu_loras >= 1, "max_cpu_loras", self.max_cpu_loras, "at least 1")
        _check(self.max_registered >= 1, "max_registered", self.max_registered, "at least 1")
        _check(self.max_adapter_bytes > 0, "max_adapter_bytes", self.max_adapter_bytes, "above 0")
        dtypes = ("auto", "float32", "bfloat16", "float16")
        _check(self.adapter_dtype in dtypes, "adapter_dtype", self.adapter_dtype, f"one of {', '.join(dtypes)}")
        _check(self.look_ahead >= 0, "look_ahead", self.look_ahead, "0 (none) or more requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from.

    Args:
        model: The base.
        memory: The pool.
        scheduler: The step.
        adapters: The adapter cache.
        seed: Seed of whatever the engine draws itself (seeds of requests that bring none).
        request_log: File that gets one JSON line per finished request: sizes, no text.
        step_log: File that gets one JSON line per step and per load: what ``manylora calibrate`` learns from.
        simulate: What to simulate in place of a model: the file of a cost profile, or ``hardware:model``.
    """

    model: ModelConfig
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    seed: int = 0
    request_log: str | None = None
    step_log: str | None = None
    simulate: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP face.

    Args:
        host: Address to listen on.
        port: Port; 0 picks a free one.
        api_keys: Keys for the inference routes; none means open.
        admin_key: Key for the adapter routes; ``None`` means they take ``api_keys`` where set, else only callers
            from loopback.
        lora_dirs: Directories adapters may be loaded from; a path outside them is refused.
        in_process: Run the engine in a thread of the API process, for debugging.
        drain_timeout_s: How long SIGTERM waits for requests in flight, in seconds.
        hang_timeout_s: Seconds for which an engine may hang, its loop making no turn or no step ending, before it is
            killed and the next one started; 0 for ever. Longer than the longest step. Not for ``in_process``.
        max_body_bytes: Largest request body.
        adapter_histograms: Show latencies by adapter in the metrics: some sixty series for each.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    lora_dirs: tuple[str, ...] = ()
    in_process: bool = False
    drain_timeout_s: float = 30.0
    hang_timeout_s: float = 300.0
    max_body_bytes: int = 32 * MIB
    adapter_histograms: bool = False

    def __post_init__(self) -> None:
        _check(0 <= self.port <= 65535, "port", self.port, "0 to 65535")
        _check(self.drain_timeout_s >= 0, "drain_timeout_s", self.drain_timeout_s, "0 or more")
        _check(self.hang_timeout_s >= 0, "hang_timeout_s", self.hang_timeout_s, "0 or more")
        _check(self.max_body_bytes >= 1024, "max_body_bytes", self.max_body_bytes, "at least 1024")
        _check(all(self.api_keys), "api_keys", self.api_keys, "keys that are not empty")
        _check(self.admin_key != "", "admin_key", self.admin_key, "a key that is not empty")
