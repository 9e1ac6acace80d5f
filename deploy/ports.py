"""Check addresses before anything is started: whether ports are free, and who can reach them.

These checks give clear messages early: a process that binds later must still handle an address that
was taken in between. `ReservedPort` keeps a port while no router listens on it.
"""

import errno
import socket

from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError
from baton.runtime.channels.endpoint import parse_endpoint
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
    control = parse_endpoint(config.control)
    if not control.path:
        host = "0.0.0.0" if control.host == "*" else control.host
        check_port(host, control.port, CONTROL_HINT)


def check_reach(config: ClusterConfig, setting: str, *endpoints: str) -> None:
    """Raise `ConfigError` if other hosts could connect to the endpoints without a key.

    Nodes and routers trust every process to which they are connected.
    """
    keys = load_keys(config.keys)
    for endpoint in endpoints:
        address = parse_endpoint(endpoint)
        keys.check(address, setting)
        if keys.pairs or address.is_loopback:
            continue
        log.warning(
            "every process that can reach this address is trusted, so the network must be private",
            setting=setting,
            address=endpoint,
        )


def reserve_port(host: str, port: int, *, is_shared: bool) -> socket.socket:
    """Bind `port`, or a free one if it is 0, so that a restarted router finds it free.

    The socket never listens, so it gets no connections, and routers can also bind the port: one
    router as usual, or several if the port is shared. Raises `ConfigError`.
    """
    check_port(host, port)
    family, address = _address(host, port)
    reserved = socket.socket(family, socket.SOCK_STREAM)
    # Without it, a port with lingering connections of a server that has ended is not free.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        reserved.bind(address)
    except OSError as error:
        reserved.close()
        raise ConfigError(f"cannot reserve port {port} on {host}: {error.strerror}") from error
    return reserved


def check_port(host: str, port: int, hint: str = PORT_HINT, *, is_shared: bool = False) -> None:
    """Raise `ConfigError` if the port cannot be listened on; port 0 is always free.

    If the port is shared, other processes that share it may listen on it.
    """
    family, address = _address(host, port)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
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


def _address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    name = None if host in ("", "*") else host
    try:
        infos = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"the host name {host!r} does not resolve: {error.strerror}") from error
    return infos[0][0], infos[0][4]
