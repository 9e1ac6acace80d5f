"""Check addresses before anything is started: whether ports are free, and who can reach them.

These checks give clear messages early: a process that binds later must still handle an address that
was taken in between. `ReservedPort` keeps a port while no router listens on it.
"""

import contextlib
import errno
import socket

from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError
from baton.runtime.channels.endpoint import bindable
from baton.runtime.channels.keys import load_keys
from baton.runtime.log import logger

PORT_HINT = "choose another with --port N (make serve PORT=N)"
CONTROL_HINT = "choose another with --control tcp://host:port, and name it to the nodes (--routers)"

log = logger("ports")


def check_router_ports(config: ClusterConfig) -> None:
    """Raise `ConfigError` if the router could not listen on its configured addresses."""
    router = config.router
    check_port(router.host, router.port, is_shared=router.shares_port)
    check_port(router.host, router.own_port, "choose another with --router-own-port N")
    control = bindable(config.control)
    if not control.path:
        host = "0.0.0.0" if control.host == "*" else control.host
        check_port(host, control.port, CONTROL_HINT)


def check_reach(config: ClusterConfig, setting: str, *endpoints: str) -> None:
    """Raise `ConfigError` if other hosts could connect to the endpoints without a key.

    Nodes and routers trust every process to which they are connected.
    """
    keys = load_keys(config.keys)
    for endpoint in endpoints:
        address = bindable(endpoint)
        keys.check(address, setting)
        if keys.pairs or address.is_loopback:
            continue
        log.warning(
            "every process that can reach this address is trusted, so the network must be private",
            setting=setting,
            address=endpoint,
        )


class ReservedPort:
    """A port that is reserved for routers, so that a restarted router finds it free.

    Its sockets are bound but never listen, so they get no connections, and routers can also bind
    the port: one router as usual, or several if the port is shared.
    """

    def __init__(self, host: str, port: int, *, is_shared: bool) -> None:
        """Bind `port`, or a free one if it is 0. Raises `ConfigError`."""
        check_port(host, port)
        self._sockets: list[socket.socket] = []
        self._option = socket.SO_REUSEPORT if is_shared else socket.SO_REUSEADDR
        self.port = port
        infos = socket.getaddrinfo(
            host if host not in ("", "*") else None,
            port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )
        try:
            for family, _, _, _, address in dict.fromkeys(infos):
                self._bind(family, str(address[0]))
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot reserve port {port} on {host}: {error.strerror}") from error

    def close(self) -> None:
        """Give the port back. It may be called again."""
        for one in self._sockets:
            one.close()

    def _bind(self, family: socket.AddressFamily, address: str) -> None:
        with contextlib.ExitStack() as undo:
            one = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            one.setsockopt(socket.SOL_SOCKET, self._option, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                one.bind((address, self.port))
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL and self._sockets:
                    return  # this family is turned off
                if error.errno != errno.EADDRINUSE:
                    raise
                # Connections of a server that has ended may linger; `check_port` found no other.
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.bind((address, self.port))
            self.port = one.getsockname()[1]
            self._sockets.append(one)
            undo.pop_all()


def check_port(host: str, port: int, hint: str = PORT_HINT, *, is_shared: bool = False) -> None:
    """Raise `ConfigError` if the port cannot be listened on; port 0 is always free.

    If the port is shared, other processes that share it may listen on it.
    """
    name = None if host in ("", "*") else host
    try:
        infos = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"the host name {host!r} does not resolve: {error.strerror}") from error
    family, kind, protocol, _, address = infos[0]
    with socket.socket(family, kind, protocol) as probe:
        # Servers set this too: connections in TIME_WAIT do not count as in use.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            probe.bind(address)
            # A listening socket would take connections that others have to answer.
            if not is_shared:
                probe.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"port {port} is in use: {hint}") from error
            if error.errno == errno.EACCES:
                raise ConfigError(
                    f"port {port} needs privileges, a port above 1023 does not: {hint}"
                ) from error
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
