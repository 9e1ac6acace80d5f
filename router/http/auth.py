"""Decide who may call the router: API keys, host names, and the web pages of other origins.

Keys are compared by their hashes, so the time of a comparison reveals nothing about a key. A router
that trusts its own host, because it listens there alone and asks for no key, must not trust the web
pages in a browser there: a page can rebind its own name to 127.0.0.1, but it cannot hide that name
in the header Host.
"""

import functools
import hashlib
import ipaddress
import math
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from aiohttp import hdrs, web

from baton.protocol.config import RouterConfig
from baton.protocol.errors import ConfigError, RequestError
from baton.router.core.request import Tenant
from baton.runtime.log import clip

# These paths need no key. Probes only tell whether requests can be served. The page at `/` holds no
# data and asks its reader for a key.
OPEN_PATHS = ("/", "/live", "/health", "/ping")
TENANT = web.RequestKey("tenant", Tenant)  # of an accepted request
_SCHEME = "bearer "
ALL = "*"
# No public name server answers for these, so no page of the web can have such a name.
_LOCAL_ENDINGS = (".localhost", ".local", ".internal")
PREFIX = "sha256:"
KEY_START = "sk-baton-"
_LINE = re.compile(rf"{PREFIX}([0-9a-f]{{64}})(\s.*)?")
_CHOICE = re.compile(r"\s(weight|salt)=(\S*)$")  # at the end of a line
MIN_WEIGHT = 0.01
MAX_WEIGHT = 100.0
MAX_SALT = 256
_PREFLIGHT = {
    hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST",
    # The clients of OpenAI and Anthropic send many of their own; a star leaves out Authorization.
    hdrs.ACCESS_CONTROL_ALLOW_HEADERS: "*, Authorization",
    hdrs.ACCESS_CONTROL_MAX_AGE: "600",
}
_READABLE = "X-Request-Id, Retry-After, retry-after-ms, Baton-Max-Tokens"
# A page of the Internet that calls a router in a private network has to be allowed to.
_ASKS_FOR_PRIVATE = "Access-Control-Request-Private-Network"
_ALLOWS_PRIVATE = "Access-Control-Allow-Private-Network"


class Access:
    def __init__(self, config: RouterConfig) -> None:
        """Without keys in the settings, any key is accepted, and so is none.

        Raises `ConfigError` if the file of keys cannot be read.
        """
        self._wants_key = config.wants_key
        self._config = config
        self._tenants: dict[bytes, Tenant] = {}  # by the digest of their key
        self.read_keys()
        self._hosts = {host.lower() for host in config.allowed_hosts}
        trusts_host = config.is_on_loopback and not (
            config.wants_key or config.speaks_tls
        )
        self._wants_local = trusts_host and not self._hosts

    def read_keys(self) -> None:
        """Take the keys that the file has now. Raises `ConfigError`, and keeps those it has."""
        digests = [digest_of(key.encode()) for key in self._config.api_keys]
        tenants = {digest: Tenant(digest.hex()) for digest in digests}
        if self._config.api_key_file:
            tenants |= read_keys(Path(self._config.api_key_file))
        self._tenants = tenants

    def check(self, request: web.Request) -> None:
        """Raise `RequestError` if the request may not be answered."""
        is_open = request.path in OPEN_PATHS or self._is_scrape(request)
        # Probes of other hosts name any address, but a page must not read the nodes' names.
        is_checked = self._wants_local or (self._hosts and not is_open)
        if is_checked and not self._answers_to(request.headers):
            text = (
                f"this router does not answer to the host {clip(request.host)!r}: name it in "
                "router.allowed_hosts"
            )
            raise RequestError(text, code="wrong_host", http_status=421)
        if (
            self._wants_key
            and not is_open
            and not self._is_known(authorization_of(request))
        ):
            text = "send a valid API key in the header `Authorization: Bearer KEY`"
            raise RequestError(text, code="invalid_api_key", http_status=401)

    def _is_scrape(self, request: web.Request) -> bool:
        """Return whether a request is for metrics at the router's own port, which has no clients.

        So a scraper needs no key.
        """
        if request.path != "/metrics" or not self._config.own_port:
            return False
        if request.transport is None:
            return False
        address = request.transport.get_extra_info("sockname")
        # The address of a Unix socket is its path.
        return isinstance(address, tuple) and bool(address[1] == self._config.own_port)

    def _answers_to(self, headers: Mapping[str, str]) -> bool:
        host = headers.get("Host", "")
        if self._wants_local:
            return is_local(host)
        return ALL in self._hosts or _name_of(host) in self._hosts

    def _is_known(self, authorization: str) -> bool:
        scheme = authorization[: len(_SCHEME)]
        given = authorization[len(_SCHEME) :]
        if scheme.lower() != _SCHEME:
            return False
        return (
            digest_of(given.strip().encode(errors="surrogateescape")) in self._tenants
        )

    def tenant_of(self, request: web.Request) -> Tenant:
        """Return whose share of the nodes an accepted request takes: a key's, or an address's."""
        if not self._wants_key:
            return Tenant(_network_of(request.remote or ""))
        given = authorization_of(request)[len(_SCHEME) :].strip()
        digest = digest_of(given.encode(errors="surrogateescape"))
        return self._tenants.get(digest) or Tenant(digest.hex())


def _network_of(address: str) -> str:
    """Return an address; of one in IPv6 its /64, in which a host takes any that it likes."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # a Unix socket
        return address
    if ip.version == 4:
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(ip) >> 64 << 64, 64)))


def authorization_of(request: web.Request) -> str:
    """Return the header Authorization, or what it would be with the key of `x-api-key`."""
    given = request.headers.get(hdrs.AUTHORIZATION)
    return f"Bearer {request.headers.get('x-api-key', '')}" if given is None else given


def refuse_pages(request: web.Request) -> None:
    """Raise `RequestError` if a web page sent this, for a POST without a body asks no preflight."""
    if hdrs.ORIGIN in request.headers:
        text = "web pages may not call this endpoint: send no header Origin"
        raise RequestError(text, code="wrong_origin", http_status=403)


class Cors:
    """Tells browsers which web pages may call the router; by default, none may.

    A browser first sends a preflight request, without the API key of the request that will follow,
    and passes a response to the page only with these headers.
    """

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)

    def preflight(self, request: web.Request) -> web.Response | None:
        """Return the response to a browser's preflight request; None for any other request."""
        asks = request.method == "OPTIONS" and (
            hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        )
        if not asks:
            return None
        headers = {str(name): value for name, value in _PREFLIGHT.items()}
        if request.headers.get(_ASKS_FOR_PRIVATE) == "true":
            headers[_ALLOWS_PRIVATE] = "true"
        return web.Response(status=204, headers=headers)

    def headers_for(self, request: web.Request) -> dict[str, str]:
        """Return the headers of any response, which name the page's origin if it is allowed."""
        headers: dict[str, str] = {hdrs.VARY: hdrs.ORIGIN}
        origin = request.headers.get(hdrs.ORIGIN, "")
        if origin.lower() in self._origins or (origin and ALL in self._origins):
            headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _READABLE
        return headers


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


# --- the file of API keys -----------------------------------------------------------------------


def digest_of(key: bytes) -> bytes:
    """Return the 32 bytes that identify a key. Keys are random, so no salt is needed."""
    return hashlib.sha256(key).digest()


def read_keys(path: Path) -> dict[bytes, Tenant]:
    """Return the digests in a file, which never holds a key itself, and whom their keys stand for.

    Raises a `ConfigError` that names the first line that is not a hash or has another weight.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = (
            error.strerror if isinstance(error, OSError) else "the file is not text"
        )
        raise ConfigError(
            f"cannot read {path} (router.api_key_file): {reason}"
        ) from error
    tenants = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"{path} line {number} is not `{PREFIX}` and 64 hexadecimal digits "
                "(router.api_key_file): add keys with `baton api-key FILE NAME`"
            )
        chosen = _choices(match[2] or "")
        weight = _weight(chosen.get("weight", "1"))
        if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            raise ConfigError(
                f"{path} line {number}: weight={chosen['weight']} is not a number from "
                f"{MIN_WEIGHT:g} to {MAX_WEIGHT:g} (router.api_key_file)"
            )
        if len(chosen.get("salt", "")) > MAX_SALT:
            raise ConfigError(
                f"{path} line {number}: a salt has at most {MAX_SALT} characters "
                "(router.api_key_file)"
            )
        tenants[bytes.fromhex(match[1])] = Tenant(
            match[1], weight, chosen.get("salt", "")
        )
    return tenants


def _choices(text: str) -> dict[str, str]:
    """Return what the end of a line chooses for its key."""
    chosen: dict[str, str] = {}
    while (found := _CHOICE.search(text)) is not None and found[1] not in chosen:
        chosen[found[1]] = found[2]
        text = text[: found.start()].rstrip()
    return chosen


def _weight(text: str) -> float:
    """Return NaN for a text that is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def add_key(path: Path, name: str) -> str:
    """Make a key, append its hash and `name` to the file, and return the key.

    A missing file is created, readable by this user only. Raises `ConfigError`.
    """
    if not name.isprintable():
        raise ConfigError("the name of a key must be one line of printable characters")
    key = KEY_START + secrets.token_urlsafe(32)
    line = f"{PREFIX}{digest_of(key.encode()).hex()} {name}".rstrip() + "\n"
    try:
        descriptor = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        with open(descriptor, "r+", encoding="utf-8") as file:
            before = file.read()
            file.write(line if not before or before.endswith("\n") else f"\n{line}")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return key
