"""The address at which a file of a registry is asked for, and the credentials that go there.

::

    https://host/path   as it is; with the host's entry in ~/.netrc, if there is one
    hf://org/name       huggingface_hub asks the hub: commit, SHA-256, and the host that stores the file
    s3:// gs:// az://   obstore signs the request, with the credentials that its cloud's own tools find

Libraries speak the protocols; the bytes come over one client, with its bounds (``http_registry``). A credential goes to
its own host alone. A hub's token stays with the hub: a file that lies elsewhere is asked for without it, at hosts of
the hub's operator only. A signed address is a credential for an hour, of one file; addresses are in no message.

Credentials are of the environment and of files, in the process that asks registries, and of no other configuration.
"""

from __future__ import annotations

import logging
import netrc
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from manylora.core.adapters.folder import CONFIG_FILE
from manylora.core.adapters.sources import STORES, HubPlace, is_moving
from manylora.core.errors import AdapterError, AdapterNotFound

if TYPE_CHECKING:
    from huggingface_hub import HfFileMetadata

__all__ = ["Addresses", "BrokenOff", "FileAddress", "file_of"]

logger = logging.getLogger(__name__)

KEPT_S = 300.0  # time for which an address is used again; a signed one is valid for longer
SIGNED_S = 3600.0
MAX_KEPT = 256
HUB_S = 10.0  # longest wait for an answer of the hub about a file
HUB_HOSTS = ("huggingface.co", "hf.co")
"""Hosts, with those below them, that store files of the hub besides the hub itself."""

_LOCAL = ("localhost", "127.0.0.1", "::1")


class BrokenOff(Exception):
    """An answer that ended early, or a server that is busy: the question may be asked again."""


class FileAddress(NamedTuple):
    """Where a file is asked for."""

    url: str  # over HTTP; may carry a credential
    headers: Mapping[str, str] = MappingProxyType({})
    etag: str = ""  # a strong ETag that the registry itself gives the file; empty if answers tell it
    commit: str = ""  # the commit of a hub that the file is of


class Addresses:
    """Finds addresses; for one thread at a time."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, FileAddress]] = {}
        self._stores: dict[str, Any] = {}
        for library in ("httpx", "httpcore", "httpx2", "httpcore2", "huggingface_hub"):
            logging.getLogger(library).setLevel(logging.WARNING)  # below it they log addresses

    def of(self, name: str, url: str) -> FileAddress:
        """Return the address of a file of the adapter ``name``, at an allowed URL in its normal form.

        ``AdapterNotFound`` if there is no such file; ``AdapterError`` if there is no address for it, with the reason;
        ``BrokenOff`` if the hub does not answer now.
        """
        scheme = url.partition("://")[0]
        if scheme not in ("hf", *STORES):
            return FileAddress(url, self._login(name, url))
        made_at, address = self._kept.get(url, (0.0, None))
        if address is None or time.monotonic() - made_at > KEPT_S:
            address = _on_hub(name, url) if scheme == "hf" else FileAddress(self._signed(name, url))
            self._keep(url, address)
        return address

    def renew(self, url: str) -> bool:
        """Forget an address that its host refuses; return whether it was used before, so that another may serve."""
        made_at, _ = self._kept.pop(url, (0.0, None))
        return 0.0 < made_at < time.monotonic() - 1.0

    def pin(self, name: str, url: str) -> str:
        """Return a folder of a hub in its present commit; see ``Registry.pin``. Raises as ``of``."""
        place = HubPlace.of(url)
        if place is None:
            return url
        file = f"{url}/{CONFIG_FILE}"
        address = _on_hub(name, file)
        pinned = place.at(address.commit)
        if is_moving(pinned):
            raise AdapterError(name, f"the hub names no commit of {place.revision!r}")
        self._keep(f"{pinned}/{CONFIG_FILE}", address)
        return pinned

    def _keep(self, url: str, address: FileAddress) -> None:
        if len(self._kept) >= MAX_KEPT:
            self._kept.clear()
        self._kept[url] = time.monotonic(), address

    def _login(self, name: str, url: str) -> dict[str, str]:
        """Return the credentials of a URL's host, which leave this machine over TLS only."""
        parts = urlsplit(url)
        entry = _netrc_hosts().get(parts.hostname or "")
        if entry is None or (parts.scheme == "http" and parts.hostname not in _LOCAL):
            return {}
        user, _, secret = entry
        if user.lower() == "bearer":
            if not (secret.isascii() and secret.isprintable()):
                raise AdapterError(name, f"the bearer token of {parts.hostname} in ~/.netrc is not printable ASCII")
            return {"Authorization": f"Bearer {secret}"}
        import base64

        return {"Authorization": "Basic " + base64.b64encode(f"{user}:{secret}".encode()).decode()}

    def _signed(self, name: str, url: str) -> str:
        scheme, _, rest = url.partition("://")
        bucket, _, key = rest.partition("/")
        try:
            import obstore
            from obstore import store as stores
        except ImportError:
            raise AdapterError(name, f"{scheme}:// needs obstore: pip install 'manylora[stores]'") from None
        try:
            if f"{scheme}://{bucket}" not in self._stores:
                kind = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}
                # Credentials of a machine's role are asked for over HTTP, here and not with the file.
                limits = {"connect_timeout": "5s", "timeout": "10s"}
                made = kind[scheme](bucket, client_options=limits, retry_config={"max_retries": 1})
                self._stores[f"{scheme}://{bucket}"] = made
            store = self._stores[f"{scheme}://{bucket}"]
            return str(obstore.sign(store, "GET", key, timedelta(seconds=SIGNED_S)))
        except Exception as error:  # its text may hold answers of a service for credentials
            reason = f"no credentials for {scheme}:// that could sign a request ({type(error).__name__})"
            raise AdapterError(name, reason) from None


def _on_hub(name: str, url: str) -> FileAddress:
    """Ask the hub where a file is."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    place = HubPlace.of(url)
    if place is None:
        raise AdapterNotFound(name, "a URL of a hub names a repository: hf://org/name")
    link = hf_hub_url(place.repo, place.path, revision=place.revision)
    found = _ask_hub(name, place, lambda: get_hf_file_metadata(link, timeout=HUB_S))
    hub, there = urlsplit(constants.ENDPOINT), urlsplit(found.location)
    host = (there.hostname or "").lower()
    if (there.scheme, there.netloc) == (hub.scheme, hub.netloc):
        headers = {key: value for key, value in build_hf_headers().items() if key.lower() == "authorization"}
    elif there.scheme == "https" and any(host == one or host.endswith(f".{one}") for one in HUB_HOSTS):
        headers = {}
    else:
        raise AdapterError(
            name, f"the hub sends to {host[:100]!r}, which is no host of a hub, for {file_of(place.path)}"
        )
    return FileAddress(found.location, headers, f'"{found.etag}"' if found.etag else "", found.commit_hash or "")


def _ask_hub(name: str, place: HubPlace, ask: Callable[[], HfFileMetadata]) -> HfFileMetadata:
    """Make a request to the hub; its errors, whose texts hold addresses, become those of ``Addresses.of``."""
    from huggingface_hub import errors

    try:
        return ask()
    except errors.EntryNotFoundError:
        raise AdapterNotFound(name, f"there is no {file_of(place.path)}") from None
    except errors.RevisionNotFoundError:
        raise AdapterNotFound(name, f"{place.repo} has no revision {place.revision!r}") from None
    except errors.GatedRepoError:
        raise AdapterError(name, f"{place.repo} is gated, and the hub's token does not open it") from None
    except errors.RepositoryNotFoundError:
        raise AdapterNotFound(name, f"the hub shows no {place.repo} to this server") from None
    except errors.HFValidationError:
        raise AdapterNotFound(name, f"{place.repo[:100]!r} is no name of a repository") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status == 429 or status >= 500:
            raise BrokenOff(f"the hub answers {status}") from None
        raise AdapterError(name, f"the hub answers {status} to {file_of(place.path)}") from None
    except Exception as error:  # of the HTTP library, another one in each version
        raise BrokenOff(f"the hub does not answer ({type(error).__name__})") from None


def _netrc_hosts() -> Mapping[str, tuple[str, str, str]]:
    """Return user, account and password by host, as they are on disk now."""
    path = os.environ.get("NETRC") or str(Path.home() / ".netrc")
    try:
        return _parse_netrc(path, os.stat(path).st_mtime_ns)
    except OSError:
        return {}


@lru_cache(maxsize=1)
def _parse_netrc(path: str, changed_ns: int) -> Mapping[str, tuple[str, str, str]]:
    try:
        return netrc.netrc(path).hosts
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError) as error:
        logger.warning("netrc_not_read error=%s", type(error).__name__)  # its text quotes the file
        return {}


def file_of(url: str) -> str:
    """Return the name of the file that a URL or a path ends in."""
    return url.rpartition("/")[2]
