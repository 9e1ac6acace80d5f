"""One rank's compute without an executor: logits of any chunk of any sequence, at a block table."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.kv_transfer.pools import HostPool
from baton.model.loading.weight_digests import WeightDigest
from baton.model.loading.weights import fingerprint
from baton.model.runner.device_kernels import UNPROVEN, DeviceKernels
from baton.model.runner.rank import load_runner
from baton.model.runner.rank_plan import plan_rank
from baton.model.runner.runner import Runner
from baton.model.tensor_parallel import Ranks, SingleRank
from baton.node.scheduling.plan import Slice
from baton.protocol.config import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    KVCacheDtype,
    ModelConfig,
)
from baton.protocol.ids import Key, RequestId
from baton.protocol.sampling import Sampling

GREEDY = Sampling(seed=0, max_tokens=1 << 20, temperature=0.0)


def compute_config(
    folder: Path,
    dtype: str = "auto",
    num_blocks: int = 128,
    block_size: int = 16,
    lora_modules: tuple[str, ...] = (),
    kv_cache_dtype: KVCacheDtype = "auto",
) -> ClusterConfig:
    return ClusterConfig(
        model=ModelConfig(str(folder), dtype=dtype, lora_modules=lora_modules),  # type: ignore[arg-type]
        cache=CacheConfig(num_blocks=num_blocks, block_size=block_size),
        engine=EngineConfig(device="cpu", threads=1, kv_cache_dtype=kv_cache_dtype),
    )


def no_progress(phase: str, done: int, total: int) -> None:
    """For those who do not watch."""


def weight_digest(folder: Path) -> bytes:
    with WeightDigest(folder) as digest:
        return digest.result(no_progress)


def model_fingerprint(folder: Path, dtype: str = "float32") -> str:
    """What a node publishes of a model without adapters."""
    return fingerprint(folder, dtype, weight_digest(folder))


@contextmanager
def loaded(
    config: ClusterConfig,
    ranks: Ranks | None = None,
    kernels: DeviceKernels = UNPROVEN,
) -> Iterator[Runner]:
    """A runner over a pool of its own."""
    ranks = ranks or SingleRank()
    plan = plan_rank(config, ranks.size)
    runner, pool = load_runner(plan, config, ranks, no_progress, kernels)
    try:
        yield runner
    finally:
        if isinstance(pool, HostPool):
            pool.close()


def needs_rules(runner: Runner) -> None:
    """Skip a test of equal bits on a CPU where no number of rows gives them: its nodes say so."""
    if not all(linear.is_batch_invariant for linear in runner.decoder.linears()):
        pytest.skip("no row rule was found on this CPU")


def random_tokens(count: int, seed: int = 0, vocab: int = 1024) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (count,), generator=generator).tolist()


def state_of(runner: Runner, number: int = 0) -> tuple[int, ...]:
    """Blocks at the end of the pool for the state of a text, if the model keeps one."""
    states = runner.cache.states
    if states is None:
        return ()
    end = len(runner.cache.pool) - number * states.num_blocks
    return tuple(range(end - states.num_blocks, end))


class Text:
    """A sequence with blocks of its own, computed a chunk at a time."""

    def __init__(
        self,
        name: str,
        tokens: Sequence[int],
        blocks: Sequence[int],
        lora: str = "",
        state: Sequence[int] = (),
    ) -> None:
        self.lora = lora
        self.state = tuple(state)
        self.key = Key(RequestId(name))
        self.tokens = list(tokens)
        self.blocks = tuple(blocks)

    def chunk(
        self, start: int, end: int, *, sample: bool = False, num_held: int = 0
    ) -> Slice:
        return Slice(
            self.key,
            start,
            end - start,
            tuple(self.tokens[start:end]),
            self.blocks,
            (0,) if sample else (),
            GREEDY if sample else None,
            len(self.tokens),
            lora=self.lora,
            state=self.state,
            num_held=num_held,
        )


def next_step(text: Text, position: int, choice: int = 0) -> Slice:
    """A decode step whose token the host does not know yet."""
    key = text.key.of_choice(choice)
    return Slice(
        key,
        position,
        1,
        (),
        text.blocks,
        (choice,),
        GREEDY,
        len(text.tokens),
        state=text.state,
    )


def logits(runner: Runner, *slices: Slice) -> list[Tensor]:
    """Compute the slices in one batch; the logits of every token of each, `[length, vocab]`."""
    batch = runner.pack(slices)
    batch = replace(batch, adapted_outputs=batch.adapted)  # all rows are wanted
    with torch.inference_mode():
        rows = runner.decoder.forward(
            batch, torch.arange(len(batch.token_ids)), runner.backend
        )
    return [rows[chunk.row : chunk.row + chunk.length] for chunk in batch.chunks]


def greedy(runner: Runner, text: Text, num_tokens: int) -> list[int]:
    """Continue a text that is computed but for its last token, a token at a time."""
    for _ in range(num_tokens):
        end = len(text.tokens)
        text.tokens.append(int(logits(runner, text.chunk(end - 1, end))[0][0].argmax()))
    return text.tokens[-num_tokens:]


def chunked_logits(runner: Runner, text: Text, chunk_sizes: Sequence[int]) -> Tensor:
    """The logits of all tokens, each chunk in a batch of its own; the last size repeats."""
    parts = []
    start = 0
    sizes = list(chunk_sizes)
    while start < len(text.tokens):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        end = min(start + size, len(text.tokens))
        parts += logits(runner, text.chunk(start, end))
        start = end
    return torch.cat(parts)
