"""Configuration: composed frozen dataclasses, checked on construction.

They have only options of the user, each defined once (``options.py``). Derived sizes (pages, bytes per page, largest
context) are computed where they are needed. Only ``cli`` reads the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from manylora.core.errors import ConfigError
from manylora.core.options import CheckedOptions, check_options, option
from manylora.core.server_config import FleetConfig, PublishConfig, WebConfig

__all__ = [
    "DEFAULT_HOST_BYTES",
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
DEFAULT_HOST_BYTES = 4 * GIB  # host memory for adapters where no machine says how much there is: in simulations

_model, _memory, _scheduling, _adapters, _http = (
    partial(option, panel=name) for name in ("Model", "Memory", "Scheduling", "Adapters", "HTTP")
)
_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The base model; ``model`` is a Hugging Face checkpoint directory, a hub name, or ``demo``."""

    model: str
    served_model_name: str | None = _model(None, help="The base's name in the API; by default the model's own.")
    tokenizer: str | None = _model(None, help="Folder or name of the tokenizer, if it is not the model's own.")
    revision: str | None = _model(None, help="Revision on the hub.")
    dtype: str = _model(
        "auto",
        choices=_DTYPES,
        help="Type of the weights: auto is float32 on CPU, the checkpoint's 16-bit type on GPU.",
    )
    base_dtype: str = _model(
        "auto",
        choices=("auto", "float32", "bfloat16", "float16", "int8", "int4"),
        help="Numbers that the base's weights are kept in: auto is what the checkpoint stores, quantised or not; "
        "others are rounded from it while it is read. On a GPU they have 8 or 4 bits, or the type of activations.",
    )
    activation_dtype: str = _model(
        "auto",
        choices=("auto", "float32", "int8"),
        help="Inputs of products with 8-bit and 4-bit integers on a CPU: int8 is several times as fast; auto is int8 "
        "where the processor multiplies bytes (AVX-512 VNNI, AVX-VNNI).",
    )
    device: str = _model("auto", metavar="auto|cpu|cuda", help="Where the model runs; auto is the GPU if there is one.")
    tensor_parallel_size: int = _model(
        1,
        unit="devices",
        at_least=1,
        help="Devices that share one model: each has a part of every layer, of KV and of adapters, and a process. "
        "--memory is that of each.",
    )
    max_model_len: int | None = _model(
        None, unit="tokens", at_least=1, help="Longest prompt plus answer; by default the model's limit."
    )
    lora_kernel: str = _model(
        "auto",
        choices=("auto", "grouped", "naive", "padded", "ragged", "reference"),
        help="Implementation of the adapters' arithmetic: auto is ragged on a GPU and grouped elsewhere; padded and "
        "ragged need a GPU; naive, padded and reference are for comparison.",
    )
    attention_kernel: str = option(
        "auto",
        choices=("auto", "torch", "triton"),
        help="Implementation of attention: auto is triton on a GPU and torch elsewhere.",
    )
    decode_graphs: str = option(
        "auto",
        choices=("auto", "off", "on"),
        help="Replay captured graphs for steps of up to 1,024 tokens: auto is on a GPU. They need triton attention.",
    )
    generation_config: str = _model(
        "auto",
        metavar="auto|vllm|PATH",
        help="Sampling defaults of requests that set none: auto reads generation_config.json of the model and of each "
        "adapter's folder, vllm reads none, PATH is a folder with the model's.",
    )
    trust_remote_code: bool = _model(False, help="Allow the checkpoint to run its own code.")

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError(f"Got model = {self.model!r}, expected a checkpoint directory, a hub name or 'demo'")
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig(CheckedOptions):
    """The pool of pages that KV, prefix blocks and adapters share."""

    memory_bytes: int | None = _memory(
        None,
        flag="--memory",
        unit="bytes",
        above=0,
        help="Memory for KV, prefixes and adapters together, as 2GiB. By default 1GiB on CPU, its free share on GPU.",
    )
    gpu_memory_utilization: float = _memory(
        0.9, above=0, at_most=1, help="Share of the GPU this process may take, without --memory."
    )
    kv_cache_dtype: str = _memory(
        "auto",
        choices=("auto", "float32", "bfloat16", "float16", "int8"),
        help="Type of KV in pages on a CPU: auto is float32 beside a base in float32, and 16 bits beside others. On a "
        "GPU it is the model's.",
    )
    block_size: int = _memory(16, unit="tokens", at_least=1, at_most=1024, help="Tokens of KV in a page.")
    num_pages: int | None = _memory(
        None, unit="pages", at_least=2, help="Size of the pool in pages, in place of its bytes."
    )
    prefix_caching: bool = _memory(
        True, help="Keep the KV of finished prompts in idle pages.", without="Forget the KV of finished prompts."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(CheckedOptions):
    """Limits of a step, and the order of requests."""

    policy: str = _scheduling("fifo", plugin="policy", help="Order of waiting requests.")
    policy_options: Mapping[str, Any] = _scheduling(
        factory=dict,
        flag="--policy-option",
        metavar="KEY=VALUE",
        help="An option of the policy, built-in or plug-in. Repeatable.",
    )
    max_num_seqs: int = _scheduling(128, unit="requests", at_least=1, help="Most requests running at once.")
    max_num_batched_tokens: int = _scheduling(
        2048, unit="tokens", at_least=1, help="Most tokens in one step; longer prompts are chunked."
    )
    step_target_s: float | None = _scheduling(
        None,
        unit="s",
        above=0,
        help="Chunk prompts so that a step takes no longer, by costs learnt while serving, and shorter when memory is "
        "short. By default only --max-num-batched-tokens limits chunks.",
    )
    max_loras: int | None = _adapters(
        None, unit="adapters", at_least=1, help="Most distinct adapters in one step; by default no limit."
    )
    max_waiting: int = _scheduling(2048, unit="requests", at_least=1, help="Most requests waiting; more get a 429.")
    max_wait_s: float | None = _scheduling(
        None,
        flag="--max-wait",
        unit="s",
        above=0,
        help="Longest wait for a place among the running requests, as predicted when a request arrives; one that would "
        "wait longer gets a 429 at once. By default only --max-waiting limits the queue.",
    )
    step_composition: str = _scheduling(
        "mixed",
        plugin="step_composition",
        help="Composition of steps from prompts and decodes, and the loads they wait for.",
    )
    reserve_output: str = _scheduling(
        "none",
        choices=("none", "whole", "peak"),
        help="Admit only requests whose longest answers fit, so that none is pre-empted and fewer run: all of them at "
        "once (whole), or at the peak of all as they end one by one (peak).",
    )
    plan_ahead: bool | None = _scheduling(
        None,
        help="Plan each step while the one before it runs, so that the device does not wait for it; by default "
        "on a GPU.",
    )
    predictor: str = _scheduling(
        "quantile", plugin="predictor", help="Predicts output lengths, for policies that use them."
    )
    predictor_options: Mapping[str, Any] = _scheduling(
        factory=dict, flag="--predictor-option", metavar="KEY=VALUE", help="An option of the predictor. Repeatable."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig(CheckedOptions):
    """The adapter cache."""

    max_cpu_loras: int | None = _adapters(None, unit="adapters", at_least=1, help="Most adapters kept in host memory.")
    host_bytes: int | None = _adapters(
        None,
        flag="--host-memory",
        unit="bytes",
        above=0,
        help="Host memory for adapters; those beyond it are read from disk again when requested. By default the "
        "engine's part of a quarter of the memory that is available once the model is loaded; in simulations 4GiB.",
    )
    background_reads: bool = _adapters(
        True,
        help="Read adapters that were registered at start into spare host memory before they are requested.",
        without="Read adapters only when they are requested.",
    )
    keep_host_copies: bool = option(
        True,
        help="Keep an adapter in host memory while it is on the device too; if not, it is read from disk again after "
        "its eviction, and none is read ahead. A copy that requests run from stays. An isolated function keeps none.",
    )
    max_registered: int = option(100_000, unit="adapters", at_least=1, help="Most adapters registered at once.")
    max_adapter_bytes: int = option(16 * GIB, unit="bytes", above=0, help="Largest weight file accepted.")
    max_adapter_share: float = _adapters(
        0.75, above=0, at_most=1, help="Largest adapter, as a share of the pages of the pool; a larger one is refused."
    )
    read_timeout_s: float = option(
        300.0, unit="s", above=0, help="Time to read an adapter, after which it is refused and its reader ended."
    )
    real_roots: tuple[str, ...] | None = option(
        None,
        help="Real paths of the folders in which all files of adapters must lie. By default a server takes its folders "
        "of adapters and the adapters named at its start, a function its own adapter; an offline engine reads any path "
        "that the program gives.",
    )
    published_root: str | None = option(
        None,
        help="Real path of the folder of published adapters, which a server sets. They are in memory, and are read at "
        "the priority of steps: a publication waits for them.",
    )
    registries: tuple[str, ...] = _adapters(
        (),
        flag="--lora-registry",
        metavar="URL",
        help="Allow adapters from below URL, as paths of --lora-modules and of loads through the API: "
        "https://host/path, hf://org, s3://bucket/path, gs://bucket/path or az://container/path. Repeatable.",
    )
    registry_cache_bytes: int = _adapters(
        16 * GIB,
        flag="--lora-cache",
        unit="bytes",
        at_least=0,
        help="Disk for files from registries, in the folder of --cache-dir; the least recently read make room. 0 keeps "
        "none.",
    )
    image_cache_bytes: int = _adapters(
        8 * GIB,
        flag="--image-cache",
        unit="bytes",
        at_least=0,
        help="Disk for packed adapters that left host memory, in the folder of --cache-dir for as long as the server "
        "runs: they come back as a copy. A tenth of the disk is left to others. 0 keeps none.",
    )
    is_offline: bool = _adapters(
        False,
        flag="--lora-offline",
        help="Ask no registry: adapters from there are read from the disk that --lora-cache gives.",
    )
    adapter_dtype: str = _adapters(
        "auto",
        choices=_DTYPES,
        help="Type of adapters on a CPU: auto is the narrowest that holds each exactly, 16-bit types round. On a GPU "
        "it is the base's type.",
    )
    eviction: str = _adapters("price", plugin="eviction", help="Eviction order of idle adapters and prefixes.")
    eviction_options: Mapping[str, Any] = _adapters(
        factory=dict,
        flag="--eviction-option",
        metavar="KEY=VALUE",
        help="An option of the eviction policy. Repeatable.",
    )
    host_eviction: str = _adapters(
        "lru",
        choices=("lru", "price"),
        help="Which copy leaves host memory for another: the least recently used, or the one that saves least time, as "
        "--eviction price tells. A copy of an adapter that is likely to stay on the device then saves none.",
    )
    by_last_run: bool = option(
        False,
        help="Keep adapters as vLLM does, by when a step last ran them: requests that wait spare none but those that "
        "have not run since they came, and a copy in host memory is used when its adapter runs, on the device too.",
    )
    link_bytes_per_s: int | None = _adapters(
        None,
        flag="--link-bandwidth",
        unit="bytes",
        above=0,
        help="Slow copies from host memory to the device down to so many bytes a second, as 500MiB, to measure cold "
        "starts on one machine as they are on another. By default they are as fast as they can be.",
    )
    cold_start: str = _adapters(
        "auto",
        choices=("auto", "wait", "assist", "layers"),
        help="Start of a request whose adapter is not on the device: wait for it, assist from its copy in host memory, "
        "or run on its layers as they arrive; auto chooses for each request, by predicted time to first token.",
    )
    look_ahead: int = _adapters(
        10, unit="requests", at_least=0, help="Waiting requests whose adapters are loaded before their turn; 0 is none."
    )
    forecast: bool = _adapters(False, help="Also load adapters without waiting requests whose next request is due.")
    forecast_by: str = _adapters(
        "gaps",
        choices=("gaps", "traffic"),
        help="When a request is due: the usual gap between an adapter's requests is over, or its recent traffic makes "
        "one likely in the next seconds.",
    )

    def most_pages(self, num_pages: int) -> int:
        """Return the pages that one adapter may take of a pool: a token has room beside it."""
        return max(1, min(int(self.max_adapter_share * num_pages), num_pages - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(CheckedOptions):
    """All options of an engine."""

    model: ModelConfig
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    num_engines: int = option(
        1,
        unit="engines",
        at_least=1,
        help="Engines on this machine, which share its cores and its memory; a server with replicas sets it.",
    )
    num_on_device: int = option(
        1,
        unit="engines",
        at_least=1,
        help="Those of them on the same device, which share the base's weights; a server with replicas sets it.",
    )
    seed: int = _model(0, help="Seed of requests without one.")
    cache_dir: str | None = _adapters(
        None,
        metavar="DIR|off",
        help="Folder for content hashes of adapters, by which the next start recognises files that did not change, for "
        "adapters that left host memory, and for bases in fewer than 32 bits as they are kept on a CPU, which the next "
        "start maps. By default "
        "[bold]manylora serve[/bold] takes manylora in the user's cache folder; off is none.",
    )
    simulate: str | None = option(
        None,
        panel="Simulation",
        metavar="PROFILE",
        help="Answer with synthetic tokens at the speed of a cost profile (the file that "
        "[bold]manylora calibrate[/bold] wrote, or hardware:model, as a40:llama-7b); of MODEL only the "
        "tokenizer is read.",
    )
    step_log: str | None = option(
        None,
        panel="Simulation",
        metavar="FILE",
        help="Append a line per step and per load, for [bold]manylora calibrate[/bold]; some hundred bytes each.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server, and its fleet of engines."""

    fleet: FleetConfig = field(default_factory=FleetConfig)
    web: WebConfig = field(default_factory=WebConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)
    host: str = _http("127.0.0.1", help="Address to listen on.")
    port: int = _http(8000, at_least=0, at_most=65535, help="Port; 0 picks a free one.")
    api_keys: tuple[str, ...] = _http(
        (),
        flag="--api-key",
        envvar="MANYLORA_API_KEY",
        help="A key that clients must send. Repeatable; none leaves the API open.",
    )
    tenants: str | None = option(
        None,
        panel="Tenants",
        metavar="FILE",
        help="A TOML file of tenants: digests of their keys, the models that they may call, limits and weights. It is "
        "read again when it changes, and on SIGHUP.",
    )
    usage: str | None = option(
        None,
        panel="Tenants",
        metavar="FILE",
        help="A SQLite file to which requests, tokens and engine seconds of each tenant and adapter are added, by day.",
    )
    router_key: str | None = option(
        None,
        panel="Tenants",
        envvar="MANYLORA_ROUTER_KEY",
        help="The key of a router with tenants ([bold]manylora route --tenants[/bold]), which may name the tenant of "
        "each request that it passes on.",
    )
    metrics_key: str | None = option(
        None,
        panel="Tenants",
        envvar="MANYLORA_METRICS_KEY",
        help="A key for /metrics and /load. With tenants, these need it or the admin key, else a caller on this "
        "machine; without tenants they are open unless it is set.",
    )
    admin_key: str | None = _http(
        None,
        envvar="MANYLORA_ADMIN_KEY",
        help="The key for loading and unloading adapters; by default an API key, or any client on this machine.",
    )
    lora_dirs: tuple[str, ...] = _adapters(
        (),
        flag="--lora-dir",
        metavar="DIR",
        help="Load every adapter folder below DIR, at any depth down to four, under its path in DIR, such as org/name "
        "(invalid ones are skipped and logged), and allow the API to load adapters from there. Repeatable.",
    )
    lora_on_demand: bool = _adapters(
        False,
        help="Look for an adapter that a request names and that is not loaded below each --lora-registry, under its "
        "name, and load it.",
    )
    allowed_lora_paths: tuple[str, ...] = _adapters(
        (),
        flag="--allowed-lora-path",
        metavar="DIR",
        help="Allow the API to load adapters from below DIR, and load none at the start. Repeatable.",
    )
    tool_call_parser: str | None = _http(
        None,
        choices=("hermes", "llama3_json", "mistral", "qwen", "qwen3_coder", "pythonic"),
        help="How the model writes tool calls. Without it, the format that its chat template shows; if it shows none, "
        "calls are left in the content unless tool_choice forces them.",
    )
    reasoning_parser: str | None = _http(
        None,
        choices=("deepseek_r1", "qwen3"),
        help="How the model marks its reasoning, which is then sent apart from the content.",
    )
    trust_adapter_templates: bool = _adapters(
        False,
        help="Render chats with the chat template in an adapter's folder, if it has one. A template is a program that "
        "runs in the server: only for adapters of authors that you trust.",
    )
    trust_request_chat_template: bool = _http(
        False,
        help="Render chats with the chat template in a request, if it has one. A template is a program that runs in "
        "the server: only for callers that you trust.",
    )
    drain_timeout_s: float = _http(30.0, unit="s", at_least=0, help="Time that SIGTERM waits for requests in flight.")
    hang_timeout_s: float = _http(
        300.0,
        unit="s",
        at_least=0,
        help="Time without a step or a turn after which the engine is killed and restarted; 0 is never. Must exceed "
        "the longest step. Not with --in-process.",
    )
    max_body_bytes: int | None = option(
        None,
        unit="bytes",
        at_least=1024,
        help="Largest request body; by default 16 bytes per token of the context, at least 1 MiB.",
    )
    shared_prefixes: bool = _http(
        False, help="Share cached prefixes between API keys. Response times can then reveal the prompts of another key."
    )
    start_timeout_s: float = _http(
        600.0,
        unit="s",
        at_least=0,
        help="Time for an engine to start, or to restart and load every adapter; then it is killed, and a restart is "
        "tried again; 0 is never. 600 s read 120 GB at 200 MB/s: raise it for a slower disk or a first download. "
        "Not with --in-process.",
    )
    max_connections: int = _http(
        4096,
        unit="connections",
        at_least=1,
        help="Most open connections; more get a 503. Fewer if the process may open fewer files.",
    )
    max_connections_per_address: int = _http(
        2048,
        unit="connections",
        at_least=1,
        help="Most open connections of one address, of IPv6 one /64 network; fewer in proportion if --max-connections "
        "is not reached. Behind a proxy all have the proxy's.",
    )
    header_timeout_s: float = _http(10.0, unit="s", above=0, help="Time for a request's headers to arrive.")
    body_timeout_s: float = _http(60.0, unit="s", above=0, help="Time for a request's body to arrive.")
    write_timeout_s: float = _http(
        300.0,
        unit="s",
        above=0,
        help="Time in which a client must take at least a byte of an answer that waits for it.",
    )
    keep_alive_s: float = _http(75.0, unit="s", above=0, help="Time that a connection stays open between requests.")
    adapter_histograms: bool = _http(
        False, help="Latency histograms by adapter in the metrics, about sixty series each."
    )
    in_process: bool = option(False, panel="Debugging", help="One process instead of two, for a debugger.")

    def __post_init__(self) -> None:
        check_options(self)
        if not all(self.api_keys):
            raise ConfigError(f"Got api_keys = {self.api_keys!r}, expected keys that are not empty")
        for name in ("admin_key", "router_key", "metrics_key"):
            if getattr(self, name) == "":
                raise ConfigError(f"Got {name} = '', expected a key that is not empty")
        if self.in_process and self.fleet.ray is not None:
            raise ConfigError(f"Got in_process = True, ray = {self.fleet.ray!r}, expected one of them")
        if self.publish.publish and self.fleet.ray is not None:
            raise ConfigError(f"Got publish = True, ray = {self.fleet.ray!r}, expected engines on this machine")
