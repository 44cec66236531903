"""TLS of a listening socket: its settings, and certificates that are renewed while it listens.

An authority issues certificates for weeks, and a program beside the server replaces their files. A context of ``ssl``
cannot forget what it has read, so changed files make a new one, which each handshake takes from then on.

A Unix socket keeps the context that it listens with. There a handshake takes the present one in the callback for the
client's name, which is called without a name as well. Clients of other sockets are not trusted with it: a name that is
no ASCII is written to the standard error, with a traceback, before the callback is asked.
"""

from __future__ import annotations

import functools
import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from manylora.core.errors import ConfigError
from manylora.core.server_config import TlsConfig
from manylora.serving.http.rereading import stamp_of

__all__ = ["ServerTls", "server_tls"]

logger = logging.getLogger(__name__)


class ServerTls:
    """The settings of TLS of one listening socket, as its files were when last read without a mistake.

    ``make`` reads them; ``ConfigError`` if they cannot be used. ``reread`` may run on a thread. Of files that are
    replaced one by one, those between are a mistake for a moment.
    """

    def __init__(self, make: Callable[[], ssl.SSLContext], files: Sequence[str]) -> None:
        self._make = make
        self._files = files
        self._stamp = self._stamp_of()  # before they are read: a change meanwhile is seen the next time
        self._present = make()

    def present(self) -> ssl.SSLContext:
        """Return the settings for the next handshake."""
        return self._present

    def for_listening(self) -> ssl.SSLContext:
        """Return settings to listen with, whose handshakes take the present ones."""
        context = self._make()
        context.sni_callback = self._choose
        return context

    def reread(self) -> None:
        """Read the files again if one has changed; a mistake is logged, and changes nothing."""
        stamp = self._stamp_of()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._present = self._make()
        except ConfigError as error:
            logger.error("certificate_kept error=%r", str(error))
        else:
            logger.info("certificate_read file=%s", Path(self._files[0]).name)

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._present

    def _stamp_of(self) -> list[tuple[int, int, int] | None]:
        return [stamp_of(path) for path in self._files]


def server_tls(config: TlsConfig) -> ServerTls | None:
    """Return the TLS of a server; ``None`` without a certificate; ``ConfigError`` if the files cannot be used."""
    if config.ssl_certfile is None:
        return None
    files = (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
    return ServerTls(functools.partial(_context, config), [one for one in files if one is not None])


def _context(config: TlsConfig) -> ssl.SSLContext:
    assert config.ssl_certfile is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")  # none is asked for on a terminal
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
        if config.ssl_ciphers is not None:
            context.set_ciphers(config.ssl_ciphers)
    except (ssl.SSLError, OSError) as error:
        given = ", ".join(f"{name} = {value!r}" for name, value in asdict(config).items() if value)
        raise ConfigError(f"Got {given}, which cannot be used: {error}") from error
    return context
