"""Access to a server as vLLM's environment asks for it: read, or refused, because silence would leave a server open."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import replace

from manylora.core.config import ServerConfig
from manylora.core.errors import ConfigError

__all__ = ["exposure_warning", "with_vllm_environment"]

API_KEY = "VLLM_API_KEY"
RUNTIME_LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"


def with_vllm_environment(
    server: ServerConfig, environment: Mapping[str, str], registries: Collection[str] = ()
) -> ServerConfig:
    """Return the configuration with vLLM's key, if it has none of its own.

    Raises:
        ConfigError: Loading adapters at run time is on in vLLM's environment and off here, or the reverse.
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
    if server.api_keys or server.web.uds is not None or _is_loopback(server.host):
        return None
    return f"warning: {server.host} is reachable from other machines and needs no key; --api-key sets one"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
