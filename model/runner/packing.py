"""Pack the slices of a plan into the inputs of a step, in one piece of host memory.

One copy takes the piece to the device. A token that is not known yet is named by its place in the
ring of sampled tokens on the device. A step of decoding sequences, or of short prompts, can be
padded to a bucket, so that all steps of that bucket have their inputs at the same places.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from baton.kernels.state_layout import (
    IDLE_CHUNK,
    Chunked,
    StateItem,
    most_chunks,
    state_chunks,
    state_item,
)
from baton.kernels.state_reference import StateTables
from baton.model.layers.attention import (
    AdaptedRows,
    Batch,
    Chunk,
    Tables,
)
from baton.model.runner.device_state import (
    IDLE_PLACE,
    IDLE_ROW,
    DeviceTables,
    TokenRing,
)
from baton.model.runner.drafting import HeadRows, HeadTensors, most_drafts
from baton.model.sampling.device_counts import NO_ROW, DeviceCounts, NewRows
from baton.model.sampling.penalties import CountedTokens, packed
from baton.model.sampling.pooling import rows_of
from baton.model.sampling.sampler import SampleRow, SamplingTensors
from baton.model.sampling.token_masks import NoMask, TokenMasks, Words
from baton.node.scheduling.plan import Slice, StepPlan
from baton.protocol.errors import InvariantBroken
from baton.protocol.sampling import Sampling

NO_ADAPTER = -1
NO_WORDS = torch.empty(0, dtype=torch.int64)
# Ids that a padded row may exclude; a step with more is not padded.
BUCKET_HELD_BACK = 8
# Tokens of a slice, such as those with guesses, for which arrays cost more than they save.
FEW_TOKENS = 16
# Tokens of a step that takes less time than its launches, however much of it is padding. Of a
# larger one, at most an eighth is.
PADDED_FREELY = 512
# Rows of a sequence that go through decode attention: a token, 16 guesses, and as many that a state
# goes through again. More would read a context too often there. Its kernels take so many of all
# sequences, unless each has one.
DECODE_ROWS = 34
ALL_DECODE_ROWS = 512
IDLE_SAMPLE = SampleRow(Sampling(seed=0, max_tokens=1, temperature=0.0), 0, 0, 1)

NUMPY: dict[torch.dtype, type[np.int64 | np.int32 | np.float64]] = {
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.float64: np.float64,
}


class ArraySpan(NamedTuple):
    """An array within the words of a step."""

    first: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, words: Tensor) -> Tensor:
        part = words[self.first : self.end]
        if self.dtype != torch.int64:
            part = part.view(self.dtype)
        if self.dtype == torch.int32:  # two to a word
            part = part[: math.prod(self.shape)]
        return part.view(self.shape)


class PackedWords:
    """Arrays that are laid one after the other into 64-bit words."""

    def __init__(self) -> None:
        self._arrays: list[tuple[int, NDArray[np.generic]]] = []
        self._size = 0

    def put(self, values: ArrayLike, dtype: torch.dtype = torch.int64) -> ArraySpan:
        array = np.asarray(values, NUMPY[dtype])
        first = self._size
        self._size += -(-array.size // 2) if dtype == torch.int32 else array.size
        self._arrays.append((first, array))
        return ArraySpan(first, self._size, array.shape, dtype)

    def laid(self, allocate: Callable[[int], Tensor]) -> Tensor:
        """Return the words, in memory from `allocate`."""
        words = allocate(self._size)
        into = words.numpy()
        for first, array in self._arrays:
            into[first:].view(array.dtype)[: array.size] = array.reshape(-1)
        return words


class Bucket(NamedTuple):
    """The sizes to which a step is padded. Those of a decode step without guesses are equal."""

    num_tokens: int
    num_sequences: int
    samples_all: bool = False  # every token, as of sequences that decode with guesses
    num_drafts: int = 0  # that a head makes for each sequence

    @property
    def has_one_row_each(self) -> bool:
        return self.num_tokens == self.num_sequences

    @property
    def num_decoding(self) -> int:
        is_decoding = self.has_one_row_each or self.samples_all
        return self.num_sequences if is_decoding else 0

    @property
    def num_more_rows(self) -> int:
        """Return the rows that sequences which decode have beside one each."""
        return self.num_tokens - self.num_sequences if self.num_decoding else 0

    @property
    def num_samples(self) -> int:
        return self.num_tokens if self.samples_all else self.num_sequences

    @property
    def num_head_rows(self) -> int:
        """Return the rows of a head: one more for each prompt that begins."""
        return self.num_tokens + (0 if self.has_one_row_each else self.num_sequences)

    def takes(self, num_tokens: int, num_sequences: int) -> bool:
        """Return whether such a step fits and is worth its padding."""
        most = self.num_tokens
        least = 0 if most <= PADDED_FREELY else most - most // 8
        return least <= num_tokens <= most and num_sequences <= self.num_sequences


AdaptedPlaces = tuple[ArraySpan, ArraySpan] | None  # `order` and `ends` of rows, if any


@dataclass(slots=True)
class StepInputs:
    """The inputs of a step in `words`, in host memory or, after one copy, on the device."""

    # [3, num_tokens]: ids, below 0 where the ring has them; positions; slots.
    tokens: ArraySpan
    rows: ArraySpan  # [num_rows]: those whose logits are needed
    # [num_samples]: the row of logits of each, if not its own.
    repeats: ArraySpan | None
    places: ArraySpan  # [num_samples]: the place of each sampled token in the ring
    samples: tuple[ArraySpan, ArraySpan, ArraySpan]
    # Of the device's tables: rows, lengths, both starts, and the places and blocks that change.
    tables: tuple[ArraySpan, ArraySpan, ArraySpan, ArraySpan] | None = None
    changes: tuple[ArraySpan, ArraySpan] | None = None
    # The items and chunks of sequences' states.
    states: tuple[ArraySpan, ArraySpan] | None = None
    # Of a head: tokens, the rows before, lengths, both starts and sequences.
    head: tuple[ArraySpan, ...] = ()
    # Samples that have one, and the masks.
    masks: tuple[ArraySpan, ArraySpan] | None = None
    # Which of those samples a head takes, and where, as `DeviceDrafter.store` does.
    taken: tuple[ArraySpan, ArraySpan] | None = None
    # As `penalties.packed` returns them.
    penalties: tuple[ArraySpan, ArraySpan] | None = None
    # Where the device counts tokens: the row of each sample and whether its token is counted, and
    # the fields of `NewRows`.
    counted: ArraySpan | None = None
    new_rows: tuple[ArraySpan, ...] = ()
    # Rows whose next token's log probability is wanted, and these tokens.
    targets: tuple[ArraySpan, ArraySpan] | None = None
    pooled: ArraySpan | None = None  # rows that are wanted themselves
    # Of the adapted tokens, of those among `rows`, before `targets` and `pooled`, and of those
    # among `rows` alone.
    adapted: tuple[AdaptedPlaces, AdaptedPlaces, AdaptedPlaces] = (None, None, None)
    words: Tensor = NO_WORDS  # until all arrays are known

    def adapted_rows(self) -> Iterator[AdaptedRows | None]:
        for places in self.adapted:
            yield places and AdaptedRows(*(place.of(self.words) for place in places))

    def sampled(self, token_ids: Tensor) -> SamplingTensors:
        """Return what a sampler takes. `token_ids` are those of the batch."""
        ints, reals, held_back = (place.of(self.words) for place in self.samples)
        tensors = SamplingTensors(ints, reals, held_back)
        if self.penalties is not None:
            tensors = replace(
                tensors, penalties=[place.of(self.words) for place in self.penalties]
            )
        if self.counted is not None:
            last_ids = token_ids[self.rows.of(self.words)]
            if self.repeats is not None:
                last_ids = last_ids[self.repeats.of(self.words)]
            tensors = replace(tensors, counted=[self.counted.of(self.words), last_ids])
        if self.masks is not None:
            masked, masks = (place.of(self.words) for place in self.masks)
            tensors = replace(tensors, masked=masked, masks=masks)
        return tensors


@dataclass(slots=True)
class PackedStep:
    """A step on the host, ready for its device."""

    plan: StepPlan
    inputs: StepInputs
    chunks: tuple[Chunk, ...]  # empty if the step is padded
    num_decoding: int  # sequences at the head that decode
    num_more_rows: int  # of these, beside one each
    # Of the longest context; None in padded steps means as many as fit.
    table_blocks: int | None
    has_unknown_tokens: bool
    bucket: Bucket | None  # to which it is padded
    # The slices whose samples do not count, and why, if they never will.
    unsampled: dict[int, str] = field(default_factory=dict)
    # The samples whose log probabilities are wanted, by the number of the likeliest tokens.
    scored: dict[int, list[int]] = field(default_factory=dict)
    num_drafts: int = 0  # that a head makes for each sequence, padding included
    num_more_head_rows: int = 0  # as `num_more_rows`, but of the head

    @property
    def num_sequences(self) -> int:
        return (
            len(self.plan.slices) if self.bucket is None else self.bucket.num_sequences
        )

    def head_rows(self, inputs: StepInputs, tables: Tables) -> HeadTensors:
        """Return a head's rows; `tables` are those of the step's batch."""
        assert inputs.head, "a head drafts on the device"
        tokens, before, lengths, starts, decode_starts, sequences = (
            place.of(inputs.words) for place in inputs.head
        )
        own = Tables(
            tables.blocks,
            lengths,
            starts,
            self.num_decoding,
            None,
            decode_starts if len(decode_starts) else None,
            self.num_more_head_rows,
        )
        return HeadTensors(tokens, before, own, sequences)

    def batch(
        self, inputs: StepInputs, token_ids: Tensor, tables: DeviceTables | None
    ) -> Batch:
        """Return the batch of `inputs`, which may be a copy of this step's inputs."""
        _, positions, slots = inputs.tokens.of(inputs.words)
        if tables is None or inputs.tables is None:
            return Batch(
                token_ids, positions, slots, self.chunks, None, *inputs.adapted_rows()
            )
        rows, lengths, starts, decode_starts = (
            place.of(inputs.words) for place in inputs.tables
        )
        has_one_row_each = not len(decode_starts)
        first = tables.state_blocks
        end = None if self.table_blocks is None else first + self.table_blocks
        blocks = tables.blocks[:, first:end][rows]
        states = None
        if inputs.states is not None:
            items, chunks = (place.of(inputs.words) for place in inputs.states)
            states = StateTables(
                tables.blocks[:, :first][rows],
                items,
                chunks,
                is_decoding=has_one_row_each and self.num_decoding == len(rows),
            )
        there = Tables(
            blocks,
            lengths,
            starts,
            self.num_decoding,
            states,
            None if has_one_row_each else decode_starts,
            self.num_more_rows,
        )
        return Batch(
            token_ids, positions, slots, self.chunks, there, *inputs.adapted_rows()
        )


@dataclass(slots=True)
class _Lists:
    """The inputs of a step as they are collected, a list for each."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    repeats: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    samples: list[SampleRow] = field(default_factory=list)
    table_rows: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    decode_starts: list[int] = field(default_factory=list)
    changes: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    states: list[StateItem] = field(default_factory=list)
    state_chunks: list[tuple[int, int]] = field(default_factory=list)
    has_unknown_tokens: bool = False
    masks: dict[int, Words] = field(default_factory=dict)  # by sample
    # The same, with penalties.
    counted: dict[int, CountedTokens] = field(default_factory=dict)
    # By sample.
    rows_of_counts: dict[int, tuple[int, bool]] = field(default_factory=dict)
    new_rows: NewRows = field(default_factory=NewRows)
    unsampled: dict[int, str] = field(default_factory=dict)
    scored: dict[int, list[int]] = field(default_factory=dict)
    head: HeadRows | None = None
    before: list[int] = field(default_factory=list)  # the rows before `targets`
    targets: list[int] = field(default_factory=list)
    pooled: list[int] = field(default_factory=list)
    # The number of each token's adapter, or NO_ADAPTER; empty where no token has one.
    adapters: list[int] = field(default_factory=list)

    def can_follow_a_replay(self, held_back: Sequence[tuple[int, ...]]) -> bool:
        """Return whether masks and log probabilities can come after a captured step.

        Sampling there counts the token that penalties count, and overwrites the logits of ids that
        are held back.
        """
        scored = chain.from_iterable(self.scored.values())
        return self.masks.keys().isdisjoint(self.rows_of_counts) and not any(
            held_back[sample] for sample in scored
        )

    def pad(self, bucket: Bucket) -> None:
        tokens = bucket.num_tokens - len(self.ids)
        self.ids += [0] * tokens
        self.positions += [0] * tokens
        self.slots += [-1] * tokens
        samples = bucket.num_samples - len(self.samples)
        sequences = bucket.num_sequences - len(self.lengths)
        self.rows += [0] * samples
        self.places += [IDLE_PLACE] * samples
        self.samples += [IDLE_SAMPLE] * samples
        self.table_rows += [IDLE_ROW] * sequences
        self.lengths += [0] * sequences
        # A step of decoding sequences has a row for each, which padding must not share.
        last = bucket.num_sequences
        self.states += [
            StateItem(row, 0, 0, 0, 0, 0) for row in range(last - sequences, last)
        ]
        if not bucket.num_decoding:
            self.starts = _padded_starts(self.starts, bucket.num_sequences)
        elif not bucket.has_one_row_each:
            self.decode_starts = _padded_starts(
                self.decode_starts, bucket.num_sequences
            )
        if self.head is not None:
            count = 1 if bucket.has_one_row_each else 0
            self.head.pad(bucket.num_head_rows, bucket.num_sequences, count)


class ModelFacts(NamedTuple):
    block_size: int
    eos_token_ids: tuple[int, ...]
    # The names of the adapters, in the order of their numbers.
    lora_modules: tuple[str, ...] = ()
    state_blocks: int = 0  # that hold the state of a sequence
    # The numbers of adapters behind them that may get a name later.
    num_lora_slots: int = 0
    chunked: Chunked = "all"  # which tokens go through a state in chunks
    replays_prompts: bool = True  # steps may be captured that compute a prompt's tokens


class Packer:
    """Packs the plans of one runner.

    `allocate` returns host memory of that many words, for one step alone. `buckets`, empty at
    first, are in order of size; what fits none of them is not padded.
    """

    def __init__(
        self,
        model: ModelFacts,
        tables: DeviceTables | None,
        allocate: Callable[[int], Tensor],
        masks: TokenMasks | None = None,
        sampled_at: Callable[[int], int] | None = None,
        counts: DeviceCounts | None = None,
    ) -> None:
        """`masks` needs `sampled_at`, which returns the token at a place of the ring."""
        self._adapters = {
            name: i for i, name in enumerate(("", *model.lora_modules), NO_ADAPTER)
        }
        self._num_adapters = len(model.lora_modules) + model.num_lora_slots
        self.buckets: Sequence[Bucket] = ()
        # Most guesses and drafts of a sequence, if a head drafts on the device.
        self.head_guesses: int | None = None
        self._block_size = model.block_size
        self._state_blocks = model.state_blocks
        self._chunked = model.chunked
        self._replays_prompts = model.replays_prompts
        self._eos_token_ids = model.eos_token_ids
        self._tables = tables
        self._allocate = allocate
        self._sampled = TokenRing()
        self._masks = masks
        self._counts = counts
        self._sampled_at = sampled_at

    def pack(self, plan: StepPlan) -> PackedStep:
        lists = self._lists()
        chunks = []
        if self._masks is not None:
            self._masks.begin_step()
        if self._counts is not None:
            self._counts.begin_step(plan.slices)
        for index, part in enumerate(plan.slices):
            if len(part.state) != self._state_blocks:
                raise InvariantBroken(
                    f"{part.key}: {len(part.state)} blocks hold its state"
                )
            chunks.append(
                Chunk(
                    len(lists.ids),
                    part.start,
                    part.length,
                    part.block_table,
                    part.state,
                    part.num_held,
                    part.num_guesses,
                    part.num_prompt_tokens,
                )
            )
            if lists.head is not None:
                lists.head.add(part, len(lists.ids), len(lists.samples))
            lists.before += range(len(lists.ids), len(lists.ids) + len(part.targets))
            lists.targets += part.targets
            if part.pooling is not None:
                lists.pooled += rows_of(part.pooling, len(lists.ids), part.length)
            self._add_tokens(lists, part)
            is_counted = self._counts is not None and self._is_only_counted(
                lists, part, self._counts
            )
            if self._masks is not None and not is_counted:
                self._add_mask(lists, index, part, self._masks)
            self._add_samples(lists, part)
        if any(part.lora for part in plan.slices):
            numbers = (
                [self._adapters[part.lora]] * part.length for part in plan.slices
            )
            lists.adapters = [*chain.from_iterable(numbers)]
        lists.places = self._sampled.add(plan.slices)
        num_decoding = _num_decoding(plan.slices, has_head=lists.head is not None)
        held_back = [row.held_back(self._eos_token_ids) for row in lists.samples]
        is_special = (
            lists.counted
            or lists.targets
            or lists.pooled
            or lists.adapters
            or not lists.can_follow_a_replay(held_back)
        )
        bucket = (
            None
            if is_special
            else self._bucket(plan.slices, num_decoding, held_back, lists.head)
        )
        width = 0
        if self._tables is not None:
            width = self._add_tables(lists, plan.slices, num_decoding)
        if bucket is not None:
            return self._padded(plan, lists, held_back, bucket)
        num_head_rows = 0
        if lists.head is not None:
            num_head_rows = sum(lists.head.counts[:num_decoding])
        inputs = self._laid(
            lists, held_back, max(map(len, held_back), default=0), num_decoding
        )
        return PackedStep(
            plan,
            inputs,
            tuple(chunks),
            num_decoding,
            sum(part.length for part in plan.slices[:num_decoding]) - num_decoding,
            width,
            lists.has_unknown_tokens,
            bucket,
            lists.unsampled,
            lists.scored,
            most_drafts(plan.slices),
            num_head_rows - num_decoding,
        )

    def name_adapter(self, name: str, number: int) -> None:
        """Give a number to an adapter, which takes it from the one that had it."""
        self._adapters = {one: of for one, of in self._adapters.items() if of != number}
        self._adapters[name] = number

    def all_of(self, name: str, rows: Tensor) -> AdaptedRows:
        """Return rows of one adapter."""
        return AdaptedRows.all_of(self._adapters[name], self._num_adapters, rows)

    def idle(self, bucket: Bucket) -> PackedStep:
        """Return a step of padding alone, with which a bucket is captured."""
        return self._padded(StepPlan(0, ()), self._lists(), [], bucket)

    # --- inside --------------------------------------------------------------------------------

    def _lists(self) -> _Lists:
        if self.head_guesses is None:
            return _Lists()
        return _Lists(head=HeadRows(self.head_guesses, self._block_size))

    def _padded(
        self,
        plan: StepPlan,
        lists: _Lists,
        held_back: list[tuple[int, ...]],
        bucket: Bucket,
    ) -> PackedStep:
        held_back += [()] * (bucket.num_samples - len(held_back))
        lists.pad(bucket)
        if self._state_blocks:
            chunks = self._most_chunks(bucket) - len(lists.state_chunks)
            lists.state_chunks += [IDLE_CHUNK] * chunks
        inputs = self._laid(
            lists, held_back, BUCKET_HELD_BACK, bucket.num_decoding, is_padded=True
        )
        return PackedStep(
            plan,
            inputs,
            (),
            bucket.num_decoding,
            bucket.num_more_rows,
            None,
            True,
            bucket,
            lists.unsampled,
            lists.scored,
            bucket.num_drafts,
            bucket.num_head_rows - bucket.num_decoding if bucket.num_decoding else 0,
        )

    def _bucket(
        self,
        slices: Sequence[Slice],
        num_decoding: int,
        held_back: Sequence[tuple[int, ...]],
        head: HeadRows | None,
    ) -> Bucket | None:
        """Return the bucket of a step that only decodes or only computes prompts."""
        if not self.buckets or num_decoding not in (0, len(slices)) or not slices:
            return None
        if any(len(part.samples) > 1 for part in slices):
            return None
        if not self._replays_prompts and any(
            part.start < part.num_prompt_tokens - 1 for part in slices
        ):
            return None
        if any(len(ids) > BUCKET_HELD_BACK for ids in held_back):
            return None
        num_tokens = sum(part.length for part in slices)
        is_decoding = num_decoding == len(slices)
        has_more_rows = is_decoding and num_tokens > num_decoding
        if (
            is_decoding
            and not has_more_rows
            and head is not None
            and head.num_single < num_decoding
        ):
            return None  # such as a prompt of one token
        num_drafts = most_drafts(slices)
        return next(
            (
                bucket
                for bucket in self.buckets
                if bucket.takes(num_tokens, len(slices))
                and bucket.num_samples >= len(held_back)
                and bool(bucket.num_decoding) == is_decoding
                and bucket.samples_all == has_more_rows
                and bucket.num_drafts >= num_drafts
                # Prompts are followed by no drafts.
                and (has_more_rows or num_drafts or not bucket.num_drafts)
            ),
            None,
        )

    def _add_tokens(self, lists: _Lists, part: Slice) -> None:
        start = part.start
        length = part.length
        table = part.block_table
        size = self._block_size
        if length == 1:
            if part.token_ids:
                lists.ids.append(part.token_ids[0])
            else:
                lists.ids.append(self._sampled.stand_in(part))
                lists.has_unknown_tokens = True
            lists.positions.append(start)
            lists.slots.append(table[start // size] * size + start % size)
            return
        lists.ids += part.token_ids
        if length <= FEW_TOKENS:
            positions = range(start, start + length)
            lists.positions += positions
            stored = positions[part.num_repeated :]
            lists.slots += [-1] * (length - len(stored))
            lists.slots += [table[at // size] * size + at % size for at in stored]
            return
        own = np.arange(start, start + length)
        first = start // size
        blocks = np.array(table[first:])[own // size - first]
        lists.positions += own.tolist()
        slots = blocks * size + own % size
        slots[: part.num_repeated] = -1  # blocks that others share are not written
        lists.slots += slots.tolist()

    def _is_only_counted(
        self, lists: _Lists, part: Slice, counts: DeviceCounts
    ) -> bool:
        """Add the row of a slice where the device counts, before `_add_samples`.

        Return whether nothing but penalties decides what may come.
        """
        if not (counted := counts.follow(part, lists.new_rows)):
            return False
        for sample in range(len(lists.samples), len(lists.samples) + len(part.samples)):
            lists.rows_of_counts[sample] = counted.row, counted.has_token
        return not counted.has_mask

    def _add_mask(
        self, lists: _Lists, index: int, part: Slice, masks: TokenMasks
    ) -> None:
        """Add the mask that the samples of a slice share, before `_add_samples`."""
        if part.sampling is None:
            return
        if not part.samples or not part.sampling.depends_on_output:
            masks.prepare(part.sampling.grammar)
            return
        tokens = part.token_ids
        if not tokens:
            assert self._sampled_at is not None
            tokens = (self._sampled_at(lists.ids[-1]),)
        num_output_tokens = part.start + part.length - part.num_prompt_tokens
        row = SampleRow(part.sampling, 0, 0, num_output_tokens)
        mask = masks.mask(part, tokens, row.held_back(self._eos_token_ids))
        if isinstance(mask, NoMask):
            lists.unsampled[index] = mask.problem
            return
        samples = range(len(lists.samples), len(lists.samples) + len(part.samples))
        if mask is not None:
            lists.masks.update((sample, mask) for sample in samples)
        if self._counts is None and (counted := masks.counted(part.key)) is not None:
            lists.counted.update((sample, counted) for sample in samples)

    def _add_samples(self, lists: _Lists, part: Slice) -> None:
        if not part.samples:
            return
        if part.sampling is None:
            raise InvariantBroken(
                f"{part.key}: a slice with samples has no sampling parameters"
            )
        for num_after in range(part.num_guesses, -1, -1):
            position = part.start + part.length - num_after
            num_output_tokens = position - part.num_prompt_tokens
            for choice in part.samples:
                if part.sampling.logprobs is not None:
                    lists.scored.setdefault(part.sampling.logprobs, []).append(
                        len(lists.samples)
                    )
                lists.repeats.append(len(lists.rows))
                lists.samples.append(
                    SampleRow(part.sampling, choice, position, num_output_tokens)
                )
            lists.rows.append(len(lists.ids) - 1 - num_after)

    def _add_tables(
        self, lists: _Lists, slices: Sequence[Slice], num_decoding: int
    ) -> int:
        """Return how many blocks the longest context has."""
        assert self._tables is not None
        if len(slices) >= len(self._tables.blocks):
            raise InvariantBroken(
                f"{len(slices)} sequences are too many for the tables"
            )
        width = 0
        for part in slices:
            end = part.start + part.length
            num_ahead = 0
            if lists.head is not None:  # it has the token behind them, and its drafts
                num_ahead = max(1, part.num_drafts or 0)
            num_blocks = -(-(end + num_ahead) // self._block_size)
            num_blocks = min(num_blocks, len(part.block_table))
            width = max(width, num_blocks)
            table = (*part.state, *part.block_table[:num_blocks])
            lists.table_rows.append(self._tables.follow(part.key, table, lists.changes))
            lists.lengths.append(end)
        if any(part.length > 1 for part in slices[:num_decoding]):
            lists.decode_starts = _starts(slices[:num_decoding])
        if num_decoding < len(slices):
            lists.starts = _starts(slices[num_decoding:])
        if self._state_blocks:
            self._add_states(lists, slices)
        return width

    def _add_states(self, lists: _Lists, slices: Sequence[Slice]) -> None:
        row = 0
        for part in slices:
            span = part.start, part.start + part.length
            lists.states.append(
                state_item(
                    row,
                    span,
                    part.num_prompt_tokens,
                    (part.num_held, part.num_guesses),
                    chunked=self._chunked,
                )
            )
            row += part.length
        lists.state_chunks = state_chunks(lists.states)

    def _most_chunks(self, bucket: Bucket) -> int:
        if self._chunked == "none":
            return 0
        if not bucket.has_one_row_each:
            return most_chunks(bucket.num_tokens, bucket.num_sequences)
        return bucket.num_sequences if self._chunked == "all" else 0

    def _laid(
        self,
        lists: _Lists,
        held_back: Sequence[tuple[int, ...]],
        width: int,
        num_decoding: int,
        *,
        is_padded: bool = False,
    ) -> StepInputs:
        """Lay all inputs into one piece of memory; those that a captured step lacks come last."""
        num_samples = len(lists.samples)
        into = PackedWords()
        padded = [(*ids, *(-1,) * (width - len(ids))) for ids in held_back]
        inputs = StepInputs(
            tokens=into.put((lists.ids, lists.positions, lists.slots)),
            rows=into.put(lists.rows),
            repeats=None,
            places=into.put(lists.places),
            samples=(
                into.put([row.ints for row in lists.samples]),
                into.put([row.reals for row in lists.samples], torch.float64),
                into.put(padded, torch.int32),
            ),
        )
        if num_samples > len(lists.rows):  # the choices of one prompt share its logits
            inputs.repeats = into.put(lists.repeats)
        if lists.counted:
            changed, changes = packed(lists.counted)
            inputs.penalties = into.put(changed), into.put(changes, torch.float64)
        # A captured step has room for the row of every sample.
        if self._counts is not None and (lists.rows_of_counts or is_padded):
            rows = [
                lists.rows_of_counts.get(sample, NO_ROW)
                for sample in range(num_samples)
            ]
            inputs.counted = into.put(rows, torch.int32)
        if lists.targets:
            inputs.targets = into.put(lists.before), into.put(lists.targets)
        if lists.pooled:
            inputs.pooled = into.put(lists.pooled)
        if lists.adapters:
            wanted = (*lists.rows, *lists.before, *lists.pooled)
            outputs = [lists.adapters[row] for row in wanted]
            sampled = outputs[: len(lists.rows)]
            inputs.adapted = (
                self._adapted(into, lists.adapters),
                self._adapted(into, outputs),
                self._adapted(into, sampled),
            )
        if self._tables is not None:
            inputs.tables = (
                into.put(lists.table_rows),
                into.put(lists.lengths, torch.int32),
                into.put(lists.starts, torch.int32),
                into.put(lists.decode_starts, torch.int32),
            )
            places, blocks = lists.changes
            if self._state_blocks:
                items = np.array(lists.states, np.int32).reshape(
                    -1, len(StateItem._fields)
                )
                cuts = np.array(lists.state_chunks, np.int32).reshape(-1, 2)
                inputs.states = (
                    into.put(items, torch.int32),
                    into.put(cuts, torch.int32),
                )
            if lists.head is not None:
                head = lists.head
                starts, decode_starts = head.starts(
                    num_decoding, has_more_rows=bool(lists.decode_starts)
                )
                inputs.head = (
                    into.put((head.ids, head.positions, head.slots)),
                    into.put(head.before),
                    into.put(head.lengths, torch.int32),
                    into.put(starts, torch.int32),
                    into.put(decode_starts, torch.int32),
                    into.put(head.sequences),
                )
            if places:
                inputs.changes = into.put(places), into.put(blocks, torch.int32)
        if lists.masks:
            masks = into.put(list(lists.masks.values()), torch.int32)
            inputs.masks = into.put(list(lists.masks)), masks
            if lists.head is not None:
                taken = lists.head.by_sample.keys() & lists.masks.keys()
                rows = [lists.head.by_sample[sample] for sample in sorted(taken)]
                again = np.array(rows, np.int64).reshape(-1, 2).T
                inputs.taken = into.put(sorted(taken)), into.put(again)
        if (new := lists.new_rows).rows:
            most = max(map(len, new.biases))
            biases = [[*own, *[0.0] * (most - len(own))] for own in new.biases]
            inputs.new_rows = (
                into.put(new.rows),
                into.put(new.factors, torch.float64),
                into.put(biases, torch.float64),
                into.put(new.places),
                into.put(new.words, torch.int32),
            )
        inputs.words = into.laid(self._allocate)
        return inputs

    def _adapted(self, into: PackedWords, adapters: list[int]) -> AdaptedPlaces:
        """Lay the rows that have an adapter, in the order of the adapters."""
        of_row = np.array(adapters, np.int64)
        numbers = np.arange(self._num_adapters)
        order = np.argsort(of_row, kind="stable")[
            np.count_nonzero(of_row == NO_ADAPTER) :
        ]
        if not len(order):
            return None
        ends = np.searchsorted(of_row[order], numbers, side="right")
        return into.put(order), into.put(ends, torch.int32)


def _num_decoding(slices: Sequence[Slice], *, has_head: bool) -> int:
    """Return how many slices at the front decode.

    A slice of several rows does by its position, which is no earlier than that of its prompt's last
    token: never because what is left of a prompt is short.
    """
    num_rows = 0
    has_more_rows = False
    for number, part in enumerate(slices):
        decodes = part.length == 1 or part.start >= part.num_prompt_tokens - 1
        if not decodes or part.length > DECODE_ROWS:
            return number
        # A head that drafts has one more where a sequence begins.
        count = part.length + (has_head and part.start == 0)
        num_rows += count
        has_more_rows = has_more_rows or count > 1
        if has_more_rows and num_rows > ALL_DECODE_ROWS:
            return number
    return len(slices)


def _starts(slices: Sequence[Slice]) -> list[int]:
    return [*accumulate((part.length for part in slices), initial=0)]


def _padded_starts(starts: list[int], num_sequences: int) -> list[int]:
    """Return `starts` with those of padding, which has no rows."""
    starts = starts or [0]
    return starts + starts[-1:] * (num_sequences + 1 - len(starts))
