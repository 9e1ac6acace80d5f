"""Decide which web pages may call the router from a browser (CORS); by default, none may.

`App` makes a `Cors` if origins are allowed. A browser first sends a preflight request, without the
API key of the request that will follow, and passes an answer to the page only with these headers.
"""

from aiohttp import hdrs, web

ALL = "*"
_PREFLIGHT = {
    hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST",
    hdrs.ACCESS_CONTROL_ALLOW_HEADERS: "Authorization, Content-Type, Last-Event-ID, X-Request-Id",
    hdrs.ACCESS_CONTROL_MAX_AGE: "600",
}
_READABLE = "X-Request-Id, Retry-After, retry-after-ms"


class Cors:
    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)

    def preflight(self, request: web.Request) -> web.Response | None:
        """Return the answer to a browser's preflight request; None for any other request."""
        asks = request.method == "OPTIONS" and (
            hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        )
        return web.Response(status=204, headers=_PREFLIGHT) if asks else None

    def headers_for(self, request: web.Request) -> dict[str, str]:
        """Return the headers of any answer, which name the page's origin if it is allowed."""
        headers: dict[str, str] = {hdrs.VARY: hdrs.ORIGIN}
        origin = request.headers.get(hdrs.ORIGIN, "")
        if origin.lower() in self._origins or (origin and ALL in self._origins):
            headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _READABLE
        return headers
