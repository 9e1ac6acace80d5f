"""Unix sockets that serve HTTP, and the connections of clients to a URL of either kind.

The URL of such a socket is `unix:` and its path.
"""

import errno
import http.client
import os
import socket
import ssl
import stat
from pathlib import Path
from urllib.parse import urlsplit

from baton.protocol.errors import ConfigError

SCHEME = "unix:"
# Whoever may open the file may use the model: this user, and the group of the process.
MODE = 0o660
PROBE_TIMEOUT_S = 1.0


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://", SCHEME))


def url_of_socket(path: str) -> str:
    return f"{SCHEME}{os.path.abspath(path)}"


def check_socket_path(path: str) -> None:
    """Raise `ConfigError` if no server could listen at `path`.

    A socket at which nobody listens, left by a process that was killed, is removed.
    """
    bind_socket(path).close()
    Path(path).unlink()


def bind_socket(path: str) -> socket.socket:
    """Return a socket that is bound to `path` and does not listen yet. Raises `ConfigError`."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        remove_left_socket(path)
        bound.bind(path)
        os.chmod(path, MODE)  # nobody can connect before it listens
    except OSError as error:
        bound.close()
        why = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            why = (
                "another file is there, or a server listens on it: choose another path"
            )
        raise ConfigError(f"cannot listen on {path} (router.uds): {why}") from error
    return bound


def remove_left_socket(path: str) -> None:
    """Remove a socket at which nobody listens, and nothing else."""
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
        # Not ours to judge, such as one of another user, or with a full backlog.
        except OSError:
            return


class SocketConnection(http.client.HTTPConnection):
    """A client's connection to a server on a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def connection_to(
    url: str, timeout_s: float, tls: ssl.SSLContext | None = None
) -> tuple[http.client.HTTPConnection, str]:
    """Return a connection that is not open yet, and the path before those of the API."""
    if url.startswith(SCHEME):
        return SocketConnection(url.removeprefix(SCHEME), timeout_s), ""
    parts = urlsplit(url)
    if parts.scheme == "https":
        secure = http.client.HTTPSConnection(
            parts.netloc, timeout=timeout_s, context=tls
        )
        return secure, parts.path
    return http.client.HTTPConnection(parts.netloc, timeout=timeout_s), parts.path
