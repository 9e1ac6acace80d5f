"""What `registry` finds changed about a node, and `core` must act on."""

import msgspec

from baton.protocol.errors import Failure
from baton.protocol.ids import NodeId
from baton.protocol.messages import NodeInfo, Role
from baton.router.membership import Replaced


class Refuse(msgspec.Struct, frozen=True):
    """The node was turned away and must be told why."""

    node: NodeId
    failure: Failure
    is_new: bool = True  # it was not told the same when it asked last


class Entered(msgspec.Struct, frozen=True):
    """The node is in service from now on."""

    info: NodeInfo


class Left(msgspec.Struct, frozen=True):
    """The node is out of service: nothing more will come of what it was given."""

    node: NodeId
    role: Role
    failure: Failure
    is_planned: bool = False  # it had announced that it would end


class Differs(msgspec.Struct, frozen=True):
    """A node that was just ready computes other bits than one that is in service."""

    node: NodeId
    other: NodeId

    @property
    def message(self) -> str:
        return (
            "two nodes compute different bits: a stream that moves from one to the other is a "
            "valid continuation, but it may differ from one that was never interrupted"
        )


class Unpaired(msgspec.Struct, frozen=True):
    """A node that was just ready can never exchange KV blocks with a node in service."""

    node: NodeId
    other: NodeId
    reason: str


Change = Refuse | Replaced | Entered | Left | Differs | Unpaired
