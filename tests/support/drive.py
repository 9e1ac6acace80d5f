"""Drives one scheduler by hand: plans run on the checked model of `tests.sim`."""

from collections.abc import Callable, Iterable
from functools import partial

from baton.decode_node.scheduler import DecodeScheduler
from baton.kv_transfer.interfaces import ConnectorEvent
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.plan import StepPlan, StepResult
from baton.node.scheduling.scheduler import NodeLimits, Scheduler
from baton.prefill_node.scheduler import PrefillScheduler
from baton.protocol.ids import Key, RequestId
from baton.protocol.messages import (
    Decode,
    Offered,
    Prefill,
    TokenEntry,
    Tokens,
    ToRouter,
)
from baton.protocol.sampling import Sampling
from tests.sim.executor import BLOCK_SIZE, CheckedModel, Context, next_token

ROOT = Context(0, -1, 0, None)
Says = Callable[[Context, int, int], int]
TOY: Says = partial(next_token, salt=0)
LIMITS = NodeLimits(max_num_batched_tokens=16, max_num_seqs=8, max_model_len=256)


def key(name: str = "r", choice: int = 0, attempt: int = 0) -> Key:
    return Key(RequestId(name), choice, attempt)


def sampling(max_tokens: int = 8, **fields: object) -> Sampling:
    return Sampling(seed=0, max_tokens=max_tokens, temperature=0.0, **fields)  # type: ignore[arg-type]


def local(
    name: str, prompt: list[int], max_tokens: int = 8, num_choices: int = 1
) -> Decode:
    """A request that decode computes alone."""
    return Decode(
        key(name), list(prompt), len(prompt), sampling(max_tokens), num_choices
    )


def handed(
    name: str, prompt: list[int], max_tokens: int = 8, num_choices: int = 1
) -> Decode:
    """A request whose prompt a prefill node computes."""
    message = local(name, prompt, max_tokens, num_choices)
    return Decode(
        message.key,
        message.token_ids,
        len(prompt),
        message.sampling,
        num_choices,
        prefill_node="p0",  # type: ignore[arg-type]
    )


def prefill(name: str, prompt: list[int], num_choices: int = 1) -> Prefill:
    return Prefill(
        key(name),
        list(prompt),
        len(prompt),
        sampling(),
        num_choices,
        decode_node="d0",  # type: ignore[arg-type]
    )


def offered(name: str, num_tokens: int, num_blocks: int) -> Offered:
    """What decode hears once a prefill node holds the blocks of that prompt."""
    return Offered(key(name), num_tokens, num_blocks, 30.0)


def toy_model(num_blocks: int, *, has_two_orders: bool = False) -> CheckedModel:
    return CheckedModel(num_blocks, ROOT, TOY, has_two_orders=has_two_orders)


def result_of(model: CheckedModel, plan: StepPlan) -> StepResult:
    return StepResult(plan.step_id, model.run(plan), 0.0, 0.001)


def continuation(
    prompt: list[int], count: int, choice: int = 0, says: Says = TOY
) -> list[int]:
    """What the toy model says after a prompt, with the seed 0."""
    context = ROOT.extended(prompt)
    tokens = []
    for _ in range(count):
        tokens.append(says(context, 0, choice))
        context = context.then(tokens[-1])
    return tokens


class Drive:
    """A scheduler of that kind over a pool and a model of its own.

    `said` and `asked` are everything told to routers and to the connector, in order.
    """

    def __init__(
        self,
        kind: Callable[..., Scheduler],
        num_blocks: int,
        limits: NodeLimits,
        state_blocks: int = 0,
        *,
        has_two_orders: bool = False,
    ) -> None:
        self.pool = BlockPool(
            num_blocks,
            BLOCK_SIZE,
            state_blocks=state_blocks,
            has_two_orders=has_two_orders,
        )
        self.scheduler = kind(self.pool, limits)
        self.model = toy_model(num_blocks, has_two_orders=has_two_orders)
        self.said: list[ToRouter] = []
        self.asked: list[ConnectorEvent] = []
        self.plans: list[StepPlan] = []
        self.now_s = 0.0

    def launch(self) -> StepPlan | None:
        plan = self.scheduler.plan(self.now_s)
        self._collect()
        if plan is not None:
            self.plans.append(plan)
        return plan

    def settle(self, plan: StepPlan) -> None:
        self.scheduler.settle(self.now_s, plan, result_of(self.model, plan))
        self._collect()

    def run(self, steps: int = 1000, depth: int = 1) -> None:
        """Until there is nothing to do, with up to `depth` launched steps."""
        launched: list[StepPlan] = []
        for _ in range(steps):
            while len(launched) < depth and (plan := self.launch()) is not None:
                launched.append(plan)
            if not launched:
                return
            self.settle(launched.pop(0))
        for plan in launched:
            self.settle(plan)

    def entries(self) -> Iterable[TokenEntry]:
        self._collect()
        for message in self.said:
            if isinstance(message, Tokens):
                yield from message.entries

    def output(self, name: str, prompt: list[int], choice: int = 0) -> list[int]:
        """The tokens streamed for one choice; fails when a position is missing or doubled."""
        tokens: list[int] = []
        for entry in self.entries():
            if (entry.key.request_id, entry.key.choice) == (name, choice):
                assert entry.position == len(prompt) + len(tokens)
                tokens += entry.token_ids
        return tokens

    def _collect(self) -> None:
        self.said += [
            message for _, message in self.scheduler.outputs.take_router_messages()
        ]
        self.asked += self.scheduler.outputs.take_connector_events()


def prefill_drive(
    num_blocks: int = 64, limits: NodeLimits = LIMITS, state_blocks: int = 0
) -> Drive:
    return Drive(PrefillScheduler, num_blocks, limits, state_blocks)


def decode_drive(
    num_blocks: int = 64, limits: NodeLimits = LIMITS, state_blocks: int = 0
) -> Drive:
    return Drive(DecodeScheduler, num_blocks, limits, state_blocks)
