"""Flags of `vllm serve` that mean nothing here: accepted with a word of why, or refused where ignoring would mislead.

People come with a command line that works. One that asks for something manylora always does, or has no need of,
should just start; one that asks for something it does not do must not start as if it did.
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
        why: What to tell people, after the flag's name.
        has_value: Whether a value follows it.
        fine: The values that can be ignored in good faith; ``None`` is any.
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
    "--enable-prefix-caching": VllmFlag(why="it is on unless --no-prefix-caching is given"),
    "--enable-chunked-prefill": VllmFlag(why="it is on unless --step-composition says otherwise"),
    "--tensor-parallel-size": VllmFlag(why=_ONE_DEVICE, has_value=True, fine=("1",)),
    "--pipeline-parallel-size": VllmFlag(why=_ONE_DEVICE, has_value=True, fine=("1",)),
    "--data-parallel-size": VllmFlag(why=_ONE_DEVICE, has_value=True, fine=("1",)),
    "--kv-cache-dtype": VllmFlag(why="KV is kept in the type of the base", has_value=True, fine=("auto",)),
    "--enforce-eager": VllmFlag(why="what cannot be captured runs eagerly by itself"),
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
    """Take vLLM's flags out of a command line.

    Returns:
        The arguments that are ours, and a remark for every flag taken out.

    Raises:
        ConfigError: A flag asks for what manylora does not do.
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
    """Let one `--lora-modules` take several adapters, as vLLM's does: `--lora-modules a=x b=y`.

    Only what looks like an adapter (`name=path` or a JSON object) is taken, so that a model after it stays the model.
    """
    return repeat_option(args, ("--lora-modules",), _looks_like_adapter)


def _looks_like_adapter(arg: str) -> bool:
    return not arg.startswith("-") and ("=" in arg or arg.startswith("{"))
