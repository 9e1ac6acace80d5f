"""What a head drafts in a step: it takes the hidden states that the model has just computed.

The head's row of a token needs the hidden state of the token before, so a step stores the rows of
all tokens after its first one, and that of the token which it samples last. Where the sequence goes
on from there, the head drafts token after token, each from its own last row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from baton.model.layers.attention import Backend, Batch, Chunk
from baton.model.layers.draft_head import DraftHead
from baton.model.sampling.sampler import POSITION, Sampler, SampleRow, SamplingTensors
from baton.node.scheduling.plan import Slice

NO_ROWS = torch.empty(0, dtype=torch.int64)


@dataclass(slots=True)
class _Drafting:
    """The drafts of one slice. The head has the row of its last token, at `position`."""

    part: Slice
    position: int
    token_ids: list[int] = field(default_factory=list)

    @property
    def has_next(self) -> bool:
        assert self.part.num_drafts is not None, "the slice asks for drafts"
        return len(self.token_ids) < self.part.num_drafts

    @property
    def sample(self) -> SampleRow:
        """Return the first draft as a sample.

        It has the noise with which the model's own token will be sampled, so both are likely to be
        equal at any temperature.
        """
        position = self.position + 1
        sampling = self.part.sampling
        assert sampling is not None, "a slice with a sample has its parameters"
        num_output_tokens = position - self.part.num_prompt_tokens
        return SampleRow(sampling, self.part.samples[0], position, num_output_tokens)

    def add(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.position += 1


@dataclass(slots=True)
class _Rows:
    """The rows of one pass of the head, as they are collected."""

    block_size: int
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    def add(self, part: Slice, start: int, token_ids: Sequence[int]) -> None:
        """Add the rows of tokens from position `start` on."""
        size = self.block_size
        table = part.block_table
        positions = range(start, start + len(token_ids))
        self.chunks.append(Chunk(len(self.ids), start, len(token_ids), table))
        self.ids += token_ids
        self.positions += positions
        self.slots += [table[at // size] * size + at % size for at in positions]

    def batch(self) -> Batch:
        ids, positions, slots = map(
            torch.tensor, (self.ids, self.positions, self.slots)
        )
        return Batch(ids, positions, slots, tuple(self.chunks))


class Drafter:
    """Drafts on a CPU, where a step may look at what it has sampled."""

    def __init__(
        self, head: DraftHead, backend: Backend, sampler: Sampler, block_size: int
    ) -> None:
        self.head = head
        self._backend = backend
        self._sampler = sampler
        self._block_size = block_size

    def drafts(
        self, slices: Sequence[Slice], states: Tensor, sampled: Sequence[int]
    ) -> Tensor:
        """Return the drafts of all slices, one after the other, after storing the head's rows.

        `states`, `[num_tokens, hidden]`, has a row for each token of the slices, and `sampled` an
        id for each sample.
        """
        rows = _Rows(self._block_size)
        before: list[int] = []  # the states that they take; zeros are behind them
        last_rows: list[int] = []
        drafting: list[_Drafting] = []
        first = 0
        ids = iter(sampled)
        for part in slices:
            own = [max(0, next(ids)) for _ in range(part.num_sampled)]
            token_ids = _tokens_after(part, own)
            end = first + len(token_ids)
            taken = [*range(first, end)]
            start = part.start + 1
            if part.start == 0:  # nothing is before the first token
                token_ids = [part.token_ids[0], *token_ids]
                taken = [len(states), *taken]
                start = 0
            if token_ids:
                rows.add(part, start, token_ids)
                before += taken
            if part.num_drafts:
                last_rows.append(len(rows.ids) - 1)
                drafting.append(_Drafting(part, start + len(token_ids) - 1))
            first += part.length
        if not rows.ids:
            return NO_ROWS
        padded = torch.cat((states, states.new_zeros(1, states.shape[1])))
        wanted = torch.tensor(last_rows, dtype=torch.int64)
        normed, states = self.head.forward(
            rows.batch(), padded[torch.tensor(before)], wanted, self._backend
        )
        if not drafting:
            return NO_ROWS
        self._draft(drafting, normed, states)
        return torch.tensor([*chain.from_iterable(one.token_ids for one in drafting)])

    # --- inside --------------------------------------------------------------------------------

    def _draft(
        self, drafting: Sequence[_Drafting], normed: Tensor, states: Tensor
    ) -> None:
        """Draft token after token, from the head's last row of each slice."""
        samples = SamplingTensors.of(
            [one.sample for one in drafting], self._sampler.eos_token_ids, normed.device
        )
        while True:
            logits = self.head.logits(normed, self._backend)
            token_ids = self._sampler.sample(logits, samples).tolist()
            for one, token_id in zip(drafting, token_ids, strict=True):
                one.add(min(token_id, logits.shape[1] - 1))
            kept = [row for row, one in enumerate(drafting) if one.has_next]
            if not kept:
                return
            if len(kept) < len(drafting):
                drafting = [drafting[row] for row in kept]
                samples = samples.picked(kept)
                states = states[kept]
            samples.ints[:, POSITION] += 1
            normed, states = self._next(drafting, states)

    def _next(
        self, drafting: Sequence[_Drafting], states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the rows of the last drafts, whose tokens before have these states."""
        rows = _Rows(self._block_size)
        for one in drafting:
            rows.add(one.part, one.position, one.token_ids[-1:])
        every = torch.arange(len(drafting))
        return self.head.forward(rows.batch(), states, every, self._backend)


def _tokens_after(part: Slice, sampled: list[int]) -> list[int]:
    """Return the tokens after the first of a slice that are known to be right."""
    if part.num_drafts is not None:
        kept = part.kept(tuple(sampled))
        num_right = part.length - part.num_guesses + len(kept) - 1
        return [*part.token_ids[1:num_right], kept[-1]]
    following = [] if part.following is None else [part.following]
    return [*part.token_ids[1:], *following]
