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

    async def on_prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the page's origin to an answer that is about to be sent, if it is allowed."""
        origin = request.headers.get(hdrs.ORIGIN, "")
        if origin.lower() in self._origins or (origin and ALL in self._origins):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _READABLE
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
