"""Read a router's /health while a cluster starts, and show the progress."""

import http.client
import ssl
import sys
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from baton.runtime.log import is_json, logger, relayed
from baton.runtime.tls import trusting

HEALTH_TIMEOUT_S = 1.0

log = logger("serve")


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
        return f"{self.phase} {self.done}/{self.total}" if self.total else self.phase or self.state


class HealthReply(msgspec.Struct, frozen=True):
    """The part of GET /health that a start needs."""

    router: str = ""  # the name of the router that answered
    nodes: tuple[NodeReply, ...] = ()
    can_serve: bool = False  # whether the answer's status was 200

    @property
    def ready_ids(self) -> frozenset[str]:
        return frozenset(node.node_id for node in self.nodes if node.state == "ready")


def ask_health(url: str) -> HealthReply | None:
    """Return the answer of the router at `url` (http://host:port), or None if there is none.

    The certificate of an https router is not checked: it names the host that clients use, nothing
    secret is sent, and Kubernetes' probes do not check it either.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port
    connection = http.client.HTTPConnection(host, port, timeout=HEALTH_TIMEOUT_S)
    if parts.scheme == "https":
        context = trusting(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        connection = http.client.HTTPSConnection(
            host, port, timeout=HEALTH_TIMEOUT_S, context=context
        )
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
    if host in ("0.0.0.0", "*", ""):
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


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
                print(f"{name}: {words}", file=sys.stderr, flush=True)


def relay(name: str, line: str) -> None:
    """Print a line of a child process on stderr."""
    print(relayed(name, line), file=sys.stderr, flush=True)
