"""Find the handler for a path and a method.

`App` adds the endpoints and calls `find` for every request. A path is that of an endpoint, or it
begins with one and has an end of its own, which the handler finds in the request. Nothing here does
I/O.
"""

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from baton.protocol.errors import RequestError
from baton.runtime.log import clip

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# What stands in a path in the place of the name in braces.
PATH_END = web.RequestKey("path_end", str)
UNKNOWN = "unknown"


class Route(msgspec.Struct, frozen=True):
    """One path. `name` is the pattern that metrics and logs show, never what a client sent."""

    name: str
    handlers: dict[str, Handler]  # by method


class Routes:
    def __init__(self) -> None:
        self._whole: dict[str, Route] = {}
        self._begun: dict[str, Route] = {}

    def add(self, path: str, **handlers: Handler) -> None:
        """Add an endpoint, with a handler for each method; a path may end in a name in braces."""
        start, brace, _ = path.partition("{")
        (self._begun if brace else self._whole)[start] = Route(path, handlers)

    def find(self, request: web.Request) -> Route | None:
        """Return the endpoint of a request, and note the end of its path if it has its own."""
        path = request.path
        if (found := self._whole.get(path)) is not None:
            return found
        for start, endpoint in self._begun.items():
            if path.startswith(start) and len(path) > len(start):
                request[PATH_END] = path[len(start) :]
                return endpoint
        return None


def handler_of(endpoint: Route | None, request: web.Request) -> Handler:
    """Return what answers a request; raises `RequestError` if nothing does."""
    if endpoint is None:
        text = f"there is no {request.method} {clip(request.path)}"
        raise RequestError(text, code="unknown_url", http_status=404)
    handler = endpoint.handlers.get(request.method)
    if handler is None:
        text = f"{clip(request.path)} does not take {clip(request.method)}"
        raise RequestError(text, code="method_not_allowed", http_status=405)
    return handler
