"""The tenants of a router: the room and limits of each, its name on the way to backends, and its usage.

::

    client  -- its key -->  router  -- the router's key, x-manylora-tenant: acme;3 -->  backend
                              |                                                           |
             keys, models, limits, usage by what backends say           weight under fair, salt of prefixes

With a router's key, the tenant's goes no further. A backend believes the name from the key that it has as
``--router-key`` alone; a client's own header of that name is not passed on. Without one, backends have the file of
tenants too, and the tenant's key is passed on. vLLM knows no tenants: its cached prefixes are kept apart by
``cache_salt``. A request counts as one answer, and its prompt by the estimate of its length until the backend says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from manylora.route.config import ProxyConfig
from manylora.route.fleet.members import Backends, Found
from manylora.route.outbox import PlaceTaken, WorkerOutbox
from manylora.route.upstream.connection import Headers
from manylora.serving.http.auth import Gate
from manylora.serving.http.room import CallerRoom, Places
from manylora.serving.metrics.usage import UsageLedger

__all__ = ["RoutedTenants", "TenantCall"]

_USAGE = re.compile(rb'"(prompt|input|completion|output)_tokens"\s*:\s*(\d{1,9})')
"""In JSON no text of an answer has a quote in this place without a backslash before it."""

_EVENT = b"data: {"
REST = 64  # bytes of a piece that are kept: the longest count of tokens may begin there


@dataclass(slots=True, eq=False)
class TenantCall:
    """One request of a tenant, until its answer has ended."""

    tenant: str
    adapter: str
    places: Places
    usage: UsageLedger | None
    num_prompt_tokens: int
    passes_key: bool = False  # whether backends get its own key
    authorization: bytes | None = None  # the router's key in place of it
    header: bytes | None = None  # the tenant and its weight, beside that key
    outbox: WorkerOutbox | None = None  # tells other workers of the place
    serial: int = 0
    _num_stated: int = 0  # tokens of the answer, as the backend says
    _num_events: int = 0
    _num_events_then: int = 0
    _rest: bytes = field(default=b"")

    def sent_headers(self, headers: Headers) -> Headers:
        """Return the headers of a request, which ask for an answer that is not compressed: its tokens are read here."""
        return [*(one for one in headers if one[0] != b"accept-encoding"), (b"accept-encoding", b"identity")]

    def headers(self, headers: Headers) -> Headers:
        """Return the headers of an answer with those about the tenant's limits here, in place of a backend's."""
        own = self.places.headers()
        return [*(one for one in headers if not own or not one[0].startswith(b"x-ratelimit-")), *own]

    def read(self, piece: bytes) -> None:
        """Learn the tokens of an answer from a piece of it: the last count that it states, or the events behind it.

        A stream may state none yet at its begin, as Anthropic's do, or repeat the request, and be cut later.
        """
        text = self._rest + piece
        num_before = self._num_events - self._rest.count(_EVENT)
        last = None
        for match in _USAGE.finditer(text):
            if match[1] in (b"prompt", b"input"):
                self.num_prompt_tokens = int(match[2])
            else:
                last = match
        if last is not None:
            self._num_stated = int(last[2])
            self._num_events_then = num_before + text.count(_EVENT, 0, last.start())
        self._num_events = num_before + text.count(_EVENT)
        self._rest = text[-REST:]

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far."""
        return max(self._num_stated, self._num_events - self._num_events_then)

    def close(self) -> None:
        """Give the places back, and count what was used."""
        num_tokens = self.num_output_tokens
        self.places.close(num_tokens)
        if self.outbox is not None:
            self.outbox.ended(self.serial, num_tokens)
        if self.usage is not None and (num_tokens or self._rest):
            self.usage.add(
                self.tenant, self.adapter, num_prompt_tokens=self.num_prompt_tokens, num_output_tokens=num_tokens
            )


class RoutedTenants:
    """Lets the requests of tenants in. For the event loop's thread alone.

    The backends that are up give the room, of which one tenant may have half; ``usage`` takes what was used, and
    ``outbox`` tells the other workers of the router.
    """

    def __init__(
        self,
        config: ProxyConfig,
        gate: Gate,
        backends: Backends,
        usage: UsageLedger | None,
        outbox: WorkerOutbox | None = None,
    ) -> None:
        self._outbox = outbox
        self._gate = gate
        self._usage = usage
        self._key = None if config.router_key is None else f"Bearer {config.router_key}".encode()
        each = max(1, config.max_in_flight // 2)  # so that no tenant takes the room of all
        self._room = CallerRoom(each, lambda: backends.num_up, limits_of=gate.limits_of)

    def check(self, caller: str) -> None:
        """Raise ``CapacityError`` (429) if a caller has no place or request left; before its body is read."""
        self._room.check(caller)

    def begin(self, caller: str, found: Found, num_prompt_tokens: int) -> TenantCall:
        """Let a request in; raise ``CapacityError`` (429) if a limit is exceeded."""
        tenant = self._gate.tenant(caller)
        places = self._room.take(caller, 1, num_tokens=num_prompt_tokens, adapter=found.adapter or None)
        call = TenantCall(caller, found.adapter, places, self._usage, num_prompt_tokens)
        if self._key is not None:
            call.authorization = self._key
            call.header = f"{caller};{1.0 if tenant is None else tenant.weight:g}".encode()
        else:
            call.passes_key = tenant is not None
        if self._outbox is not None:
            call.outbox = self._outbox
            call.serial = self._outbox.taken(caller, found.adapter or None, num_prompt_tokens)
        return call

    def count(self, taken: PlaceTaken) -> Places:
        """Count the place of a request that another worker has let in."""
        return self._room.count(taken.caller, 1, num_tokens=taken.num_tokens, adapter=taken.adapter)
