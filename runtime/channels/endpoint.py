"""Addresses of channels: `tcp://host[:port]` and `ipc://path`, checked before ZMQ sees them.

A tcp address without a port means any free port.
"""

import ipaddress
import os
import re
import socket as sockets
from pathlib import Path

import msgspec
import zmq

from baton.protocol.errors import ConfigError

# The field sun_path holds 108 bytes, the closing zero included.
MAX_IPC_PATH_BYTES = 107
_TCP = re.compile(
    r"(\[(?P<ipv6>[^]\s]+)\]|(?P<host>[^:\s]+))(:(\*|(?P<port>\d+))?)?", re.ASCII
)


class Endpoint(msgspec.Struct, frozen=True):
    """A parsed address. For ipc, `host` is empty and `port` is 0; for tcp, `path` is empty."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_loopback(self) -> bool:
        """Return whether only this host can reach it; False for a name that does not resolve."""
        if self.path or self.is_wildcard:
            return bool(self.path)
        try:
            return ipaddress.ip_address(self.resolved()[0].host).is_loopback
        except ConfigError:
            return False

    @property
    def is_name(self) -> bool:
        """Return whether a name server must be asked for the host."""
        if self.path or self.is_wildcard:
            return False
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return True
        return False

    @property
    def is_wildcard(self) -> bool:
        return not self.path and self.host in ("*", "0.0.0.0", "::")

    @property
    def dial_endpoint(self) -> str:
        """Return the address for a dialer's socket. Raises `ConfigError` if there is none."""
        if not self.path and (self.port == 0 or self.is_wildcard):
            raise ConfigError(
                f"cannot dial {self}: the address needs a host and a port"
            )
        return str(self)

    def resolved(self) -> list["Endpoint"]:
        """Return the address with each numeric host that it stands for. Raises `ConfigError`.

        This waits for the name server, which may take seconds.
        """
        if not self.is_name:
            return [self]
        try:
            found = sockets.getaddrinfo(self.host, None, type=sockets.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            text = f"the host name {self.host!r} does not resolve: {error}"
            raise ConfigError(text) from error
        return [Endpoint(str(address[0]), self.port) for *_, address in found]

    def bind(self, socket: "zmq.Socket[bytes]") -> str:
        """Bind `socket` and return the address that it got. Raises `ConfigError`."""
        numeric = self.resolved()[0]  # ZMQ cannot bind to names
        wanted = str(numeric)
        if not self.path:
            # A star stands for every address: libzmq takes IPv4 alone where the system has no IPv6.
            socket.setsockopt(zmq.IPV6, int(":" in numeric.host or numeric.host == "*"))
            wanted = f"tcp://{bracketed(numeric.host)}:{self.port or '*'}"
        try:
            socket.bind(wanted)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {self}: {error.strerror}") from error
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return bound.rstrip(b"\0").decode()

    def __str__(self) -> str:
        return (
            f"ipc://{self.path}"
            if self.path
            else f"tcp://{bracketed(self.host)}:{self.port}"
        )


def parse_endpoint(text: str) -> Endpoint:
    """Return the parsed address. Raises a `ConfigError` that says what is wrong with it."""
    scheme, _, rest = text.partition("://")
    if scheme == "ipc" and rest:
        if len(os.fsencode(rest)) > MAX_IPC_PATH_BYTES:
            raise ConfigError(
                f"{text}: a socket path has at most {MAX_IPC_PATH_BYTES} bytes; shorten it"
            )
        if not Path(rest).parent.is_dir():
            raise ConfigError(f"{text}: the folder {Path(rest).parent} does not exist")
        return Endpoint(path=rest)
    if scheme == "tcp" and (found := _TCP.fullmatch(rest)):
        port = int(found["port"] or 0)
        if port <= 65535:
            return Endpoint(host=found["ipv6"] or found["host"], port=port)
    raise ConfigError(
        f"{text!r} is not an address: write tcp://host:port or ipc:///path"
    )


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
