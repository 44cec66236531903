"""Values as people write them on a command line: sizes, addresses, adapters by name, folders of adapters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from urllib.parse import urlsplit

from manylora.adapters.config import CONFIG_FILE
from manylora.errors import ConfigError

__all__ = [
    "adapters_below",
    "collect_adapters",
    "parse_adapter",
    "parse_address",
    "parse_setting",
    "parse_size",
    "repeat_option",
]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Read a size in bytes: `2GiB`, `512MiB`, `1.5GB`, `4g` (as `4GiB`) or plain bytes.

    Raises:
        ConfigError: It is none of these.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ConfigError(f"Got a size of {text!r}, expected something like 2GiB, 512MiB or a number of bytes")
    number, prefix, binary = match.groups()
    is_decimal = bool(prefix) and not binary and text.strip().lower().endswith("b")
    base = 1000 if is_decimal else 1024
    return int(float(number) * base ** " kmgt".index(prefix.lower() or " "))


def parse_setting(flag: str, text: str) -> tuple[str, str]:
    """Read `KEY=VALUE`.

    Raises:
        ConfigError: There is no `=`.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"Got {flag} {text!r}, expected KEY=VALUE")
    return key.strip(), value.strip()


def parse_address(url: str) -> str:
    """Return a server's address without a slash at its end; `host:port` will do, and clients' `/v1` does no harm.

    Raises:
        ConfigError: That is no address.
    """
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or not whole.isascii() or any(character.isspace() for character in whole):
        raise ConfigError(f"Got URL = {url!r}, expected something like http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def parse_adapter(text: str) -> tuple[str, str]:
    """Read `name=path`, or the JSON object that vLLM's `--lora-modules` takes.

    Raises:
        ConfigError: It is neither.
    """
    if text.lstrip().startswith("{"):
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"Got --lora-modules {text!r}, which is not JSON: {error}") from None
        name, path = fields.get("name"), fields.get("path")
        unknown = sorted(fields.keys() - {"name", "path", "base_model_name"})
        if unknown:
            raise ConfigError(f"Got --lora-modules {text!r} with unknown {unknown}, expected name and path")
    else:
        name, _, path = text.partition("=")
    if not (isinstance(name, str) and name.strip() and isinstance(path, str) and path.strip()):
        raise ConfigError(f'Got --lora-modules {text!r}, expected name=path or {{"name": ..., "path": ...}}')
    return name, str(Path(path).expanduser())


def adapters_below(folder: str) -> dict[str, str]:
    """Find the adapters directly below a folder: every folder with an `adapter_config.json`, named after itself.

    Raises:
        ConfigError: There is no such folder, or it is an adapter itself.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ConfigError(f"Got --lora-dir {folder!r}, expected a folder that exists")
    if (root / CONFIG_FILE).exists():
        raise ConfigError(
            f"Got --lora-dir {folder!r}, which is an adapter: expected the folder it is in, "
            f"or --lora-modules {root.resolve().name}={folder}"
        )
    return {config.parent.name: str(config.parent) for config in sorted(root.glob(f"*/{CONFIG_FILE}"))}


def collect_adapters(modules: Iterable[str], folders: Iterable[str]) -> dict[str, str]:
    """Merge `--lora-modules` and the contents of every `--lora-dir` into paths by name.

    Raises:
        ConfigError: One name stands for two paths.
    """
    adapters: dict[str, str] = {}
    found = [parse_adapter(text) for text in modules]
    for folder in folders:
        found.extend(adapters_below(folder).items())
    for name, path in found:
        other = adapters.setdefault(name, path)
        if Path(other).resolve() != Path(path).resolve():
            raise ConfigError(f"Got two adapters named {name!r}: {other} and {path}")
    return adapters


def repeat_option(
    args: Iterable[str], names: Collection[str], is_value: Callable[[str], bool] = lambda arg: not arg.startswith("-")
) -> list[str]:
    """Let an option be given once before several values: it is repeated before each of them.

    Args:
        args: A command line.
        names: The options that take several values.
        is_value: Tells their values from other arguments.
    """
    spread: list[str] = []
    option: str | None = None
    for arg in args:
        if option is not None and is_value(arg):
            if spread[-1] != option:
                spread.append(option)
        else:
            option = arg if arg in names else None
        spread.append(arg)
    return spread
