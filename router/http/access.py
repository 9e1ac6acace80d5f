"""Check who may call the router: API keys, and the host names to which it answers.

`App` checks every request except probes, before its body is read. Keys are compared by their
hashes, so the time of a comparison reveals nothing about a key. A router that trusts its own host,
because it listens there alone and asks for no key, must not trust the web pages in a browser there:
a page can rebind its own name to 127.0.0.1, but it cannot hide that name in the header Host.
"""

import functools
from collections.abc import Mapping

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
ALL_HOSTS = "*"
# No public name server answers for these, so no page of the web can have such a name.
_LOCAL_ENDINGS = (".localhost", ".local", ".internal")


class Access:
    def __init__(self, config: RouterConfig) -> None:
        """Without keys in the settings, any key is accepted, and so is none.

        Raises `ConfigError` if the file of keys cannot be read.
        """
        self._digests = {digest_of(key.encode()) for key in config.api_keys}
        self._file = KeyFile(config.api_key_file, monotonic) if config.api_key_file else None
        self._hosts = {host.lower() for host in config.allowed_hosts}
        trusts_host = config.is_on_loopback and not (config.wants_key or config.speaks_tls)
        self._wants_local = trusts_host and not self._hosts

    @property
    def _wants_key(self) -> bool:
        return bool(self._digests) or self._file is not None

    def check(self, request: web.Request) -> None:
        """Raise `RequestError` if the request may not be answered."""
        if request.path in OPEN_PATHS:
            return
        if (self._hosts or self._wants_local) and not self._answers_to(request.headers):
            text = (
                f"this router does not answer to the host {clip(request.host)!r}: name it in "
                "router.allowed_hosts"
            )
            raise RequestError(text, code="wrong_host", http_status=421)
        if self._wants_key and not self._is_known(request.headers.get("Authorization", "")):
            text = "send a valid API key in the header `Authorization: Bearer KEY`"
            raise RequestError(text, code="invalid_api_key", http_status=401)

    def _answers_to(self, headers: Mapping[str, str]) -> bool:
        host = headers.get("Host", "")
        if self._wants_local:
            return is_local(host)
        return ALL_HOSTS in self._hosts or _name_of(host) in self._hosts

    def _is_known(self, authorization: str) -> bool:
        scheme, given = authorization[: len(_SCHEME)], authorization[len(_SCHEME) :]
        if scheme.lower() != _SCHEME:
            return False
        digest = digest_of(given.strip().encode(errors="surrogateescape"))
        return digest in self._digests or (self._file is not None and digest in self._file)


@functools.lru_cache(maxsize=64)
def is_local(host: str) -> bool:
    """Return whether a Host header has an address or a name that no web page can have."""
    name = _name_of(host).removesuffix(".")
    is_address = name.startswith("[") or name.rpartition(".")[2].isdecimal()
    return is_address or "." not in name or name.endswith(_LOCAL_ENDINGS)


def _name_of(host: str) -> str:
    """Return a Host header without its port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()
