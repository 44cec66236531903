"""Options of a server beside its engines' own: its fleet of engines, and its side towards clients."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from manylora.core.errors import ConfigError
from manylora.core.options import check_options, option
from manylora.core.types import MAX_LOGPROBS, USUAL_LOGPROBS

__all__ = ["FleetConfig", "PublishConfig", "TlsConfig", "TraceConfig", "WebConfig"]

_http, _replicas = partial(option, panel="HTTP"), partial(option, panel="Replicas")
_adapters = partial(option, panel="Adapters")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """The engines of a server, and the choice among them."""

    replicas: int = _replicas(
        1, unit="engines", at_least=1, at_most=256, help="Engines that serve the model, each with memory of its own."
    )
    devices: str | None = _replicas(
        None,
        metavar="DEVICE,...",
        help="Devices of the engines in order, as cuda:0,cuda:1, then from the first again; by default --device.",
    )
    router: str = _replicas("auto", plugin="router", help="Choice of the engine for each request.")
    router_options: Mapping[str, Any] = _replicas(
        factory=dict,
        flag="--router-option",
        metavar="KEY=VALUE",
        help="An option of the router, built-in or plug-in. Repeatable.",
    )
    max_resumes: int = _replicas(
        3,
        at_least=0,
        help="Engines that a request may lose and still go on, on another engine or the restarted one; 0 fails it with "
        "its engine.",
    )
    resume_timeout_s: float = _replicas(
        300.0,
        unit="s",
        at_least=0,
        help="Longest wait of a request that lost its engine for another or the restarted one, while none serves.",
    )
    min_replicas: int | None = _replicas(
        None, unit="engines", at_least=1, at_most=256, help="Engines at least, with --max-replicas; by default 1."
    )
    max_replicas: int | None = _replicas(
        None,
        unit="engines",
        at_least=1,
        at_most=256,
        help="Start and drain engines by the load, up to this many; by default their number is fixed.",
    )
    slo_ttft_s: float = _replicas(
        2.0, unit="s", above=0, help="Time to first token that scaling keeps, for 99 % of requests."
    )
    replica_rate: float | None = _replicas(
        None,
        unit="requests/s",
        above=0,
        help="Capacity of an engine, as of [bold]manylora plan[/bold]; by default predicted from its steps, and "
        "corrected by the traffic.",
    )

    ray: str | None = _replicas(
        None,
        metavar="auto|HOST:PORT",
        help="Run the engines on the nodes of this Ray cluster; auto is the one of RAY_ADDRESS, or of this machine.",
    )
    ray_resources: Mapping[str, Any] = _replicas(
        factory=dict,
        flag="--ray-resource",
        metavar="NAME=AMOUNT",
        help="A resource that each engine takes of its node: CPU, GPU, memory (bytes), or a name of your own; by "
        "default CPU=1, and GPU=1 with [bold]--device cuda[/bold]. Repeatable.",
    )
    ray_labels: Mapping[str, Any] = _replicas(
        factory=dict,
        flag="--ray-label",
        metavar="KEY=VALUE",
        help="A label that the nodes of the engines must have. Repeatable.",
    )
    ray_timeout_s: float = _replicas(
        300.0, unit="s", above=0, help="Time for Ray to find a node for an engine, and for the cluster to grow one."
    )

    @property
    def num_places(self) -> int:
        """Engines at most."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_replicas is not None and self.replicas != 1:
            raise ConfigError(
                f"Got replicas = {self.replicas}, max_replicas = {self.max_replicas}, expected a fixed number or bounds"
            )
        if self.min_replicas is not None and not self.min_replicas <= (self.max_replicas or 0):
            raise ConfigError(
                f"Got min_replicas = {self.min_replicas}, max_replicas = {self.max_replicas}, expected 1 <= min <= max"
            )
        if self.devices is not None and not all(self.devices.split(",")):
            raise ConfigError(f"Got devices = {self.devices!r}, expected names between commas, as cuda:0,cuda:1")
        if self.ray is not None and self.devices is not None:
            raise ConfigError(f"Got ray = {self.ray!r}, devices = {self.devices!r}, expected --ray-resource GPU=1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishConfig:
    """Adapters that come with requests, as training sends them, and their versions."""

    publish: bool = _adapters(
        False, help="Take adapters with requests, PUT /adapters/NAME; their files are kept in memory, not on disk."
    )
    publish_shm: str | None = _adapters(
        None, metavar="PREFIX", help="With --publish: also take adapters from files in /dev/shm whose names begin so."
    )
    publish_bytes: int = _adapters(
        4 * 1024**3,
        flag="--publish-memory",
        unit="bytes",
        above=0,
        help="Memory for the files of published adapters; beyond it a publication gets a 503.",
    )
    keep_versions: int = _adapters(
        1,
        unit="versions",
        at_least=0,
        help="Versions of a published adapter that stay addressable as NAME@NUMBER beside the current one.",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.publish_shm is not None and not self.publish:
            raise ConfigError(f"Got publish_shm = {self.publish_shm!r} without publish, expected both")
        if (
            self.publish_shm is not None
            and re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,200}", self.publish_shm) is None
        ):
            raise ConfigError(
                f"Got publish_shm = {self.publish_shm!r}, expected the begin of a file's name: letters, digits and _.-"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """TLS towards clients, of a server and of a router, 1.2 at least. Files that change are read again."""

    ssl_keyfile: str | None = _http(None, metavar="FILE", help="Private key of --ssl-certfile.")
    ssl_certfile: str | None = _http(
        None, metavar="FILE", help="Certificate of the server, which then speaks TLS. Files that change are read again."
    )
    ssl_ca_certs: str | None = _http(None, metavar="FILE", help="Certificates that clients' certificates must lead to.")
    ssl_cert_reqs: int = _http(
        0, at_least=0, at_most=2, help="Certificates of clients, as in Python's ssl: 0 none, 1 optional, 2 required."
    )
    ssl_ciphers: str | None = _http(None, metavar="CIPHERS", help="Ciphers of TLS 1.2, in OpenSSL's format.")

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ConfigError(f"Got {name} without ssl_certfile, expected both")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(f"Got ssl_cert_reqs = {self.ssl_cert_reqs} without ssl_ca_certs, expected both")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """Where the spans of a server or router go, as vLLM names it."""

    otlp_traces_endpoint: str | None = _http(
        None,
        metavar="URL",
        help="Send a trace of each request to this OpenTelemetry collector: http://host:4317 (gRPC), or "
        "http://host:4318/v1/traces (HTTP). Needs the extra otel.",
    )

    def __post_init__(self) -> None:
        check_options(self)
        url = self.otlp_traces_endpoint
        if url is not None and not url.startswith(("http://", "https://")):
            raise ConfigError(f"Got otlp_traces_endpoint = {url!r}, expected a URL like http://collector:4317")


@dataclass(frozen=True, slots=True, kw_only=True)
class WebConfig:
    """Address, CORS, names and logs. The flags are vLLM's, so that its manifests start this server."""

    uds: str | None = _http(
        None,
        metavar="PATH",
        help="Listen on a Unix socket in place of --host and --port. Adapter routes then need a key.",
    )
    uds_mode: str = _http(
        "600", metavar="MODE", help="Permissions of the --uds socket, as of chmod: 660 lets its group connect as well."
    )
    root_path: str = _http("", metavar="PATH", help="Path of the server behind a proxy that cuts it off, such as /llm.")
    allowed_origins: tuple[str, ...] = _http(
        (),
        metavar="ORIGIN",
        help="Allow web pages of this origin to call the server (CORS); * is all. By default none. Repeatable, or a "
        "JSON list.",
    )
    allowed_hosts: tuple[str, ...] = _http(
        (),
        metavar="NAME",
        help="Answer requests with this Host too, such as the public name of a proxy; * is any. Without keys a server "
        "on a loopback address takes local names alone. Repeatable, or a JSON list.",
    )
    allowed_methods: tuple[str, ...] = _http(
        (), metavar="METHOD", help="Methods that these pages may use; by default all. Repeatable, or a JSON list."
    )
    allowed_headers: tuple[str, ...] = _http(
        (), metavar="HEADER", help="Headers that these pages may send; by default all. Repeatable, or a JSON list."
    )
    allow_credentials: bool = _http(False, help="Allow these pages to send cookies and keys that the browser holds.")
    aliases: tuple[str, ...] = _http(
        (),
        flag="--alias",
        metavar="NAME",
        help="Another name of the base in the API, as second and later names after --served-model-name. Repeatable.",
    )
    chat_template: str | None = _http(
        None, metavar="FILE", help="Chat template in place of the model's own: a file, or the template itself."
    )
    max_logprobs: int = _http(
        USUAL_LOGPROBS,
        at_least=-1,
        at_most=MAX_LOGPROBS,
        help="Most log-probabilities of a token that a request gets; -1 is as many as the server can report.",
    )
    request_id_headers: bool = _http(
        False,
        flag="--enable-request-id-headers",
        help="Send X-Request-Id with every response; without it only to clients that sent one.",
    )
    log_requests: bool = _http(
        False, flag="--enable-log-requests", help="Log a line per request: route, status, duration, id; no text."
    )
    prompt_tokens_details: bool = _http(
        False,
        flag="--enable-prompt-tokens-details",
        help="Show in usage how many tokens of the prompt the prefix cache held.",
    )
    tokenizer_info: bool = _http(
        False,
        flag="--enable-tokenizer-info-endpoint",
        help="Answer GET /tokenizer_info: settings of the tokenizer, and the chat template.",
    )
    disable_docs: bool = _http(False, flag="--disable-fastapi-docs", help="Leave out /openapi.json and /docs.")
    disable_ui: bool = _http(False, help="Leave out the live page, /ui.")
    tls: TlsConfig = field(default_factory=TlsConfig)
    traces: TraceConfig = field(default_factory=TraceConfig)

    def __post_init__(self) -> None:
        check_options(self)
        if re.fullmatch(r"0?[0-7]{3}", self.uds_mode) is None:
            raise ConfigError(f"Got uds_mode = {self.uds_mode!r}, expected permissions from 000 to 777, such as 660")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"Got root_path = {self.root_path!r}, expected something like /llm")
        if not all(self.aliases):
            raise ConfigError(f"Got aliases = {self.aliases!r}, expected names that are not empty")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError("Got allow_credentials with the origin *, expected origins by name")
