"""A decode scheduler over a runner of `graph_stand_in`, and requests that come and go by chance."""

import random
from collections import deque
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton.decode_node.scheduler import DecodeScheduler
from baton.model.runner.runner import Runner
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.plan import StepPlan, StepResult
from baton.node.scheduling.scheduler import NodeLimits
from baton.protocol.ids import Key
from baton.protocol.messages import Decode, Failed, Tokens
from baton.protocol.sampling import Sampling
from tests.support.drive import key
from tests.support.graph_stand_in import BLOCK_SIZE, SHAPE, RecordingQueue


class World:
    """A decode scheduler and a runner, with up to `depth` steps launched."""

    def __init__(
        self,
        runner: Runner,
        luck: random.Random,
        depth: int,
        limits: NodeLimits,
        name: str = "r",
    ) -> None:
        """`name` begins the keys; no other world of the runner may have it while it serves.

        The last block of the runner's pool belongs to no sequence.
        """
        self.name = name
        self.runner = runner
        self.luck = luck
        self.depth = depth
        num_blocks = len(runner.cache.pool) - 1
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = DecodeScheduler(self.pool, limits)
        self.launched: deque[tuple[StepPlan, bool]] = deque()
        # Plans, what came of them, and whether they were replayed.
        self.done: list[tuple[StepPlan, StepResult, bool]] = []
        self.num_asked = 0
        self.asked: dict[Key, tuple[list[int], Sampling]] = {}
        self.said: dict[Key, list[int]] = {}
        self.ended: set[Key] = set()
        # Cancelled or preempted: what they said is a beginning.
        self.cut: set[Key] = set()

    def ask(self, prompt: list[int], sampling: Sampling, num_choices: int = 1) -> None:
        of = key(f"{self.name}{self.num_asked}")
        self.num_asked += 1
        for choice in range(num_choices):
            self.asked[of.of_choice(choice)] = (prompt, sampling)
            self.said[of.of_choice(choice)] = []
        self.scheduler.add(
            0.0, 0, Decode(of, list(prompt), len(prompt), sampling, num_choices)
        )

    def turn(self) -> bool:
        """Launch what can be launched, collect the oldest; False when nothing is left."""
        while len(self.launched) < self.depth and (plan := self.scheduler.plan(0.0)):
            queue = self.runner._queue
            assert isinstance(queue, RecordingQueue)
            num_before = queue.num_replays
            self.runner.launch(plan)
            self.launched.append((plan, queue.num_replays > num_before))
        if not self.launched:
            return False
        plan, is_replayed = self.launched.popleft()
        result = self.runner.collect()
        self.done.append((plan, result, is_replayed))
        self.scheduler.settle(0.0, plan, result)
        for _, message in self.scheduler.outputs.take_router_messages():
            match message:
                case Tokens(entries=entries):
                    for entry in entries:
                        self.said[entry.key] += entry.token_ids
                        if entry.finish_reason:
                            self.ended.add(entry.key)
                case Failed(key=of):
                    self.cut.add(of)
        return True

    def play(
        self,
        prompts: list[list[int]],
        samplings: list[Sampling],
        most_choices: int = 1,
    ) -> None:
        """Let sequences join, leave, end and be cancelled in a random order."""
        for _ in range(self.luck.randint(2, 8)):
            prompt = self.luck.choice(prompts)
            sampling = self.luck.choice(samplings)
            self.ask(prompt, sampling, self.luck.randint(1, most_choices))
            for _ in range(self.luck.randint(0, 5)):
                self.turn()
            if self.luck.random() < 0.2:
                of = self.luck.choice(sorted(self.asked))
                if of not in self.ended:
                    self.cut.add(of)
                self.scheduler.cancel(0, (of,))
        while self.turn():
            pass


def write_characters(folder: Path) -> None:
    """Write a tokenizer whose id 0 ends, and every other id is a character."""
    characters = {chr(32 + number): number for number in range(1, SHAPE.vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab={"<end>": 0, **characters}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
