"""Flags of `vllm serve` that manylora does not have: ignored with a remark, or refused.

A flag is ignored if manylora always does what it asks for, or does not need it. A flag for an unsupported feature is an
error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manylora.cli.options.values import repeat_option
from manylora.errors import ConfigError

__all__ = ["VLLM_FLAGS", "VllmFlag", "spread_lists", "take_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFlag:
    """One flag.

    Args:
        why: The reason, for the remark or the error.
        has_value: Whether the flag has a value.
        fine: Values that can be ignored; ``None`` for all.
    """

    why: str
    has_value: bool = False
    fine: tuple[str, ...] | None = None


_ONE_DEVICE = "one engine runs on one device"

VLLM_FLAGS: dict[str, VllmFlag] = {
    "--enable-lora": VllmFlag(why="adapters are always enabled"),
    "--max-lora-rank": VllmFlag(why="every adapter is kept at its own rank, there is no largest one", has_value=True),
    "--lora-dtype": VllmFlag(why="--adapter-dtype chooses", has_value=True, fine=("auto",)),
    "--fully-sharded-loras": VllmFlag(why=_ONE_DEVICE),
    "--enable-auto-tool-choice": VllmFlag(why="it is on with --tool-call-parser"),
    "--enable-prefix-caching": VllmFlag(why="it is on unless --no-prefix-caching is given"),
    "--enable-chunked-prefill": VllmFlag(why="it is on unless --step-composition turns it off"),
    "--tensor-parallel-size": VllmFlag(why=_ONE_DEVICE, has_value=True, fine=("1",)),
    "--pipeline-parallel-size": VllmFlag(why=_ONE_DEVICE, has_value=True, fine=("1",)),
    "--data-parallel-size": VllmFlag(why=_ONE_DEVICE, has_value=True, fine=("1",)),
    "--kv-cache-dtype": VllmFlag(why="KV is kept in the type of the base", has_value=True, fine=("auto",)),
    "--enforce-eager": VllmFlag(why="steps that cannot be captured run eagerly"),
    "--swap-space": VllmFlag(why="pre-empted requests are computed again, not swapped", has_value=True),
    "--disable-log-requests": VllmFlag(why="requests are never logged"),
    "--disable-log-stats": VllmFlag(why="figures are at /metrics, not in the log"),
}

_SAME_AS = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}
_TRANSLATED = {
    "--no-enable-prefix-caching": "--no-prefix-caching",
    "--no-chunked-prefill": "--step-composition=whole-prompts",
    "--no-enable-chunked-prefill": "--step-composition=whole-prompts",
}


def take_out(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Remove vLLM's flags from a command line.

    Returns:
        The other arguments, and a remark for every removed flag.

    Raises:
        ConfigError: A flag is for an unsupported feature.
    """
    ours: list[str] = []
    remarks: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg == "--":
            return [*ours, arg, *rest], remarks
        name, equals, value = arg.partition("=")
        name = _SAME_AS.get(name, name)
        if arg in _TRANSLATED:
            ours.append(_TRANSLATED[arg])
        elif (flag := VLLM_FLAGS.get(name)) is None:
            ours.append(arg)
        else:
            if flag.has_value and not equals:
                if not rest:
                    raise ConfigError(f"Got {name} without its value")
                value = rest.pop(0)
            if flag.fine is not None and value not in flag.fine:
                raise ConfigError(f"{' '.join([name, value]).strip()} is not supported: {flag.why}")
            remarks.append(f"{name} is not needed: {flag.why}")
    return ours, remarks


def spread_lists(args: Sequence[str]) -> list[str]:
    """Accept several adapters after one `--lora-modules`, as vLLM does: `--lora-modules a=x b=y`.

    Only `name=path` and JSON objects count as adapters, so that a model may follow.
    """
    return repeat_option(args, ("--lora-modules",), _looks_like_adapter)


def _looks_like_adapter(arg: str) -> bool:
    return not arg.startswith("-") and ("=" in arg or arg.startswith("{"))
