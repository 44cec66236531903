"""Options of `manylora route`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from manylora.core.errors import ConfigError
from manylora.core.options import check_options, option
from manylora.core.routing.policies import DEFAULT_ROUTER
from manylora.core.server_config import TlsConfig, TraceConfig

__all__ = ["ProxyConfig", "is_key"]

_backends, _routing, _health, _http, _tenants = (
    partial(option, panel=name) for name in ("Backends", "Routing", "Health", "HTTP", "Tenants")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """The proxy and the fleet behind it."""

    backends: tuple[str, ...] = _backends(
        (),
        flag="--backend",
        metavar="URL",
        help="A server with OpenAI's API, as http://host:8000; or dns:NAME:PORT (dns+https:NAME:PORT) for every "
        "address of a name, looked up again and again; or pods:NAMESPACE/SELECTOR:PORT or pool:NAMESPACE/NAME for the "
        "ready pods of a cluster, or of an InferencePool. With #env:NAME or #file:PATH it gets a key of its own. "
        "Repeatable.",
    )
    backend_key: str | None = _backends(
        None, envvar="MANYLORA_BACKEND_KEY", help="The API key that backends get, in place of the client's own."
    )
    backend_ca_certs: str | None = _backends(
        None,
        metavar="FILE",
        help="Certificates that the certificates of backends must lead to; by default those of the system.",
    )
    max_in_flight: int = _backends(
        256, unit="requests", at_least=1, help="Most requests at one backend at once; beyond it on all, 429."
    )
    resolve_s: float = _backends(
        10.0, unit="s", above=0, help="Time between two look-ups of a DNS name, and two reads of an InferencePool."
    )
    kubernetes_api: str = _backends(
        "https://kubernetes.default.svc:443", metavar="URL", help="The API of the cluster, for pods: and pool:."
    )
    kubernetes_account: str = _backends(
        "/var/run/secrets/kubernetes.io/serviceaccount",
        metavar="DIR",
        help="Folder with the token and ca.crt of the service account that may list and watch pods.",
    )

    router: str = _routing(DEFAULT_ROUTER, plugin="router", help="Routing policy: chooses the backend of a request.")
    router_options: Mapping[str, Any] = _routing(
        factory=dict, flag="--router-option", metavar="KEY=VALUE", help="An option of the router. Repeatable."
    )
    names: tuple[str, ...] = _routing(
        (),
        flag="--name",
        metavar="NAME=MODEL:WEIGHT,...",
        help="A public name, and the models that answer it by weight, as sql=sql-v1:90,sql-v2:10; MODEL@URL:WEIGHT "
        "asks one backend alone. A conversation stays with its model. Repeatable.",
    )
    retries: int = _routing(
        2,
        unit="retries",
        at_least=0,
        help="Most further backends that a request is sent to before the first byte of its answer. A request that "
        "two backends died on is not sent to a third.",
    )
    manage_adapters: bool = _routing(
        False,
        help="Load and unload adapters on backends: where the router wants them, and on all of them by "
        "/v1/load_lora_adapter of this router. Backends must allow it.",
    )
    max_placed: int | None = _routing(
        None,
        unit="adapters",
        at_least=1,
        help="With --manage-adapters: most adapters that the router keeps loaded on one backend by itself; the least "
        "recently used is unloaded. By default no limit.",
    )
    place_timeout_s: float = _routing(
        60.0, unit="s", above=0, help="With --manage-adapters: time that a backend may take to load an adapter."
    )

    poll_s: float = _health(1.0, flag="--poll-interval", unit="s", above=0, help="Time between two polls of a backend.")
    poll_timeout_s: float = _health(5.0, unit="s", above=0, help="Time that an answer to a poll may take.")
    connect_timeout_s: float = _health(2.0, unit="s", above=0, help="Time that a connection to a backend may take.")
    fall: int = _health(
        3,
        unit="failures",
        at_least=1,
        help="Failures in a row after which a backend is out: polls that failed while it sent no bytes, or requests "
        "without an answer.",
    )
    rise: int = _health(2, unit="polls", at_least=1, help="Good polls in a row after which a backend is in again.")
    first_byte_timeout_s: float = _health(
        600.0,
        unit="s",
        above=0,
        help="Time to the first byte of an answer's body, queues and long prompts included; an answer that is not "
        "streamed comes only at its end. Beyond it, a request goes elsewhere if its backend sent nothing to any.",
    )
    idle_timeout_s: float = _health(
        120.0, unit="s", above=0, help="Time between two pieces of an answer; beyond it the answer ends with an error."
    )
    panic_threshold: float = _health(
        50.0,
        unit="%",
        at_least=0,
        at_most=100,
        help="Share of a model's backends that are in, below which those that are out are tried as well, after the "
        "others; 0 never tries them.",
    )
    slow_start_s: float = _health(
        10.0, unit="s", at_least=0, help="Time over which a backend that joins or returns gets its share of requests."
    )

    host: str = _http("127.0.0.1", help="Address to listen on.")
    port: int = _http(8000, at_least=0, at_most=65535, help="Port; 0 picks a free one.")
    reuse_port: bool = _http(
        False, help="Share the port with another router, so that a new one can start before the old one stops."
    )
    workers: int = _http(
        1,
        unit="processes",
        at_least=1,
        at_most=64,
        help="Processes that share the port, each on a core of its own, and choose by one book of the requests under "
        "way. Not with --manage-adapters.",
    )
    api_keys: tuple[str, ...] = _http(
        (),
        flag="--api-key",
        envvar="MANYLORA_API_KEY",
        help="A key that clients must send; it is not passed on. Repeatable; without one, the client's is passed on.",
    )
    tenants: str | None = _tenants(
        None,
        metavar="FILE",
        help="A TOML file of tenants, as of a server: their keys, the models that they may call, limits and weights. "
        "Their keys are passed on to backends that have the file too, or, with --router-key, stay here.",
    )
    router_key: str | None = _tenants(
        None,
        envvar="MANYLORA_ROUTER_KEY",
        help="The key that backends have as [bold]--router-key[/bold]: they get it in place of a tenant's own, and the "
        "tenant's name and weight beside it. vLLM gets it as its API key.",
    )
    usage: str | None = _tenants(
        None,
        metavar="FILE",
        help="A SQLite file to which requests and tokens of each tenant and adapter are added, by day.",
    )
    metrics_key: str | None = _tenants(
        None,
        envvar="MANYLORA_METRICS_KEY",
        help="A key for /metrics. With tenants it needs it or the admin key, else a caller on this machine.",
    )
    allowed_hosts: tuple[str, ...] = _http(
        (),
        metavar="NAME",
        help="Answer requests with this Host too; * is any. Without keys a router on a loopback address takes local "
        "names alone. Repeatable.",
    )
    admin_key: str | None = _http(
        None,
        envvar="MANYLORA_ADMIN_KEY",
        help="The key for /status and for loading adapters; by default an API key, or any client on this machine.",
    )
    drain_timeout_s: float = _http(30.0, unit="s", at_least=0, help="Time that SIGTERM waits for requests in flight.")
    tls: TlsConfig = field(default_factory=TlsConfig)
    traces: TraceConfig = field(default_factory=TraceConfig)

    def __post_init__(self) -> None:
        check_options(self)
        if not self.backends:
            raise ConfigError("Got no backends, expected at least one --backend URL")
        if self.workers > 1 and self.manage_adapters:
            raise ConfigError(
                f"Got workers = {self.workers} with manage_adapters, expected 1: one process alone loads and unloads"
            )
        if not all(self.api_keys):
            raise ConfigError(f"Got api_keys = {self.api_keys!r}, expected keys that are not empty")
        for name in ("admin_key", "backend_key", "metrics_key", "router_key"):
            key = getattr(self, name)
            if key is not None and not is_key(key):
                raise ConfigError(f"Got {name} = {key!r}, expected printable ASCII that is not empty")


def is_key(text: str) -> bool:
    """Whether a text can be sent as a key: printable ASCII that is not empty."""
    return bool(text) and text.isascii() and text.isprintable()
