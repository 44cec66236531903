"""`manylora functions`: isolated functions, on one machine or on many; `manylora backbone`: a base for them."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from manylora.cli.options.fields import Chosen, flags_of, with_flags
from manylora.cli.options.values import LogLevel, ModelArgument, log_to_stderr, parse_address, resolve_model
from manylora.cli.views.functions_view import bill_table, functions_table, starts_table
from manylora.cli.views.terminal import note, out
from manylora.core.config import ModelConfig, ServerConfig
from manylora.core.errors import ConfigError
from manylora.core.options import option
from manylora.core.server_config import FleetConfig
from manylora.functions.controller.credentials import TOKEN, read_token, tls_files
from manylora.functions.wire import AgentSetup, ControllerSetup, TlsFiles

if TYPE_CHECKING:
    from manylora.functions.controller.client import ControllerClient

__all__ = ["ControllerOptions", "backbone", "functions_app"]

functions_app = typer.Typer(help="Serve adapters as isolated functions over shared bases.", no_args_is_help=True)

T = TypeVar("T")

_option = partial(option, panel="Options")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerOptions:
    """The state of a controller, and how to reach it.

    ``ConfigError`` if some of the files for TLS are given, and others are not.
    """

    state_dir: str = _option("functions-state", metavar="DIR", help="Folder of the ledger, the token and the sockets.")
    controller: str | None = _option(
        None, metavar="URL", help="Address of the controller; by default that of the state folder."
    )
    token_file: str | None = _option(
        None, metavar="FILE", envvar="MANYLORA_TOKEN_FILE", help="File with the controller's token."
    )
    tls_cert: str | None = _option(
        None, metavar="FILE", help="Certificate of this side, for TLS between controller and agents."
    )
    tls_key: str | None = _option(None, metavar="FILE", help="Private key of --tls-cert.")
    tls_ca: str | None = _option(None, metavar="FILE", help="Authority of the other side's certificate.")

    @property
    def folder(self) -> Path:
        """The folder of state."""
        return Path(self.state_dir).resolve()

    def make_folder(self) -> str:
        """Make the folder of state, for this user alone, and return it."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return str(self.folder)

    def token(self) -> str | None:
        """Return the token of ``token_file``."""
        return None if self.token_file is None else read_token(Path(self.token_file))

    def tls(self) -> TlsFiles | None:
        """Return the files of TLS, if there are any."""
        return tls_files(self.tls_cert, self.tls_key, self.tls_ca)

    def client(self) -> ControllerClient:
        """Return a client of the controller at an address, by default of the one that uses the folder of state."""
        from manylora.functions.controller.client import ControllerClient

        if self.controller is not None:
            return ControllerClient(parse_address(self.controller), self.token(), self.tls())
        try:
            url = json.loads((self.folder / "controller.json").read_text())["url"]
            token = self.folder / TOKEN
            own = read_token(token) if token.exists() else None
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"Got state_dir = {self.state_dir!r}, where no functions are served: {error}") from None
        return ControllerClient(str(url), self.token() or own, self.tls())


_HTTP = tuple(flag for flag in flags_of(ServerConfig) if flag.known.panel in ("HTTP", "Tenants"))
_RAY = flags_of(FleetConfig, only=("ray", "ray_resources", "ray_labels"), panel="Ray")
_CONTROLLER = flags_of(ControllerOptions)
_SIDE = tuple(flag for flag in _CONTROLLER if flag.field.name != "controller")
"""Options of a controller, and of an agent, which must be told its controller."""
_PANELS = ("HTTP", "Tenants", "Ray")

ConfigFile = Annotated[Path, typer.Option("--config", metavar="FILE", help="TOML with backbones, functions, prices.")]
NodeName = Annotated[str | None, typer.Option(help="This machine's name; by default its host name.")]


@functions_app.command(name="serve")
@with_flags((*_HTTP, *_RAY, *_SIDE), panels=_PANELS)
def serve_functions(config: ConfigFile, chosen: Chosen, node: NodeName = None, log_level: LogLevel = "info") -> None:
    """Run controller, agent, backbones and functions on this machine, with OpenAI's API in front.

    A function is a model name. It sleeps until a request comes, and costs nothing meanwhile.

    With --ray, an agent runs on every node of the cluster, and needs a token or certificates there.

    [bold]manylora functions serve --config functions.toml --port 8000[/bold]
    """
    log_to_stderr(log_level, "functions")
    from manylora.functions.agent.cluster import supervise_cluster  # imports the web framework
    from manylora.functions.agent.supervise import supervise

    own, server = chosen.make(ControllerOptions), chosen.make(ServerConfig, fleet=FleetConfig())
    fleet, tls = chosen.make(FleetConfig), own.tls()
    if fleet.ray is None and tls is not None:
        raise ConfigError("Got tls_cert without ray, where controller and agent share a machine")
    if fleet.ray is not None and node is not None:
        raise ConfigError(f"Got node = {node!r} with ray, where each node has the name that the cluster gives it")
    note(f"starting functions of {config}; the address follows when they are served")
    shared: dict[str, Any] = {
        "token_file": None if own.token_file is None else Path(own.token_file),
        "log_level": logging.getLogger().getEffectiveLevel(),
    }
    if fleet.ray is None:
        sys.exit(supervise(config, own.folder, server, node=node or socket.gethostname(), **shared))
    sys.exit(supervise_cluster(config, own.folder, server, fleet, tls=tls, **shared))


@functions_app.command(name="controller")
@with_flags(_SIDE)
def controller_command(
    config: ConfigFile,
    chosen: Chosen,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that is not loopback needs a token or certificates.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 8100,
    log_level: LogLevel = "info",
) -> None:
    """Run the controller of several nodes, each with an agent."""
    log_to_stderr(log_level, "controller")
    from manylora.functions.controller.server import run_controller

    own = chosen.make(ControllerOptions)
    folder, token, tls = own.make_folder(), own.token(), own.tls()
    sys.exit(
        run_controller(ControllerSetup(config=str(config), folder=folder, token=token, tls=tls, host=host, port=port))
    )


@functions_app.command(name="agent")
@with_flags((*_HTTP, *_SIDE), panels=_PANELS)
def agent_command(
    controller: Annotated[str, typer.Option(metavar="URL", help="Address of the controller.")],
    chosen: Chosen,
    node: NodeName = None,
    log_level: LogLevel = "info",
) -> None:
    """Run the agent of this machine, which serves the functions that the controller gives it."""
    log_to_stderr(log_level, "agent")
    from manylora.functions.agent.agent import run_agent

    own = chosen.make(ControllerOptions)
    setup = AgentSetup(
        node=node or socket.gethostname(),
        controller=parse_address(controller),
        folder=own.make_folder(),
        token=own.token(),
        tls=own.tls(),
        server=chosen.make(ServerConfig, fleet=FleetConfig()),
    )
    sys.exit(run_agent(setup))


@functions_app.command(name="ps")
@with_flags(_CONTROLLER)
def list_functions(
    chosen: Chosen,
    all_functions: Annotated[bool, typer.Option("--all", help="Also those that have never been awake.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the controller's answer.")] = False,
) -> None:
    """Show functions: state, memory, and the last cold start by its parts."""
    overview = _ask(chosen, lambda client: client.overview())
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(overview)).decode() + "\n")
    else:
        out.print(functions_table(overview, now=time.time(), with_all=all_functions))
        out.print(starts_table(overview))


@functions_app.command(name="logs")
@with_flags(_CONTROLLER)
def show_lines(name: Annotated[str, typer.Argument(metavar="NAME", help="The function.")], chosen: Chosen) -> None:
    """Show the last lines that a function has written, errors of its engine and its libraries among them."""
    for line in _ask(chosen, lambda client: client.logs(name)):
        sys.stdout.write(f"{line}\n")


def _ask(chosen: Chosen, call: Callable[[ControllerClient], Awaitable[T]]) -> T:
    async def ask() -> T:
        async with chosen.make(ControllerOptions).client() as client:
            return await call(client)

    return asyncio.run(ask())


@functions_app.command(name="bill")
@with_flags(flags_of(ControllerOptions, only=("state_dir",)))
def bill_command(
    chosen: Chosen,
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
    from manylora.functions.controller.server import LEDGER
    from manylora.functions.controller.store import read_ledger, read_prices
    from manylora.functions.deployment import read_prices_file

    ledger = chosen.make(ControllerOptions).folder / LEDGER
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


def _nanoseconds(text: str | None, default: int) -> int:
    if text is None:
        return default
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1e9)
    except ValueError:
        raise typer.BadParameter(f"Got {text!r}, expected a date and time as 2026-01-31T12:00") from None


def backbone(
    model: ModelArgument,
    socket: Annotated[Path, typer.Option(help="Unix socket to make, for this user alone.", show_default=False)],
    dtype: Annotated[str, typer.Option(metavar="auto|float32", help="Type of the model's numbers.")] = "auto",
    base_dtype: Annotated[
        str,
        typer.Option(metavar="auto|float32|bfloat16|float16|int8|int4", help="Numbers that the weights are kept in."),
    ] = "auto",
    log_level: LogLevel = "info",
) -> None:
    """Load a base once on the CPU, seal it in memory, and hand it out over a socket until SIGTERM or Ctrl-C.

    The memory cannot be written by any process, this one included. It lives until its last reader ends. Once it is
    sealed, the process gives up the libraries that loaded it.
    """
    log_to_stderr(log_level, "backbone")
    from manylora.execution.model.base_weights import share_weights
    from manylora.execution.model.freeze import load_weights
    from manylora.execution.model.load import load_model
    from manylora.functions.processes.holder import BackboneSocket, become_holder
    from manylora.functions.processes.messages import Backbone

    folder, served_name, _ = resolve_model(model, None, {})
    config = ModelConfig(
        model=_local_folder(folder), served_model_name=served_name, dtype=dtype, base_dtype=base_dtype, device="cpu"
    )

    with BackboneSocket(socket):  # callers wait, and another backbone is refused before the base is loaded
        _, weights = load_weights(config, load_model)
        shared = share_weights(weights)
        assert shared is not None, "weights on a CPU are in memory that can be shared"
    encoded = msgspec.msgpack.encode(Backbone(model=config, base=shared))
    become_holder(socket, encoded, shared.file, f"serving {shared.num_bytes} bytes of {folder} on {socket}")


def _local_folder(folder: str) -> str:
    """Return a model's folder; a name of the hub is fetched to its cache, since functions have no network."""
    if Path(folder).is_dir():
        return str(Path(folder).resolve())
    from huggingface_hub import snapshot_download

    return str(snapshot_download(folder, allow_patterns=["*.json", "*.safetensors", "*.model"]))
