"""The credentials of the controller and its callers: a token in a file, or certificates of one authority with TLS."""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
from pathlib import Path

from manylora.core.errors import CertificateRefused, ConfigError
from manylora.functions.wire import TlsFiles

__all__ = ["TOKEN", "find_refusal", "own_token", "read_token", "tls_context", "tls_files"]

TOKEN = "token"  # name of the file in a folder of state
CLOSE_S = 2.0  # time in which a controller closes a connection that it refuses


def read_token(path: Path) -> str:
    """Return the token in a file.

    ``ConfigError`` if the file cannot be read, or is empty: every caller knows an empty token.
    """
    try:
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"Got token_file = {str(path)!r}, which cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"Got token_file = {str(path)!r}, which is not ASCII") from None
    if not token:
        raise ConfigError(f"Got token_file = {str(path)!r}, which is empty, expected a token")
    return token


def own_token(folder: Path) -> str:
    """Return the token in a folder of state; a new one if there is none.

    The file is whole or not there: a kill between its creation and its contents would leave an empty token.
    """
    path = folder / TOKEN
    if path.exists() and path.stat().st_size:
        return read_token(path)
    fresh = folder / f"{TOKEN}.new"
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
    fresh.replace(path)
    return read_token(path)


def tls_files(cert: str | None, key: str | None, ca: str | None) -> TlsFiles | None:
    """Return the files if they are given, and ``None`` if none is.

    ``ConfigError`` if some are given and some are not.
    """
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None or ca is None:
        raise ConfigError(f"Got tls_cert = {cert!r}, tls_key = {key!r}, tls_ca = {ca!r}, expected all three or none")
    return TlsFiles(cert=cert, key=key, ca=ca)


def tls_context(files: TlsFiles, side: int) -> ssl.SSLContext:
    """Return the settings of one side, ``ssl.PROTOCOL_TLS_SERVER`` for the controller or ``ssl.PROTOCOL_TLS_CLIENT``.

    Each side refuses another that has no certificate of the authority. A caller also checks that the controller's
    certificate names its host. ``ConfigError`` if a file cannot be used.
    """
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(files.cert, files.key, password="")  # none is asked for on a terminal
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"Got tls_cert = {files.cert!r} and tls_key = {files.key!r}, which cannot be used: {error}"
        ) from error
    try:
        context.load_verify_locations(files.ca)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"Got tls_ca = {files.ca!r}, which cannot be used: {error}") from error
    return context


async def find_refusal(error: Exception, host: str, port: int, context: ssl.SSLContext) -> CertificateRefused | None:
    """Return the refusal of a certificate that made a call fail; ``None`` if there was another cause.

    In TLS 1.3 a server refuses after the client has finished its part, and event loops send no alert then. So a
    connection is made that sends no request: a controller that takes it waits, and one that refuses it closes it.
    """
    if (found := _refusal_in(error)) is not None:
        return found
    try:
        async with asyncio.timeout(CLOSE_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
            try:
                await reader.read(1)
            except ConnectionError:
                pass
            finally:
                writer.close()
            return CertificateRefused("it refuses the certificate of this side, or the lack of one")
    except OSError as again:  # TimeoutError: it takes the connection
        return _refusal_in(again)


def _refusal_in(error: BaseException | None) -> CertificateRefused | None:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return CertificateRefused(f"its certificate is refused here: {error.verify_message}")
        error = error.__cause__ or error.__context__
    return None
