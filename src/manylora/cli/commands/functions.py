"""`manylora functions`: isolated functions of one base each, on one machine or on many."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manylora.cli.options.fields import Chosen, flags_of, with_flags
from manylora.cli.options.values import LogLevel, log_to_stderr, parse_address
from manylora.cli.views.functions_view import bill_table, functions_table, starts_table
from manylora.cli.views.terminal import note, out
from manylora.core.config import ServerConfig
from manylora.core.errors import ConfigError
from manylora.core.server_config import FleetConfig
from manylora.functions.wire import AgentSetup, ControllerSetup, Overview

if TYPE_CHECKING:
    from manylora.functions.controller.client import ControllerClient

__all__ = ["functions_app"]

_FLAGS = tuple(flag for flag in flags_of(ServerConfig) if flag.known.panel == "HTTP")
_RAY_FLAGS = flags_of(FleetConfig, only=("ray", "ray_resources", "ray_labels"), panel="Ray")
_PANELS = ("HTTP", "Ray")

functions_app = typer.Typer(help="Serve adapters as isolated functions over shared bases.", no_args_is_help=True)

ConfigFile = Annotated[Path, typer.Option("--config", metavar="FILE", help="TOML with backbones, functions, prices.")]
StateFolder = Annotated[
    Path, typer.Option("--state-dir", metavar="DIR", help="Folder of the ledger, the token and the sockets.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file", metavar="FILE", envvar="MANYLORA_TOKEN_FILE", help="File with the controller's token."
    ),
]
ControllerUrl = Annotated[
    str | None,
    typer.Option("--controller", metavar="URL", help="Address of the controller; by default that of the state folder."),
]
TlsCert = Annotated[
    str | None,
    typer.Option("--tls-cert", metavar="FILE", help="Certificate of this side, for TLS between controller and agents."),
]
TlsKey = Annotated[str | None, typer.Option("--tls-key", metavar="FILE", help="Private key of --tls-cert.")]
TlsCa = Annotated[
    str | None,
    typer.Option("--tls-ca", metavar="FILE", help="Authority of the other side's certificate."),
]
STATE = Path("functions-state")


@functions_app.command(name="serve")
@with_flags((*_FLAGS, *_RAY_FLAGS), panels=_PANELS)
def serve_functions(
    config: ConfigFile,
    chosen: Chosen,
    state_dir: StateFolder = STATE,
    node: Annotated[str | None, typer.Option(help="This machine's name; by default its host name.")] = None,
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    log_level: LogLevel = "info",
) -> None:
    """Run controller, agent, backbones and functions on this machine, with OpenAI's API in front.

    A function is a model name. It sleeps until a request comes, and costs nothing meanwhile.

    With --ray, an agent runs on every node of the cluster, and needs a token or certificates there.

    [bold]manylora functions serve --config functions.toml --port 8000[/bold]
    """
    log_to_stderr(log_level, "functions")
    from manylora.functions.agent.cluster import supervise_cluster  # imports the web framework
    from manylora.functions.agent.supervise import supervise
    from manylora.functions.controller.credentials import tls_files

    server, fleet = chosen.make(ServerConfig, fleet=FleetConfig()), chosen.make(FleetConfig)
    level = logging.getLogger().getEffectiveLevel()
    tls, folder = tls_files(tls_cert, tls_key, tls_ca), state_dir.resolve()
    if fleet.ray is None and tls is not None:
        raise ConfigError("Got tls_cert without ray, where controller and agent share a machine")
    if fleet.ray is not None and node is not None:
        raise ConfigError(f"Got node = {node!r} with ray, where each node has the name that the cluster gives it")
    note(f"starting functions of {config}; the address follows when they are served")
    if fleet.ray is None:
        sys.exit(
            supervise(config, folder, server, node=node or socket.gethostname(), token_file=token_file, log_level=level)
        )
    sys.exit(supervise_cluster(config, folder, server, fleet, token_file=token_file, tls=tls, log_level=level))


@functions_app.command(name="controller")
def controller_command(
    config: ConfigFile,
    state_dir: StateFolder = STATE,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that is not loopback needs a token or certificates.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 8100,
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    log_level: LogLevel = "info",
) -> None:
    """Run the controller of several nodes, each with an agent."""
    log_to_stderr(log_level, "controller")
    from manylora.functions.controller.credentials import tls_files
    from manylora.functions.controller.process import run_controller

    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    setup = ControllerSetup(
        config=str(config),
        folder=str(state_dir.resolve()),
        token=_token(token_file),
        tls=tls_files(tls_cert, tls_key, tls_ca),
        host=host,
        port=port,
    )
    sys.exit(run_controller(setup))


@functions_app.command(name="agent")
@with_flags(_FLAGS, panels=_PANELS)
def agent_command(
    controller: Annotated[str, typer.Option(metavar="URL", help="Address of the controller.")],
    chosen: Chosen,
    state_dir: StateFolder = STATE,
    node: Annotated[str | None, typer.Option(help="This machine's name; by default its host name.")] = None,
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    log_level: LogLevel = "info",
) -> None:
    """Run the agent of this machine, which serves the functions that the controller gives it."""
    log_to_stderr(log_level, "agent")
    from manylora.functions.agent.agent import run_agent
    from manylora.functions.controller.credentials import tls_files

    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    setup = AgentSetup(
        node=node or socket.gethostname(),
        controller=parse_address(controller),
        token=_token(token_file),
        tls=tls_files(tls_cert, tls_key, tls_ca),
        server=chosen.make(ServerConfig, fleet=FleetConfig()),
        folder=str(state_dir.resolve()),
    )
    sys.exit(run_agent(setup))


@functions_app.command(name="ps")
def list_functions(
    state_dir: StateFolder = STATE,
    controller: ControllerUrl = None,
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    all_functions: Annotated[bool, typer.Option("--all", help="Also those that have never been awake.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the controller's answer.")] = False,
) -> None:
    """Show functions: state, memory, and the last cold start by its parts."""
    import msgspec

    client = _client(state_dir, controller, token_file, tls_cert, tls_key, tls_ca)

    async def ask() -> Overview:
        async with client:
            return await client.overview()

    overview = asyncio.run(ask())
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(overview)).decode() + "\n")
    else:
        out.print(functions_table(overview, now=time.time(), with_all=all_functions))
        out.print(starts_table(overview))


@functions_app.command(name="logs")
def show_lines(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The function.")],
    state_dir: StateFolder = STATE,
    controller: ControllerUrl = None,
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
) -> None:
    """Show the last lines that a function has written, errors of its engine and its libraries among them."""
    client = _client(state_dir, controller, token_file, tls_cert, tls_key, tls_ca)

    async def ask() -> list[str]:
        async with client:
            return await client.logs(name)

    for line in asyncio.run(ask()):
        sys.stdout.write(f"{line}\n")


@functions_app.command(name="bill")
def bill_command(
    state_dir: StateFolder = STATE,
    by: Annotated[str, typer.Option(metavar="tenant|function", help="The lines of the bill.")] = "tenant",
    since: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="Begin, as 2026-01-31 or 2026-01-31T12:00; local time.")
    ] = None,
    until: Annotated[
        str | None, typer.Option("--to", metavar="TIME", help="End; usage of whole minutes counts.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    prices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML with a table `prices`; by default the controller's.")
    ] = None,
) -> None:
    """Show a bill from the ledger; exit code 1 if it does not add up to the machines' time.

    [bold]manylora functions bill --by tenant --from 2026-01-01 --to 2026-02-01 --csv[/bold]
    """
    if by not in ("tenant", "function"):
        raise typer.BadParameter(f"Got {by!r}, expected tenant or function", param_hint="--by")
    from manylora.functions.controller.bill import make_bill, write_csv
    from manylora.functions.controller.process import LEDGER
    from manylora.functions.controller.store import read_ledger, read_prices
    from manylora.functions.deployment import read_prices_file

    ledger = state_dir.resolve() / LEDGER
    rows = read_ledger(ledger, _nanoseconds(since, 0), _nanoseconds(until, 2**62))
    bill = make_bill(
        *rows, read_prices(ledger) if prices is None else read_prices_file(prices), by_tenant=by == "tenant"
    )
    if as_csv:
        write_csv(bill, by, sys.stdout)
    else:
        out.print(bill_table(bill, by))
    if not bill.adds_up:
        note(f"the ledger lacks {bill.difference_ns} ns of the machines' time")
        raise typer.Exit(1)


def _client(
    folder: Path, url: str | None, token_file: Path | None, cert: str | None, key: str | None, ca: str | None
) -> ControllerClient:
    """Return the controller at an address, or else the one that runs with a folder of state."""
    from manylora.functions.controller.client import ControllerClient
    from manylora.functions.controller.credentials import tls_files

    token, tls = _token(token_file), tls_files(cert, key, ca)
    if url is None:
        address, own = _local(folder)
        return ControllerClient(address, token or own, tls)
    return ControllerClient(parse_address(url), token, tls)


def _token(file: Path | None) -> str | None:
    from manylora.functions.controller.credentials import read_token

    return None if file is None else read_token(file)


def _local(folder: Path) -> tuple[str, str | None]:
    """Return the address of the controller that runs with a folder of state, and the token there, if there is one."""
    import json

    from manylora.functions.controller.credentials import TOKEN, read_token

    try:
        url = json.loads((folder / "controller.json").read_text())["url"]
        token = folder / TOKEN
        return str(url), read_token(token) if token.exists() else None
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"Got state_dir = {str(folder)!r}, where no functions are served: {error}") from None


def _nanoseconds(text: str | None, default: int) -> int:
    if text is None:
        return default
    if re.fullmatch(r"\d{1,12}", text):
        return int(text) * 10**9
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1e9)
    except ValueError:
        raise typer.BadParameter(f"Got {text!r}, expected a date and time as 2026-01-31T12:00") from None
