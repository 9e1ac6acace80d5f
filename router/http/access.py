"""Who may call the router: API keys, and the host names that it answers to.

`App` checks every request except probes, before its body is read. Nothing here does I/O.
"""

import hmac
from collections.abc import Sequence

from aiohttp import web

from baton.protocol.errors import RequestError
from baton.runtime.log import clip

# These are answered to anybody: they tell no more than whether requests can be served.
OPEN_PATHS = ("/live", "/health")
_SCHEME = "bearer "


class Access:
    def __init__(self, api_keys: Sequence[str], allowed_hosts: Sequence[str]) -> None:
        """Without keys or hosts, requests with any key or for any host are let in."""
        self._keys = [key.encode() for key in api_keys]
        self._hosts = {host.lower() for host in allowed_hosts}

    def check(self, request: web.Request) -> None:
        """Raise `RequestError` if the request may not be answered."""
        if request.path in OPEN_PATHS:
            return
        if self._hosts and _name_of(request.host) not in self._hosts:
            text = f"this router does not answer to {clip(request.host)!r} (router.allowed_hosts)"
            raise RequestError(text, code="wrong_host", http_status=421)
        if self._keys and not self._is_known(request.headers.get("Authorization", "")):
            text = "send a valid API key in the header `Authorization: Bearer KEY`"
            raise RequestError(text, code="invalid_api_key", http_status=401)

    def _is_known(self, authorization: str) -> bool:
        scheme, given = authorization[: len(_SCHEME)], authorization[len(_SCHEME) :]
        if scheme.lower() != _SCHEME:
            return False
        data = given.strip().encode(errors="surrogateescape")
        # All keys are compared, each in constant time, so the time tells nothing about any key.
        return sum([hmac.compare_digest(data, key) for key in self._keys]) > 0


def _name_of(host: str) -> str:
    """Return a Host header without its port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()
