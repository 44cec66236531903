"""Sessions of the live page: a signed cookie in place of the administrator's key.

The cookie has the times of the sign-in and of its last renewal, and a MAC over both. The MAC's key is derived from the
administrator's key. So a session is the same in every worker and after a restart, and ends with the key; scrypt makes
a stolen cookie no quick way to try keys. A session ends ``IDLE_S`` after its last renewal, and ``LIFE_S`` after the
sign-in whatever happens.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from starlette.requests import Request

from manylora.serving.http.auth import Gate, digest_of
from manylora.serving.http.connections import client_of
from manylora.serving.http.errors import HttpError
from manylora.serving.http.room import Allowance

__all__ = ["IDLE_S", "PageSessions"]

IDLE_S = 1800
LIFE_S = 12 * 3600
WRONG_KEYS_A_MINUTE = 10
MAX_CLIENTS = 1024  # clients whose wrong keys are counted; beyond them the one that tried longest ago is forgotten


@dataclass(eq=False)
class PageSessions:
    """Signs the administrator in, and knows the cookies that it gave. For the event loop's thread alone."""

    gate: Gate  # knows the administrator's key
    _: KW_ONLY
    epoch_s: Callable[[], float] = time.time  # returns the time in seconds since 1970
    monotonic_s: Callable[[], float] = time.monotonic  # returns a time in seconds that never steps back
    _secret: asyncio.Task[bytes] | None = None
    _wrong: OrderedDict[str, Allowance] = field(default_factory=OrderedDict)

    async def sign_in(self, request: Request, key: str) -> str:
        """Return the value of a new cookie.

        ``HttpError`` if the key is wrong (401), or no key is the administrator's (403); ``CapacityError`` (429) if
        this client has tried too many wrong ones.
        """
        if (administrator := self.gate.administrator) is None:
            raise HttpError(403, "No key opens this page; start the server with --admin-key.")
        client = "" if request.client is None else client_of(request.client.host)
        wrong, now = self._wrong.get(client) or Allowance("wrong keys"), self.monotonic_s()
        wrong.check(WRONG_KEYS_A_MINUTE, 1, now)
        if not hmac.compare_digest(digest_of(key), administrator):
            wrong.take(WRONG_KEYS_A_MINUTE, 1, now)
            self._wrong[client] = wrong
            self._wrong.move_to_end(client)
            if len(self._wrong) > MAX_CLIENTS:
                self._wrong.popitem(last=False)
            raise HttpError(401, "This is not the administrator's key.")
        return await self._signed(int(self.epoch_s()))

    async def renewed(self, cookie: str) -> str | None:
        """Return the cookie of the same session that ends later; ``None`` if it is not valid, or no more."""
        began_text, _, rest = cookie.partition(".")
        renewed_text, _, mac = rest.partition(".")
        if self.gate.administrator is None or not hmac.compare_digest(
            mac.encode(), await self._mac(began_text, renewed_text)
        ):
            return None
        now = self.epoch_s()
        if now - int(renewed_text, 16) > IDLE_S or now - int(began_text, 16) > LIFE_S:
            return None
        return await self._signed(int(began_text, 16))

    async def _signed(self, began_at: int) -> str:
        began, renewed = f"{began_at:x}", f"{int(self.epoch_s()):x}"
        return f"{began}.{renewed}.{(await self._mac(began, renewed)).decode()}"

    async def _mac(self, began: str, renewed: str) -> bytes:
        if self._secret is None:
            self._secret = asyncio.create_task(asyncio.to_thread(self._derive))
        secret = await asyncio.shield(self._secret)
        return hmac.new(secret, f"{began}.{renewed}".encode(), hashlib.sha256).hexdigest().encode()

    def _derive(self) -> bytes:
        assert self.gate.administrator is not None
        return hashlib.scrypt(self.gate.administrator, salt=b"manylora page", n=2**14, r=8, p=1)
