"""One sequence on a node: its tokens, its blocks, and how far computing has come.

Shared by both schedulers. Tokens are *planned* when a step that computes them was launched and
*computed* when that step is settled; blocks may be given back only when nothing is in flight.
"""

from dataclasses import dataclass, field

from baton.engine.block_pool import BlockPool
from baton.engine.plan import Slice
from baton.protocol.block_hash import BlockHash, block_hashes, next_hash, root_hash
from baton.protocol.ids import Key
from baton.protocol.messages import FinishReason
from baton.protocol.sampling import Sampling


@dataclass(slots=True)
class Sequence:
    key: Key
    token_ids: list[int]  # prompt and output
    num_prompt_tokens: int
    sampling: Sampling
    extra_keys: tuple[str, ...] = ()
    block_table: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)  # of the full blocks hashed so far
    num_computed_tokens: int = 0
    num_planned_tokens: int = 0
    num_unsettled: int = 0  # launched steps that name this sequence

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_idle(self) -> bool:
        return self.num_unsettled == 0

    def hash_blocks(self, block_size: int, num_tokens: int) -> list[BlockHash]:
        """Hashes of the full blocks among the first `num_tokens` tokens; extends `hashes`."""
        if not self.hashes:
            self.hashes = block_hashes(self.token_ids[:num_tokens], block_size, self.extra_keys)
        parent = self.hashes[-1] if self.hashes else root_hash(self.extra_keys)
        for end in range((len(self.hashes) + 1) * block_size, num_tokens + 1, block_size):
            parent = next_hash(parent, self.token_ids[end - block_size : end])
            self.hashes.append(parent)
        return self.hashes[: num_tokens // block_size]

    def slice(self, length: int, draws: tuple[int, ...]) -> Slice:
        """Launch the next `length` tokens; whoever calls it must settle or drop the plan."""
        start, end = self.num_planned_tokens, self.num_planned_tokens + length
        self.num_planned_tokens = end
        self.num_unsettled += 1
        return Slice(
            key=self.key,
            start=start,
            length=length,
            token_ids=tuple(self.token_ids[start:end]),
            block_table=tuple(self.block_table),
            draws=draws,
            sampling=self.sampling if draws else None,
            num_prompt_tokens=self.num_prompt_tokens,
        )

    def settle(self, done: Slice) -> None:
        self.num_unsettled -= 1
        self.num_computed_tokens = done.start + done.length

    def store_prefix(self, pool: BlockPool) -> None:
        """Offer every whole computed block to the prefix cache.

        A step that was launched before a cancel computes one token that nobody was told.
        """
        hashes = self.hash_blocks(
            pool.block_size, min(self.num_computed_tokens, len(self.token_ids))
        )
        pool.store(hashes, self.block_table[: len(hashes)])

    def finish_reason(
        self, token_id: int, eos_token_ids: tuple[int, ...], max_model_len: int
    ) -> FinishReason | None:
        """Whether `token_id`, as the next token, ends this sequence (it is not appended yet)."""
        num_tokens = self.num_tokens + 1
        num_output_tokens = num_tokens - self.num_prompt_tokens
        if num_output_tokens > self.sampling.min_tokens:
            if token_id in self.sampling.stop_token_ids:
                return "stop"
            if not self.sampling.ignore_eos and token_id in eos_token_ids:
                return "stop"
        if num_output_tokens >= self.sampling.max_tokens or num_tokens >= max_model_len:
            return "length"
        return None
