"""Addresses, checked before anything is started: taken ports, and ports that others can reach.

The command line and `serve` call it. A check here is for the message's sake; who binds later
still has to cope with an address that was taken in between.
"""

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
    """Raises `ConfigError` when the router could not listen where it is told to."""
    check_port(config.router.host, config.router.port, PORT_HINT)
    control = bindable(config.control)
    if not control.path:
        host = "0.0.0.0" if control.host == "*" else control.host
        check_port(host, control.port, CONTROL_HINT)


def check_reach(config: ClusterConfig, setting: str, *endpoints: str) -> None:
    """Raises `ConfigError` where other hosts could be reached and trusted without a key.

    Nodes and routers believe whoever they talk to.
    """
    keys = load_keys(config.keys)
    for endpoint in endpoints:
        address = bindable(endpoint)
        keys.check(address, setting)
        if keys.secret or address.is_loopback:
            continue
        log.warning(
            "whoever reaches this address is trusted: keep it on a private network",
            setting=setting,
            address=endpoint,
        )


def check_port(host: str, port: int, hint: str = PORT_HINT) -> None:
    """Raises `ConfigError` when nobody could listen there; port 0 is always free."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"the host name {host!r} does not resolve: {error.strerror}") from error
    family, kind, protocol, _, address = infos[0]
    with socket.socket(family, kind, protocol) as probe:
        # As servers do: what lingers of closed connections does not count as in use.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"port {port} is in use: {hint}") from error
            if error.errno == errno.EACCES:
                raise ConfigError(
                    f"port {port} needs privileges: one above 1023 does not; {hint}"
                ) from error
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
