"""One prompt on its way from a router's request to blocks that decode has read.

Held by the prefill scheduler only. `is_offered` is true from the offer until the connector reports
`Released`: as long as it is, a reader may need the blocks.
"""

from dataclasses import dataclass

from baton.engine.outputs import Origin
from baton.engine.sequence import Sequence
from baton.protocol.ids import Key, NodeId
from baton.protocol.messages import Prefill


@dataclass(slots=True, eq=False)
class Handoff:
    sequence: Sequence
    origin: Origin
    choices: tuple[int, ...]
    decode_node: NodeId | None
    arrived_s: float
    live_choices: set[int]
    admitted_s: float = 0.0
    num_cached_tokens: int = 0
    num_published_blocks: int = 0
    is_offered: bool = False
    is_ended: bool = False

    @classmethod
    def of(cls, message: Prefill, origin: Origin, now_s: float) -> "Handoff":
        sequence = Sequence(
            message.key,
            message.token_ids,
            message.num_prompt_tokens,
            message.sampling,
            message.extra_keys,
        )
        choices = tuple(range(message.key.choice, message.key.choice + message.num_choices))
        return cls(sequence, origin, choices, message.decode_node, now_s, set(choices))

    @property
    def num_tokens(self) -> int:
        return self.sequence.num_tokens

    def cancel_choices(self, keys: tuple[Key, ...]) -> bool:
        """Strike the choices that `keys` name; True when none is left."""
        mine = self.sequence.key
        named = {
            key.choice
            for key in keys
            if key.request_id == mine.request_id and key.attempt == mine.attempt
        }
        if not named & self.live_choices:
            return False
        self.live_choices -= named
        return not self.live_choices
