"""A transport of HTTP whose operations all end at one time.

The timeouts of an HTTP client are for one operation on a socket. A server that sends a byte of its head before each of
them has run out is waited for without an end. Here no operation outlasts ``deadline``.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterable
from typing import Any

import httpcore
import httpx

__all__ = ["DeadlineTransport"]


class DeadlineTransport(httpx.HTTPTransport):
    """An ``httpx.HTTPTransport`` for one question at a time."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(verify=context, trust_env=False)
        self.deadline = 0.0
        """End of the question in progress, on the monotonic clock."""
        self._pool.close()
        # Of the public classes none takes both a network and the mapping of errors that httpx makes.
        self._pool = httpcore.ConnectionPool(ssl_context=context, network_backend=_Network(self._within))

    def _within(self, timeout_s: float | None) -> float:
        """Return the time for an operation; raise once there is none."""
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise httpcore.ReadTimeout("its time is over")
        return left_s if timeout_s is None else min(timeout_s, left_s)


class _Network(httpcore.NetworkBackend):
    def __init__(self, within: Callable[[float | None], float]) -> None:
        self._sockets = httpcore.SyncBackend()
        self._within = within

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        opened = self._sockets.connect_tcp(host, port, self._within(timeout), local_address, socket_options)
        return _Stream(opened, self._within)


class _Stream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream, within: Callable[[float | None], float]) -> None:
        self._stream = stream
        self._within = within

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._within(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._within(timeout))

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, self._within(timeout)), self._within)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)

    def close(self) -> None:
        self._stream.close()
