"""A command line and an environment of `vllm serve`, taken by `manylora serve`.

Flags are translated, ignored with a remark, or refused with a reason. Access to a server is read from the environment,
or refused, because silence would leave a server open.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from manylora.cli.options.values import repeat_option
from manylora.cli.options.vllm_flag_table import SAME_AS, TRANSLATED, VLLM_FLAGS
from manylora.core.config import ServerConfig
from manylora.core.errors import ConfigError

__all__ = ["exposure_warning", "near_names", "spread_lists", "take_out", "with_vllm_environment"]

API_KEY = "VLLM_API_KEY"
RUNTIME_LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"

_JSON_LISTS = ("--allowed-origins", "--allowed-methods", "--allowed-headers")
_SEVERAL = ("--served-model-name", "--api-key")
"""Flags with several values, if the model comes before them: after them, the last would be the model."""

SAME_SPELLING = 0.9  # share of equal letters from which a flag counts as another flag, mistyped


def take_out(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Remove and translate vLLM's flags of a command line.

    Return the arguments of this server, and a remark for every flag that was removed. ``ConfigError`` if a flag is for
    an unsupported feature, or its value is missing.
    """
    ours: list[str] = []
    remarks: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg == "--":
            return [*ours, arg, *rest], remarks
        name, equals, value = arg.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
            arg = name + equals + value
        name = SAME_AS.get(name, name)

        def take_value(name: str = name, given: str | None = value if equals else None) -> str:
            if given is not None:
                return given
            if not rest:
                raise ConfigError(f"Got {name} without its value")
            return rest.pop(0)

        flag = VLLM_FLAGS.get(name.partition(".")[0])  # also one setting of it, as --compilation-config.mode
        opposite = VLLM_FLAGS.get(name.replace("--no-", "--", 1)) if name.startswith("--no-") else None
        if name == "--model":
            ours.insert(0, take_value())
        elif name in TRANSLATED:
            ours.append(_translate(name, "" if "" in TRANSLATED[name] else take_value()))
        elif flag is not None:
            value = take_value() if flag.has_value else ""
            if flag.fine is not None and value not in flag.fine:
                raise ConfigError(f"{' '.join([name, value]).strip()} is not supported: {flag.why}")
            remarks.append(f"{name} is not needed: {flag.why}")
        elif opposite is not None and opposite.fine == ():
            remarks.append(f"{name} is not needed: {opposite.why}")
        elif opposite is not None and opposite.fine is None and not opposite.has_value:
            raise ConfigError(f"{name} is not supported: {opposite.why}")
        else:
            ours.append(name + equals + value)
    return ours, remarks


def _translate(name: str, value: str) -> str:
    by_value = TRANSLATED[name]
    ours = by_value.get(value) or by_value.get("*")
    if ours is None:
        raise ConfigError(f"Got {name} {value!r}, expected one of {', '.join(by_value)}")
    return ours.replace("*", value)


def spread_lists(args: Sequence[str]) -> list[str]:
    """Accept several values after one flag, and lists as JSON, as vLLM does.

    After `--lora-modules a=x b=y` a model may follow: only `name=path` and JSON objects count as adapters. After
    `--served-model-name a b` and `--api-key a b` none may; later names are aliases of the first.
    """
    spread = repeat_option(args, ("--lora-modules",), _looks_like_adapter)
    if spread and not spread[0].startswith("-"):
        spread = repeat_option(spread, _SEVERAL)
    return _as_aliases(_read_json(spread))


def _looks_like_adapter(arg: str) -> bool:
    return not arg.startswith("-") and ("=" in arg or arg.startswith("{"))


def _read_json(args: Sequence[str]) -> list[str]:
    """Replace a JSON list of strings after a flag by one flag for each."""
    out: list[str] = []
    for arg in args:
        flag, equals, value = arg.partition("=")
        before = out[-1] if out else ""
        if not (equals and flag in _JSON_LISTS):
            flag, value = before, arg
        if flag not in _JSON_LISTS or not value.startswith("["):
            out.append(arg)
            continue
        try:
            items = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"Got {flag} {value!r}, which is not JSON: {error}") from None
        if not all(isinstance(item, str) for item in items):
            raise ConfigError(f"Got {flag} {value!r}, expected a list of strings")
        if flag is before:
            out.pop()
        out += [part for item in items for part in (flag, item)]
    return out


def _as_aliases(args: Sequence[str]) -> list[str]:
    """Keep the first name after `--served-model-name`, and make the others aliases."""
    out: list[str] = []
    for arg in args:
        is_later = arg == "--served-model-name" and arg in out
        out.append("--alias" if is_later else arg)
    return out


def near_names(name: str, names: Collection[str]) -> list[str]:
    """Return the flags that a mistyped flag may stand for: all its words but one, or nearly all letters, are the same.

    Names that are near in letters alone (``--max-logs``, ``--max-loras``) mislead.
    """
    words = set(name.strip("-").split("-"))

    def is_near(other: str) -> bool:
        theirs = set(other.strip("-").split("-"))
        num_others = max(len(words), len(theirs)) - len(words & theirs)
        is_part = bool(words & theirs) and (words <= theirs or theirs <= words)
        return is_part or num_others == 1 < len(words) - 1 or SequenceMatcher(None, name, other).ratio() > SAME_SPELLING

    return sorted(other for other in names if is_near(other))


# -- environment -------------------------------------------------------------------------------------------------------


def with_vllm_environment(
    server: ServerConfig, environment: Mapping[str, str], registries: Collection[str] = ()
) -> ServerConfig:
    """Return the configuration with vLLM's key, if it has none of its own.

    ``ConfigError`` if loading adapters at run time is on in vLLM's environment and off here, or the reverse.
    """
    key = environment.get(API_KEY, "")
    if key and not server.api_keys:
        server = replace(server, api_keys=(key,))
    wish = environment.get(RUNTIME_LORA, "").strip().lower()
    may_load = bool(server.lora_dirs or server.allowed_lora_paths or registries)
    if wish in ("1", "true") and not may_load:
        raise ConfigError(
            f"Got {RUNTIME_LORA}={wish}, which allows any path: give --lora-dir DIR or --allowed-lora-path DIR, the "
            "directories to load adapters from, or --lora-registry URL"
        )
    if wish in ("0", "false") and may_load:
        raise ConfigError(
            f"Got {RUNTIME_LORA}={wish} with --lora-dir, --allowed-lora-path or --lora-registry, which allow loading "
            "at run time: unset it, or give adapters with --lora-modules"
        )
    return server


def exposure_warning(server: ServerConfig) -> str | None:
    """Return a warning if other machines can call the server without a key."""
    from manylora.serving.http.auth import is_loopback  # imports the web framework

    is_keyed = server.api_keys or server.tenants or server.router_key
    if is_keyed or server.web.uds is not None or is_loopback(server.host):
        return None
    return f"warning: {server.host} is reachable from other machines and needs no key; --api-key sets one"
