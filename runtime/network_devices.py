"""The network devices that UCX may use when no setting names one.

`engine/node` calls it when a node starts. A node whose cluster is on this host alone uses loopback.
Any other node takes the interface that leads to its cluster, and the RDMA ports of this host, which
UCX prefers. Any process can connect to UCX over the devices that are named here, so no other
interface is named.
"""

import contextlib
import ipaddress
import socket
from pathlib import Path

import psutil

from baton.protocol.config import NodeConfig
from baton.runtime.channels.destination import address_in
from baton.runtime.channels.endpoint import Endpoint, bindable

RDMA_PORTS = Path("/sys/class/infiniband")
_ACTIVE = "4: ACTIVE"


def devices_for(node: NodeConfig, rdma_ports: Path = RDMA_PORTS) -> str:
    """Return UCX's list of devices, such as `mlx5_0:1,eth0`; empty for loopback alone.

    An address that does not resolve yet, or that this host cannot reach, counts as loopback.
    """
    names = (_interface_of(own_address(endpoint)) for endpoint in _outward(node))
    interface = next(filter(None, names), "")
    return ",".join([*active_ports(rdma_ports), interface]) if interface else ""


def reaches_out(node: NodeConfig) -> bool:
    """Return whether a node binds or dials an address beyond this host."""
    return bool(_outward(node))


def _outward(node: NodeConfig) -> list[Endpoint]:
    endpoints = [bindable(node.bind), *map(address_in, node.routers)]
    return [one for one in endpoints if not (one.path or one.is_loopback or one.is_wildcard)]


def own_address(endpoint: Endpoint) -> str:
    """Return the address from which this host would talk to `endpoint`; empty if it cannot."""
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port or 1, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # a datagram socket only looks up the route
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _interface_of(address: str) -> str:
    if not address:
        return ""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    for name, owned in psutil.net_if_addrs().items():
        for one in owned:
            is_ip = one.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and ipaddress.ip_address(one.address.partition("%")[0]) == wanted:
                return name
    return ""


def active_ports(folder: Path = RDMA_PORTS) -> list[str]:
    """Return the ports that are up, as `device:port`."""
    found = []
    for state in sorted(folder.glob("*/ports/*/state")):
        with contextlib.suppress(OSError):  # a port that is hidden from this process
            if state.read_text().strip() == _ACTIVE:
                found.append(f"{state.parents[2].name}:{state.parent.name}")
    return found
