"""Options of the server towards its clients: address and TLS, browsers, names, the log of requests.

The flags are vLLM's, so that its manifests start this server.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from manylora.core.errors import ConfigError
from manylora.core.options import check_options, option

__all__ = ["MOST_LOGPROBS", "WebConfig"]

MOST_LOGPROBS = 20
"""Most log-probabilities of a token, as in OpenAI's API."""

_http = partial(option, panel="HTTP")


@dataclass(frozen=True, slots=True, kw_only=True)
class WebConfig:
    """Address, TLS, CORS, names and logs; part of ``ServerConfig``."""

    uds: str | None = _http(
        None,
        metavar="PATH",
        help="Listen on a Unix socket in place of --host and --port. Adapter routes then need a key.",
    )
    uds_mode: str = _http(
        "600", metavar="MODE", help="Permissions of the --uds socket, as of chmod: 660 lets its group connect as well."
    )
    root_path: str = _http("", metavar="PATH", help="Path of the server behind a proxy that cuts it off, such as /llm.")
    ssl_keyfile: str | None = _http(None, metavar="FILE", help="Private key of --ssl-certfile.")
    ssl_certfile: str | None = _http(None, metavar="FILE", help="Certificate of the server, which then speaks TLS.")
    ssl_ca_certs: str | None = _http(None, metavar="FILE", help="Certificates that clients' certificates must lead to.")
    ssl_cert_reqs: int = _http(
        0, at_least=0, at_most=2, help="Certificates of clients, as in Python's ssl: 0 none, 1 optional, 2 required."
    )
    ssl_ciphers: str | None = _http(None, metavar="CIPHERS", help="Ciphers of TLS 1.2, in OpenSSL's format.")
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
        MOST_LOGPROBS, at_least=0, at_most=MOST_LOGPROBS, help="Most log-probabilities of a token that a request gets."
    )
    request_id_headers: bool = _http(
        False,
        flag="--enable-request-id-headers",
        help="Send X-Request-Id with every response; without it only to clients that sent one.",
    )
    log_requests: bool = _http(
        False, flag="--enable-log-requests", help="Log a line per request: route, status, duration, id; no text."
    )
    disable_docs: bool = _http(False, flag="--disable-fastapi-docs", help="Leave out /openapi.json and /docs.")

    def __post_init__(self) -> None:
        check_options(self)
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("Got ssl_keyfile without ssl_certfile, expected both")
        if re.fullmatch(r"0?[0-7]{3}", self.uds_mode) is None:
            raise ConfigError(f"Got uds_mode = {self.uds_mode!r}, expected permissions from 000 to 777, such as 660")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"Got root_path = {self.root_path!r}, expected something like /llm")
        if not all(self.aliases):
            raise ConfigError(f"Got aliases = {self.aliases!r}, expected names that are not empty")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError("Got allow_credentials with the origin *, expected origins by name")
