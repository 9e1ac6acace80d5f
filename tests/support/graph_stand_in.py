"""A CPU that behaves like a GPU with graphs, and a model that such a device can compute.

`RecordingQueue` computes when a step is launched. Its `capture` records every torch operation with
the tensors that it took, and a replay runs these operations again without any Python code of the
engine: what a captured step has read from the host shows in the results of its replays. One that
asks for a value on the host, or makes a tensor from host data, fails at once.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baton.kernels import reference
from baton.kernels.constants import SILU, Gate
from baton.model.config.rope_config import Rope
from baton.model.config.tensor_parts import share
from baton.model.layers.attention import Batch, Chunk, Tables, decode_rows
from baton.model.layers.decoder import Decoder
from baton.model.layers.linear import Linear
from baton.model.layers.mlp import (
    ExpertMlp,
    GroupedProduct,
    SoftmaxRouter,
    StackedExperts,
)
from baton.model.layers.rotary import rope_table
from baton.model.runner.kv_cache import KVCache
from baton.model.runner.runner import Runner
from baton.model.runner.step_queue import StepWork
from baton.model.sampling.device_counts import DeviceCounts
from baton.model.sampling.sampler import POSITION, SEED, TEMPERATURE, Sampler
from baton.model.sampling.token_masks import TokenMasks
from baton.model.tensor_parallel import Ranks
from baton.runtime.clock import monotonic
from tools.gpu.drafts import random_head
from tools.gpu.engine import random_decoder
from tools.gpu.floors import Shape

aten = torch.ops.aten
# Each of them waits for the device, or brings data that a replay would not have.
REFUSED = (
    aten.item,
    aten._local_scalar_dense,
    aten.is_nonzero,
    aten.nonzero,
    aten.masked_select,
    aten.lift_fresh,
    aten._unique2,
)
VIEWS = ("slice", "view", "select", "unbind", "alias", "detach")
SHAPE = Shape("tiny", 32, 48, 2, 4, 2, 8, 96, is_tied=False, has_qk_norm=False)
BLOCK_SIZE = 4
MAX_LEN = 64
MAX_ROWS = 6  # of sequences with penalties


def refuse_waits(func: Any, args: Any) -> None:
    """Fail if the operation waits for the device; an index by a mask counts what it takes."""
    assert func.overloadpacket not in REFUSED, f"{func} in a step"
    if func.overloadpacket in (aten.index, aten.index_put_):
        indices = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor)]
        assert not any(index.dtype == torch.bool for index in indices), (
            "an index by a mask"
        )


class Watch(TorchDispatchMode):
    """Notes the operations of steps on `meta`; none may mix devices or ask for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.num_copies_to_device = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        refuse_waits(func, args)
        out = func(*args, **(kwargs or {}))
        found: list[Any] = list(tree_leaves((args, kwargs, out)))
        devices = {leaf.device.type for leaf in found if isinstance(leaf, torch.Tensor)}
        name = func.overloadpacket.__name__
        if devices == {"meta", "cpu"}:
            assert name in {"copy_", "_to_copy", "to"}, (
                f"{func} takes tensors of two devices"
            )
            self.num_copies_to_device += 1
        elif devices == {"meta"} and name not in VIEWS:
            self.names.append(name)
        return out


class Recorder(TorchDispatchMode):
    """Records the operations that run while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        refuse_waits(func, args)
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if hasattr(new, "wait"):
                    new.wait()  # a collective, which a stream would order
                elif isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class RecordingQueue:
    """A `StepQueue` on `device`, which holds nothing if it is `meta`."""

    overlaps = True

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.num_replays = 0
        self.num_waits = 0
        self._ids: deque[list[int]] = deque()

    def allocate(self, num_words: int) -> Tensor:
        # Not zeros: what is not laid must not be read.
        return torch.full((num_words,), -7)

    def launch(self, work: StepWork) -> None:
        with torch.inference_mode():
            ids = work()
        self._ids.append([0] * len(ids) if ids.is_meta else ids.tolist())

    def collect(self) -> list[int]:
        return self._ids.popleft()

    def wait(self) -> None:
        self.num_waits += 1  # work runs as it is launched

    def capture(self, work: StepWork) -> StepWork:
        with torch.inference_mode():
            work()
            with Recorder() as recorder:
                ids = work()

        def replay() -> Tensor:
            self.num_replays += 1
            if self.device.type != "meta":
                recorder.replay()
            return ids

        return replay


class TableBackend:
    """Attention in torch that reads tables on the device, and in a decode step nothing else.

    With `reads_chunks`, it makes the tables of the chunks of a step on its host.
    """

    name = "tables"
    is_batch_invariant = False
    has_two_orders = False
    expands_prompts = False
    absorbed_rows = None
    expansion = None

    def __init__(
        self,
        pool: Tensor,
        num_heads: int,
        max_model_len: int,
        *,
        reads_chunks: bool = False,
    ) -> None:
        """The last block of the pool takes what is not to be stored."""
        self.pool = pool
        self.num_heads = num_heads
        self.block_size, self.head_dim = pool.shape[4], pool.shape[5]
        self._width = -(-max_model_len // self.block_size)
        self.table_blocks = 0 if reads_chunks else self._width
        table = rope_table(Rope(1e4), self.head_dim, max_model_len)
        self._cos_sin = table.to(pool.device, pool.dtype)

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        self._tables = batch.tables or self._of_chunks(batch.chunks)

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        head_norms: Tensor | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        assert head_norms is None
        heads = self.num_heads
        tables = self._tables
        q, k, v = qkv.view(len(qkv), -1, self.head_dim).split(
            (heads, self.pool.shape[1], self.pool.shape[1]), 1
        )
        q = self._rotated(q)
        k = self._rotated(k)
        spare = (len(self.pool) - 1) * self.block_size
        slots = torch.where(self._batch.slots < 0, spare, self._batch.slots)
        blocks = slots // self.block_size
        offsets = slots % self.block_size
        self.pool[blocks, :, layer, 0, offsets] = k
        self.pool[blocks, :, layer, 1, offsets] = v
        decoding = tables.num_decoding
        decode = decode_rows(tables, 1)
        count = tables.num_decode_rows
        out = self._attended(q[:count], layer, decode.blocks, decode.context_lens)
        if decoding < len(tables.blocks):
            token = torch.arange(len(q) - count, device=q.device)
            ends = tables.query_starts[1:]
            # Padding behind the last prompt counts as its own.
            owner = torch.searchsorted(ends, token, right=True).clamp(max=len(ends) - 1)
            seen = tables.context_lens[decoding:][owner] - ends[owner] + token + 1
            blocks = tables.blocks[decoding:][owner]
            out = torch.cat((out, self._attended(q[count:], layer, blocks, seen)))
        return out.flatten(1) if rows is None else out[rows].flatten(1)

    def _of_chunks(self, chunks: Sequence[Chunk]) -> Tables:
        tables = [chunk.block_table[: self._width] for chunk in chunks]
        blocks = [[*table, *[0] * (self._width - len(table))] for table in tables]
        starts = [0, *(chunk.row + chunk.length for chunk in chunks)]
        return Tables(
            torch.tensor(blocks),
            torch.tensor([chunk.end for chunk in chunks]),
            torch.tensor(starts),
            0,
        )

    def _attended(self, q: Tensor, layer: int, blocks: Tensor, seen: Tensor) -> Tensor:
        """Attend from each row to the first keys of its own table, as many as are seen."""
        found = self.pool[blocks.long(), :, layer]
        # [2, rows, kv_heads, tokens, dim].
        found = found.permute(3, 0, 2, 1, 4, 5).flatten(3, 4)
        keys, values = found
        grouped = q.unflatten(1, (keys.shape[1], -1))
        scores = torch.einsum("bkgd,bknd->bkgn", grouped, keys) * self.head_dim**-0.5
        place = torch.arange(keys.shape[2], device=q.device)
        hidden = place >= seen[:, None]
        scores = scores.masked_fill(hidden[:, None, None], -1e30)
        values = values.masked_fill(hidden[:, None, :, None], 0.0)
        return torch.einsum("bkgn,bknd->bkgd", scores.softmax(-1), values).flatten(1, 2)

    def _rotated(self, x: Tensor) -> Tensor:
        cos, sin = self._cos_sin[self._batch.positions][:, None].chunk(2, dim=-1)
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        stream = x if residual is None else x + residual
        return stream * torch.rsqrt(
            stream.square().mean(-1, keepdim=True) + eps
        ) * weight, stream

    def add_experts(self, rows: Tensor, weights: Tensor) -> Tensor:
        return reference.add_experts(rows, weights)

    def gate_mul(self, gate_up: Tensor, _: Gate = SILU) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


def sample_on_device(
    logits: Tensor,
    ints: Tensor,
    reals: Tensor,
    held_back: Tensor,
    changed: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Draw from noise that the seed and the position give; not what a `Sampler` samples."""
    if changed is not None:
        logits = torch.where(changed[1][:, :1] >= 0, changed[0], logits)
    vocab = logits.shape[1]
    spare = torch.nn.functional.pad(logits, (0, 1))
    places = torch.where(held_back < 0, vocab, held_back).long()
    logits = spare.scatter(1, places, -torch.inf)[:, :vocab]
    tokens = torch.arange(vocab, device=logits.device)
    mixed = (ints[:, SEED] * 7919 + ints[:, POSITION] * 104_729)[:, None] + tokens * 31
    noise = (mixed * mixed % 10_007) / 10_007
    return (logits + noise * reals[:, TEMPERATURE, None]).argmax(-1)


def with_experts(
    decoder: Decoder, product: GroupedProduct, num_experts: int = 3
) -> Decoder:
    """Return the decoder whose last layer has experts as wide as its MLP, two for each token."""
    *layers, last = decoder.layers
    gate_up, down = last.mlp.linears()
    stacked = [
        StackedExperts(
            torch.stack([one.weight.roll(part, 0) for part in range(num_experts)]),
            product,
        )
        for one in (gate_up, down)
    ]
    linear = replace(gate_up, weight=gate_up.weight[:num_experts].contiguous())
    numbers = torch.arange(num_experts, device=linear.weight.device)
    router = SoftmaxRouter(linear, num_experts_per_tok=2, norm_topk_prob=True)
    experts = ExpertMlp(router, numbers, *stacked)
    return replace(decoder, layers=(*layers, replace(last, mlp=experts)))


def stand_in(  # noqa: PLR0913  (each test chooses a few)
    num_blocks: int,
    queue: RecordingQueue,
    eos_token_ids: tuple[int, ...] = (),
    ranks: Ranks | None = None,
    masks: TokenMasks | None = None,
    *,
    has_counts: bool = True,
    max_len: int = MAX_LEN,
    num_drafts: int = 0,
    reads_chunks: bool = False,
) -> Runner:
    """Return a runner of a tiny random model in float64, over a pool on the queue's device.

    Without counts there, the host computes penalties.

    Several `ranks` compute all heads each, but only their part of every sum and of the logits. Two
    give the bits of one, as halves of a product are exact. With `num_drafts`, a random head drafts
    as many tokens.
    """
    torch.manual_seed(3)
    decoder = random_decoder(SHAPE, torch.float64, queue.device)
    for linear in decoder.linears():
        linear.weight.mul_(8.0)  # so that every token depends on those before it
    if ranks is not None:
        for layer in decoder.layers:
            *_, down = layer.mlp.linears()
            layer.output.weight.div_(ranks.size)
            down.weight.div_(ranks.size)
    decoder = with_experts(decoder, reference.grouped_product)
    if ranks is not None:
        rows = share(SHAPE.vocab_size, ranks.rank, ranks.size)
        head = Linear(decoder.head.weight[rows])
        decoder = replace(decoder, head=head, head_is_split=True, ranks=ranks)
    sizes = (
        num_blocks + 1,
        SHAPE.num_kv_heads,
        SHAPE.num_layers + 1,
        2,
        BLOCK_SIZE,
        SHAPE.head_dim,
    )
    pool = torch.zeros(sizes, dtype=torch.float64, device=queue.device)
    cache = KVCache(pool, torch.zeros(num_blocks + 1).numpy().astype("uint32"))
    backend = TableBackend(pool, SHAPE.num_heads, max_len, reads_chunks=reads_chunks)
    counts = DeviceCounts(
        MAX_ROWS, SHAPE.vocab_size, queue.device, reference.penalize_counted
    )
    sampler = Sampler(
        eos_token_ids, sample_on_device, masks, counts if has_counts else None
    )
    runner = Runner(decoder, backend, cache, sampler, queue, monotonic)
    if num_drafts:
        head = random_head(decoder, feeds_normed=num_drafts % 2 == 0)
        runner.draft_with(head, num_drafts)
    return runner
