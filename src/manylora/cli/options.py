"""Options that several commands share, and the configuration they make.

Defaults are the configuration's own: nothing is decided twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manylora.cli.values import parse_size
from manylora.config import AdapterConfig, MemoryConfig, ModelConfig
from manylora.demo import demo_adapters, demo_model_path
from manylora.errors import ConfigError

__all__ = [
    "ADAPTER_DEFAULTS",
    "DEMO",
    "MEMORY_DEFAULTS",
    "MODEL_DEFAULTS",
    "AdapterDtype",
    "Device",
    "Dtype",
    "LoraDirs",
    "LoraKernel",
    "LoraModules",
    "MaxModelLen",
    "Memory",
    "ModelArgument",
    "NumPages",
    "Revision",
    "Seed",
    "Tokenizer",
    "parse_memory",
    "resolve_model",
]

DEMO = "demo"

_MODEL = "Model"
_ADAPTERS = "Adapters"
_MEMORY = "Memory"

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face checkpoint folder (or a hub name), or [bold]demo[/bold]: the small model in the package.",
        show_default=False,
    ),
]
Tokenizer = Annotated[
    str | None, typer.Option(help="Folder of the tokenizer, if it is not the model's own.", rich_help_panel=_MODEL)
]
Revision = Annotated[str | None, typer.Option(help="Revision on the hub.", rich_help_panel=_MODEL)]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="TYPE",
        help="float32, bfloat16, float16 or auto: float32 on CPU, the checkpoint's 16-bit type on GPU.",
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda", rich_help_panel=_MODEL)]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Longest prompt plus answer in tokens; by default what the model allows.", rich_help_panel=_MODEL
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of requests that bring none.", rich_help_panel=_MODEL)]
LoraKernel = Annotated[
    str,
    typer.Option(
        metavar="auto|grouped|naive|padded|ragged|reference",
        help="Implementation of the adapters' arithmetic; padded and ragged need a GPU.",
        rich_help_panel=_MODEL,
    ),
]
AdapterDtype = Annotated[
    str,
    typer.Option(
        metavar="auto|float32|bfloat16|float16",
        help="Type adapters are kept in on a CPU: auto is the narrowest that holds each exactly.",
        rich_help_panel=_ADAPTERS,
    ),
]
LoraModules = Annotated[
    list[str] | None,
    typer.Option(
        "--lora-modules",
        metavar="NAME=PATH",
        help='An adapter by name; also as JSON: \'{"name": "sql", "path": "/adapters/sql"}\'. Repeatable.',
        rich_help_panel=_ADAPTERS,
    ),
]
LoraDirs = Annotated[
    list[str] | None,
    typer.Option(
        "--lora-dir",
        metavar="DIR",
        help="Load every adapter folder below DIR, named after itself. Repeatable.",
        rich_help_panel=_ADAPTERS,
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory for KV, prefixes and adapters together, as 2GiB. By default 1GiB on CPU, what is left on GPU.",
        rich_help_panel=_MEMORY,
    ),
]
NumPages = Annotated[
    int | None, typer.Option(help="The same as a number of pages, for experiments.", rich_help_panel=_MEMORY)
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Let the checkpoint run code of its own.", rich_help_panel=_MODEL),
]

ADAPTER_DEFAULTS = AdapterConfig()
MODEL_DEFAULTS = ModelConfig(model=DEMO)
MEMORY_DEFAULTS = MemoryConfig()


def resolve_model(
    model: str, served_model_name: str | None, adapters: dict[str, str]
) -> tuple[str, str | None, dict[str, str]]:
    """Put the demo model's folder, name and adapters in place of `demo`; anything else stays as it is.

    Args:
        model: As typed.
        served_model_name: As typed.
        adapters: Paths by name, as typed; the demo brings its own when there are none.

    Returns:
        The checkpoint, its name in the API, and paths by name.

    Raises:
        ConfigError: It is a path, and nothing is there.
    """
    if model != DEMO:
        is_path = model.startswith(("/", "./", "../", "~"))
        if is_path and not Path(model).expanduser().is_dir():
            raise ConfigError(f"Got model = {model!r}, and there is no such folder")
        return str(Path(model).expanduser()) if is_path else model, served_model_name, adapters
    adapters = adapters or {name: str(path) for name, path in demo_adapters().items()}
    return str(demo_model_path()), served_model_name or DEMO, adapters


def parse_memory(text: str | None) -> int | None:
    """Read `--memory`."""
    return None if text is None else parse_size(text)
