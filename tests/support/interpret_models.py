"""A process that runs decoders on the CUDA backend, interpreted, beside the CPU backend.

It is given folders of models, and writes what came of each as JSON.
"""

import json
import sys
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from baton.kernels.hopper.attention import latent_prefill, latent_proof, prefill
from baton.kernels.proofs import LATENT_PREFILL
from baton.model.config.decoder_config import DecoderConfig
from baton.model.layers.attention import Batch, IndexPool
from baton.model.layers.cuda_backend import CudaBackend
from baton.model.layers.rotary import rope_table
from baton.model.runner.cuda_start import warm_up
from baton.model.runner.device_kernels import DeviceKernels, shapes_of
from baton.model.runner.kv_cache import wide_heads
from baton.model.runner.rank_plan import plan_rank
from baton.model.runner.runner import Runner
from baton.model.runner.step_queue import HostQueue
from baton.node.scheduling.plan import Slice
from baton.runtime.clock import monotonic
from tests.support.compute import Text, compute_config, loaded, logits, random_tokens
from tests.support.hopper_stand_in import StandIn
from tests.support.interpret_kernels import Interpreting
from tests.support.one_order import Arithmetic


class NotingBackend(CudaBackend):
    """Notes where each sequence of each step starts, and its length."""

    noted: ClassVar[list[tuple[int, int]]] = []

    def begin(self, batch: Batch) -> None:
        self.noted.extend((chunk.start, chunk.length) for chunk in batch.chunks)
        super().begin(batch)


def beside_the_cpu(folder: Path) -> dict[str, object]:
    """Return the largest relative error of each batch, and what a warm-up computed and stored."""
    config = compute_config(folder, num_blocks=16)
    decoder = plan_rank(config, 1).decoder
    assert isinstance(decoder, DecoderConfig)
    errors: dict[str, float] = {}
    shapes = shapes_of(decoder, 1, 16, (torch.bfloat16, torch.bfloat16), 128)
    is_expanded = not latent_proof.missing_for(shapes, (9, 0))
    proven = frozenset({LATENT_PREFILL} if is_expanded else ())
    kernel = StandIn(Arithmetic())
    with (
        loaded(config, kernels=DeviceKernels(proven)) as cpu,
        patch.object(latent_prefill, "launch_prefill", kernel),
        patch.object(prefill, "_layout", of_fp32),
    ):
        tables = [rope_table(rope, width, 128) for rope, width in decoder.rotations]
        pool = torch.zeros_like(cpu.cache.pool)
        NotingBackend.noted.clear()
        index = index_over(decoder, cpu.cache.index_keys)
        wide = wide_heads(decoder, 1)
        backend = NotingBackend(
            pool,
            decoder.num_heads,
            tables,
            decoder.rms_norm_eps,
            index=index,
            wide=wide,
            proven=proven,
        )
        cache = type(cpu.cache)(pool, cpu.cache.generations.copy())
        cuda = Runner(cpu.decoder, backend, cache, cpu.sampler, HostQueue(), monotonic)
        warm_up(cuda)
        warm = {
            "chunks": backend.noted.copy(),
            "slots": pool.transpose(1, 4).flatten(2).any(-1).nonzero().tolist(),
            "generations": int(cache.generations.sum()),
        }
        one = Text("one", random_tokens(40, vocab=512), (5, 2, 9))
        two = Text("two", random_tokens(21, seed=1, vocab=512), (1, 7))
        # Three blocks, of which the first has left the window; and the end of a block.
        batches = {
            "a prompt": (one.chunk(0, 34),),
            "decode beside a prompt": (one.chunk(34, 35), two.chunk(0, 6)),
            "two that decode": (one.chunk(35, 36), two.chunk(6, 7)),
            "guesses beside a prompt": (
                guessed(one.chunk(36, 40)),
                two.chunk(7, 11),
            ),
            "many guesses": (guessed(two.chunk(11, 21)),),
        }
        ordered = CudaBackend(
            torch.zeros_like(pool),
            decoder.num_heads,
            tables,
            decoder.rms_norm_eps,
            is_ordered=True,
            index=index_over(decoder, cpu.cache.index_keys),
            wide=wide,
            proven=proven,
        )
        cache = type(cpu.cache)(ordered.pool, cpu.cache.generations.copy())
        in_order = Runner(
            cpu.decoder, ordered, cache, cpu.sampler, HostQueue(), monotonic
        )
        for runner, how in ((cuda, ""), (in_order, ", in one order")):
            for name, batch in batches.items():
                ours = torch.cat(logits(runner, *batch))
                theirs = torch.cat(logits(cpu, *batch))
                error = (ours - theirs).abs().max() / theirs.abs().max()
                errors[name + how] = float(error)
        stored = (pool - cpu.cache.pool)[[5, 2, 9, 1]].abs().max() / pool.abs().max()
    return {
        "errors": errors | {"what is stored": float(stored)},
        "warm_up": warm,
        "is_expanded": bool(kernel.forms),
    }


def guessed(part: Slice) -> Slice:
    """Return a slice of a response."""
    return msgspec.structs.replace(part, num_prompt_tokens=part.start)


def of_fp32(rank: int) -> gl.NVMMASharedLayout:
    """Return the layout of a box of numbers that the kernel itself does not take."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=rank)


def index_over(decoder: DecoderConfig, keys: Tensor | None) -> IndexPool | None:
    """An index like that over `keys`, with keys of its own."""
    index = decoder.index
    if index is None or keys is None:
        return None
    return IndexPool(torch.zeros_like(keys), index.num_heads, index.num_chosen)


def main() -> None:
    Interpreting()
    print(json.dumps([beside_the_cpu(Path(folder)) for folder in sys.argv[1:]]))


if __name__ == "__main__":
    main()
