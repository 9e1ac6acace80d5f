"""What a start needs: checks of its addresses, the routers' /health, and lines of progress.

The checks give clear messages early: a process that binds later must still handle an address that
was taken in between. `reserve_port` keeps a port while no router listens on it.
"""

import errno
import http.client
import socket
import ssl
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError
from baton.runtime.channels.endpoint import bracketed, parse_endpoint
from baton.runtime.channels.keys import load_keys
from baton.runtime.log import is_json, logger, say
from baton.runtime.tls import trusting
from baton.runtime.unix_socket import check_socket_path, connection_to

PORT_HINT = "choose another with --port N (make serve PORT=N)"
CONTROL_HINT = "choose another with --control tcp://host:port, and name it to the nodes (--routers)"

log = logger("start")


def check_router_ports(config: ClusterConfig) -> None:
    """Raise `ConfigError` if the router could not listen on its configured addresses."""
    router = config.router
    is_shared = router.shares_port or router.port_is_held
    if router.uds:
        check_socket_path(router.uds)
    else:
        check_port(router.host, router.port, is_shared=is_shared)
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


def check_cache_folder(folder: str) -> None:
    """Raise `ConfigError` unless nodes of this user could keep blocks in `cache.folder`."""
    if not folder:
        return
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"cache.folder: cannot write to {folder}: {error.strerror}; name a folder that this "
            "user can write to"
        ) from None


def reserve_port(host: str, port: int, hint: str = PORT_HINT) -> socket.socket:
    """Bind `port`, or a free one if it is 0, so that a restarted router finds it free.

    The socket never listens, so it gets no connections. Only routers of this user that share their
    port can bind it too. Raises `ConfigError`.
    """
    reserved = _bound(host, port, hint, is_shared=True)
    # Without this, any process could bind the port whenever no router listens.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return reserved


def check_port(
    host: str, port: int, hint: str = PORT_HINT, *, is_shared: bool = False
) -> None:
    """Raise `ConfigError` if the port cannot be bound; port 0 is always free."""
    _bound(host, port, hint, is_shared=is_shared).close()


def _bound(host: str, port: int, hint: str, *, is_shared: bool) -> socket.socket:
    family, address = _address(host, port)
    bound = socket.socket(family, socket.SOCK_STREAM)
    # Without it, a port with lingering connections of a server that has ended is not free.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        why = f"cannot listen on {host}:{port}: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            why = f"port {port} is in use: {hint}"
        elif error.errno == errno.EACCES:
            why = f"port {port} needs privileges, a port above 1023 does not: {hint}"
        raise ConfigError(why) from error
    return bound


def _address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    name = None if host in ("", "*", "::") else host
    try:
        infos = socket.getaddrinfo(
            name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(
            f"the host name {host!r} does not resolve: {error.strerror}"
        ) from error
    return infos[0][0], infos[0][4]


HEALTH_TIMEOUT_S = 1.0


class NodeLoad(msgspec.Struct, frozen=True):
    num_running: int = 0
    num_waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0


class NodeReply(msgspec.Struct, frozen=True):
    """A node as a router reports it at /health, and with its load at /status.json."""

    node_id: str
    role: str = ""
    state: str = ""
    phase: str = ""
    done: int = 0
    total: int = 0
    reason: str = ""  # why it is degraded
    load: NodeLoad = NodeLoad()
    heartbeat_age_s: float = 0.0

    @property
    def doing(self) -> str:
        """Return the state, with the progress if the node is starting."""
        if self.state != "starting":
            return self.state
        return (
            f"{self.phase} {self.done}/{self.total}"
            if self.total
            else self.phase or self.state
        )


class HealthReply(msgspec.Struct, frozen=True):
    """The part of GET /health that commands need."""

    router: str = ""  # the name of the router that answered
    nodes: tuple[NodeReply, ...] = ()
    num_running: int = 0
    num_queued: int = 0
    can_serve: bool = False  # whether the answer's status was 200

    @property
    def ready_ids(self) -> frozenset[str]:
        return frozenset(node.node_id for node in self.nodes if node.state == "ready")


def ask_health(url: str) -> HealthReply | None:
    """Return the answer of the router at `url`, or None if there is none.

    The certificate of an https router is not checked: it names the host that clients use, nothing
    secret is sent, and Kubernetes' probes do not check it either.
    """
    context: ssl.SSLContext | None = None
    if url.startswith("https:"):
        context = trusting(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    connection, _ = connection_to(url, HEALTH_TIMEOUT_S, context)
    try:
        connection.request("GET", "/health")
        reply = connection.getresponse()
        health = msgspec.json.decode(reply.read(), type=HealthReply)
    except (OSError, http.client.HTTPException, msgspec.MsgspecError):
        return None
    finally:
        connection.close()
    return msgspec.structs.replace(health, can_serve=reply.status == 200)


def url_of(host: str, port: int, *, is_tls: bool = False) -> str:
    """Return the URL by which a client on this host reaches a server bound to `host`."""
    if host in ("0.0.0.0", "::", "*", ""):
        host = "127.0.0.1"
    return f"{'https' if is_tls else 'http'}://{bracketed(host)}:{port}"


# What people are told of the phases of a node's start. Logs for machines have the phases.
PHASES = {
    "weights": "loading weights",
    "weight digests": "hashing the weight files",
    "kernels": "compiling kernels, once for this machine",
    "row rules": "trying how many rows a product takes without changing a bit",
    "proofs": "proving kernels on this GPU, once for this machine",
    "products": "choosing the fastest products",
    "kv pool": "allocating the KV cache",
    "graphs": "capturing CUDA graphs",
}


class StartProgress:
    """Prints a line for each new phase of a process."""

    def __init__(self) -> None:
        self._shown: dict[str, str] = {}

    def show(self, phases: Mapping[str, str]) -> None:
        """Take the name of each process, and its phase of the start."""
        for name, phase in phases.items():
            # Counts change often; a line per phase is enough.
            words = phase.rstrip("0123456789/ ")
            if self._shown.get(name) == words:
                continue
            self._shown[name] = words
            if is_json():
                log.info("starting", node=name, phase=words)
            else:
                say(f"{name}: {PHASES.get(words, words)}")
