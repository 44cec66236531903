"""Options that several commands share, and the configuration they make.

Defaults are the configuration's own: nothing is decided twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manylora.cli.options.panels import panel
from manylora.cli.options.values import parse_size
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
Tokenizer = Annotated[str | None, panel(_MODEL, "Folder of the tokenizer, if it is not the model's own.")]
Revision = Annotated[str | None, panel(_MODEL, "Revision on the hub.")]
Dtype = Annotated[
    str,
    panel(
        _MODEL,
        "float32, bfloat16, float16 or auto: float32 on CPU, the checkpoint's 16-bit type on GPU.",
        metavar="TYPE",
    ),
]
Device = Annotated[
    str, panel(_MODEL, "Where the model runs; auto is the GPU if there is one.", metavar="auto|cpu|cuda")
]
MaxModelLen = Annotated[
    int | None,
    panel(_MODEL, "Longest prompt plus answer in tokens; by default what the model allows."),
]
Seed = Annotated[int, panel(_MODEL, "Seed of requests that bring none.")]
LoraKernel = Annotated[
    str,
    panel(
        _MODEL,
        "Implementation of the adapters' arithmetic; padded and ragged need a GPU.",
        metavar="auto|grouped|naive|padded|ragged|reference",
    ),
]
AdapterDtype = Annotated[
    str,
    panel(
        _ADAPTERS,
        "Type adapters are kept in on a CPU: auto is the narrowest that holds each exactly.",
        metavar="auto|float32|bfloat16|float16",
    ),
]
LoraModules = Annotated[
    list[str] | None,
    panel(
        _ADAPTERS,
        'An adapter by name; also as JSON: \'{"name": "sql", "path": "/adapters/sql"}\'. Repeatable.',
        "--lora-modules",
        metavar="NAME=PATH",
    ),
]
LoraDirs = Annotated[
    list[str] | None,
    panel(
        _ADAPTERS, "Load every adapter folder below DIR, named after itself. Repeatable.", "--lora-dir", metavar="DIR"
    ),
]
Memory = Annotated[
    str | None,
    panel(
        _MEMORY,
        "Memory for KV, prefixes and adapters together, as 2GiB. By default 1GiB on CPU, what is left on GPU.",
        metavar="SIZE",
    ),
]
NumPages = Annotated[int | None, panel(_MEMORY, "The same as a number of pages, for experiments.")]
TrustRemoteCode = Annotated[
    bool,
    panel(_MODEL, "Let the checkpoint run code of its own.", "--trust-remote-code"),
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
