"""Write ``options.md``, from the fields of the configuration and the table of vLLM's flags: run by `make docs`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manylora.cli.options.fields import PLUGINS, flags_of
from manylora.cli.options.vllm_flag_table import TRANSLATED, VLLM_FLAGS
from manylora.core.config import (
    AdapterConfig,
    EngineConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from manylora.core.options import Option, option_of
from manylora.core.plugins import options_of
from manylora.core.server_config import FleetConfig, PublishConfig, TlsConfig, TraceConfig, WebConfig
from manylora.lab.costs.workers import CpuWorkers
from manylora.lab.sim.scenario import Scenario
from manylora.lab.sim.setup import Setup
from manylora.route.config import ProxyConfig

__all__ = ["SAME_NAMES", "options_page", "vllm_section"]

_HEAD = """# Options

Made from the fields of the configuration by `make docs`; do not edit. A field without a flag is set from Python or in a
scenario. A file for `manylora serve --config` takes the names of flags (`step-target = 0.1`) and of fields
(`step_target_s = 0.1`), and `KEY=VALUE` as a table. `manylora.Engine` takes the fields of the first four sections
and `seed` as keywords.
"""

_SAME = """
    --allow-credentials --allowed-headers --allowed-methods --allowed-origins --api-key --block-size --chat-template
    --config --device --disable-fastapi-docs --download-dir --dtype --enable-log-requests
    --enable-prompt-tokens-details --enable-request-id-headers --enable-tokenizer-info-endpoint --generation-config
    --gpu-memory-utilization --host --log-level --lora-modules --max-cpu-loras --max-logprobs --max-loras
    --max-model-len --max-num-batched-tokens --max-num-seqs --otlp-traces-endpoint --port --reasoning-parser --revision
    --root-path --seed --served-model-name --ssl-ca-certs --ssl-cert-reqs --ssl-certfile --ssl-ciphers --ssl-keyfile
    --tokenizer --tool-call-parser --trust-remote-code --trust-request-chat-template --uds
"""
SAME_NAMES = tuple(_SAME.split())
"""Flags that mean the same here (``--config`` reads TOML)."""

_VLLM_HEAD = """## Flags of `vllm serve`

`manylora serve` takes a command line of vLLM: a flag works, or is ignored with a remark because it is not needed, or
stops the start with one line of why. Underscores count as hyphens. Several values may follow `--lora-modules`, and
`--served-model-name` and `--api-key` where the model comes before them.

| flag | here | why |
|---|---|---|
"""

_SECTIONS: tuple[tuple[str, type, str], ...] = (
    ("Model", ModelConfig, ""),
    ("Memory", MemoryConfig, ""),
    ("Scheduler", SchedulerConfig, "In scenarios and experiments: `[setup.scheduler]`."),
    ("Adapters", AdapterConfig, "In scenarios and experiments: `[setup.adapters]`."),
    ("Engine", EngineConfig, ""),
    ("Replicas", FleetConfig, ""),
    ("Server", ServerConfig, ""),
    ("Server: published adapters", PublishConfig, ""),
    ("Server: address, browsers, names, log", WebConfig, ""),
    ("TLS towards clients", TlsConfig, "Of `manylora serve` and `manylora route`."),
    ("Traces", TraceConfig, "Of `manylora serve` and `manylora route`."),
    ("Route", ProxyConfig, "Of `manylora route`, which takes a file by `--config` as well."),
    ("Setup of a simulation", Setup, "In scenarios and experiments: `[setup]`; the flags are those of `simulate`."),
    ("CPU workers of a simulation", CpuWorkers, "In scenarios and experiments: `[setup.workers]`."),
    ("Scenario", Scenario, "At the top of a scenario; the flags are those of `simulate`."),
)

_PLUGIN_PLACES = {
    "policy": "`--policy-option`, `[setup.scheduler.policy_options]`",
    "predictor": "`--predictor-option`, `[setup.scheduler.predictor_options]`",
    "eviction": "`--eviction-option`, `[setup.adapters.eviction_options]`",
    "router": "`--router-option`, `[setup.router_options]`",
}


def options_page() -> str:
    """Return the page as Markdown."""
    parts = [_HEAD]
    for title, owner, place in _SECTIONS:
        parts += [f"## {title}\n", f"{place}\n" if place else "", _table(owner)]
    parts.append("## Options of one policy, predictor, eviction policy or router\n")
    parts.append("Options of a policy of your own are given in the same way ([your own policy](own-policy.md)).\n")
    for kind, ours in PLUGINS.items():
        owners: dict[type, list[str]] = {}
        for name, owner in options_of(ours).items():
            owners.setdefault(owner, []).append(f"`{name}`")
        for owner, names in owners.items():
            parts += [f"### {kind.capitalize()} {', '.join(names)}\n", f"{_PLUGIN_PLACES[kind]}\n", _table(owner)]
    return "\n".join(part for part in (*parts, vllm_section()) if part)


def _table(owner: type) -> str:
    spelled = {flag.field.name: f"`{flag.spelled}`" for flag in flags_of(owner)}
    lines = ["| field | flag | default | values | meaning |", "|---|---|---|---|---|"]
    for field in dataclasses.fields(owner):
        known = option_of(field)
        if known is not None:
            help = known.help.replace("[bold]", "`").replace("[/bold]", "`")
            cells = (f"`{field.name}`", spelled.get(field.name, ""), _default(field), _values(known), help)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _values(known: Option) -> str:
    if known.plugin is not None:
        return f"{', '.join(sorted(PLUGINS[known.plugin]))}, or your own"
    other = known.metavar.replace("|", ", ") if known.metavar is not None else known.unit
    return known.expected.removeprefix("one of ") or {"s": "seconds"}.get(other or "", other or "")


def _default(field: dataclasses.Field[Any]) -> str:
    default = field.default
    if default is dataclasses.MISSING or default is None or default == ():
        return ""
    if isinstance(default, int) and default >= 2**20 and default % 2**20 == 0:
        return f"{default >> 20} MiB"
    return str(default).lower() if isinstance(default, bool) else str(default)


def vllm_section() -> str:
    """Return the section about the flags of `vllm serve`, a row for each flag in alphabetical order."""
    rows = "".join(f"| `{flag}` | {here} | {why} |\n" for flag, here, why in sorted(_vllm_rows()))
    return _VLLM_HEAD + rows


def _vllm_rows() -> Iterator[tuple[str, str, str]]:
    yield "--model", "works", "as the argument MODEL"
    for flag in SAME_NAMES:
        yield flag, "works", ""
    for flag, by_value in TRANSLATED.items():
        ours = ", ".join(f"`{one}`" for one in dict.fromkeys(by_value.values()))
        yield flag, "works", f"as {ours}"
    for flag, known in VLLM_FLAGS.items():
        if known.fine is None:
            yield flag, "ignored", known.why
        elif known.fine:
            yield flag, f"{' or '.join(known.fine)} only", known.why
        else:
            yield flag, "refused", known.why


if __name__ == "__main__":
    Path(__file__).with_name("options.md").write_text(options_page(), encoding="utf-8")
