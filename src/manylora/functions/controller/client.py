"""Calls to the controller."""

from __future__ import annotations

import ssl
from typing import TypeVar
from urllib.parse import quote

import httpx
import msgspec

from manylora.core.errors import CapacityError, CertificateRefused, ConfigError, RequestError
from manylora.functions.controller.credentials import find_refusal, tls_context
from manylora.functions.wire import NodeReport, Orders, Overview, TlsFiles

__all__ = ["ControllerClient"]

TIMEOUT_S = 10.0

T = TypeVar("T")


class ControllerClient:
    """The controller at an address; a context.

    ``ConfigError`` if a file cannot be used, or the address is not one of TLS.
    """

    def __init__(self, url: str, token: str | None, tls: TlsFiles | None = None) -> None:
        if tls is not None and not url.startswith("https://"):
            raise ConfigError(
                f"Got controller = {url!r} with a certificate, expected an address that begins with https://"
            )
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._tls = ssl.create_default_context() if tls is None else tls_context(tls, ssl.PROTOCOL_TLS_CLIENT)
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False, verify=self._tls
        )

    async def report(self, node: str, report: NodeReport) -> Orders:
        """Send a report.

        ``CapacityError`` if the controller does not answer now, or another program answers; ``CertificateRefused`` if
        one side refuses the other's certificate; ``RequestError`` if the controller refuses the report.
        """
        body = await self._send("POST", f"/v1/nodes/{quote(node)}/report", msgspec.json.encode(report))
        return self._decoded(body, Orders)

    async def overview(self) -> Overview:
        """Return the platform's state, or raise an error like ``report``."""
        return self._decoded(await self._send("GET", "/v1/functions"), Overview)

    async def logs(self, name: str) -> list[str]:
        """Return the last lines that a function has written, or raise an error like ``report``."""
        answer = self._decoded(await self._send("GET", f"/v1/functions/{quote(name)}/logs"), dict[str, list[str]])
        return answer.get("lines", [])

    async def __aenter__(self) -> ControllerClient:
        """Return itself."""
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close the connections."""
        await self._http.aclose()

    def _decoded(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # a proxy before it, or one of another version
            raise CapacityError(f"What answers at {self._http.base_url} is no controller: {error}") from error

    async def _send(self, method: str, path: str, content: bytes | None = None) -> bytes:
        url = self._http.base_url
        try:
            answer = await self._http.request(method, path, content=content)
        except httpx.HTTPError as error:
            if url.scheme == "https":
                refusal = await find_refusal(error, url.host, url.port or 443, self._tls)
                if refusal is not None:
                    raise CertificateRefused(f"No connection to the controller at {url}: {refusal}") from error
            raise CapacityError(f"The controller at {url} does not answer: {error!r}") from error
        if answer.status_code >= 500 or answer.status_code in (408, 429):  # it was slow, or is busy
            raise CapacityError(f"The controller at {url} failed: {answer.status_code}")
        if answer.status_code != 200:
            try:
                reason = str(answer.json()["error"])
            except (ValueError, KeyError, TypeError):
                reason = answer.reason_phrase
            raise RequestError(f"The controller refused {method} {path}: {reason}", param=str(answer.status_code))
        return answer.content
