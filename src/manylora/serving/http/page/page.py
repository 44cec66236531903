"""The routes of the live page, all of them below ``/ui``: its files, its session, its snapshots and its actions.

The files are the same for everyone and hold nothing of the server. All else needs a session, which a cookie proves that
browsers send to ``/ui`` alone. A call must come from the page itself, as ``Sec-Fetch-Site`` says, or ``Origin`` where
a browser sends no such header (it does not over plain HTTP). So a cookie opens no other route, and no page of another
site can use it. A call that passes goes to the route that the API has for it, as the administrator's.

The policy of the page (CSP) allows its own files alone: no inline script or style, no other host, no frame around it,
and no text that becomes markup (Trusted Types).
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from manylora.core.errors import RequestError
from manylora.serving.http.auth import IS_ADMIN, Gate
from manylora.serving.http.errors import HttpError, json_response
from manylora.serving.http.page.session import IDLE_S, PageSessions
from manylora.serving.http.page.viewers import Viewers
from manylora.serving.http.room import short_body

__all__ = ["LivePage", "PageAction"]

COOKIE = "manylora_session"
MAX_KEY_BYTES = 4096

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),  # nginx must not buffer events
    *((name.lower().encode(), value.encode()) for name, value in HEADERS.items()),
]
FILES = {
    "/ui": ("page.html", "text/html"),
    "/ui/page.css": ("page.css", "text/css"),
    "/ui/page.js": ("page.js", "text/javascript"),
    "/ui/icon.svg": ("icon.svg", "image/svg+xml"),
}


class SignInBody(msgspec.Struct, forbid_unknown_fields=True):
    """``POST /ui/session``."""

    key: str


@dataclass(frozen=True, slots=True)
class PageAction:
    """A route of the API that the page may call, below ``/ui``."""

    method: str
    path: str  # as of the API, as ``/adapters/{name:path}``
    endpoint: Callable[[Request], Awaitable[Response]]


class LivePage:
    """The page of one server, which may call ``actions``; without any key it is open to callers on this machine.

    ``take`` takes a snapshot of the server, as JSON in one line; ``is_ending`` returns whether the server ends.
    """

    def __init__(
        self,
        gate: Gate,
        take: Callable[[], Awaitable[bytes]],
        is_ending: Callable[[], bool],
        actions: Sequence[PageAction] = (),
    ) -> None:
        self._gate = gate
        self._sessions = PageSessions(gate)
        self.viewers = Viewers(take, is_ending)
        self._actions = actions

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            *(Route(path, _file(*named), methods=["GET"]) for path, named in FILES.items()),
            Route("/ui/session", self._session, methods=["GET", "POST", "PUT", "DELETE"]),
            Route("/ui/events", self._events, methods=["GET"]),
            *(Route(f"/ui{one.path}", self._allowed(one.endpoint), methods=[one.method]) for one in self._actions),
        ]

    async def _session(self, request: Request) -> Response:
        """``/ui/session``: tell whether there is one (GET), begin (POST), renew (PUT) and end it (DELETE)."""
        if request.method == "GET":
            return json_response(await self._state(request), headers=HEADERS)
        _check_own_page(request)
        if request.method == "DELETE":
            return _with_cookie(request, "", 0)
        if request.method == "PUT":
            return _with_cookie(request, await self._check(request), IDLE_S)
        return _with_cookie(request, await self._sessions.sign_in(request, await _key_of(request)), IDLE_S)

    async def _state(self, request: Request) -> dict[str, object]:
        try:
            await self._check(request)
        except HttpError as error:
            return {"is_open": False, "needs_key": self._gate.asks_for_key, "message": str(error)}
        return {"is_open": True, "needs_key": self._gate.asks_for_key}

    async def _events(self, request: Request) -> ASGIApp:
        """``GET /ui/events``: a snapshot a second, as server-sent events."""
        await self._check(request)
        self.viewers.check_room()
        return functools.partial(self.viewers.send_to, headers=STREAM_HEADERS)

    def _allowed(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def allowed(request: Request) -> Response:
            await self._check(request)
            request.scope[IS_ADMIN] = True
            answer = await endpoint(request)
            answer.headers.update(HEADERS)
            return answer

        return allowed

    async def _check(self, request: Request) -> str:
        """Return the session's cookie, to be kept in place of the one that came; empty where no key is asked for.

        ``HttpError`` without a session (401), for a call of another page, or from elsewhere without any key (403).
        """
        _check_own_page(request)
        if not self._gate.asks_for_key:
            self._gate.check_admin(request)
            return ""
        cookie = await self._sessions.renewed(request.cookies.get(COOKIE, ""))
        if cookie is None:
            raise HttpError(401, "Sign in with the administrator's key.")
        return cookie


def _check_own_page(request: Request) -> None:
    """Raise ``HttpError`` (403) for a call that a page of another site may have caused."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        is_own = site == "same-origin"
    else:  # a browser sends neither with a GET over plain HTTP, and keeps the answer from other sites
        origin = request.headers.get("origin", "")
        is_own = origin.partition("://")[2] == request.headers.get("host") if origin else request.method == "GET"
    if not is_own:
        raise HttpError(403, "The routes of the page take calls of the page alone.")


async def _key_of(request: Request) -> str:
    """Return the key in the body of a sign-in.

    ``HttpError`` if it is too long (413), no JSON (415), or the client has gone (400); ``RequestError`` if malformed.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HttpError(415, "Expected the media type application/json")
    body = await short_body(request, MAX_KEY_BYTES)
    try:
        return msgspec.json.decode(body, type=SignInBody).key.strip()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # its text may have the key
        raise RequestError('Expected {"key": "..."}', param="key") from None


def _with_cookie(request: Request, cookie: str, max_age_s: int) -> Response:
    """Return an answer that sets the session's cookie, for ``/ui`` alone."""
    answer = json_response({}, headers=HEADERS)
    answer.set_cookie(
        COOKIE,
        cookie,
        max_age=max_age_s,
        path=request.scope.get("root_path", "") + "/ui",
        # A proxy may speak TLS for the server: the browser names its own scheme.
        secure="https" in (request.scope["scheme"], request.headers.get("origin", "").partition(":")[0]),
        httponly=True,
        samesite="strict",
    )
    return answer


def _file(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    """Return the route of a file."""
    read = functools.cache((files("manylora.serving.http.page") / "assets" / name).read_bytes)

    async def file(request: Request) -> Response:
        return Response(read(), media_type=media_type, headers=HEADERS)

    return file
