"""A step on one rank: from a plan to tokens.

Called by an executor's compute thread or a rank's worker process, one plan after the other. It
packs the slices, runs the decoder and samples; it keeps nothing of a sequence but the tokens that
a plan in flight may refer to. It trusts its plans: block tables and positions are the scheduler's.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np
import torch

from baton.engine.attention.backend import Backend, Batch, Chunk
from baton.engine.kv_cache import KVCache
from baton.engine.models.decoder import Decoder
from baton.engine.plan import Slice, StepPlan, StepResult
from baton.engine.sampler import Sampler, SampleRow
from baton.protocol.errors import InvariantBroken
from baton.protocol.ids import Key
from baton.runtime.clock import Clock

# Steps whose sampled tokens are kept: a plan may leave out a token only while its step is unsettled
# (two steps at most), so older ones cannot be asked for.
REMEMBERED_STEPS = 4


class Runner:
    def __init__(
        self,
        decoder: Decoder,
        backend: Backend,
        cache: KVCache,
        sampler: Sampler,
        device: torch.device,
        clock: Clock,
    ) -> None:
        self.decoder = decoder
        self.backend = backend
        self.cache = cache
        self.sampler = sampler
        self.device = device
        self._clock = clock
        self._sampled: deque[dict[Key, int]] = deque(maxlen=REMEMBERED_STEPS)

    def execute(self, plan: StepPlan) -> StepResult:
        """Returns when every store is visible to transports."""
        started_s = self._clock()
        self.cache.write_generations(plan.generations)
        self.cache.copy_blocks(plan.copies)
        with torch.inference_mode():
            tokens = self._compute(plan.slices)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a step without draws may still be storing
        return StepResult(plan.step_id, tokens, started_s, self._clock())

    def _compute(self, slices: tuple[Slice, ...]) -> tuple[tuple[int, ...], ...]:
        batch = self.pack(slices)
        drawing = [i for i, part in enumerate(slices) if part.draws]
        last = [batch.chunks[i].row + batch.chunks[i].length - 1 for i in drawing]
        logits = self.decoder.forward(
            batch, torch.tensor(last, dtype=torch.int64, device=self.device), self.backend
        )
        # One row per draw: choices of one prompt share its logits.
        draws = [row for row, i in enumerate(drawing) for _ in slices[i].draws]
        if len(draws) > len(drawing):
            logits = logits[torch.tensor(draws, dtype=torch.int64, device=self.device)]
        tokens = iter(self.sampler.sample(logits, list(_sample_rows(slices))))
        drawn = tuple(tuple(next(tokens) for _ in part.draws) for part in slices)
        self._remember(slices, drawn)
        return drawn

    def pack(self, slices: tuple[Slice, ...]) -> Batch:
        """The slices one after the other."""
        block_size = self.cache.pool.shape[4]
        chunks: list[Chunk] = []
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for part in slices:
            start, length, table = part.start, part.length, part.block_table
            chunks.append(Chunk(len(token_ids), start, length, table))
            if length == 1:  # a decode step: an array of one would cost more than it saves
                token_ids.append(part.token_ids[0] if part.token_ids else self._last_sampled(part))
                positions.append(start)
                slots.append(table[start // block_size] * block_size + start % block_size)
                continue
            token_ids += part.token_ids
            own, first = np.arange(start, start + length), start // block_size
            blocks = np.array(table[first:])[own // block_size - first]
            positions += own.tolist()
            slots += (blocks * block_size + own % block_size).tolist()
        rows = torch.from_numpy(np.array((token_ids, positions, slots), np.int64)).to(self.device)
        return Batch(rows[0], rows[1], rows[2], tuple(chunks))

    def _last_sampled(self, part: Slice) -> int:
        for step in reversed(self._sampled):
            token_id = step.get(part.key)
            if token_id is not None:
                return token_id
        raise InvariantBroken(f"{part.key}: no token was sampled in the last steps")

    def _remember(self, slices: tuple[Slice, ...], drawn: tuple[tuple[int, ...], ...]) -> None:
        self._sampled.append(
            {
                part.key.of_choice(choice): token_id
                for part, tokens in zip(slices, drawn, strict=True)
                for choice, token_id in zip(part.draws, tokens, strict=True)
            }
        )


def _sample_rows(slices: tuple[Slice, ...]) -> Iterator[SampleRow]:
    for part in slices:
        for choice in part.draws:
            if part.sampling is None:
                raise InvariantBroken(f"{part.key}: a draw without sampling")
            position = part.start + part.length
            yield SampleRow(part.sampling, choice, position, position - part.num_prompt_tokens)
