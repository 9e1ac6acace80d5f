"""Small kernels of a step that start while the one before them ends, and the proof that they may.

A launch behind another costs a GPU some microseconds. With programmatic dependent launch, the
programs of a kernel take their places before the kernel in front has ended, and wait there. So each
of them calls `gdc_wait` before it reads anything but weights, before it stores, and before it ends,
because what comes behind it waits for it alone.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.cuda.pool_writes import rope_and_store
from baton.kernels.cuda.rows import add_rms_norm, gate_mul
from baton.kernels.hopper.attention.one_order_proof import captured
from baton.kernels.proofs import FP8_POOL, ModelShapes

CAPABILITY = 9  # and above
ROWS = (1, 8, 64, 300)
LAYERS = 6  # of a chain
REPLAYS = 40
POSITIONS = 4096
EPS = 1e-6


def missing_for(shapes: ModelShapes, capability: tuple[int, int]) -> str:
    """Return why kernels of such a model cannot overlap; empty if they can."""
    if capability[0] < CAPABILITY:
        return f"compute capability {capability}"
    if shapes.is_latent:
        return "latent attention"
    if shapes.pool_dtype not in {shapes.dtype, FP8_POOL}:
        return f"a pool of {shapes.pool_dtype}"
    return "" if all(map(all, shapes.linears[:4])) else "layers without an MLP"


class Chain:
    """What the layers of a model compute without attention, over weights of its sizes.

    Each product waits for a kernel that may overlap, and each of these for a product.
    """

    def __init__(self, shapes: ModelShapes, rows: int, device: str) -> None:
        dtype = getattr(torch, shapes.dtype)
        luck = torch.Generator(device).manual_seed(rows)

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=luck, device=device)

        qkv, output, gate_up, down = shapes.linears[:4]
        self._linears = [
            (random(*size) * size[1] ** -0.5).to(dtype)
            for size in (qkv, output, gate_up, down)
        ]
        hidden = qkv[1]
        self._norms = [random(hidden).to(dtype) + 1 for _ in range(2)]
        self._head_norm = random(shapes.head_dim).to(dtype) + 1
        self._num_heads = shapes.num_heads
        self._head_dim = shapes.head_dim
        self._cos_sin = random(POSITIONS, shapes.head_dim)
        size = shapes.block_size
        num_blocks = -(-rows // size)
        # In a pool of FP8, a row has a byte more.
        width = shapes.head_dim + (shapes.pool_dtype == FP8_POOL)
        self.pool = torch.zeros(
            (num_blocks, shapes.kv_heads, LAYERS, 2, size, width),
            dtype=getattr(torch, shapes.pool_dtype),
            device=device,
        )
        slots = torch.randperm(num_blocks * size, generator=luck, device=device)
        self._slots = slots[:rows]
        self._positions = torch.randint(
            POSITIONS, (rows,), generator=luck, device=device
        )
        self.x = random(rows, hidden).to(dtype)

    def run(self, *, overlaps: bool) -> Tensor:
        """Return what the last layer adds to, `[rows, hidden]`, and fill the pool."""
        qkv, output, gate_up, down = self._linears
        x = self.x.clone()  # a kernel may also follow a copy
        stream: Tensor | None = None
        for layer in range(LAYERS):
            x, stream = add_rms_norm(x, stream, self._norms[0], EPS, overlaps=overlaps)
            heads = F.linear(x, qkv).view(len(x), -1, self._head_dim)
            k, v = heads[:, self._num_heads :].chunk(2, dim=1)
            q = rope_and_store(
                heads[:, : self._num_heads],
                k,
                v,
                self._positions,
                self._cos_sin,
                self.pool,
                layer,
                self._slots,
                self._head_norm,
                self._head_norm,
                EPS,
                overlaps=overlaps,
            )
            x = F.linear(q.flatten(1), output)
            x, stream = add_rms_norm(x, stream, self._norms[1], EPS, overlaps=overlaps)
            x = F.linear(gate_mul(F.linear(x, gate_up), overlaps=overlaps), down)
        # The kernel behind an overlapping one, which waits for no other.
        return add_rms_norm(x, stream, self._norms[0], EPS, overlaps=overlaps)[0] + 0


def prove(shapes: ModelShapes, device: str) -> str:
    """Return where a chain of overlapping kernels differs; empty if nowhere."""
    for rows in ROWS:
        chain = Chain(shapes, rows, device)
        usual = captured(partial(chain.run, overlaps=False))
        overlapping = captured(partial(chain.run, overlaps=True))
        if number := differing_replay(chain, usual, overlapping):
            return f"{rows} rows: replay {number} has other bits if kernels overlap"
    return ""


def differing_replay(
    chain: Chain, usual: Callable[[], Tensor], overlapping: Callable[[], Tensor]
) -> int:
    """Return the number of the first replay with other bits; 0 if none has.

    Each has other inputs, so a kernel that reads too early reads what the replay before has left.
    """
    for number in range(1, REPLAYS + 1):
        chain.x.normal_()
        found = []
        for run in (usual, overlapping):
            chain.pool.zero_()
            found.append((run().clone(), chain.pool.clone()))
        if not all(map(torch.equal, *found)):
            return number
    return 0
