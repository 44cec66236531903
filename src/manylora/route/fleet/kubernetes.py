"""Pods as backends: listed and watched through the API of a Kubernetes cluster.

::

    list --resourceVersion--> watch --ended--> watch from the last version
                                     --lost--> wait --> watch from the last version
                                     --refused, gone, unreadable--> wait --> list

The wait doubles each time, and is short again behind a watch that lasted a while.

A pod is a backend while it is ready, has an address and is not being deleted. The token of the service account is read
for every request, because the cluster replaces it about once an hour. Of an InferencePool the selector and the port are
read again and again; the pods are watched anew when one of them changes.

Source: Kubernetes' API concepts, "Efficient detection of changes"; Gateway API Inference Extension, ``InferencePool``
(``v1``, and ``v1alpha2`` before).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from random import Random
from time import monotonic
from typing import TypeVar
from urllib.parse import quote

import msgspec

from manylora.core.errors import ConfigError
from manylora.route.fleet.sources import Pods
from manylora.route.upstream.address import Address, parse_backend, request_head
from manylora.route.upstream.pool import FetchFailed, Pool, fetch

__all__ = ["Cluster"]

WATCH_S = 240  # time after which the API server ends a watch, in seconds; it ends that late if the connection has died
LATE_S = 30
ANSWER_S = 30.0
MAX_PAGE_BYTES = 64 << 20
PAGE = 250
MAX_LINE_BYTES = 4 << 20
MAX_WATCH_BYTES = 1 << 40
LEAST_WAIT_S, FIRST_WAIT_S, MOST_WAIT_S = 0.05, 0.5, 30.0
WELL_S = 5.0  # a watch that lasted so long has worked, whatever ended it
POOLS = ("inference.networking.k8s.io/v1", "inference.networking.x-k8s.io/v1alpha2")

T = TypeVar("T")

logger = logging.getLogger(__name__)

Update = Callable[[Iterable[Address]], None]


class _Meta(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    cont: str = msgspec.field(name="continue", default="")


class _Condition(msgspec.Struct):
    type: str = ""
    status: str = ""


class _Status(msgspec.Struct, rename={"pod_ip": "podIP"}):
    pod_ip: str = ""
    conditions: list[_Condition] = []


class _Pod(msgspec.Struct):
    metadata: _Meta
    status: _Status = msgspec.field(default_factory=_Status)

    @property
    def is_ready(self) -> bool:
        is_ready = any(one.type == "Ready" and one.status == "True" for one in self.status.conditions)
        return is_ready and bool(self.status.pod_ip) and self.metadata.deletion_timestamp is None


class _PodList(msgspec.Struct):
    metadata: _Meta
    items: list[_Pod] | None = None  # ``null`` for none, as servers in Go may say


class _Error(msgspec.Struct):
    code: int = 0


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Port(msgspec.Struct):
    number: int


class _PoolSpec(msgspec.Struct, rename="camel"):
    selector: dict[str, str | dict[str, str]]
    target_ports: list[_Port] = []
    target_port_number: int | None = None


class _InferencePool(msgspec.Struct):
    spec: _PoolSpec


_pods = msgspec.json.Decoder(_PodList)
_pod = msgspec.json.Decoder(_Pod)
_event = msgspec.json.Decoder(_Event)
_error = msgspec.json.Decoder(_Error)
_pool = msgspec.json.Decoder(_InferencePool)


class _Gone(FetchFailed):
    """The pods cannot be watched from the version of the last event: they are listed anew."""


@dataclass(slots=True, eq=False)
class _Watched:
    """The pods of one selector, by name, and the version of the last event."""

    update: Callable[[Iterable[str]], None]
    ips: dict[str, str] = field(default_factory=dict)
    version: str = ""
    _rest: bytes = b""

    def begin(self, ips: dict[str, str], version: str) -> None:
        """Begin from a list, or again from the last event."""
        self.ips, self.version, self._rest = ips, version, b""

    def feed(self, piece: bytes) -> None:
        """Read the events that a piece of a watch completes; ``_Gone`` for one that ends it."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        before = dict(self.ips)
        try:
            for line in filter(bytes.strip, lines):
                self._read(_event.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _Gone(f"an event is not as expected: {str(error)[:200]}") from None
        finally:
            if self.ips != before:
                self.update(self.ips.values())
        if len(self._rest) > MAX_LINE_BYTES:
            raise _Gone(f"an event is longer than {MAX_LINE_BYTES} bytes")

    def note(self, pod: _Pod) -> None:
        """Learn the state of a pod."""
        if pod.is_ready:
            self.ips[pod.metadata.name] = pod.status.pod_ip
        else:
            self.ips.pop(pod.metadata.name, None)

    def _read(self, event: _Event) -> None:
        if event.type == "ERROR":  # almost always 410
            raise _Gone(f"the watch was ended with {_error.decode(event.object).code}")
        pod = _pod.decode(event.object)
        self.version = pod.metadata.resource_version or self.version
        if event.type == "DELETED":
            self.ips.pop(pod.metadata.name, None)
        elif event.type in ("ADDED", "MODIFIED"):
            self.note(pod)


class Cluster:
    """The API of a cluster; ``ConfigError`` if its URL is malformed.

    ``account`` is the folder with the ``token`` and ``ca.crt`` of a service account. An InferencePool is looked at
    every ``again_s`` seconds; ``rng`` draws waits, so that routers do not fall into step.
    """

    def __init__(self, url: str, account: str, *, again_s: float, rng: Random) -> None:
        self._address = parse_backend(url)
        self._account = Path(account)
        self._again_s = again_s
        self._rng = rng

    async def watch(self, pods: Pods, update: Update) -> None:
        """Tell the addresses of the ready pods whenever they change, until cancelled."""
        if not pods.pool:
            await self._watch_selector(pods, pods.selector, pods.port or 0, update)
            return
        known: tuple[str, int] | None = None
        task: asyncio.Task[None] | None = None
        try:
            while True:
                found = await self._read_pool(pods)
                if found is not None and found != known:
                    if task is not None:
                        task.cancel()
                    known = found
                    task = asyncio.create_task(self._watch_selector(pods, *found, update))
                await asyncio.sleep(self._again_s)
        finally:
            if task is not None:
                task.cancel()

    async def _watch_selector(self, pods: Pods, selector: str, port: int, update: Update) -> None:
        def tell(ips: Iterable[str]) -> None:
            hosts = [f"[{ip}]" if ":" in ip else ip for ip in sorted(set(ips))]
            update([replace(parse_backend(f"http://{host}:{port}"), key_from=pods.key_from) for host in hosts])

        path = f"/api/v1/namespaces/{pods.namespace}/pods?labelSelector={quote(selector, safe='')}"
        watched, wait_s = _Watched(tell), 0.0
        while True:
            followed_at, reason = inf, ""
            try:
                if not watched.version:
                    await self._list(path, watched)
                    tell(watched.ips.values())
                followed_at = monotonic()
                await self._follow(path, watched)
            except FetchFailed as error:
                reason = str(error)
                if isinstance(error, _Gone):
                    watched.version = ""
            if is_well := monotonic() - followed_at >= WELL_S:
                wait_s = 0.0
            if reason or not is_well:
                wait_s = min(MOST_WAIT_S, max(FIRST_WAIT_S, 2 * wait_s))
                logger.warning("watch_failed selector=%s error=%r again_s=%.1f", selector, reason, wait_s)
            await asyncio.sleep(max(LEAST_WAIT_S, wait_s * self._rng.uniform(0.5, 1.0)))

    async def _list(self, path: str, watched: _Watched) -> None:
        """Read all pods, page by page."""
        ips: dict[str, str] = {}
        more = ""
        while True:
            status, body = await self._get(f"{path}&limit={PAGE}&continue={quote(more, safe='')}")
            page = _decoded(_pods, status, body)
            ips |= {pod.metadata.name: pod.status.pod_ip for pod in page.items or () if pod.is_ready}
            more = page.metadata.cont
            if not more:
                break
        watched.begin(ips, page.metadata.resource_version)

    async def _follow(self, path: str, watched: _Watched) -> None:
        """Read events until the API server ends the watch; ``_Gone`` if it refuses."""
        version = quote(watched.version, safe="")
        watched.begin(watched.ips, watched.version)
        status, _ = await self._get(
            f"{path}&watch=true&allowWatchBookmarks=true&timeoutSeconds={WATCH_S}&resourceVersion={version}",
            timeout_s=WATCH_S + LATE_S,
            max_bytes=MAX_WATCH_BYTES,
            on_piece=watched.feed,
        )
        if status != 200:
            raise _Gone(f"the watch was answered {status}")

    async def _read_pool(self, pods: Pods) -> tuple[str, int] | None:
        """Return the selector and the port of an InferencePool; ``None`` if it cannot be read now."""
        answers = []
        try:
            for version in POOLS:
                path = f"/apis/{version}/namespaces/{pods.namespace}/inferencepools/{pods.pool}"
                status, body = await self._get(path)
                if status not in (403, 404):  # the account may read one version alone, also where the other is unknown
                    return _selected(_decoded(_pool, status, body).spec)
                answers.append(status)
            logger.warning("pool_missing name=%s/%s answers=%s", pods.namespace, pods.pool, answers)
        except FetchFailed as error:
            logger.warning("pool_failed name=%s/%s error=%r", pods.namespace, pods.pool, str(error))
        return None

    async def _get(
        self,
        path: str,
        *,
        timeout_s: float = ANSWER_S,
        max_bytes: int = MAX_PAGE_BYTES,
        on_piece: Callable[[bytes], None] | None = None,
    ) -> tuple[int, bytes]:
        authority = self._account / "ca.crt"
        try:
            token = (self._account / "token").read_bytes().strip()
            ca_certs = str(authority) if authority.exists() else None
            pool = Pool(self._address, connect_timeout_s=ANSWER_S, ca_certs=ca_certs)
        except (OSError, ConfigError) as error:
            raise FetchFailed(f"the service account cannot be read: {error}") from None
        head = request_head(
            self._address,
            b"GET",
            path.encode(),
            num_body_bytes=0,
            headers=((b"accept", b"application/json"),),
            authorization=b"Bearer " + token,
        )
        try:
            return await fetch(pool, head, timeout_s=timeout_s, max_bytes=max_bytes, on_piece=on_piece)
        finally:
            pool.abort()


def _selected(spec: _PoolSpec) -> tuple[str, int]:
    labels = spec.selector.get("matchLabels", spec.selector)
    port = spec.target_ports[0].number if spec.target_ports else spec.target_port_number
    if not isinstance(labels, dict) or not labels or port is None:
        raise FetchFailed("the pool has no selector or no port")
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items())), port


def _decoded(decoder: msgspec.json.Decoder[T], status: int, body: bytes) -> T:
    if status != 200:
        raise FetchFailed(f"it was answered {status}")
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FetchFailed(f"the answer is not as expected: {error}") from None
