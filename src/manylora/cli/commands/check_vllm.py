"""`manylora check-vllm`: whether the plug-in for vLLM is active, here and in a running server."""

from __future__ import annotations

import os
import re
import urllib.request
from http.client import HTTPException
from importlib.metadata import entry_points
from typing import Annotated

import typer

from manylora.cli.options.values import parse_address
from manylora.cli.views.terminal import fail, out
from manylora.core.errors import ConfigError
from manylora.vllm.plugin import CONNECTOR, check_release

__all__ = ["check_vllm"]

TIMEOUT_S = 5.0
MAX_BYTES = 64 * 2**20
GROUP, NAME = "vllm.general_plugins", "manylora"
FLAG = f"""--kv-transfer-config '{{"kv_connector": "{CONNECTOR}", "kv_role": "kv_both"}}'"""
_SAMPLE = re.compile(r"^manylora:([a-z_]+)(?:_total)?\{([^\n]*)\} (\S+)$", re.MULTILINE)


def check_vllm(
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="Address of a running vLLM; without it, this environment.")
    ] = None,
) -> None:
    """Say whether manylora's plug-in for vLLM can run in this environment, or what it does in a running server.

    [bold]manylora check-vllm http://127.0.0.1:8000[/bold]
    """
    if url is not None:
        _check_server(parse_address(url))
        return
    try:
        out.print(f"vLLM {check_release()}: known")
    except ImportError as error:
        fail(f"vLLM is not installed in this environment ({error}); install manylora into vLLM's", code=1)
    except ConfigError as error:
        fail(str(error), code=1)
    if NAME not in {point.name for point in entry_points(group=GROUP)}:
        fail(f"the entry point {NAME!r} of {GROUP} is missing: install manylora with pip", code=1)
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and NAME not in chosen.split(","):
        fail(f"VLLM_PLUGINS is {chosen!r}: add {NAME!r} to it, or unset it", code=1)
    out.print(f"The plug-in is installed. Switch it on with: vllm serve MODEL --enable-lora {FLAG}")


def _check_server(url: str) -> None:
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as reply:
            text = reply.read(MAX_BYTES).decode(errors="replace")
    except (OSError, HTTPException) as error:
        fail(f"no metrics at {url}: {error}", code=1)
    samples = _SAMPLE.findall(text)
    if not samples:
        fail(f"the server at {url} runs without the plug-in; switch it on with {FLAG}", code=1)
    levels = {"device": 0, "host": 0}
    for name, labels, value in samples:
        if name == "plugin_info":
            options = [one for one in re.findall(r'(\w+)="([^"]*)"', labels) if one[0] not in ("model_name", "engine")]
            out.print(f"active; options given: {dict(options) or 'none'}")
        elif name == "lora_adapter_loaded":
            level = re.search(r'level="(\w+)"', labels)
            levels[level[1] if level else ""] += 1
        elif not name.endswith("_created"):
            out.print(f"{name.removesuffix('_total').replace('_', ' ')}: {float(value):g}")
    out.print(f"adapters in slots: {levels['device']}, in host memory alone: {levels['host']}")
