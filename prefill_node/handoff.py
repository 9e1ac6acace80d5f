"""One prompt, from a router's request until decode has read its blocks.

Only the prefill scheduler holds a handoff. `is_offered` is true from the offer until the connector
reports `Released`; during that time a reader may need the blocks.
"""

from dataclasses import dataclass

from baton.engine.choices import Choices
from baton.engine.outputs import Origin
from baton.engine.sequence import Sequence
from baton.protocol.ids import NodeId
from baton.protocol.messages import Prefill


@dataclass(slots=True, eq=False)
class Handoff:
    sequence: Sequence
    origin: Origin
    choices: Choices
    decode_node: NodeId | None
    arrived_s: float
    admitted_s: float = 0.0
    num_cached_tokens: int = 0
    num_announced_blocks: int = 0
    is_offered: bool = False
    is_ended: bool = False

    @classmethod
    def of(cls, message: Prefill, origin: Origin, now_s: float) -> "Handoff":
        choices = Choices.of(message)
        return cls(Sequence.of(message), origin, choices, message.decode_node, now_s)
