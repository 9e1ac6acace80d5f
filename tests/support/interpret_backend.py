"""A process that runs a decoder on the CUDA backend, interpreted, beside the CPU backend.

Triton decides at import whether it interprets, so `tests/unit/compute/test_cuda_backend.py` starts
this one, with `TRITON_INTERPRET=1`. It prints as JSON the largest relative error of each batch,
and what the warm-up computed and where it stored.
"""

import json
from typing import ClassVar

import torch

from baton.engine.compute.attention import Batch
from baton.engine.compute.cuda_backend import CudaBackend
from baton.engine.compute.cuda_start import warm_up
from baton.engine.compute.rank import plan_rank
from baton.engine.compute.rotary import rope_table
from baton.engine.compute.runner import Runner
from baton.engine.compute.step_queue import HostQueue
from baton.runtime.clock import monotonic
from tests.support.checkpoints import model_folder
from tests.support.compute import Text, compute_config, loaded, logits, random_tokens


class NotingBackend(CudaBackend):
    """Notes where each sequence of each step starts, and its length."""

    noted: ClassVar[list[tuple[int, int]]] = []

    def begin(self, batch: Batch) -> None:
        self.noted.extend((chunk.start, chunk.length) for chunk in batch.chunks)
        super().begin(batch)


def main() -> None:
    torch.set_num_threads(1)
    shape = {"num_layers": 1, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96}
    config = compute_config(
        model_folder("qwen3", **shape, num_heads=2, num_kv_heads=1, head_dim=32),  # type: ignore[arg-type]
        num_blocks=16,
    )
    decoder = plan_rank(config, 1).decoder
    errors: dict[str, float] = {}
    with loaded(config) as cpu:
        table = rope_table(decoder.rope, decoder.head_dim, 128)
        pool = torch.zeros_like(cpu.cache.pool)
        backend = NotingBackend(pool, decoder.num_heads, table, decoder.rms_norm_eps)
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
        batches = {
            "a prompt": (one.chunk(0, 37),),
            "decode beside a prompt": (one.chunk(37, 38), two.chunk(0, 20)),
            "two that decode": (one.chunk(38, 39), two.chunk(20, 21)),
        }
        for name, batch in batches.items():
            ours, theirs = torch.cat(logits(cuda, *batch)), torch.cat(logits(cpu, *batch))
            errors[name] = float((ours - theirs).abs().max() / theirs.abs().max())
        ordered = CudaBackend(
            torch.zeros_like(pool), decoder.num_heads, table, decoder.rms_norm_eps, is_ordered=True
        )
        cache = type(cpu.cache)(ordered.pool, cpu.cache.generations.copy())
        runner = Runner(cpu.decoder, ordered, cache, cpu.sampler, HostQueue(), monotonic)
        for name, batch in batches.items():
            ours, theirs = torch.cat(logits(runner, *batch)), torch.cat(logits(cpu, *batch))
            error = float((ours - theirs).abs().max() / theirs.abs().max())
            errors[f"{name}, in one order"] = error
    print(json.dumps({"errors": errors, "warm_up": warm}))


if __name__ == "__main__":
    main()
