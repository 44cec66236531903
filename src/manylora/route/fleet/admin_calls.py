"""The routes of backends that load and unload adapters."""

from __future__ import annotations

import msgspec

from manylora.route.backends.backend import Backend
from manylora.route.backends.report import ServerKind
from manylora.route.config import ProxyConfig
from manylora.route.upstream.fetch import FetchFailed, fetch
from manylora.route.upstream.head import request_head

__all__ = ["AdminCalls"]

MAX_ANSWER_BYTES = 64 * 1024


class AdminCalls:
    """Loads and unloads an adapter on one backend; each returns the status and text of its answer, 502 without one.

    Args:
        config: The key and the time limit.
    """

    def __init__(self, config: ProxyConfig) -> None:
        self._key = config.backend_key
        self._timeout_s = config.place_timeout_s

    async def load(self, backend: Backend, name: str, path: str, *, in_place: bool) -> tuple[int, str]:
        """Load an adapter, in place of one of its name if asked to."""
        body: dict[str, object] = {"lora_name": name, "lora_path": path}
        if in_place:
            body["load_inplace"] = True
        return await self._call(backend, b"load_lora_adapter", body)

    async def unload(self, backend: Backend, name: str) -> tuple[int, str]:
        """Unload an adapter; 200 as well where it was not loaded."""
        status, text = await self._call(backend, b"unload_lora_adapter", {"lora_name": name})
        return (200 if status == 404 else status), text

    async def _call(self, backend: Backend, route: bytes, body: dict[str, object]) -> tuple[int, str]:
        prefix = b"/" if backend.kind is ServerKind.SGLANG else b"/v1/"
        sent = msgspec.json.encode(body)
        head = request_head(
            backend.address,
            b"POST",
            prefix + route,
            num_body_bytes=len(sent),
            headers=[(b"content-type", b"application/json")],
            authorization=None if self._key is None else b"Bearer " + self._key.encode(),
        )
        try:
            status, answer = await fetch(
                backend.pool, head, sent, timeout_s=self._timeout_s, max_bytes=MAX_ANSWER_BYTES
            )
        except FetchFailed as error:
            return 502, str(error)
        return status, answer.decode(errors="replace").strip()
