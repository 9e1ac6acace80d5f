"""What a head drafts in a step: it takes the hidden states that the model has just computed.

The head's row of a token needs the hidden state of the token before, so a step stores the rows of
all tokens after its first one, and that of the token which it samples last. Where the sequence goes
on from there, the head drafts token after token, each from its own last row. `Drafter` reads on the
host what was sampled, and so computes no row in vain. `DeviceDrafter` computes the rows of wrong
guesses as well and stores them nowhere, because nothing may wait for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.model.layers.attention import Backend, Batch, Chunk, Tables
from baton.model.layers.draft_head import DraftHead
from baton.model.sampling.sampler import POSITION, Sampler, SampleRow, SamplingTensors
from baton.node.scheduling.plan import Slice

NO_STATE = -1  # of the row before the first token of a sequence
# The columns of `HeadTensors.sequences`; from `GUESSES` on, there is a column for each guess.
FIRST_ROW, FIRST_SAMPLE, FIRST_POSITION, NUM_DRAFTS, GUESSES = range(5)
NO_GUESS = -1


@dataclass(slots=True)
class _Drafting:
    """The drafts of one slice. The head has the row of its last token, at `position`."""

    number: int
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
        equal at any temperature. What is held back is that of the last sample.
        """
        position = self.position + 1
        sampling = self.part.sampling
        assert sampling is not None, "a slice with a sample has its parameters"
        num_output_tokens = self.position - self.part.num_prompt_tokens
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
        """Return the drafts, `[num_slices, most drafts of a slice]`, after storing the head's rows.

        `states`, `[num_tokens, hidden]`, has a row for each token of the slices, and `sampled` an
        id for each sample. A slice that asks for fewer drafts has zeros behind them.
        """
        rows = _Rows(self._block_size)
        before: list[int] = []  # the states that they take; zeros are behind them
        last_rows: list[int] = []
        drafting: list[_Drafting] = []
        first = 0
        ids = iter(sampled)
        for number, part in enumerate(slices):
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
                last = start + len(token_ids) - 1
                drafting.append(_Drafting(number, part, last))
            first += part.length
        if rows.ids:
            padded = torch.cat((states, states.new_zeros(1, states.shape[1])))
            wanted = torch.tensor(last_rows, dtype=torch.int64)
            normed, states = self.head.forward(
                rows.batch(), padded[torch.tensor(before)], wanted, self._backend
            )
        if drafting:
            self._draft(drafting, normed, states)
        width = most_drafts(slices)
        drafts = [[0] * width for _ in slices]
        for one in drafting:
            drafts[one.number][: len(one.token_ids)] = one.token_ids
        return torch.tensor(drafts, dtype=torch.int64).view(len(slices), width)

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


def most_drafts(slices: Sequence[Slice]) -> int:
    """Return the largest number of drafts for which a slice asks."""
    return max((part.num_drafts or 0 for part in slices), default=0)


@dataclass(slots=True, frozen=True)
class HeadTensors:
    """The head's rows of a step on a device, in the order of its sequences."""

    # [3, num_rows]: ids, positions, slots. Below 0, an id says which sample it is: `~id` counts
    # one more sample than guesses for each sequence.
    tokens: Tensor
    before: Tensor  # [num_rows]: the row of the token before among those of the step, or `NO_STATE`
    tables: Tables
    # [num_sequences, 4 + most guesses]: the head's row of the first sampled token, the number of
    # this sample, its position, the number of drafts, and the guess after each sample.
    sequences: Tensor


@dataclass(slots=True)
class HeadRows:
    """The head's rows of a step, as they are collected on the host for a device."""

    num_guesses: int  # most guesses and drafts of a sequence
    block_size: int
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    # By sequence: the number of rows, and the tokens up to the last of them.
    counts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    sequences: list[tuple[int, ...]] = field(default_factory=list)
    # The row that takes a sample which no guess follows, and the number of its sequence.
    by_sample: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def num_single(self) -> int:
        """Return how many sequences at the head have one row."""
        several = (i for i, count in enumerate(self.counts) if count != 1)
        return next(several, len(self.counts))

    def add(self, part: Slice, row: int, sample: int) -> None:
        """Add the rows of a slice whose first token is `row` of the step."""
        first = len(self.ids)
        ids = [*part.token_ids[1 : part.length - part.num_guesses]]
        states = [*range(row, row + part.length)]
        start = part.start + 1
        if part.start == 0:  # nothing is before the first token
            ids = [part.token_ids[0], *ids]
            states = [NO_STATE, *states]
            start = 0
        if part.following is not None:
            ids.append(part.following)
        first_row = first + len(ids)
        if part.num_drafts is None:
            self.sequences.append((0, 0, 0, 0, *[NO_GUESS] * self.num_guesses))
        else:
            self.by_sample[sample] = first_row, len(self.sequences)
            named = len(self.sequences) * (1 + self.num_guesses)
            ids += [~(named + i) for i in range(1 + part.num_guesses)]
            guesses = part.token_ids[part.length - part.num_guesses :]
            missing = self.num_guesses - part.num_guesses
            position = part.start + part.length - part.num_guesses
            self.sequences.append(
                (
                    first_row,
                    sample,
                    position,
                    part.num_drafts,
                    *guesses,
                    *[NO_GUESS] * missing,
                )
            )
        size = self.block_size
        table = part.block_table
        positions = range(start, start + len(ids))
        self.ids += ids
        self.positions += positions
        self.slots += [table[at // size] * size + at % size for at in positions]
        self.before += states[: len(ids)]
        self.counts.append(len(ids))
        self.lengths.append(start + len(ids))

    def pad(self, num_rows: int, num_sequences: int, count: int) -> None:
        """Add padding, up to so many rows and sequences, of which each counts `count` rows."""
        rows = num_rows - len(self.ids)
        self.ids += [0] * rows
        self.positions += [0] * rows
        self.slots += [-1] * rows
        self.before += [NO_STATE] * rows
        sequences = num_sequences - len(self.sequences)
        self.counts += [count] * sequences
        self.lengths += [0] * sequences
        idle = (0, 0, 0, 0, *[NO_GUESS] * self.num_guesses)
        self.sequences += [idle] * sequences

    def starts(
        self, num_decoding: int, *, has_more_rows: bool
    ) -> tuple[list[int], list[int]]:
        """Return `query_starts` and `decode_starts` of `Tables`; without any, empty ones.

        Where the step `has_more_rows`, so has the head, even if each of its sequences has one: all
        steps of a bucket have the same arrays.
        """
        decode = self.counts[:num_decoding]
        others = self.counts[num_decoding:]
        has_more_rows = has_more_rows or any(count != 1 for count in decode)
        return (
            [*accumulate(others, initial=0)] if others else [],
            [*accumulate(decode, initial=0)] if has_more_rows else [],
        )


class DeviceDrafter:
    """Drafts on a device that the host does not wait for, and so in steps that are replayed."""

    def __init__(
        self, head: DraftHead, backend: Backend, sampler: Sampler, block_size: int
    ) -> None:
        self.head = head
        self._backend = backend
        self._sampler = sampler
        self._block_size = block_size

    def drafts(
        self,
        rows: HeadTensors,
        states: Tensor,
        sampled: Tensor,
        samples: SamplingTensors,
        num_drafts: int,
    ) -> Tensor:
        """Return `[num_sequences, num_drafts]` drafts after storing the head's rows.

        `states`, `[num_tokens, hidden]`, has a row for each token of the step, `sampled` an id for
        each sample, and `samples` tells how they were sampled. A sequence that asks for fewer
        drafts has others behind them.
        """
        ids, positions, slots = rows.tokens.unbind()
        first_row, first_sample = rows.sequences[:, :FIRST_POSITION].unbind(1)
        guesses = rows.sequences[:, GUESSES:]
        num_right = torch.zeros_like(first_row)
        if len(sampled):
            count = torch.arange(1 + guesses.shape[1], device=ids.device)
            places = (first_sample[:, None] + count).clamp(max=len(sampled) - 1)
            own = sampled[places].clamp(min=0)
            right = (own[:, :-1] == guesses).cumprod(1)
            num_right = right.sum(1)
            # A sample counts while all guesses before it are right.
            counts = F.pad(right, (1, 0), value=1).flatten() > 0
            is_sampled = ids < 0
            named = (~ids).clamp(min=0)
            ids = torch.where(is_sampled, own.flatten()[named], ids)
            slots = torch.where(is_sampled & ~counts[named], -1, slots)
        if not len(ids):
            return ids.new_empty(len(rows.sequences), num_drafts)
        before = states[rows.before.clamp(min=0)]
        before = before.masked_fill((rows.before < 0)[:, None], 0.0)
        last_rows = first_row + num_right if num_drafts else first_row[:0]
        batch = Batch(ids, positions, slots, (), rows.tables)
        normed, states = self.head.forward(batch, before, last_rows, self._backend)
        if not num_drafts:
            return ids.new_empty(len(rows.sequences), 0)
        last = first_sample + num_right
        samples = SamplingTensors(
            samples.ints[last], samples.reals[last], samples.held_back[last]
        )
        position = rows.sequences[:, FIRST_POSITION] + num_right
        return self._draft(rows, normed, states, samples, position, num_drafts)

    def store(
        self, rows: HeadTensors, states: Tensor, again: Tensor, sampled: Tensor
    ) -> None:
        """Store again the rows of samples that have changed since `drafts` stored them.

        `again`, `[2, num_rows]`, has the numbers of rows and sequences, and `sampled` their ids.
        """
        row, sequence = again.unbind()
        _, positions, slots = rows.tokens[:, row].unbind()
        tables = rows.tables
        lengths = (positions + 1).int()
        starts = tables.query_starts[:0]
        own = Tables(tables.blocks[sequence], lengths, starts, len(row))
        batch = Batch(sampled.clamp(min=0), positions, slots, (), own)
        self.head.forward(batch, states[rows.before[row]], row[:0], self._backend)

    # --- inside --------------------------------------------------------------------------------

    def _draft(
        self,
        rows: HeadTensors,
        normed: Tensor,
        states: Tensor,
        samples: SamplingTensors,
        position: Tensor,
        num_drafts: int,
    ) -> Tensor:
        """Draft token after token, from the head's row of the last token of each sequence.

        `samples` tells how these tokens, at `position`, were sampled. The first draft has the noise
        with which the model's own token will be sampled.
        """
        every = torch.arange(len(position), device=position.device)
        drafts: list[Tensor] = []
        while True:
            samples.ints[:, POSITION] += 1
            logits = self.head.logits(normed, self._backend)
            token_ids = self._sampler.sample(logits, samples)
            drafts.append(token_ids.clamp(max=logits.shape[1] - 1))
            if len(drafts) == num_drafts:
                return torch.stack(drafts, 1)
            position = position + 1
            # The rows of the others have no blocks.
            is_wanted = rows.sequences[:, NUM_DRAFTS] > len(drafts)
            batch = self._next(drafts[-1], position, is_wanted, rows.tables)
            normed, states = self.head.forward(batch, states, every, self._backend)

    def _next(
        self, ids: Tensor, position: Tensor, is_wanted: Tensor, tables: Tables
    ) -> Batch:
        """Return the rows of the last drafts, one for each sequence."""
        size = self._block_size
        position = torch.where(is_wanted, position, 0)
        blocks = tables.blocks.gather(1, (position // size)[:, None])[:, 0].long()
        slots = torch.where(is_wanted, blocks * size + position % size, -1)
        lengths = torch.where(is_wanted, position + 1, 0).int()
        own = Tables(tables.blocks, lengths, tables.query_starts[:0], len(ids))
        return Batch(ids, position, slots, (), own)
