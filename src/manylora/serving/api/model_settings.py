"""Settings of requests by model: sampling defaults and chat template, of the base and of adapters' folders.

The folder of an adapter is read on a thread at the first request for it, and again when the adapter is replaced, so
that a start with thousands of adapters reads none of them. Requests that come meanwhile wait for the same read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from manylora.core.adapters.request_files import is_same_base, read_request_files
from manylora.core.generation import GenerationDefaults
from manylora.serving.hosting.fleet.adapter_book import LoadedAdapter
from manylora.serving.hosting.fleet.versions import name_of
from manylora.serving.text import Tokenizer

__all__ = ["ModelSettings", "Settings"]

logger = logging.getLogger(__name__)

MAX_OTHER_BASES = 100  # names of other bases that are logged
MAX_KEPT = 4096  # adapters whose settings are kept; the least recently requested are read again
MAX_KEPT_CHARS = 32 * 1024 * 1024  # characters of chat templates that are kept
NUM_READERS = 2  # threads that read folders: a disk that hangs takes no others


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one model's requests; ``chat_template`` is ``None`` for the tokenizer's own."""

    defaults: GenerationDefaults
    chat_template: str | None = None


@dataclass(eq=False, kw_only=True)
class ModelSettings:
    """Finds the settings for the model of a request. For the event loop's thread alone."""

    base_defaults: GenerationDefaults | None  # ``None`` if generation defaults are off, those of adapters included
    base_name: str  # the base's name in requests
    adapters: Mapping[str, LoadedAdapter]  # the adapters that are loaded, by name
    tokenizer: Tokenizer
    trusts_templates: bool  # whether chat templates of adapters are used
    base_names: Collection[str]  # all names of the base's model; an adapter that was trained on another one is logged
    roots: Collection[str] | None = None  # real paths below which folders of adapters must lie; ``None`` for no limit
    base: Settings = field(init=False)
    _other_bases: set[str] = field(default_factory=set)
    _kept: OrderedDict[str, tuple[str, int, Settings]] = field(default_factory=OrderedDict)
    _num_kept_chars: int = 0
    _reading: dict[tuple[str, str, int], asyncio.Future[Settings]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.base = Settings(defaults=self.base_defaults or GenerationDefaults())
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="adapter-settings")

    async def of(self, model: str) -> Settings:
        """Return the settings for a model's name; the base's settings for a name that does not exist."""
        if model == self.base_name:
            return self.base
        name = model if model in self.adapters else model.removeprefix(f"{self.base_name}:")
        if name not in self.adapters:
            name = name_of(name)  # a version by its digest has the settings of the current one
        entry = self.adapters.get(name)
        if entry is None:
            return self.base
        kept = self._kept.get(name)
        if kept is None or kept[:2] != (entry.path, entry.num_loads):
            return await self._read_once(name, entry.path, entry.num_loads)
        self._kept.move_to_end(name)
        return kept[2]

    async def _read_once(self, name: str, path: str, num_loads: int) -> Settings:
        """Read an adapter's settings and keep them; requests that ask at once share the read."""
        asked = name, path, num_loads
        reading = self._reading.get(asked)
        if reading is None:
            read = asyncio.get_running_loop().run_in_executor(self._readers, self._read, name, path)
            reading = self._reading[asked] = asyncio.ensure_future(self._keep(asked, read))
        return await asyncio.shield(reading)  # a client that leaves ends it for no other

    async def _keep(self, asked: tuple[str, str, int], read: Awaitable[Settings]) -> Settings:
        name, path, num_loads = asked
        try:
            settings = await read
        finally:
            del self._reading[asked]
        self._drop(self._kept.pop(name, None))
        self._kept[name] = path, num_loads, settings
        self._num_kept_chars += len(settings.chat_template or "")
        while len(self._kept) > MAX_KEPT or self._num_kept_chars > MAX_KEPT_CHARS:
            self._drop(self._kept.popitem(last=False)[1])
        return settings

    def _drop(self, kept: tuple[str, int, Settings] | None) -> None:
        if kept is not None:
            self._num_kept_chars -= len(kept[2].chat_template or "")

    def _read(self, name: str, path: str) -> Settings:
        """Read an adapter's folder, and log its settings and those that have no effect."""
        extras = read_request_files(name, path, self.roots)
        defaults, template = self.base.defaults, None
        ignored = list(extras.problems)
        if given := extras.defaults.given():
            if self.base_defaults is not None:
                defaults = extras.defaults.over(self.base.defaults)
                logger.info("adapter_defaults name=%s %s", name, " ".join(f"{key}={given[key]}" for key in given))
            else:
                ignored.append("generation_config.json: off by --generation-config vllm")
        if extras.chat_template is not None and extras.chat_template != self.tokenizer.chat_template:
            if self.trusts_templates:
                template = extras.chat_template
                logger.info("adapter_chat_template name=%s", name)
            else:
                ignored.append("its chat template, which is not the base's: see --trust-adapter-templates")
        lacking = [token for token, number in extras.tokens if self.tokenizer.token_id(token) != number]
        if lacking:
            ignored.append(f"{len(lacking)} tokens that the base's tokenizer lacks, as {lacking[0][:50]!r}")
        if extras.base_model is not None and not is_same_base(extras.base_model, self.base_names):
            self._warn_of_base(name, extras.base_model)
        for one in ignored[:20]:
            logger.warning("adapter_setting_ignored name=%s: %s", name, one)
        return Settings(defaults=defaults, chat_template=template)

    def _warn_of_base(self, name: str, base_model: str) -> None:
        """Log an adapter of another base, once for each such base."""
        if base_model not in self._other_bases and len(self._other_bases) < MAX_OTHER_BASES:
            self._other_bases.add(base_model)
            logger.warning(
                "adapter_of_another_base name=%s trained_on=%r served=%r: its shapes fit; check the base",
                *(name, base_model, self.base_name),
            )
