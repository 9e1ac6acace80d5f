"""Check who may call the router: API keys, and the host names to which it answers.

`App` checks every request except probes, before its body is read. Keys are compared by their
hashes, so the time of a comparison reveals nothing about a key.
"""

from aiohttp import web

from baton.protocol.config import RouterConfig
from baton.protocol.errors import RequestError
from baton.router.http.key_file import KeyFile, digest_of
from baton.runtime.clock import monotonic
from baton.runtime.log import clip

# These paths need no key. Probes only tell whether requests can be served. The page at `/` holds no
# data and asks its reader for a key.
OPEN_PATHS = ("/", "/live", "/health")
_SCHEME = "bearer "


class Access:
    def __init__(self, config: RouterConfig) -> None:
        """Without keys or hosts in the settings, any key or any host is accepted.

        Raises `ConfigError` if the file of keys cannot be read.
        """
        self._digests = {digest_of(key.encode()) for key in config.api_keys}
        self._file = KeyFile(config.api_key_file, monotonic) if config.api_key_file else None
        self._hosts = {host.lower() for host in config.allowed_hosts}

    @property
    def _wants_key(self) -> bool:
        return bool(self._digests) or self._file is not None

    def check(self, request: web.Request) -> None:
        """Raise `RequestError` if the request may not be answered."""
        if request.path in OPEN_PATHS:
            return
        if self._hosts and _name_of(request.host) not in self._hosts:
            text = f"this router does not answer to {clip(request.host)!r} (router.allowed_hosts)"
            raise RequestError(text, code="wrong_host", http_status=421)
        if self._wants_key and not self._is_known(request.headers.get("Authorization", "")):
            text = "send a valid API key in the header `Authorization: Bearer KEY`"
            raise RequestError(text, code="invalid_api_key", http_status=401)

    def _is_known(self, authorization: str) -> bool:
        scheme, given = authorization[: len(_SCHEME)], authorization[len(_SCHEME) :]
        if scheme.lower() != _SCHEME:
            return False
        digest = digest_of(given.strip().encode(errors="surrogateescape"))
        return digest in self._digests or (self._file is not None and digest in self._file)


def _name_of(host: str) -> str:
    """Return a Host header without its port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()
