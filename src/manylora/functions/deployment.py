"""The functions of a platform and their backbones, as data: read from TOML, sent over REST, kept in the ledger.

::

    [backbones.llama]
    model = "/models/llama"

    [functions.sql]
    backbone = "llama"
    adapter = "/adapters/sql"
    tenant = "acme"
    slo-s = 1.0

Every value is bounded, and an error names the table and the field.
"""

from __future__ import annotations

import os
import stat
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from manylora.core.adapters.folder import CONFIG_FILE, WEIGHT_FILES
from manylora.core.adapters.sources import open_folder
from manylora.core.errors import AdapterError, ConfigError
from manylora.functions.decisions.billing import PriceList
from manylora.serving.metrics.status_report import FunctionName

__all__ = [
    "MAX_FUNCTIONS",
    "BackboneSpec",
    "Deployment",
    "FunctionSpec",
    "NodeSpec",
    "check_folder",
    "check_function",
    "read_deployment",
    "read_prices_file",
]

MIB = 2**20
MAX_FUNCTIONS = 100_000
MAX_BACKBONES = 64
MAX_FILE_BYTES = 64 * MIB

PathText = Annotated[str, Meta(min_length=1, max_length=1024, pattern=r"^[^\x00]+$")]
Caller = Annotated[str, Meta(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._@+-]*$")]
Seconds = Annotated[float, Meta(ge=0.0, le=1e7)]
Bytes = Annotated[int, Meta(ge=1, le=2**50)]

T = TypeVar("T")


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab", omit_defaults=True):
    """A table of the file; also the body of a request."""


class BackboneSpec(_Table, frozen=True, kw_only=True):
    """A base that functions share."""

    model: PathText  # folder of the checkpoint, or ``demo``
    dtype: str = "auto"  # type of the model's numbers: ``auto`` or ``float32``
    # Numbers that the weights are kept in, as ``--base-dtype`` of a server.
    base_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"] = "auto"


class FunctionSpec(_Table, frozen=True, kw_only=True):
    """A function."""

    backbone: FunctionName  # name of its base
    adapter: PathText  # folder of its adapter
    tenant: Annotated[str, Meta(max_length=128, pattern=r"^[A-Za-z0-9._/@+-]*$")] = ""  # the account that pays
    # Tenants that may call it, and API keys, each as ``key-`` and the first 12 hexadecimal digits of its SHA-256; empty
    # for any key of the server.
    callers: Annotated[tuple[Caller, ...], Meta(max_length=1024)] = ()
    # Objective for the first token of a warm request, in seconds.
    slo_s: Annotated[float, Meta(gt=0.0, le=3600.0)] = 2.0
    max_batch: Annotated[int, Meta(ge=1, le=4096)] = 16  # most requests that leave as one batch
    max_waiting: Annotated[int, Meta(ge=1, le=65536)] = 256  # most requests that wait; further ones are refused
    kv_bytes: Bytes = 64 * MIB  # its pool of pages
    adapter_bytes: Bytes = 64 * MIB  # host memory for its adapter's packed weights
    # Seconds without a request after which its process ends; ``None`` for the node's.
    keep_alive_s: Seconds | None = None
    # Threads of its engine; ``None`` for the machine's cores.
    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    # Most address space that its process may add to the zygote's; ``None`` for no limit.
    memory_bytes: Bytes | None = None
    cgroup_bytes: Bytes | None = None  # most memory of a control group of its own; ``None`` for no limit
    # Most processors of the group; ``None`` for no limit.
    cgroup_cpus: Annotated[float, Meta(gt=0.0, le=4096.0)] | None = None

    def may_call(self, caller: str) -> bool:
        """Whether a caller, named as in ``callers``, may call it."""
        return not self.callers or caller in self.callers


class NodeSpec(_Table, frozen=True, kw_only=True):
    """The limits of every node."""

    # Memory for backbones, zygotes and functions; ``None`` for most of the memory that is available.
    memory_bytes: Bytes | None = None
    # Seconds without a request after which a function's process ends; ``None`` for as long as the rent of the machine
    # is worth the start that it saves.
    keep_alive_s: Seconds | None = None
    preload: bool = True  # whether the controller decides what is held ready


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """All tables of a file."""

    backbones: dict[str, BackboneSpec]
    functions: dict[str, FunctionSpec]
    node: NodeSpec
    prices: PriceList


def read_deployment(path: Path) -> Deployment:
    """Read a file of functions.

    ``ConfigError`` if the file cannot be read, or a value is wrong; the message names the table and the field.
    """
    tables = _tables(path)
    backbones = _named(tables.get("backbones", {}), "backbones", BackboneSpec, MAX_BACKBONES)
    functions = _named(tables.get("functions", {}), "functions", FunctionSpec, MAX_FUNCTIONS)
    folder = path.resolve().parent  # paths may be relative to the file
    backbones = {
        name: one if one.model == "demo" else msgspec.structs.replace(one, model=str(folder / one.model))
        for name, one in backbones.items()
    }
    functions = {
        name: msgspec.structs.replace(one, adapter=str(folder / one.adapter)) for name, one in functions.items()
    }
    for name, function in functions.items():
        check_function(name, function, backbones)
    return Deployment(
        backbones=backbones,
        functions=functions,
        node=_converted(tables.get("node", {}), "node", NodeSpec),
        prices=_prices(tables.get("prices", {})),
    )


def check_function(name: str, function: FunctionSpec, backbones: Mapping[str, BackboneSpec]) -> None:
    """Raise ``ConfigError`` unless a function may have its name and its adapter, and there is its backbone."""
    _converted(name, f"functions.{name[:128]!r}", FunctionName)
    if function.backbone not in backbones:
        raise ConfigError(
            f"Got functions.{name}: backbone = {function.backbone!r}, expected one of {', '.join(backbones) or 'none'}"
        )
    if name in backbones:
        raise ConfigError(f"Got functions.{name}, the name of a backbone, expected another name")
    adapter = os.path.normpath(function.adapter) + os.sep
    for backbone, spec in backbones.items():
        if spec.model != "demo" and adapter.startswith(os.path.normpath(spec.model) + os.sep):
            raise ConfigError(
                f"Got functions.{name}: adapter = {function.adapter!r}, in the folder of the model of backbone "
                f"{backbone!r}, which every function on it reads; expected another folder"
            )


def check_folder(name: str, function: FunctionSpec) -> None:
    """Raise ``ConfigError`` unless the adapter's files are on this machine, and a function's process can read them."""
    try:
        folder = open_folder(name, Path(function.adapter))
        for file in (CONFIG_FILE, folder.find_weights()):
            folder.open(file, sys.maxsize).close()
        if os.geteuid() == 0:  # the process is another user
            _check_open_to_all(name, Path(function.adapter))
    except (AdapterError, OSError) as error:
        reason = error.reason if isinstance(error, AdapterError) else error.strerror
        raise ConfigError(
            f"Got functions.{name}: adapter = {function.adapter!r}, which cannot be read: {reason}"
        ) from None


def _check_open_to_all(name: str, folder: Path) -> None:
    for file in (CONFIG_FILE, *WEIGHT_FILES):
        path = folder / file
        if path.exists() and not path.stat().st_mode & stat.S_IROTH:
            raise AdapterError(name, f"{file} is not readable by all users")
    for parent in (folder.resolve(), *folder.resolve().parents):
        if not parent.stat().st_mode & stat.S_IXOTH:
            raise AdapterError(name, f"{str(parent)!r} is not open to all users")


def read_prices_file(path: Path) -> PriceList:
    """Return the prices in a file of functions; raise ``ConfigError`` like ``read_deployment``."""
    return _prices(_tables(path).get("prices", {}))


def _tables(path: Path) -> dict[str, Any]:
    got = f"Got config = {str(path)!r}"
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{got}, which has more than {MAX_FILE_BYTES} bytes")
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{got}, which cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{got}, which is not TOML: {error}") from None
    if unknown := sorted(set(tables) - {"backbones", "functions", "node", "prices"}):
        raise ConfigError(f"{got} with the table {unknown[0]!r}, expected backbones, functions, node or prices")
    return tables


def _named(table: object, where: str, kind: type[T], most: int) -> dict[str, T]:
    if not isinstance(table, dict) or len(table) > most:
        raise ConfigError(f"Got {where}, expected at most {most} tables by name")
    found = {}
    for name, value in table.items():
        _converted(name, f"{where}.{name[:128]!r}", FunctionName)
        found[name] = _converted(value, f"{where}.{name}", kind)
    return found


def _prices(table: Any) -> PriceList:
    if not isinstance(table, dict):
        raise ConfigError("Got prices, expected a table")
    found: PriceList = _converted({key.replace("-", "_"): value for key, value in table.items()}, "prices", PriceList)
    return found


def _converted(value: Any, where: str, kind: Any) -> Any:
    try:
        if kind is PriceList and (unknown := sorted(set(value) - set(PriceList.__dataclass_fields__))):
            raise ConfigError(
                f"Got {where}: {unknown[0]!r}, expected one of {', '.join(PriceList.__dataclass_fields__)}"
            )
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"Got {where}: {error}") from None
