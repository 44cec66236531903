"""The certificate of a caller, for the controller's application: a node belongs to the one that reports for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from manylora.serving.http.http_protocol import ChunkWritingProtocol

__all__ = ["MEMBER", "MemberProtocol", "member_of"]

MEMBER = "manylora.member"
"""Key of a request's scope."""


class MemberProtocol(ChunkWritingProtocol):
    """The server's protocol, whose requests have the names in the caller's certificate in their scope."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Note the certificate, which the handshake has checked."""
        super().connection_made(transport)
        app, member = self.app, member_of(transport.get_extra_info("peercert") or {})

        async def named(scope: Scope, receive: Receive, send: Send) -> None:
            scope[MEMBER] = member
            await app(scope, receive, send)

        self.app = named


def member_of(certificate: Mapping[str, Any]) -> str | None:
    """Return the names in a certificate, as Python's ``ssl`` gives it; ``None`` for none.

    They outlive a renewal. Those of the subject count only without names of hosts or addresses.
    """
    names = certificate.get("subjectAltName") or [pair for part in certificate.get("subject", ()) for pair in part]
    return ", ".join(sorted(f"{kind}:{name}" for kind, name in names)) or None
