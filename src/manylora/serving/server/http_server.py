"""The HTTP server over a fleet: the tokenizer, the application, uvicorn's settings.

Importing this takes seconds, most of them in the libraries of the tokenizer: ``serve`` does it while the engines start.
"""

from __future__ import annotations

import functools
import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import uvicorn

from manylora.core.adapters.request_files import names_of_base
from manylora.core.config import EngineConfig, ServerConfig
from manylora.core.errors import ConfigError
from manylora.serving.api.model_settings import ModelSettings
from manylora.serving.api.request import Context
from manylora.serving.hosting.fleet.fleet import Fleet
from manylora.serving.http.connections import ConnectionBounds, max_open_files
from manylora.serving.http.http_protocol import ChunkWritingProtocol
from manylora.serving.http.listening import HttpServer
from manylora.serving.http.refusals import Refusals
from manylora.serving.metrics.prometheus import Metrics
from manylora.serving.server.app import ROOM_PATHS, make_app
from manylora.serving.text import Tokenizer
from manylora.serving.text.model_files import load_generation_defaults

__all__ = ["connection_bounds", "make_http_server"]

LAST_WRITES_S = 2.0
"""Time that clients have to read the last bytes of failed answers, in seconds."""

FILES_BESIDE_CONNECTIONS = 64
"""Files that the server opens at once, beside connections and engines."""

FILES_PER_ENGINE = 32
"""Files that an engine takes here: its sockets, its pipe, and those of the next while it is replaced."""

logger = logging.getLogger(__name__)


def make_http_server(
    engine: EngineConfig,
    server: ServerConfig,
    *,
    fleet: Fleet,
    metrics: Metrics,
    named_paths: Sequence[str],
    on_listening: Callable[[], None],
) -> HttpServer:
    """Load the tokenizer and return the server, which does not listen yet.

    Args:
        engine: Configuration of the engines.
        server: Configuration of the HTTP server.
        fleet: The engines.
        metrics: Of the server.
        named_paths: Folders of adapters named at the start, which may be loaded again.
        on_listening: Called when clients can connect.

    Raises:
        ConfigError: There is no such tokenizer, or TLS cannot be set up.
    """
    model, web = engine.model, server.web
    tokenizer = Tokenizer.load(model.tokenizer or model.model, revision=model.revision, chat_template=web.chat_template)
    # A simulated engine reads only the tokenizer of its model, which may be all there is.
    named = model if engine.simulate is None else replace(model, model=model.tokenizer or model.model)
    # An adapter named at start may be loaded again from its directory; those found are below a folder of adapters.
    roots = [*server.lora_dirs, *server.allowed_lora_paths, *named_paths]
    context = Context(
        engine_config=engine,
        config=server,
        fleet=fleet,
        tokenizer=tokenizer,
        settings=ModelSettings(
            load_generation_defaults(named),
            base_name=fleet.served_name,
            adapters=fleet.adapters.loaded,
            tokenizer=tokenizer,
            trusts_templates=server.trust_adapter_templates,
            base_names=names_of_base(model.model, fleet.served_name, *web.aliases),
            roots=engine.adapters.real_roots,
        ),
        metrics=metrics,
        lora_roots=tuple(dict.fromkeys(Path(root) for root in roots)),
    )
    bounds = connection_bounds(server)
    config = uvicorn.Config(
        make_app(context),
        http=functools.partial(  # type: ignore[arg-type]
            ChunkWritingProtocol, bounds=bounds, refusals=_refusals(context)
        ),
        root_path=web.root_path,
        ssl_keyfile=web.ssl_keyfile,
        ssl_certfile=web.ssl_certfile,
        ssl_ca_certs=web.ssl_ca_certs,
        ssl_cert_reqs=web.ssl_cert_reqs,
        ssl_ciphers=web.ssl_ciphers or "TLSv1",  # uvicorn's default
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        lifespan="off",
        proxy_headers=False,  # a forwarded request is not local; see auth
        server_header=False,
        timeout_keep_alive=server.keep_alive_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=max(1, int(LAST_WRITES_S)),
    )
    try:
        config.load()
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"Got ssl_certfile = {web.ssl_certfile!r}, which cannot be used: {error}") from error
    return HttpServer(config, on_listening, context.forms.close, bounds)


def _refusals(context: Context) -> Refusals | None:
    """Return the refusals without a task; ``None`` if a line is to be logged for each request."""
    web = context.config.web
    if web.log_requests:
        return None
    return Refusals(
        paths=ROOM_PATHS,
        check_room=context.fleet.check_room,
        callers=context.callers,
        gate=context.gate,
        retries=context.retries,
        count=context.metrics.count_response,
        monotonic_s=context.monotonic_s,
        names_all=web.request_id_headers,
    )


def connection_bounds(config: ServerConfig) -> ConnectionBounds:
    """Return the bounds of connections, fewer than the files that this process may open."""
    room = config.max_connections
    if (num_files := max_open_files()) is not None:
        room = max(1, num_files - FILES_BESIDE_CONNECTIONS - FILES_PER_ENGINE * config.fleet.num_places)
        if room < config.max_connections:
            logger.warning("fewer_connections max_connections=%d open_files=%d", room, num_files)
    max_connections = min(room, config.max_connections)
    per_address = min(config.max_connections_per_address, config.max_connections)
    return ConnectionBounds(
        max_connections=max_connections,
        # Callers over a Unix socket have no address. Of fewer connections, an address has the same share.
        max_per_address=max_connections
        if config.web.uds
        else max(1, per_address * max_connections // config.max_connections),
        header_timeout_s=config.header_timeout_s,
        body_timeout_s=config.body_timeout_s,
        write_timeout_s=config.write_timeout_s,
    )
