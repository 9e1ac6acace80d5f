"""Read a router's /health, for commands that wait for a cluster.

It needs no HTTP library.
"""

import http.client
import ssl
from urllib.parse import urlsplit

import msgspec

from baton.runtime.tls import trusting

HEALTH_TIMEOUT_S = 1.0


class NodeReply(msgspec.Struct, frozen=True):
    node_id: str
    role: str = ""
    state: str = ""
    phase: str = ""
    done: int = 0
    total: int = 0
    reason: str = ""  # why it is degraded

    @property
    def doing(self) -> str:
        if self.state != "starting":
            return self.state
        return f"{self.phase} {self.done}/{self.total}" if self.total else self.phase


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
