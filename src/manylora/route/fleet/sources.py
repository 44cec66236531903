"""Where backends come from: the configuration, the admin route, names in DNS, and pods of a cluster.

Each source has its own set of addresses, which it replaces whole. The backends are the union of all of them: an address
leaves when no source has it any more, and its requests under way go on to their end.

::

    http://gpu1:8000              one server
    dns:vllm.default.svc:8000     every address of a name, looked up again and again
    pods:default/app=vllm:8000    the ready pods with these labels (``kubernetes.py``)
    pool:default/vllm-llama       the ready pods of a Gateway API InferencePool, at its port
    ...#env:NAME  ...#file:PATH   the key that these backends get, and no others
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from time import monotonic

from manylora.core.errors import ConfigError
from manylora.route.config import is_key
from manylora.route.outbox import Listed, Said, WorkerOutbox
from manylora.route.upstream.address import Address, parse_backend

__all__ = ["Pods", "Resolve", "Sources", "parse_source", "resolve"]

KEY_SOURCES = ("env", "file")
MAX_SAID = 1000  # backends whose last change is remembered, beyond those that were added
FORGET_S = 600.0
"""Time in no source after which a backend that was removed is forgotten, in seconds.

A pod that is not ready for a while is still the one that was removed; later its address may be another's.
"""
FIRST_S = 5.0  # time that the start waits for the first list of pods, in seconds

logger = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[set[str]]]  # returns the IP addresses of a name and port; raises ``OSError``


async def resolve(name: str, port: int) -> set[str]:
    """Ask the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return {str(address[0]) for *_, address in found}


@dataclass(frozen=True, slots=True)
class Pods:
    """Pods of a cluster."""

    namespace: str
    selector: str = ""  # selects them by labels, as ``kubectl -l`` does; empty for those of a pool
    port: int | None = None  # their port; ``None`` for that of a pool
    pool: str = ""  # name of an InferencePool
    key_from: str = ""  # as for ``Address``


WatchPods = Callable[[Pods, Callable[[Iterable[Address]], None]], Awaitable[None]]
"""Tells the addresses of pods, again and again, until it is cancelled."""


@dataclass(slots=True, eq=False)
class Sources:
    """The sources of addresses. For the event loop's thread alone."""

    resolve_s: float  # time between two look-ups of a name, in seconds
    resolve: Resolve
    watch_pods: WatchPods
    on_change: Callable[[Mapping[str, Address]], None]  # called with the addresses of all sources, by URL
    environment: Mapping[str, str]  # environment variables, for keys
    outbox: WorkerOutbox | None = None  # tells the other workers of the router what was added and removed
    _configured: dict[str, dict[str, Address]] = field(default_factory=dict)  # addresses by URL, of each text
    _added: dict[str, Address] = field(default_factory=dict)
    _removed: dict[str, float | None] = field(default_factory=dict)  # and since when no source has it, if none has
    _said_at: dict[str, float] = field(default_factory=dict)  # time of the last change of each, the latest last
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def configure(self, texts: Iterable[str]) -> None:
        """Replace the configured sources, after the first look at each new one; backends that were removed return.

        ``ConfigError`` if a text is malformed; nothing has changed.
        """
        parsed = {text: parse_source(text, self.environment) for text in texts}
        new = [text for text in parsed if text not in self._configured]
        await asyncio.gather(*(self._begin(text, parsed[text]) for text in new))
        # Only now: a backend that both have must not leave while the first look at a new source takes its time.
        for text in [text for text in self._configured if text not in parsed]:
            del self._configured[text]
            if (task := self._tasks.pop(text, None)) is not None:
                task.cancel()
        self._removed.clear()
        self._changed()

    def add(self, text: str, key: str | None = None) -> Address:
        """Add a single server, with a key of its own if there is one; return its address.

        ``ConfigError`` if the text is not the URL of one server.
        """
        address = parse_source(text, {})
        if isinstance(address, Pods) or address.is_name_of_many or address.key_from:  # a file would be sent there
            raise ConfigError(f"Got backend = {text.partition('#')[0]!r}, expected the URL of one server and no more")
        if key is not None and not is_key(key):
            raise ConfigError("Got a key that is not printable ASCII, or empty")
        self._say(Said(address.url, key or "", monotonic()))
        return address

    def remove(self, url: str) -> bool:
        """Remove a backend, until it is added or the configuration is read again; return whether there was one."""
        if url not in self._all():
            return False
        self._say(Said(url, None, monotonic()))
        return True

    def heed(self, said: Said) -> None:
        """Add or remove a backend, as this worker was told, or another one; a change that a later one overtook is none.

        So all workers end with the same, in whichever order they hear of the changes of two.
        """
        if not self._is_news(said.url, said.at):
            return
        if said.key is None:
            self._removed[said.url] = None
        else:
            self._added[said.url] = _added(said.url, said.key)
            self._removed.pop(said.url, None)
        self._changed()

    def listed(self) -> Listed:
        """Return what was added and removed, for other workers."""
        keys = {url: address.key_from.removeprefix("key:") for url, address in self._added.items()}
        listed = Listed([], {})
        for url, at in self._said_at.items():
            if url in keys or url in self._removed:
                listed.said.append(Said(url, None if url in self._removed else keys[url], at))
            else:
                listed.gone[url] = at
        return listed

    def adopt(self, listed: Listed) -> None:
        """Take over what another worker was told: this one has just begun, or did not hear it."""
        for said in listed.said:
            self.heed(said)
        for url, at in listed.gone.items():
            if self._is_news(url, at):
                self._added.pop(url, None)
                self._removed.pop(url, None)
        self._changed()

    def _is_news(self, url: str, at: float) -> bool:
        """Whether a change is later than all others of its backend; it is the last one from then on."""
        if at <= self._said_at.get(url, -math.inf):
            return False
        self._said_at.pop(url, None)
        self._said_at[url] = at
        if len(self._said_at) > MAX_SAID:
            gone = (one for one in self._said_at if one not in self._added and one not in self._removed)
            self._said_at.pop(next(gone, url))
        return True

    async def stop(self) -> None:
        """End all look-ups and watches."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _begin(self, text: str, source: Address | Pods) -> None:
        self._configured[text] = {}
        if isinstance(source, Pods):
            first = asyncio.Event()

            def update(addresses: Iterable[Address]) -> None:
                if text in self._configured:
                    self._configured[text] = {address.url: address for address in addresses}
                    first.set()
                    self._changed()

            self._tasks[text] = asyncio.create_task(_until_cancelled(text, self.watch_pods(source, update)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_S):
                    await first.wait()
        elif source.is_name_of_many:
            await self._look_up(text, source)
            self._tasks[text] = asyncio.create_task(self._look_up_forever(text, source))
        else:
            self._configured[text] = {source.url: source}

    async def _look_up_forever(self, text: str, name: Address) -> None:
        while True:
            await asyncio.sleep(self.resolve_s)
            await self._look_up(text, name)
            self._changed()

    async def _look_up(self, text: str, name: Address) -> None:
        """Look a name up; on failure, and without any address, its backends stay as they are."""
        try:
            ips = await self.resolve(name.host, name.port)
        except OSError as error:
            logger.warning("lookup_failed name=%s error=%r", name.host, error.strerror or str(error))
            return
        if ips and text in self._configured:
            self._configured[text] = {address.url: address for address in (name.at(ip) for ip in sorted(ips))}

    def _say(self, said: Said) -> None:
        self.heed(said)
        if self.outbox is not None:
            self.outbox.tell(said)

    def _all(self) -> dict[str, Address]:
        found = dict(self._added)
        for addresses in self._configured.values():
            found |= addresses
        return found

    def _changed(self) -> None:
        found, now = self._all(), monotonic()
        for url, since in list(self._removed.items()):
            self._added.pop(url, None)
            if since is not None and now - since > FORGET_S:
                del self._removed[url]
            elif url in found:
                self._removed[url] = None
            elif since is None:
                self._removed[url] = now
        self.on_change({url: address for url, address in found.items() if url not in self._removed})


def parse_source(text: str, environment: Mapping[str, str]) -> Address | Pods:
    """Return the address or the pods that a text names; keys from the environment are read here.

    ``ConfigError`` if the text has none of the forms above.
    """
    plain, _, key_from = text.partition("#")
    if key_from:
        source, _, named = key_from.partition(":")
        if source not in KEY_SOURCES or not named:
            raise ConfigError(f"Got backend = {plain!r} with a key that is not #env:NAME or #file:PATH")
        if source == "env":
            if not environment.get(named):
                raise ConfigError(f"Got backend = {plain!r} with #env:{named}, a variable that is not set")
            key_from = f"key:{environment[named]}"
    kind, _, rest = plain.partition(":")
    if kind == "pool":
        namespace, _, name = rest.partition("/")
        if not _is_label(namespace) or not _is_label(name):
            raise ConfigError(f"Got backend = {plain!r}, expected pool:NAMESPACE/NAME")
        return Pods(namespace, pool=name, key_from=key_from)
    if kind == "pods":
        named, _, port = rest.rpartition(":")
        namespace, _, selector = named.partition("/")
        if not (_is_label(namespace) and selector and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ConfigError(f"Got backend = {plain!r}, expected pods:NAMESPACE/SELECTOR:PORT, as app=vllm:8000")
        return Pods(namespace, selector, int(port), key_from=key_from)
    return replace(parse_backend(plain), key_from=key_from)


def _added(url: str, key: str) -> Address:
    return replace(parse_backend(url), key_from=f"key:{key}" if key else "")


def _is_label(text: str) -> bool:
    return bool(text) and len(text) < 254 and all(one.isascii() and (one.isalnum() or one in "-.") for one in text)


async def _until_cancelled(text: str, watching: Awaitable[None]) -> None:
    try:
        await watching
    except Exception:  # a bug: its backends stay as they are
        logger.exception("watch_broke source=%s", text.partition("#")[0])
