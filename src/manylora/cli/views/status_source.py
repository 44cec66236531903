"""Reports of a server's status, with messages for the cases without an answer, and rates between two reports."""

from __future__ import annotations

import http.client
import socket
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass

import msgspec

from manylora.cli.options.values import parse_address
from manylora.core.errors import ConfigError, ManyloraError
from manylora.serving.metrics.status_report import StatusReport

__all__ = ["MAX_BYTES", "MAX_MESSAGE", "Away", "NoRedirects", "Rates", "StatusSource", "printable", "rates_between"]

TIMEOUT_S = 5.0
MAX_BYTES = 64 * 2**20
MAX_MESSAGE = 300


class Away(ManyloraError):
    """The server does not answer now, but may answer later."""

    status = 503


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, which would send the key to another server."""

    def redirect_request(self, *_args: object) -> None:
        """Return no request in place of the redirected one."""
        return None


class StatusSource:
    """``GET /status`` of one server, at an address that ``parse_address`` accepts; ``key`` is sent if given."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = parse_address(url)
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._opener = urllib.request.build_opener(NoRedirects())
        self._has_answered = False

    def fetch(self, num_adapters: int) -> StatusReport:
        """Return the report with at most ``num_adapters`` adapters.

        ``Away`` if the server does not answer now; ``ConfigError`` for a wrong address or a wrong key, which stays.
        """
        request = urllib.request.Request(f"{self.url}/status?adapters={num_adapters}", headers=self._headers)
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as reply:
                body = reply.read(MAX_BYTES)
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from None
        except urllib.error.URLError as error:
            raise self._no_answer(error.reason) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error) from None
        try:
            report = msgspec.json.decode(body, type=StatusReport)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{self.url} answers, but not as this version of manylora does: {error}") from None
        self._has_answered = True
        return report

    def _refusal(self, error: urllib.error.HTTPError) -> ManyloraError:
        with error:
            message = _message(error.read(MAX_BYTES))
        if error.code in (401, 403):
            return ConfigError(f"{self.url} refuses the key (HTTP {error.code}). {message}".rstrip())
        if error.code >= 500 or error.code == 429:
            return Away(f"{self.url} answers HTTP {error.code}. {message}".rstrip())
        return ConfigError(f"{self.url} is not a manylora server, or an older one: HTTP {error.code} for /status")

    def _no_answer(self, reason: object) -> ManyloraError:
        if isinstance(reason, ssl.SSLError) or (isinstance(reason, socket.gaierror) and not self._has_answered):
            return ConfigError(f"{self.url} cannot be asked: {reason}")
        return Away(f"no answer from {self.url}: {reason}")


def _message(body: bytes) -> str:
    """Return the printable message of an error body; empty for another body."""
    try:
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, LookupError, TypeError):
        return ""
    return printable(message)


def printable(text: str) -> str:
    """Return the begin of another server's text, with spaces in place of what could control a terminal."""
    return "".join(character if character.isprintable() else " " for character in text[:MAX_MESSAGE])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates per second between two reports."""

    tokens: float
    steps: float
    loads: float
    evictions: float
    preemptions: float


def rates_between(older: StatusReport, newer: StatusReport) -> Rates | None:
    """Return the rates between two reports; ``None`` without an engine, or unless the same engines answered both."""
    before, after, elapsed_s = older.engine, newer.engine, newer.time - older.time

    def engines(report: StatusReport) -> tuple[float, int, list[int]]:
        answered = [row.index for row in report.replicas if row.num_running is not None]
        return report.started_at, report.num_restarts, answered

    is_same = engines(older) == engines(newer)
    if before is None or after is None or not is_same or elapsed_s <= 0:
        return None

    return Rates(
        tokens=(after.num_generated_tokens - before.num_generated_tokens) / elapsed_s,
        steps=(after.num_steps - before.num_steps) / elapsed_s,
        loads=(after.num_loads - before.num_loads) / elapsed_s,
        evictions=(after.num_evictions - before.num_evictions) / elapsed_s,
        preemptions=(after.num_preemptions - before.num_preemptions) / elapsed_s,
    )
