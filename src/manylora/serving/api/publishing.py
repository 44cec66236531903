"""``PUT /adapters/{name}``: a version of an adapter from the request's body, or from a file in shared memory.

The body is a safetensors file, whose metadata may hold ``adapter_config`` as text: the two files of PEFT in one. Or it
is JSON that names a file of that kind in ``/dev/shm``. Sizes are bounded before anything is parsed; then the adapter is
read from memory as from a folder, with all of its checks.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manylora.core.adapters.folder import CONFIG_FILE, MAX_CONFIG_BYTES, WEIGHT_FILES, LocalFile
from manylora.core.adapters.sources import MAX_NAME_CHARS, check_name
from manylora.core.adapters.weight_file import parse_metadata, read_header_bytes
from manylora.core.errors import AdapterError, AdapterForbidden, ManyloraError, RequestError
from manylora.serving.api.adapters import adapter_fields, admin_context
from manylora.serving.api.json_body import is_null, raw_field
from manylora.serving.api.request import Context, read_body
from manylora.serving.hosting.fleet.fleet_versions import PublicationTerms
from manylora.serving.hosting.fleet.versions import MAX_NUMBER, NumberedVersion, VersionTerms
from manylora.serving.hosting.spool import AdapterSpool, SpooledAdapter, open_shared
from manylora.serving.http.errors import HttpError, json_response
from manylora.serving.http.room import body_parts

__all__ = ["PublishBody", "publish_routes"]

CONFIG_KEY = "adapter_config"
TENSORS = ("application/octet-stream", "application/vnd.safetensors")
LONGEST_LABEL = 1 + len(str(MAX_NUMBER))


class PublishTerms(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The query of ``PUT /adapters/{name}`` with tensors."""

    version: int | None = None
    preload: bool = False
    pin: bool = False
    keep_versions: int | None = None
    ttl_s: float | None = None


class PublishBody(PublishTerms, kw_only=True, forbid_unknown_fields=True):
    """``PUT /adapters/{name}`` with JSON."""

    shm: str
    move: bool = False
    adapter_config: msgspec.Raw = raw_field()


async def put_adapter(request: Request) -> Response:
    """``PUT /adapters/{name}``: publish a version of an adapter, and move its name to it."""
    context = admin_context(request)
    name = request.path_params["name"]
    spool = context.spool
    if spool is None:
        raise AdapterForbidden(name, "adapters that come with requests are off; start the server with --publish")
    check_name(name)
    if len(name) > MAX_NAME_CHARS - LONGEST_LABEL:
        raise AdapterError(
            name, f"its name has {len(name)} characters, expected at most {MAX_NAME_CHARS - LONGEST_LABEL}"
        )
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    with spool.arriving(name) as arriving:
        config = b""
        terms: PublishTerms
        if media_type == "application/json":
            body = await read_body(request, PublishBody)
            terms, config = body, b"" if is_null(body.adapter_config) else bytes(memoryview(body.adapter_config))
            await _take_shared(context, arriving, body.shm, moves=body.move)
        elif media_type in TENSORS:
            terms = _query(request)
            async for part in body_parts(request, context.engine_config.adapters.max_adapter_bytes):
                arriving.write(part)
        else:
            raise HttpError(415, f"Got the media type {media_type[:100]!r}, expected {TENSORS[0]} or application/json")
        taken = _terms(context, terms)
        path = await asyncio.to_thread(_complete, arriving, config)
        spool.keep(arriving)
        with _removed_if_refused(spool, path):
            version, status = await context.fleet.adapters.publish(name, path, taken)
    shown = adapter_fields(status, shows_paths=True) | {"name": version.label}
    return json_response({**version_fields(version), "status": shown})


def version_fields(version: NumberedVersion) -> dict[str, Any]:
    """Return the fields of a version that routes about adapters show."""
    return {
        "name": version.name,
        "version": version.number,
        "model": version.label,
        "digest": version.key,
        "num_answers": version.num_answers,
        "is_current": version.superseded_at is None,
        "is_leased": not version.has_ended,
    }


def _query(request: Request) -> PublishTerms:
    """Return the terms in a query."""
    try:
        return msgspec.convert(dict(request.query_params), PublishTerms, strict=False)
    except msgspec.ValidationError as error:
        raise RequestError(f"Got a query that cannot be used: {error}") from None


def _terms(context: Context, given: PublishTerms) -> PublicationTerms:
    """Return the terms of a publication; ``RequestError`` for one out of range."""
    if given.version is not None and not 1 <= given.version <= MAX_NUMBER:
        raise RequestError(f"Got version = {given.version}, expected 1..{MAX_NUMBER}", param="version")
    keep = context.config.publish.keep_versions if given.keep_versions is None else given.keep_versions
    if not 0 <= keep <= MAX_NUMBER:
        raise RequestError(f"Got keep_versions = {keep}, expected 0..{MAX_NUMBER}", param="keep_versions")
    if given.ttl_s is not None and not 0 <= given.ttl_s <= 1e9:
        raise RequestError(f"Got ttl_s = {given.ttl_s}, expected 0..1e9", param="ttl_s")
    return PublicationTerms(
        number=given.version,
        is_preloaded=given.preload,
        is_pinned=given.pin,
        lease=VersionTerms(keep=keep, ttl_s=given.ttl_s),
        is_settled=False,
    )


async def _take_shared(context: Context, arriving: SpooledAdapter, file: str, *, moves: bool) -> None:
    """Copy or move a file of shared memory to an adapter's folder."""
    prefix = context.config.publish.publish_shm
    if prefix is None:
        raise AdapterForbidden(arriving.name, "reading shared memory is off; allow a prefix with --publish-shm PREFIX")
    descriptor, num_bytes = open_shared(arriving.name, file, prefix, context.engine_config.adapters.max_adapter_bytes)
    try:
        if moves:
            arriving.move(file, num_bytes)
        else:
            await asyncio.to_thread(arriving.copy, descriptor, num_bytes)
    finally:
        os.close(descriptor)


def _complete(arriving: SpooledAdapter, config: bytes) -> str:
    """Add the configuration that came beside the weights, or in their metadata; return the folder's path.

    ``AdapterError`` if there is none, or the file is no safetensors file.
    """
    name, path = arriving.name, arriving.folder / WEIGHT_FILES[0]
    if not config:
        with open(path, "rb") as opened, closing(LocalFile(name, opened, path)) as file:
            metadata = parse_metadata(name, read_header_bytes(name, file))
        if CONFIG_KEY not in metadata:
            raise AdapterError(name, f"its metadata has no {CONFIG_KEY!r}, the text of PEFT's {CONFIG_FILE}")
        config = metadata[CONFIG_KEY].encode()
    if len(config) > MAX_CONFIG_BYTES:
        raise AdapterError(name, f"{CONFIG_FILE} has {len(config)} bytes, at most {MAX_CONFIG_BYTES} are accepted")
    return arriving.complete(config)


@contextmanager
def _removed_if_refused(spool: AdapterSpool, path: str) -> Iterator[None]:
    """Remove the folder of an adapter that no engine serves."""
    try:
        yield
    except ManyloraError:
        spool.remove(path)
        raise


async def list_versions(request: Request) -> Response:
    """``GET /adapters/{name}/versions``: the versions of an adapter that are not freed."""
    context = admin_context(request)
    versions = context.fleet.adapters.versions_of(request.path_params["name"])
    return json_response({"object": "list", "data": [version_fields(one) for one in versions]})


publish_routes = [
    Route("/adapters/{name:path}/versions", list_versions, methods=["GET"]),
    Route("/adapters/{name:path}", put_adapter, methods=["PUT"]),
]
