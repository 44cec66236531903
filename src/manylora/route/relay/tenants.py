"""The tenants of a router: the room and limits of each, its name on the way to backends, and its usage.

::

    client  -- its key -->  router  -- the router's key, x-manylora-tenant: acme;3 -->  backend
                              |                                                           |
             keys, models, limits, usage by what backends say           weight under fair, salt of prefixes

With a router's key, the tenant's goes no further. A backend believes the name from the key that it has as
``--router-key`` alone; a client's own header of that name is not passed on. Without one, backends have the file of
tenants too, and the tenant's key is passed on. vLLM knows no tenants: its cached prefixes are kept apart by
``cache_salt``. A request counts as one answer, and its prompt by the estimate of its length until the backend says.

Answers of ``/v1/responses`` repeat fields of the request, such as the schemas of tools, and a tenant may have named a
count of tokens there. So these counts are read in their place alone: in ``usage`` of the answer, or of its event.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from manylora.route.config import ProxyConfig
from manylora.route.fleet.members import Backends, Found
from manylora.route.outbox import PlaceTaken, WorkerOutbox
from manylora.route.upstream.connection import Headers
from manylora.serving.http.auth import Gate
from manylora.serving.http.room import CallerRoom, Places
from manylora.serving.metrics.usage import UsageLedger

__all__ = ["PlacedCounts", "RoutedTenants", "TenantCall"]

_USAGE = re.compile(rb'"(prompt|input|completion|output)_tokens"\s*:\s*(\d{1,9})')
"""In JSON no text of an answer has a quote in this place without a backslash before it."""

_TOKEN = re.compile(rb'"([^"\\]*+(?:\\.[^"\\]*+)*+)("?)|[][{}]|\d++', re.DOTALL)
"""A string, which may go on in the next piece, a bracket, or digits."""

_PLACES = [[b"usage"], [b"response", b"usage"]]
_COUNTS = {f"{of}_tokens".encode(): of.encode() for of in ("prompt", "input", "completion", "output")}
ECHOING = "/v1/responses"

_EVENT = b"data: {"
REST = 64  # bytes of a piece that are kept: the longest count of tokens may begin there


@dataclass(slots=True, eq=False)
class PlacedCounts:
    """Finds counts of tokens in their place in an answer, piece by piece, each in time linear in its length."""

    _keys: list[bytes] = field(default_factory=list)  # of the objects and arrays around, the outermost first
    _last: bytes = b""  # the last string
    _rest: bytes = b""  # a string or number that may go on

    def find(self, piece: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield the counts in the next piece, with their kinds."""
        text, self._rest = self._rest + piece, b""
        for match in _TOKEN.finditer(text):
            token = match[0]
            if match.end() == len(text) and token[-1:].isdigit() and match[1] is None:
                self._rest = token[:REST]
            elif match[1] is not None and not match[2]:
                # Of a long one, which is no key, all but an escape that is not over.
                self._rest = text[match.start() :] if len(text) - match.start() < REST else b'"' + text[match.end() :]
            elif match[1] is not None:
                self._last = match[1]
            elif token in (b"{", b"["):
                self._keys.append(self._last)
            elif token in (b"}", b"]"):
                del self._keys[-1:]
            elif self._keys[1:] in _PLACES and (kind := _COUNTS.get(self._last)) is not None:
                yield kind, int(token[:9])


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
    placed: PlacedCounts | None = None  # where the answer repeats the request
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
        self._num_events = num_before + text.count(_EVENT)
        if self.placed is not None:
            found = [(kind, num, len(text)) for kind, num in self.placed.find(piece)]
        else:
            found = [(match[1], int(match[2]), match.start()) for match in _USAGE.finditer(text)]
        for kind, num, at in found:
            if kind in (b"prompt", b"input"):
                self.num_prompt_tokens = num
            else:
                self._num_stated, self._num_events_then = num, num_before + text.count(_EVENT, 0, at)
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
        self.room = CallerRoom(each, lambda: backends.num_up, limits_of=gate.limits_of)

    def begin(self, caller: str, found: Found, num_prompt_tokens: int, path: str = "") -> TenantCall:
        """Let a request to a path in; raise ``CapacityError`` (429) if a limit is exceeded."""
        tenant = self._gate.tenant(caller)
        places = self.room.take(caller, 1, num_tokens=num_prompt_tokens, adapter=found.adapter or None)
        call = TenantCall(caller, found.adapter, places, self._usage, num_prompt_tokens)
        if path == ECHOING:
            call.placed = PlacedCounts()
        if self._key is not None:
            call.authorization = self._key
            call.header = f"{caller};{1.0 if tenant is None else tenant.weight:g}".encode()
        else:
            call.passes_key = tenant is not None
        if self._outbox is not None:
            call.outbox = self._outbox
            call.serial = self._outbox.taken(caller, found.adapter or None, num_prompt_tokens)
        return call

    def count(self, taken: PlaceTaken, *, is_new: bool) -> Places:
        """Count the place of a request that another worker has let in; of one that is not new, nothing a minute."""
        return self.room.count(
            taken.caller, 1, num_tokens=taken.num_tokens, adapter=taken.adapter, takes_allowance=is_new
        )
