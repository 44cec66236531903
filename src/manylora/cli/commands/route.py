"""`manylora route`: a router in front of servers with OpenAI's API."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from manylora.cli.options.config_file import chosen_again, config_option
from manylora.cli.options.fields import Chosen, flags_of, with_flags
from manylora.cli.options.values import LogLevel, log_to_stderr
from manylora.core.plugins import options_of
from manylora.core.routing import ROUTERS
from manylora.core.server_config import TlsConfig, TraceConfig
from manylora.route.config import ProxyConfig

__all__ = ["route"]

_FLAGS = flags_of(ProxyConfig, TlsConfig, TraceConfig, *options_of(ROUTERS).values())


@with_flags(_FLAGS, panels=("Backends", "Routing", "Health", "HTTP", "Tenants", "Debugging"))
def route(
    context: typer.Context,
    chosen: Chosen,
    config: Annotated[str | None, config_option(_FLAGS, "Read options from a TOML file, by the same names.")] = None,
    log_level: LogLevel = "info",
) -> None:
    """Route requests over servers that run already: manylora, vLLM, SGLang.

    The router reads what the servers report, keeps requests for one adapter together while the load allows it, and
    passes answers on byte by byte. A request goes to another server if the first one fails before its first byte.

    [bold]manylora route --backend http://gpu1:8000 --backend http://gpu2:8000 --port 9000[/bold]

    [bold]manylora route --backend dns:vllm.default.svc:8000 --manage-adapters[/bold]
    """
    made = _made(chosen)

    def read() -> ProxyConfig:
        assert config is not None
        return _made(chosen_again(context, config, _FLAGS))

    log_to_stderr(log_level, "route")
    from manylora.route.serve import run  # imports the web framework

    sys.exit(run(made, environment=os.environ, file=config, read=read))


def _made(chosen: Chosen) -> ProxyConfig:
    return chosen.make(ProxyConfig, tls=chosen.make(TlsConfig), traces=chosen.make(TraceConfig))
