"""One prompt on a prefill node, until nobody needs its blocks any more."""

from dataclasses import dataclass, field

from baton.node.scheduling.pooling import PooledPrompt
from baton.node.scheduling.prompt_reads import PrefixRead
from baton.node.scheduling.requests import Choices, Origin
from baton.node.scheduling.sequence import Sequence
from baton.protocol.ids import NodeId
from baton.protocol.messages import Prefill, StageTimes


@dataclass(slots=True, eq=False)
class Handoff:
    sequence: Sequence
    origin: Origin
    choices: Choices
    decode_node: NodeId | None
    arrived_s: float
    admitted_s: float = 0.0
    prefix_node: NodeId | None = None
    read: PrefixRead | None = None  # until it has ended
    num_cached_tokens: int = 0
    num_read_tokens: int = 0
    prefix_read_s: float = 0.0
    num_announced_blocks: int = 0
    is_offered: bool = False
    is_ended: bool = False
    pooled: PooledPrompt = field(default_factory=PooledPrompt)

    @classmethod
    def of(cls, message: Prefill, origin: Origin, now_s: float) -> "Handoff":
        choices = Choices.of(message)
        return cls(
            Sequence.of(message),
            origin,
            choices,
            message.decode_node,
            now_s,
            prefix_node=message.prefix_node,
        )

    @property
    def is_ready(self) -> bool:
        """Return whether the next step may compute some of it."""
        return self.read is None and self.sequence.num_unplanned_tokens > 0

    @property
    def is_pooled(self) -> bool:
        """Return whether all rows that are wanted instead of tokens are there."""
        sequence = self.sequence
        is_computed = sequence.num_computed_tokens == sequence.num_tokens
        return sequence.sampling.pooling is not None and is_computed

    def times(self, now_s: float) -> StageTimes:
        return StageTimes(
            queue_s=self.admitted_s - self.arrived_s,
            prefill_s=now_s - self.admitted_s - self.prefix_read_s,
            num_cached_tokens=self.num_cached_tokens,
            num_read_tokens=self.num_read_tokens,
            prefix_read_s=self.prefix_read_s,
        )
