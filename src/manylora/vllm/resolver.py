"""A resolver for vLLM: a model name that no adapter has yet is looked for in registries, and its files are fetched."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

from manylora.core.adapters.sources import check_name, check_registry
from manylora.core.errors import AdapterError, AdapterUnavailable
from manylora.core.logs import escape
from manylora.execution.storage.registry_folders import copy_adapter

__all__ = ["RegistryResolver", "register_resolver"]

logger = logging.getLogger("vllm.manylora")


class RegistryResolver(LoRAResolver):  # type: ignore[misc]
    """Finds adapters below the URLs of registries, in their order; ``folder`` takes their files."""

    def __init__(self, registries: Sequence[str], folder: Path) -> None:
        self._registries, self._folder = [check_registry(url) for url in registries], folder

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return the adapter of a name, ``None`` if no registry has it.

        Raises:
            AdapterUnavailable: A registry does not answer: a later request may find it.
        """
        try:
            path = await asyncio.to_thread(copy_adapter, check_name(lora_name), self._registries, self._folder)
        except AdapterUnavailable:
            raise
        except AdapterError as error:
            logger.warning("adapter_not_fetched error=%s", escape(str(error)))
            return None
        return None if path is None else LoRARequest(lora_name, 1, str(path))  # vLLM gives it a number


def register_resolver(registries: Sequence[str]) -> None:
    """Make registries known to vLLM; their files go to ``MANYLORA_LORA_CACHE``, or to the user's cache."""
    folder = os.environ.get("MANYLORA_LORA_CACHE") or Path.home() / ".cache" / "manylora" / "vllm"
    LoRAResolverRegistry.register_resolver("manylora", RegistryResolver(registries, Path(folder)))
