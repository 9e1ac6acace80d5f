"""Run the steps of one rank, from a plan to tokens.

A step is packed, copied to the device once, and run there through the decoder and the sampler; on a
GPU the host waits for nothing before it collects. Of a sequence, the runner keeps only the block
table and the tokens to which a plan in flight may refer. It trusts its plans.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from baton.model.layers.attention import AdaptedRows, Backend, Batch
from baton.model.layers.decoder import Taps
from baton.model.layers.draft_head import DraftHead
from baton.model.layers.linear import Linear
from baton.model.loading.adapters import LoraLoader, PreparedAdapter
from baton.model.runner.device_state import (
    RING_TOKENS,
    DeviceTables,
    without_owning,
)
from baton.model.runner.drafting import DeviceDrafter, Drafter
from baton.model.runner.kv_cache import KVCache
from baton.model.runner.packing import (
    Bucket,
    ModelFacts,
    PackedStep,
    Packer,
    StepInputs,
)
from baton.model.runner.step_queue import GraphQueue, StepQueue, StepWork
from baton.model.sampling.logprobs import (
    packed_logprobs,
    packed_prompt,
    unpacked_logprobs,
)
from baton.model.sampling.pooling import packed_rows, rows_of, unpacked_rows
from baton.model.sampling.sampler import Sampler, SamplingTensors
from baton.model.tensor_parallel import Ranks
from baton.node.executor import Progress
from baton.node.scheduling.plan import NOT_FINITE, Slice, StepPlan, StepResult
from baton.protocol.messages import TokenLogprobs
from baton.runtime.clock import Clock
from baton.runtime.log import logger

# Sequences with a table on the device: as many as the kernels take in one step.
MAX_SEQUENCES = 1024
NO_TOKEN = -1  # stands for one that could not be sampled
# Room for changes of block tables, and masks; a step with more runs eagerly.
SPARE_WORDS = 1 << 19

log = logger("runner")


class StepDecoder(Protocol):
    """A model on one rank. `source` names the code that computes, if it is not baton's."""

    @property
    def ranks(self) -> Ranks: ...

    @property
    def source(self) -> str: ...

    @property
    def lora_modules(self) -> tuple[str, ...]:
        """The names of the adapters, in the order of their numbers."""
        ...

    @property
    def num_lora_slots(self) -> int:
        """The numbers behind those, of adapters that come at run time."""
        ...

    @property
    def is_batch_invariant(self) -> bool: ...

    def linears(self) -> Iterable[Linear]: ...

    def forward(self, batch: Batch, rows: Tensor, backend: Backend) -> Tensor:
        """Store the batch's keys and values; return the logits of `rows`."""
        ...

    def hidden(
        self,
        batch: Batch,
        rows: Tensor,
        backend: Backend,
        *,
        are_many: bool = False,
        taps: Taps | None = None,
    ) -> Tensor:
        """Store the batch's keys and values; return what `logits` takes of `rows`.

        `taps` get the streams for which they ask.
        """
        ...

    def logits(
        self, hidden: Tensor, backend: Backend, adapted: AdaptedRows | None = None, /
    ) -> Tensor:
        """Return `[num_rows, vocab]`. `adapted` are the rows of `hidden` that adapters change."""
        ...

    def classify(self, hidden: Tensor, /) -> Tensor:
        """Return the numbers of the model's classifier, `[num_rows, labels]`, if it has one."""
        ...


class Runner:
    def __init__(
        self,
        decoder: StepDecoder,
        backend: Backend,
        cache: KVCache,
        sampler: Sampler,
        queue: StepQueue,
        clock: Clock,
    ) -> None:
        self.decoder = decoder
        self.backend = backend
        self.cache = cache
        self.sampler = sampler
        self.device = device = queue.device
        self.overlaps = queue.overlaps
        self._queue = queue
        self._clock = clock
        self._tables = None
        state_blocks = 0 if cache.states is None else cache.states.num_blocks
        if backend.table_blocks:
            self._tables = DeviceTables(
                MAX_SEQUENCES, backend.table_blocks, device, state_blocks
            )
        self._ring = torch.zeros(RING_TOKENS, dtype=torch.int64, device=device)
        facts = ModelFacts(
            cache.pool.shape[4],
            sampler.eos_token_ids,
            decoder.lora_modules,
            state_blocks,
            decoder.num_lora_slots,
            "all" if cache.states is None else cache.states.shape.chunked,
            replays_prompts=not backend.expands_prompts,
        )
        self._packer = Packer(
            facts,
            self._tables,
            self._queue.allocate,
            sampler.masks,
            self._sampled,
            sampler.counts,
        )
        self.drafter: Drafter | DeviceDrafter | None = None
        self.loras: LoraLoader | None = None  # reads adapters at run time
        self._graphs: StepGraphs | None = None
        self._uncaptured: list[Bucket] = []  # in order of size
        # Each with the time of its launch.
        self._launched: deque[tuple[PackedStep | StepPlan, float]] = deque()
        self._ended_s = 0.0  # the last step that was collected

    def draft_with(self, head: DraftHead, num_drafts: int) -> None:
        """Let `head` draft up to `num_drafts` tokens of a sequence; before any step."""
        of_step = self.backend, self.sampler, self.cache.pool.shape[4]
        if self._tables is None:
            self.drafter = Drafter(head, *of_step)
        else:
            self.drafter = DeviceDrafter(head, *of_step)
            self._packer.head_guesses = num_drafts

    def capture(self, buckets: Sequence[Bucket], progress: Progress) -> None:
        """Replay the steps of these sizes from now on. The thread that launches calls it.

        The largest are captured now. The others share their memory and are captured when the first
        step of their size comes, or by `capture_next`; several ranks capture all of them now.
        """
        assert isinstance(self._queue, GraphQueue), "a CPU has no graphs"
        most_words = max(
            len(self._packer.idle(bucket).inputs.words) for bucket in buckets
        )
        self._graphs = StepGraphs(most_words, self.device)
        self._packer.buckets = buckets
        waiting = sorted(buckets)
        first = _largest(buckets)
        if self.decoder.ranks.size > 1:
            first = waiting[::-1]
        for done, bucket in enumerate(first):
            progress("graphs", done, len(first))
            self._capture(bucket, self._graphs)
            waiting.remove(bucket)
        self._uncaptured = waiting
        progress("graphs", len(first), len(first))

    @property
    def has_uncaptured(self) -> bool:
        return bool(self._uncaptured)

    def capture_next(self) -> None:
        """Capture the smallest step that is left, unless another is still to be collected."""
        if not self._launched:
            self._capture_late(self._uncaptured[0])

    def drop_graphs(self) -> None:
        """Let go of the captured steps; nothing may be launched from then on."""
        self._uncaptured = []
        self._graphs = None

    def put_adapter(self, prepared: PreparedAdapter) -> None:
        """Let an adapter take effect in the steps that are launched from now on."""
        prepared.put()
        self._packer.name_adapter(prepared.lora, prepared.number)

    def launch(self, plan: StepPlan) -> None:
        """Queue a step after those already launched. At most two may be uncollected."""
        launched_s = self._clock()
        # From here on, a reader that expects a block's former owner must refuse the block.
        self.cache.write_generations(plan.generations)
        if not plan.slices:  # it only publishes generations
            self._launched.append((plan, launched_s))
            return
        step = self._packer.pack(plan)
        if step.bucket in self._uncaptured:
            self._capture_late(step.bucket)
            launched_s = self._clock()  # what steps cost is learned from their times
        self._launched.append((step, launched_s))
        self._queue.launch(lambda: self._compute(step))

    def collect(self) -> StepResult:
        """Return the oldest step's result once transports can see all of its stores."""
        step, launched_s = self._launched[0]
        if isinstance(step, StepPlan):
            self._launched.popleft()
            return StepResult(step.step_id, (), launched_s, self._clock())
        ids = iter(self._queue.collect())
        self._launched.popleft()  # until here, nothing may be captured meanwhile
        plan = step.plan
        drafts = _drafts(step, ids)
        tokens = [
            tuple(next(ids) for _ in range(part.num_sampled)) for part in plan.slices
        ]
        broken = {
            index: NOT_FINITE for index, ids in enumerate(tokens) if NO_TOKEN in ids
        }
        logprobs = _logprobs(step, ids) if step.scored else ()
        of_prompts = _prompt_logprobs(step, ids) if step.inputs.targets else ()
        pooled: dict[int, bytes] = {}
        for index, part in enumerate(plan.slices):
            if part.pooling is not None:
                pooled[index], is_finite = unpacked_rows(ids)
                if not is_finite:
                    broken[index] = NOT_FINITE
        unsampled = {**broken, **step.unsampled}
        for index in unsampled:
            tokens[index] = ()
        failed = tuple((index, why) for index, why in unsampled.items() if why)
        started_s = max(launched_s, self._ended_s)
        self._ended_s = self._clock()
        return StepResult(
            plan.step_id,
            tuple(tokens),
            started_s,
            self._ended_s,
            failed,
            logprobs,
            of_prompts,
            tuple(pooled.items()),
            drafts,
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Launch a step and collect it."""
        self.launch(plan)
        return self.collect()

    def pack(self, slices: tuple[Slice, ...]) -> Batch:
        """Return the slices as a batch on the device, one after the other."""
        step = self._packer.pack(StepPlan(0, slices))
        return self._batch(step, self._sent(step.inputs))

    # --- inside --------------------------------------------------------------------------------

    def _capture(self, bucket: Bucket, graphs: "StepGraphs") -> None:
        """Capture a step that consists of padding, which stores nothing."""
        assert isinstance(self._queue, GraphQueue), "a CPU has no graphs"
        self._queue.wait()  # the last replay may still read its inputs
        idle = self._packer.idle(bucket)
        graphs.capture(idle, self._queue.capture, self._forward)

    def _capture_late(self, bucket: Bucket) -> None:
        """Capture a step during service. If that fails, all that are left run eagerly."""
        assert self._graphs is not None, "steps are left to capture"
        self._uncaptured.remove(bucket)
        try:
            self._capture(bucket, self._graphs)
        except Exception as error:  # noqa: BLE001  (Triton's have no base class but this)
            log.warning(
                "some steps are not replayed: one could not be captured",
                num_tokens=bucket.num_tokens,
                problem=(str(error) or repr(error)).strip().split("\n")[0],
            )
            self._uncaptured = []

    def _sampled(self, place: int) -> int:
        """Return the token at a place of the ring."""
        self._queue.wait()
        return int(self._ring[place])

    def _compute(self, step: PackedStep) -> Tensor:
        """Do all work of a step on the device; return the sampled ids, and log probabilities."""
        self.cache.copy_blocks(step.plan.copies)
        if self._graphs is not None and self._graphs.takes(step):
            return self._replayed(step, self._graphs)
        ids, *_ = self._forward(step, self._sent(step.inputs))
        return ids

    def _replayed(self, step: PackedStep, graphs: "StepGraphs") -> Tensor:
        """Replay a step, and do what it lacks with the logits that it leaves."""
        inputs = graphs.filled(step)
        self._write_tables(inputs)
        replayed, logits, states = graphs.replay(step)
        num_sampled = sum(part.num_sampled for part in step.plan.slices)
        num_drafts = step.num_sequences * step.num_drafts
        ids = replayed[: num_drafts + num_sampled]
        if inputs.masks is not None:
            sampled = self._sample_masked(inputs, logits, ids[num_drafts:])
            ids = torch.cat([ids[:num_drafts], sampled])
            if inputs.taken is not None:
                self._store_masked(step, inputs, states, sampled)
        if not step.scored:
            return ids
        valid = self._ring[inputs.places.of(inputs.words)]
        return torch.cat(
            [ids, *_packed_scores(step, _scored_rows(step, logits), valid)]
        )

    def _sample_masked(self, inputs: StepInputs, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the ids of a captured step, with others where a mask says what may come."""
        assert inputs.masks is not None
        masked, masks = (place.of(inputs.words) for place in inputs.masks)
        ints, reals, held_back = (place.of(inputs.words) for place in inputs.samples)
        samples = SamplingTensors(
            ints[masked],
            reals[masked],
            held_back[masked],
            torch.arange(len(masked), device=self.device),
            masks,
        )
        sampled = self.sampler.sample(logits[masked], samples)
        places = inputs.places.of(inputs.words)
        self._ring[places[masked]] = sampled
        is_broken = ids[masked] == NO_TOKEN
        return ids.index_put((masked,), sampled.masked_fill(is_broken, NO_TOKEN))

    def _store_masked(
        self, step: PackedStep, inputs: StepInputs, states: Tensor, sampled: Tensor
    ) -> None:
        """Store a head's rows of samples with masks, of which a captured step has other ids."""
        assert isinstance(self.drafter, DeviceDrafter)
        assert inputs.taken is not None
        samples, again = (place.of(inputs.words) for place in inputs.taken)
        if not len(samples):
            return
        tables = self._batch(step, inputs).tables
        assert tables is not None
        rows = step.head_rows(inputs, tables)
        self.drafter.store(rows, states, again, sampled[samples])

    def _sent(self, inputs: StepInputs) -> StepInputs:
        """Copy the inputs to the device, and update its block tables."""
        sent = replace(inputs, words=inputs.words.to(self.device, non_blocking=True))
        self._write_tables(sent)
        return sent

    def _write_tables(self, inputs: StepInputs) -> None:
        if self._tables is not None and inputs.changes is not None:
            self._tables.write(*(place.of(inputs.words) for place in inputs.changes))
        if self.sampler.counts is not None and inputs.new_rows:
            self.sampler.counts.write(
                [place.of(inputs.words) for place in inputs.new_rows]
            )

    def _batch(self, step: PackedStep, inputs: StepInputs) -> Batch:
        ids = inputs.tokens.of(inputs.words)[0]
        if step.has_unknown_tokens:
            # An index below 0 counts from the ring's end; a known token reads the last place.
            ids = torch.where(ids < 0, self._ring[ids.clamp(max=-1)], ids)
        return step.batch(inputs, ids, self._tables)

    def _forward(
        self, step: PackedStep, inputs: StepInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return drafts, sampled ids and all else that is wanted, one behind the other.

        Also return the samples' logits, and the states that a head takes, if there is one.
        """
        sampled = inputs.rows.of(inputs.words)
        batch = self._batch(step, inputs)
        before = pooled = sampled[:0]
        if inputs.targets is not None:
            before = inputs.targets[0].of(inputs.words)
        if inputs.pooled is not None:
            pooled = inputs.pooled.of(inputs.words)
        rows = sampled
        if len(before) or len(pooled):  # nearly no step has them
            rows = torch.cat([sampled, before, pooled])
        are_many = inputs.targets is not None or len(pooled) > len(step.plan.slices)
        every = None
        if self.drafter is not None:
            hidden, every = self._of_all_rows(batch, self.drafter)
            hidden = hidden[rows]
        else:
            hidden = self.decoder.hidden(batch, rows, self.backend, are_many=are_many)
        if rows is sampled:
            ids, logits = self._sample(step, inputs, hidden, batch)
        else:
            parts = torch.split(hidden, [len(sampled), len(before), len(pooled)])
            ids, logits = self._sample(step, inputs, parts[0], batch)
            scored = self._scored(step, inputs, parts[1])
            made = self._pooled(step, parts[2])
            ids = torch.cat([ids, *scored, *made])
        if every is None or self.drafter is None:
            return ids, logits, logits[:0]
        num_samples = len(step.inputs.places.of(step.inputs.words))
        drafts = self._drafted(step, inputs, batch, every, ids[:num_samples])
        return torch.cat([drafts.flatten(), ids]), logits, every

    def _drafted(
        self,
        step: PackedStep,
        inputs: StepInputs,
        batch: Batch,
        states: Tensor,
        sampled: Tensor,
    ) -> Tensor:
        """Return `[num_sequences, step.num_drafts]`, what may follow the sampled tokens."""
        if isinstance(self.drafter, DeviceDrafter):
            assert batch.tables is not None, "it reads tables"
            return self.drafter.drafts(
                step.head_rows(inputs, batch.tables),
                states,
                sampled,
                inputs.sampled(batch.token_ids),
                step.num_drafts,
            )
        assert self.drafter is not None
        return self.drafter.drafts(step.plan.slices, states, sampled.tolist())

    def _of_all_rows(
        self, batch: Batch, drafter: Drafter | DeviceDrafter
    ) -> tuple[Tensor, Tensor]:
        """Return what the model's head takes of all rows, and what that which drafts takes."""
        rows = torch.arange(batch.num_tokens, device=self.device)
        whole = replace(batch, adapted_outputs=batch.adapted)
        taps = Taps(drafter.head.tapped)
        hidden = self.decoder.hidden(
            whole, rows, self.backend, are_many=True, taps=taps
        )
        return hidden, drafter.head.states(hidden, taps)

    def _scored(
        self, step: PackedStep, inputs: StepInputs, hidden: Tensor
    ) -> list[Tensor]:
        """Return the log probabilities of the tokens after the rows `hidden`, by slice."""
        if inputs.targets is None:
            return []
        parts = [part for part in step.plan.slices if part.targets]
        lengths = [len(part.targets) for part in parts]
        next_ids = inputs.targets[1]
        pieces = (
            torch.split(hidden, lengths),
            torch.split(next_ids.of(inputs.words), lengths),
        )
        return [
            packed_prompt(
                partial(self._logits_of, part.lora), own, tokens, part.num_top
            ).view(-1)
            for part, own, tokens in zip(parts, *pieces, strict=True)
        ]

    def _pooled(self, step: PackedStep, hidden: Tensor) -> list[Tensor]:
        """Return what is made of the rows `hidden`, by slice."""
        if not len(hidden):
            return []
        wanted = [(part.pooling, part.length) for part in step.plan.slices]
        pooled = [
            (how, len(rows_of(how, 0, length)))
            for how, length in wanted
            if how is not None
        ]
        pieces = torch.split(hidden, [num_rows for _, num_rows in pooled])
        return [
            packed_rows(how, rows, self.decoder.classify)
            for (how, _), rows in zip(pooled, pieces, strict=True)
        ]

    def _logits_of(self, lora: str, hidden: Tensor) -> Tensor:
        """Return the logits of rows that have one adapter, or none."""
        adapted = self._packer.all_of(lora, hidden) if lora else None
        return self.decoder.logits(hidden, self.backend, adapted)

    def _sample(
        self, step: PackedStep, inputs: StepInputs, hidden: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """Return the sampled ids, and behind them log probabilities; and the logits of all.

        An id is `NO_TOKEN` where the hidden state has NaN or infinity, as the logits have then.
        """
        is_broken = ~hidden.isfinite().all(dim=1)
        logits = self.decoder.logits(hidden, self.backend, batch.adapted_samples)
        if inputs.repeats is not None:
            repeats = inputs.repeats.of(inputs.words)
            logits = logits[repeats]
            is_broken = is_broken[repeats]
        places = inputs.places.of(inputs.words)
        if not len(places):
            return places, logits
        # Copies, because sampling may change them.
        raw = _scored_rows(step, logits)
        ids = self.sampler.sample(logits, inputs.sampled(batch.token_ids))
        # Valid ids, which a step that is launched already may take.
        self._ring[places] = ids
        shown = ids.masked_fill(is_broken, NO_TOKEN)
        if not raw:
            return shown, logits
        # The rows behind these are padding.
        num_samples = sum(part.num_sampled for part in step.plan.slices)
        scores = _packed_scores(step, raw, ids)
        return torch.cat([shown[:num_samples], *scores]), logits


def _largest(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Return the largest buckets of each kind, which together need as much memory as all.

    Those with the most sequences count, too: with guesses, others may have more rows.
    """
    largest = {
        (bool(one.num_decoding), one.samples_all, one.num_drafts, by_rows): one
        for by_rows in (True, False)
        for one in sorted(buckets, key=lambda one: one if by_rows else one[1::-1])
    }
    return sorted({*largest.values()}, reverse=True)


class CapturedStep(NamedTuple):
    replay: StepWork
    kept: list[Tensor]  # logits and states of the last replay


class StepGraphs:
    """Steps that a device replays, captured once for each bucket.

    All buckets read their inputs from one piece of device memory. A replay runs the same kernels as
    an eager step of its bucket, so it gives the same bits. Steps that decode beside prompts are
    never replayed.
    """

    def __init__(self, num_words: int, device: torch.device) -> None:
        self._words = torch.zeros(
            num_words + SPARE_WORDS, dtype=torch.int64, device=device
        )
        self._steps: dict[Bucket | None, CapturedStep] = {}

    def capture(
        self,
        step: PackedStep,
        capture: Callable[[StepWork], StepWork],
        forward: Callable[[PackedStep, StepInputs], tuple[Tensor, Tensor, Tensor]],
    ) -> None:
        """Capture the bucket of `step`, which consists of padding."""
        inputs = self.filled(step)
        kept: list[Tensor] = []

        def work() -> Tensor:
            ids, *kept[:] = forward(step, inputs)
            return ids

        replay = capture(work)
        if self._words.is_cuda:
            # Captured steps share their memory, which nothing takes before the next replay.
            kept[:] = map(without_owning, kept)
        self._steps[step.bucket] = CapturedStep(replay, kept)

    def takes(self, step: PackedStep) -> bool:
        return step.bucket in self._steps and len(step.inputs.words) <= len(self._words)

    def filled(self, step: PackedStep) -> StepInputs:
        """Copy the inputs to where the graphs read them, which is the only copy of a step."""
        words = step.inputs.words
        self._words[: len(words)].copy_(words, non_blocking=True)
        return replace(step.inputs, words=self._words)

    def replay(self, step: PackedStep) -> tuple[Tensor, Tensor, Tensor]:
        """Run a step that is filled, and return what its capture did, padding included."""
        captured = self._steps[step.bucket]
        ids = captured.replay()
        logits, states = captured.kept
        return ids, logits, states


def _scored_rows(step: PackedStep, logits: Tensor) -> list[Tensor]:
    """Return copies of the logits whose log probabilities are wanted, as `step.scored` has them."""
    return [
        torch.stack([logits[one] for one in samples])
        for samples in step.scored.values()
    ]


def _packed_scores(step: PackedStep, rows: list[Tensor], ids: Tensor) -> list[Tensor]:
    """Return what `packed_logprobs` makes of these rows and of the valid ids of all samples."""
    return [
        packed_logprobs(own, torch.stack([ids[one] for one in samples]), num_top).view(
            -1
        )
        for own, (num_top, samples) in zip(rows, step.scored.items(), strict=True)
    ]


def _drafts(
    step: PackedStep, words: Iterator[int]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Read, by slice, the drafts that are before the ids."""
    if not step.num_drafts:
        return ()
    drafts = [tuple(islice(words, step.num_drafts)) for _ in range(step.num_sequences)]
    return tuple(
        (index, drafts[index][: part.num_drafts])
        for index, part in enumerate(step.plan.slices)
        if part.num_drafts
    )


def _logprobs(
    step: PackedStep, words: Iterator[int]
) -> tuple[tuple[int, tuple[TokenLogprobs, ...]], ...]:
    """Read, by slice, what `_sample` has added behind the ids."""
    found = {
        sample: unpacked_logprobs([*islice(words, 1 + num_top)])
        for num_top, samples in step.scored.items()
        for sample in samples
    }
    ends = accumulate(part.num_sampled for part in step.plan.slices)
    return tuple(
        (index, tuple(found[sample] for sample in range(end - part.num_sampled, end)))
        for index, (part, end) in enumerate(zip(step.plan.slices, ends, strict=True))
        if part.samples
        and part.sampling is not None
        and part.sampling.logprobs is not None
    )


def _prompt_logprobs(
    step: PackedStep, words: Iterator[int]
) -> tuple[tuple[int, bytes], ...]:
    """Read, by slice, what `_forward` has added behind them."""
    return tuple(
        (
            index,
            array("q", islice(words, len(part.targets) * (1 + part.num_top))).tobytes(),
        )
        for index, part in enumerate(step.plan.slices)
        if part.targets
    )
