"""A process that runs models with states on the CUDA backend, interpreted, beside the CPU backend.

It is given the folder of a model, and writes what came of it as JSON: relative errors beside the
CPU, and what should have equal bits but has not. With `captured`, it writes this of captured steps
alone.
"""

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from baton.kernels.state_reference import StateBytes
from baton.model.config.decoder_config import DecoderConfig
from baton.model.layers.cuda_backend import CudaBackend
from baton.model.layers.rotary import rope_table
from baton.model.runner.compute_digest import has_two_orders
from baton.model.runner.kv_cache import KVCache
from baton.model.runner.packing import Bucket
from baton.model.runner.rank_plan import plan_rank
from baton.model.runner.runner import Runner
from baton.model.runner.step_queue import HostQueue, StepWork
from baton.node.scheduling.plan import Slice, StepPlan
from baton.runtime.clock import monotonic
from tests.support.compute import (
    Text,
    compute_config,
    loaded,
    logits,
    next_step,
    no_progress,
    random_tokens,
)
from tests.support.interpret_kernels import Interpreting

BLOCK_SIZE = 64
NUM_BLOCKS = 90
MAX_LEN = 128
PROMPT = 75
LENGTH = 78


class AgainQueue(HostQueue):
    """A captured step computes again what the idle one has computed, from where its inputs are."""

    def capture(self, work: StepWork) -> StepWork:
        with torch.inference_mode():
            work()
        return work


class Case:
    """One model on the CPU, and runners on the CUDA backend with pools of their own."""

    def __init__(self, cpu: Runner, decoder: DecoderConfig) -> None:
        self.cpu = cpu
        self._decoder = decoder
        assert cpu.cache.states is not None
        self.states = cpu.cache.states

    def runner(self) -> Runner:
        pool = torch.full_like(self.cpu.cache.pool, float("nan"))
        decoder = self._decoder
        backend = CudaBackend(
            pool,
            decoder.num_heads,
            [rope_table(rope, width, MAX_LEN) for rope, width in decoder.rotations],
            decoder.rms_norm_eps,
            is_ordered=True,
            states=self.states,
        )
        generations = np.zeros(len(pool), np.uint32)
        cache = KVCache(pool, generations, self.states)
        return Runner(
            self.cpu.decoder, backend, cache, self.cpu.sampler, AgainQueue(), monotonic
        )

    def text(self, number: int, seed: int = 0, length: int = LENGTH) -> Text:
        """A text whose blocks are in no order."""
        first = 1 + number * (2 + self.states.num_blocks)
        state = range(first + 1 + self.states.num_blocks, first + 1, -1)
        tokens = random_tokens(length, seed=seed, vocab=512)
        return Text(f"t{number}", tokens, (first + 1, first), state=tuple(state))

    def state(self, runner: Runner, text: Text) -> Tensor:
        """All numbers of a text's state, in the order of its layers."""
        stored = StateBytes(runner.cache.pool, self.states)
        parts = []
        for layer in range(len(self.states.tails)):
            parts.append(stored.tail(layer, text.state).flatten().float())
            if self.states.shape.has_matrices:
                parts.append(stored.matrices(layer, text.state).flatten())
        return torch.cat(parts)

    def errors(self) -> Iterator[tuple[str, float]]:
        """Compare the logits and states of the same batches with the CPU's."""
        ours = self.runner()
        one = self.text(0)
        two = self.text(1, seed=1, length=30)
        batches = {
            "a prompt": (part(one, 0, 64),),
            "decode beside prompts": (part(two, 0, 20, 20), part(one, 64, PROMPT)),
            "two that decode": (part(two, 20, 21, 20), part(one, PROMPT, PROMPT + 1)),
        }
        for name, batch in batches.items():
            mine = torch.cat(logits(ours, *batch))
            yield name, error(mine, torch.cat(logits(self.cpu, *batch)))
        yield "states", error(self.state(ours, one), self.state(self.cpu, one))
        # As a handoff leaves them.
        ours = self.runner()
        ours.cache.pool.copy_(self.cpu.cache.pool)
        batch = (part(one, PROMPT + 1, PROMPT + 2),)
        mine = torch.cat(logits(ours, *batch))
        yield "behind a CPU", error(mine, torch.cat(logits(self.cpu, *batch)))

    def differing(self) -> Iterator[str]:
        """Name what has other bits than a prompt and the steps after it."""
        runner = self.runner()
        one = self.text(0)
        cuts = [0, 64, *range(PROMPT, LENGTH + 1)]
        expected = torch.cat(
            [logits(runner, part(one, start, end))[0] for start, end in pairwise(cuts)]
        )
        end = self.state(runner, one)
        resumed = self.text(1)
        crowd = self.text(2, seed=1, length=20)
        rows = logits(runner, part(crowd, 0, 20, 20), part(resumed, 0, LENGTH))[1]
        if not torch.equal(rows, expected):
            yield "a resumed sequence"
        if not torch.equal(self.state(runner, resumed), end):
            yield "its state"
        (last,) = logits(runner, part(one, LENGTH - 1, LENGTH, num_held=1))
        if not torch.equal(last, expected[-1:]):
            yield "a token that is computed again"
        if not torch.equal(self.state(runner, one), end):
            yield "the state that it read"
        refused = self.text(3)
        logits(runner, part(refused, 0, PROMPT))
        (last,) = logits(runner, part(refused, PROMPT - 1, PROMPT, num_held=1))
        if not torch.equal(last, expected[PROMPT - 1 : PROMPT]):
            yield "the end of a prompt that is computed again"
        behind = self.text(3)
        runner.cache.pool[list(behind.state)] = float("nan")
        logits(runner, part(refused, 0, 64))
        other = self.text(4)
        copies = list(zip(behind.state, other.state, strict=True))
        runner.cache.copy_blocks([*copies, (behind.blocks[0], other.blocks[0])])
        (rows,) = logits(runner, part(other, 64, LENGTH))
        if not torch.equal(rows, expected[64:]):
            yield "a sequence behind a checkpoint"
        guessing = self.text(5)
        logits(runner, part(guessing, 0, PROMPT))
        guesses = msgspec.structs.replace(part(guessing, PROMPT, LENGTH), num_guesses=2)
        (rows,) = logits(runner, guesses)
        (again,) = logits(runner, part(guessing, PROMPT + 1, LENGTH))
        if not torch.equal(
            torch.cat((rows, again)),
            torch.cat((expected[PROMPT:], expected[PROMPT + 1 :])),
        ):
            yield "guesses"
        if not torch.equal(self.state(runner, guessing), end):
            yield "the state after guesses"

    def differing_when_captured(self) -> Iterator[str]:
        """Name the steps whose tokens or states differ where steps are padded and captured."""
        eager = self.runner()
        captured = self.runner()
        captured.capture((Bucket(4, 4), Bucket(24, 3)), no_progress)
        ends = (21, 12, 9)
        texts = [
            self.text(number, seed=number, length=end)
            for number, end in enumerate(ends)
        ]
        tokens: list[list[tuple[tuple[int, ...], ...]]] = [[], []]
        first, second, third = (
            part(text, 0, end, end, sample=True)
            for text, end in zip(texts, ends, strict=True)
        )
        steps: list[tuple[Slice, ...]] = [
            (first,),
            (second, third),
            tuple(next_step(text, end) for text, end in zip(texts, ends, strict=True)),
            (next_step(texts[2], ends[2] + 1),),
        ]
        for number, step in enumerate(steps):
            for said, runner in zip(tokens, (eager, captured), strict=True):
                said.append(runner.execute(StepPlan(number, step)).tokens)
            if tokens[0][-1] != tokens[1][-1]:
                yield f"the tokens of step {number}"
        for text in texts:
            if not torch.equal(self.state(eager, text), self.state(captured, text)):
                yield f"the state of {text.key}"


def part(
    text: Text,
    start: int,
    end: int,
    num_prompt_tokens: int = PROMPT,
    *,
    num_held: int = 0,
    sample: bool = False,
) -> Slice:
    chunk = text.chunk(start, end, num_held=num_held, sample=sample)
    return msgspec.structs.replace(chunk, num_prompt_tokens=num_prompt_tokens)


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs).norm() / theirs.double().norm())


def found_of(folder: Path, *, is_whole: bool) -> dict[str, object]:
    config = compute_config(folder, "bfloat16", NUM_BLOCKS, BLOCK_SIZE)
    decoder = plan_rank(config, 1).decoder
    assert isinstance(decoder, DecoderConfig)
    with loaded(config) as cpu:
        case = Case(cpu, decoder)
        found: dict[str, object] = {"captured": list(case.differing_when_captured())}
        if is_whole:
            found |= {
                "errors": dict(case.errors()),
                "keeps_bits": cpu.decoder.is_batch_invariant,
                "differing": list(case.differing()),
                "has_two_orders": has_two_orders(case.runner()),
            }
        return found


def main() -> None:
    Interpreting()
    print(json.dumps(found_of(Path(sys.argv[1]), is_whole="captured" not in sys.argv)))


if __name__ == "__main__":
    main()
