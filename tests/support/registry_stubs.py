"""A hub and an object store on loopback: as much of their protocols as clients of adapters use, checked strictly.

The hub answers ``HEAD /org/name/resolve/REVISION/FILE`` with commit, ETag and SHA-256, and sends weight files to
another host, as the public one does. The store answers ``GET /bucket/KEY`` if the address bears the signature of AWS,
version 4, or one of the other clouds' kind.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path
from urllib.parse import parse_qsl, quote

from registry_server import FolderHandler, RegistryServer

__all__ = ["HUB_TOKEN", "S3_KEY", "S3_SECRET", "HubHandler", "HubServer", "StoreServer"]

HUB_TOKEN = "hf_abcdefghijklmnopqrstuvwxyz0123456789"
S3_KEY, S3_SECRET = "AKIAEXAMPLE", "s3-secret-of-tests"
_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


class HubServer(RegistryServer):
    """Repositories below a folder, ``org/name/FILE``, at every commit; with a ``token`` for those that send it."""

    def __init__(self, root: Path, handler: type[HubHandler] | None = None) -> None:
        super().__init__(root, handler or HubHandler)
        self.commits = {"main": "a" * 40}
        self.token: str | None = HUB_TOKEN
        self.storage: str | None = None  # URL of the host of weight files; ``None`` if that is the hub


class HubHandler(FolderHandler):
    """Answers as the hub."""

    server: HubServer

    def do_HEAD(self) -> None:
        match, commit, path = _RESOLVE.fullmatch(self.path), "", self.file()
        if match is not None:
            revision = match["revision"]
            commit = revision if len(revision) == 40 else self.server.commits.get(revision, "")
        if self.server.faults.statuses:
            return self._answer(self.server.faults.statuses.pop(0), {})
        if match is None or not self._is_known() or not (self.server.root / match["repo"]).is_dir():
            return self._answer(401, {"X-Error-Code": "RepoNotFound"})
        if not commit:
            return self._answer(404, {"X-Error-Code": "RevisionNotFound"})
        if not path.is_file():
            return self._answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        content = path.read_bytes()
        known = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        if path.suffix != ".safetensors" or self.server.storage is None:
            return self._answer(200, known | {"Content-Length": str(len(content))})
        known["X-Linked-Etag"] = f'"{hashlib.sha256(content).hexdigest()}"'
        known["X-Linked-Size"] = str(len(content))
        known["Location"] = f"{self.server.storage}/{path.relative_to(self.server.root)}?Signature=of-the-hub"
        return self._answer(302, known)

    def do_GET(self) -> None:
        if self._is_known():
            super().do_GET()
        else:
            self._answer(401, {})

    def file(self) -> Path:
        match = _RESOLVE.fullmatch(self.path)
        return self.server.root / "none" if match is None else self.server.root / match["repo"] / match["file"]

    def _is_known(self) -> bool:
        return self.server.token is None or self.headers.get("Authorization") == f"Bearer {self.server.token}"

    def _answer(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": "0"} | headers).items():
            self.send_header(name, value)
        self.end_headers()


class StoreServer(RegistryServer):
    """Buckets below a folder."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, _StoreHandler)


class _StoreHandler(FolderHandler):
    server: StoreServer

    def do_GET(self) -> None:
        query = dict(parse_qsl(self.path.partition("?")[2], strict_parsing=True))
        if "X-Amz-Signature" in query:
            is_signed = query["X-Amz-Signature"] == self._signature(query)
        else:
            is_signed = bool(query.get("X-Goog-Signature") or query.get("sig"))
        if is_signed and "Authorization" not in self.headers:
            super().do_GET()
        else:
            self._end(403)

    def _signature(self, query: dict[str, str]) -> str:
        """Return the signature of this request (AWS, Signature Version 4, authenticating with query parameters)."""
        names = sorted(name for name in query if name != "X-Amz-Signature")
        canonical = "&".join(f"{quote(name, safe='')}={quote(query[name], safe='')}" for name in names)
        path, scope = self.path.partition("?")[0], query["X-Amz-Credential"].partition("/")[2]
        text = f"GET\n{path}\n{canonical}\nhost:{self.headers['Host']}\n\nhost\nUNSIGNED-PAYLOAD"
        digest = hashlib.sha256(text.encode()).hexdigest()
        signed = f"AWS4-HMAC-SHA256\n{query['X-Amz-Date']}\n{scope}\n{digest}"
        key = f"AWS4{S3_SECRET}".encode()
        for part in (*scope.split("/"), signed):
            key = hmac.digest(key, part.encode(), "sha256")
        return key.hex()
