"""A resolver for vLLM: a model name that no adapter has yet is looked for in registries, and its files are fetched.

vLLM reads adapters from folders, so the files are copied to one. Its name is the identity of the files in the registry:
a folder is complete or not there, and is never written again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

from manylora.core.adapters.folder import CONFIG_FILE, MAX_CONFIG_BYTES, WEIGHT_FILES
from manylora.core.adapters.sources import check_name, check_registry, is_moving
from manylora.core.errors import AdapterError, AdapterNotFound, AdapterUnavailable
from manylora.core.logs import escape
from manylora.execution.storage.http_registry import HttpRegistry

__all__ = ["RegistryResolver", "register_resolver"]

logger = logging.getLogger("vllm.manylora")

MAX_BYTES = {CONFIG_FILE: MAX_CONFIG_BYTES, WEIGHT_FILES[0]: 16 << 30}


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
            path = await asyncio.to_thread(self._fetch, check_name(lora_name))
        except AdapterUnavailable:
            raise
        except AdapterError as error:
            logger.warning("adapter_not_fetched error=%s", escape(str(error)))
            return None
        return None if path is None else LoRARequest(lora_name, 1, str(path))  # vLLM gives it a number

    def _fetch(self, name: str) -> Path | None:
        with closing(HttpRegistry(self._registries)) as http:
            for registry in self._registries:
                place = f"{registry}/{name}"
                try:
                    place = http.pin(name, place) if is_moving(place) else place
                    urls = {file: f"{place}/{file}" for file in MAX_BYTES}
                    heads = {file: http.open(name, url, MAX_BYTES[file]) for file, url in urls.items()}
                except AdapterNotFound:
                    continue
                identity = repr([(urls[file], head.size, head.etag, head.modified) for file, head in heads.items()])
                target = self._folder / hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
                if not target.is_dir():
                    self._folder.mkdir(parents=True, exist_ok=True)
                    with tempfile.TemporaryDirectory(dir=self._folder, prefix=".") as made:
                        (whole := Path(made) / "whole").mkdir()
                        for file, head in heads.items():
                            with (whole / file).open("wb") as copy:
                                copy.writelines(http.parts(name, urls[file], head, 0, head.size))
                        try:
                            whole.replace(target)
                        except OSError:
                            if not target.is_dir():  # else another process was first
                                raise
                return target
        return None


def register_resolver(registries: Sequence[str]) -> None:
    """Make registries known to vLLM; their files go to ``MANYLORA_LORA_CACHE``, or to the user's cache."""
    folder = os.environ.get("MANYLORA_LORA_CACHE") or Path.home() / ".cache" / "manylora" / "vllm"
    LoRAResolverRegistry.register_resolver("manylora", RegistryResolver(registries, Path(folder)))
