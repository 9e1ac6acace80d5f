"""Compare KV blocks in FP8 with those in bf16: `python -m tools.kv_dtypes`.

The demo model answers its exam's questions about long texts in both, in turn: how many answers are
right and equal, and how far the logits of every position of the texts are apart. Then decode steps
of a random model are timed in turn.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from baton.deploy.model_folder import CHECKPOINT
from baton.kv_transfer.pools import HostPool
from baton.model.runner.rank import load_runner
from baton.model.runner.rank_plan import plan_rank
from baton.model.runner.runner import Runner
from baton.model.tensor_parallel import SingleRank
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
from tools.demo_model.exam import recall
from tools.floor import CHUNK, Case
from tools.gpu.serving import BLOCK_SIZE
from tools.random_model import SIZES, write_model

KINDS: tuple[KVCacheDtype, ...] = ("auto", "fp8")
NUM_TOKENS = 1024
NUM_TEXTS = 4
NUM_QUESTIONS = 16
GREEDY = Sampling(seed=0, max_tokens=1 << 20, temperature=0.0)
CASES = (Case(1, 4096), Case(8, 1024), Case(8, 4096))


def runner_of(
    folder: Path, kind: KVCacheDtype, num_blocks: int, held: ExitStack
) -> Runner:
    config = ClusterConfig(
        model=ModelConfig(path=str(folder), dtype="bfloat16"),
        cache=CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE),
        engine=EngineConfig(device="cpu", threads=1, kv_cache_dtype=kind),
    )
    plan = plan_rank(config, 1)
    runner, pool = load_runner(plan, config, SingleRank(), lambda *_: None)
    assert isinstance(pool, HostPool)
    held.callback(pool.close)
    print(
        f"{kind}: {plan.layout.block_bytes / BLOCK_SIZE:.0f} bytes per token, {runner.backend.name}"
    )
    return runner


def logits(runner: Runner, tokens: Sequence[int], start: int) -> Tensor:
    """Compute the tokens from `start` on, and return their logits."""
    parts = []
    for first in range(start, len(tokens), CHUNK):
        own = tuple(tokens[first : first + CHUNK])
        blocks = tuple(range(-(-len(tokens) // BLOCK_SIZE)))
        key = Key(RequestId("text"))
        piece = Slice(key, first, len(own), own, blocks, (), GREEDY, len(tokens))
        batch = runner.pack((piece,))
        with torch.inference_mode():
            parts.append(
                runner.decoder.forward(batch, torch.arange(len(own)), runner.backend)
            )
    return torch.cat(parts).float()


def continued(runner: Runner, tokens: list[int], start: int, count: int) -> list[int]:
    """Return `count` greedy tokens after `tokens`, of which `start` are computed already."""
    tokens = list(tokens)
    for _ in range(count):
        token = int(logits(runner, tokens, start)[-1].argmax())
        start = len(tokens)
        tokens.append(token)
    return tokens[-count:]


def compare_answers() -> None:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    right = [0, 0]
    equal = 0
    num_answers = 0
    num_tokens = 0
    differences = []
    alike = []
    spread = []
    with ExitStack() as held:
        runners = [
            runner_of(CHECKPOINT, kind, NUM_TOKENS // BLOCK_SIZE + 8, held)
            for kind in KINDS
        ]
        for seed in range(NUM_TEXTS):
            memory = recall(tokenizer, num_tokens=NUM_TOKENS, seed=seed, num_facts=32)
            told = tokenizer.encode(memory.told).ids
            ours, theirs = (logits(runner, told, 0) for runner in runners)
            differences.append((ours - theirs).abs().amax().item())
            alike.append((ours.argmax(-1) == theirs.argmax(-1)).float().mean().item())
            spread.append(ours.std().item())
            for question in memory.questions[:NUM_QUESTIONS]:
                asked = told + tokenizer.encode(question.prompt).ids
                wanted = tokenizer.encode(question.answer).ids
                answers = [
                    continued(one, asked, len(told), len(wanted)) for one in runners
                ]
                for number, answer in enumerate(answers):
                    right[number] += tokenizer.decode(answer) == question.answer
                num_answers = num_answers + 1
                num_tokens = num_tokens + len(wanted)
                equal += sum(a == b for a, b in zip(*answers, strict=True))
    print(f"right answers of {num_answers}: {right[0]} in bf16, {right[1]} in fp8")
    print(f"equal tokens of those answers: {equal} of {num_tokens}")
    print(
        f"equal best tokens at the positions of the texts: {statistics.mean(alike):.4f}"
    )
    print(
        f"largest difference of a logit: {max(differences):.3f} (their deviation is "
        f"{statistics.mean(spread):.2f})"
    )


def compare_steps(rounds: int) -> None:
    num_blocks = max(case.batch * case.context // BLOCK_SIZE for case in CASES)
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory())) / "model"
        write_model(folder, SIZES["180m"], torch.device("cpu"))
        runners = [runner_of(folder, kind, num_blocks, held) for kind in KINDS]
        for runner in runners:
            pool = runner.cache.pool
            # Bytes of codes and exponents of 1, or numbers of about 1.
            pool.fill_(0x77) if pool.dtype == torch.uint8 else pool.fill_(1.0)
        for case in CASES:
            times: list[list[float]] = [[], []]
            for number in range(rounds + 1):
                for own, runner in zip(times, runners, strict=True):
                    began_s = time.process_time()
                    for plan in case.plans():
                        runner.execute(plan)
                    if number:  # the first round warms up
                        own.append(time.process_time() - began_s)
            plain, narrow = (1e3 * statistics.median(spent) for spent in times)
            ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
            print(
                f"{case.name}: {plain:.1f} ms in bf16, {narrow:.1f} ms in fp8, x {ratio:.2f}"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.kv_dtypes", description=__doc__
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="repetitions of each decode step"
    )
    given = parser.parse_args(arguments)
    compare_answers()
    compare_steps(given.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
