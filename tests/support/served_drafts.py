"""A decode node's scheduler over a real runner of a model that drafts."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from baton.decode_node.scheduler import DecodeScheduler
from baton.model.runner.runner import Runner
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.plan import Slice, StepPlan, StepResult
from baton.node.scheduling.scheduler import NodeLimits
from baton.protocol.config import ClusterConfig, EngineConfig
from baton.protocol.messages import Decode, Tokens
from baton.protocol.sampling import Sampling
from tests.support.compute import compute_config
from tests.support.drive import key

NUM_DRAFTS = 3
LIMITS = NodeLimits(
    max_num_batched_tokens=32,
    max_num_seqs=8,
    max_model_len=512,
    engine=EngineConfig(num_speculative_tokens=NUM_DRAFTS, speculative_method="mtp"),
)


def drafting(folder: Path, eagle: Path | None = None) -> ClusterConfig:
    config = compute_config(folder)
    engine = msgspec.structs.replace(
        config.engine,
        num_speculative_tokens=NUM_DRAFTS,
        speculative_method="eagle3" if eagle else "mtp",
        speculative_model=str(eagle or ""),
    )
    return msgspec.structs.replace(config, engine=engine)


@dataclass
class Served:
    """A decode node's scheduler over a real runner."""

    runner: Runner
    limits: NodeLimits = LIMITS
    num_blocks: int = 128
    texts: dict[str, list[int]] = field(default_factory=dict)
    drafts: list[tuple[str, int, tuple[int, ...]]] = field(default_factory=list)
    num_steps: int = 0

    def __post_init__(self) -> None:
        states = self.runner.cache.states
        state_blocks = 0 if states is None else states.num_blocks
        block_size = self.runner.cache.pool.shape[4]
        self.pool = BlockPool(self.num_blocks, block_size, state_blocks=state_blocks)
        self.scheduler = DecodeScheduler(self.pool, self.limits)

    def add(self, name: str, text: list[int], sampling: Sampling) -> None:
        self.texts[name] = list(text)
        self.scheduler.add(
            0.0, 0, Decode(key(name), list(text), len(text), sampling, 1)
        )

    def run(self, depth: int = 1) -> None:
        """Until all texts have ended."""
        launched: list[StepPlan] = []
        while True:
            while (
                len(launched) < depth and (plan := self.scheduler.plan(0.0)) is not None
            ):
                launched.append(plan)
                self.runner.launch(plan)
            if not launched:
                break
            self.num_steps += 1
            plan = launched.pop(0)
            result = self.runner.collect()
            self._note(plan, result)
            self.scheduler.settle(0.0, plan, result)
            for _, message in self.scheduler.outputs.take_router_messages():
                for entry in message.entries if isinstance(message, Tokens) else ():
                    self.texts[entry.key.request_id] += entry.token_ids
            self.scheduler.outputs.take_connector_events()

    def _note(self, plan: StepPlan, result: StepResult) -> None:
        for index, drafts in result.drafts:
            part: Slice = plan.slices[index]
            kept = part.kept(result.tokens[index])
            end = part.start + part.length - part.num_guesses + len(kept)
            self.drafts.append((part.key.request_id, end, drafts))


def sampling(max_tokens: int, temperature: float = 0.0) -> Sampling:
    return Sampling(
        seed=5, max_tokens=max_tokens, temperature=temperature, ignore_eos=True
    )
