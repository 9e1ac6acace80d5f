"""A process that drafts on the CUDA backend, interpreted, beside the CPU backend.

Its arguments are models: a folder, that of a draft or nothing, a dtype and a block size, with
commas between. It writes as JSON what each says and drafts on the CPU, on the CUDA backend eagerly
and in captured steps, and there without drafts.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch

from baton.model.config.decoder_config import DecoderConfig
from baton.model.layers.cuda_backend import CudaBackend
from baton.model.layers.rotary import rope_table
from baton.model.runner.packing import Bucket
from baton.model.runner.rank_plan import plan_rank
from baton.model.runner.runner import Runner
from baton.model.runner.step_queue import StepWork
from baton.protocol.config import EngineConfig
from baton.protocol.sampling import Sampling
from baton.runtime.clock import monotonic
from tests.support.compute import loaded, no_progress, random_tokens
from tests.support.interpret_kernels import Interpreting
from tests.support.interpret_models import index_over
from tests.support.interpret_states import AgainQueue
from tests.support.served_drafts import LIMITS, NUM_DRAFTS, Served, drafting

MAX_LEN = 128
# The noise of hot samples is that of their drafts, which are often right then.
SAMPLINGS = {
    "cold": Sampling(seed=5, max_tokens=7, temperature=0.0, ignore_eos=True),
    "hot": Sampling(seed=6, max_tokens=9, temperature=30.0, ignore_eos=True),
}
PROMPTS = {"cold": 37, "hot": 21}  # a chunk is 32 tokens
BUCKETS = (
    Bucket(2, 2, num_drafts=NUM_DRAFTS),
    Bucket(2 + 2 * NUM_DRAFTS, 2, True, NUM_DRAFTS),
)


class CountingQueue(AgainQueue):
    def __init__(self) -> None:
        super().__init__()
        self.num_replays = 0

    def capture(self, work: StepWork) -> StepWork:
        again = super().capture(work)

        def replay() -> torch.Tensor:
            self.num_replays += 1
            return again()

        return replay


@dataclass
class Said:
    texts: dict[str, list[int]]
    drafts: list[tuple[str, int, tuple[int, ...]]]
    num_steps: int
    num_right: int
    num_replays: int = 0


def said(runner: Runner, *, drafts: bool = True) -> Said:
    engine = LIMITS.engine if drafts else EngineConfig()
    limits = msgspec.structs.replace(LIMITS, engine=engine)
    served = Served(runner, limits, len(runner.cache.pool))
    for number, (name, sampling) in enumerate(SAMPLINGS.items()):
        text = random_tokens(PROMPTS[name], seed=number, vocab=512)
        served.add(name, text, sampling)
    served.run()
    num_right = served.pool.counts.spec_decode_accepted_tokens
    return Said(served.texts, served.drafts, served.num_steps, num_right)


def on_cuda(cpu: Runner, decoder: DecoderConfig, *, drafts: bool = True) -> Runner:
    """A runner of the same weights on the CUDA backend, over a pool of its own."""
    pool = torch.zeros_like(cpu.cache.pool)
    backend = CudaBackend(
        pool,
        decoder.num_heads,
        [rope_table(rope, width, MAX_LEN) for rope, width in decoder.rotations],
        decoder.rms_norm_eps,
        is_ordered=True,
        index=index_over(decoder, cpu.cache.index_keys),
        states=cpu.cache.states,
    )
    cache = type(cpu.cache)(pool, cpu.cache.generations.copy(), cpu.cache.states)
    runner = Runner(
        cpu.decoder, backend, cache, cpu.sampler, CountingQueue(), monotonic
    )
    if drafts:
        assert cpu.drafter is not None
        runner.draft_with(cpu.drafter.head, NUM_DRAFTS)
    return runner


def found_of(folder: Path, draft: Path | None, dtype: str, block_size: int) -> object:
    config = drafting(folder, draft)
    config = msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, dtype=dtype),
        cache=msgspec.structs.replace(config.cache, block_size=block_size),
    )
    decoder = plan_rank(config, 1).decoder
    assert isinstance(decoder, DecoderConfig)
    with loaded(config) as cpu:
        found = {"host": said(cpu)}
        found["eager"] = said(on_cuda(cpu, decoder))
        captured = on_cuda(cpu, decoder)
        captured.capture(BUCKETS, no_progress)
        found["replayed"] = said(captured)
        queue = captured._queue
        assert isinstance(queue, CountingQueue)
        found["replayed"].num_replays = queue.num_replays
        found["none"] = said(on_cuda(cpu, decoder, drafts=False), drafts=False)
    return {name: asdict(one) for name, one in found.items()}


def main() -> None:
    Interpreting()
    found = []
    for argument in sys.argv[1:]:
        folder, draft, dtype, block_size = argument.split(",")
        eagle = Path(draft) if draft else None
        found.append(found_of(Path(folder), eagle, dtype, int(block_size)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
