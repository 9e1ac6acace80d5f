"""The changes of a node that `registry` finds and on which `core` must act."""

import msgspec

from baton.protocol.errors import Failure
from baton.protocol.ids import NodeId
from baton.protocol.messages import NodeInfo, Role
from baton.router.membership import Replaced


class Refuse(msgspec.Struct, frozen=True):
    """The node was refused and must be told why."""

    node: NodeId
    failure: Failure
    is_new: bool = True  # the node was not told the same when it asked last


class Entered(msgspec.Struct, frozen=True):
    """The node is in service from now on."""

    info: NodeInfo


class Left(msgspec.Struct, frozen=True):
    """The node is out of service, and nothing will come of its work."""

    node: NodeId
    role: Role
    failure: Failure


class Differs(msgspec.Struct, frozen=True):
    """A node that is just ready computes other bits than a node in service."""

    node: NodeId
    other: NodeId

    @property
    def message(self) -> str:
        return (
            "two nodes compute different bits: a stream that moves from one to the other is a "
            "valid continuation, but it may differ from one that was never interrupted"
        )


class Unpaired(msgspec.Struct, frozen=True):
    """A node that is just ready can never exchange KV blocks with a node in service."""

    node: NodeId
    other: NodeId
    reason: str


Change = Refuse | Replaced | Entered | Left | Differs | Unpaired
