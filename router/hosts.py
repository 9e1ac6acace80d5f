"""The hosts on which nodes of both roles are in service, by what the nodes publish.

`registry` asks whenever its nodes have changed; `policy` prefers pairs within a host. This file is
pure.
"""

from collections.abc import Sequence

import msgspec

from baton.protocol.ids import NodeId
from baton.router.node import Node


class Host(msgspec.Struct, frozen=True):
    """Nodes in service that can read each other within a host."""

    prefills: tuple[NodeId, ...]
    decodes: tuple[NodeId, ...]


class Hosts(msgspec.Struct, frozen=True):
    """The hosts with nodes of both roles."""

    shared: tuple[Host, ...] = ()
    is_one: bool = False  # all nodes in service are on one of them


def hosts_of(prefills: Sequence[Node], decodes: Sequence[Node]) -> Hosts:
    """Return the hosts of these nodes, which are all nodes in service."""
    first, second = _by_way(prefills), _by_way(decodes)
    shared = tuple(Host(tuple(first[way]), tuple(second[way])) for way in first if way in second)
    num_nodes = len(prefills) + len(decodes)
    is_one = any(len(one.prefills) + len(one.decodes) == num_nodes for one in shared)
    return Hosts(shared, is_one)


def _by_way(nodes: Sequence[Node]) -> dict[str, list[NodeId]]:
    """Return the nodes that can be read in each way that stays within a host."""
    found: dict[str, list[NodeId]] = {}
    for node in nodes:
        for way in dict.fromkeys(node.info.reaches if node.info is not None else ()):
            if "@" in way:  # the other ways may lead to other hosts
                found.setdefault(way, []).append(node.node_id)
    return found
