"""`manylora backbone`: hold a base, sealed in memory, for engines and functions of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from manylora.cli.options.values import LogLevel, ModelArgument, log_to_stderr, resolve_model
from manylora.core.config import ModelConfig

__all__ = ["backbone"]


def backbone(
    model: ModelArgument,
    socket: Annotated[Path, typer.Option(help="Unix socket to make, for this user alone.", show_default=False)],
    dtype: Annotated[str, typer.Option(metavar="auto|float32", help="Type of the weights.")] = "auto",
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
    config = ModelConfig(model=_local(folder), served_model_name=served_name, dtype=dtype, device="cpu")

    with BackboneSocket(socket):  # callers wait, and another backbone is refused before the base is loaded
        _, weights = load_weights(config, load_model)
        shared = share_weights(weights)
        assert shared is not None, "weights on a CPU are in memory that can be shared"
    encoded = msgspec.msgpack.encode(Backbone(model=config, base=shared))
    become_holder(socket, encoded, shared.file, f"serving {shared.num_bytes} bytes of {folder} on {socket}")


def _local(folder: str) -> str:
    """Return a model's folder; that of a hub's name in its cache, since functions have no network."""
    if Path(folder).is_dir():
        return str(Path(folder).resolve())
    from huggingface_hub import snapshot_download

    return str(snapshot_download(folder, allow_patterns=["*.json", "*.safetensors", "*.model"]))
