"""The interface of a scheduler to the loop, and the checks of both schedulers on a message.

Prefill and decode nodes each have their own scheduler; the loop does not know which one it drives.
Time comes in as `now_s`, and messages go out through `outputs`. `plan` may be called again before
the last plan is settled.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from baton.kv_transfer.interfaces import ConnectorReport
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.plan import DraftCost, Origin, Outputs, StepPlan, StepResult
from baton.node.scheduling.prefetches import Prefetches
from baton.node.scheduling.tiers import Tiers
from baton.protocol.adapters import shown_lora
from baton.protocol.codec import MalformedMessage
from baton.protocol.config import EngineConfig
from baton.protocol.errors import BatonError, RequestError
from baton.protocol.ids import Key
from baton.protocol.messages import Decode, Load, Prefill
from baton.protocol.pooling import ModelTasks
from baton.protocol.sampling import MAX_CHOICES


class NodeLimits(msgspec.Struct, frozen=True):
    """The bounds of a step and of a sequence on this node, as it found them, and its settings."""

    max_num_batched_tokens: int  # token budget of one step
    max_num_seqs: int  # sequences in one step
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = 1 << 31  # token ids are below this
    # Whose bounds of a step may be 0, unlike those above.
    engine: EngineConfig = EngineConfig()
    draft_cost: DraftCost = DraftCost()
    lora_modules: tuple[str, ...] = ()
    tasks: ModelTasks = ModelTasks()
    max_loras: int = 0  # adapters that may be loaded at run time
    run_time_loras: set[str] = set()  # those that are loaded now, which the loop keeps

    @property
    def max_first_tokens(self) -> int:
        """Return how many tokens the prompts of a step may sample: each needs a row of logits."""
        return max(self.max_num_seqs, MAX_CHOICES)


def problem_of(
    message: Prefill | Decode,
    limits: NodeLimits,
    is_in_use: Callable[[Prefill | Decode], bool],
) -> BatonError | None:
    """Return why no node could work on this message. It then ends a request, never a process.

    `is_in_use` says whether a sequence of this node already has one of its keys.
    """
    num_tokens = len(message.token_ids)
    num_output = num_tokens - message.num_prompt_tokens
    first = message.key.choice
    end = message.key.choice + message.num_choices
    if not 0 <= first < end <= MAX_CHOICES:
        text = (
            f"choices {first} to {end - 1} are not all between 0 and {MAX_CHOICES - 1}"
        )
        return MalformedMessage(text)
    if not 0 <= num_output < num_tokens:
        text = (
            f"the prompt cannot have {message.num_prompt_tokens} of {num_tokens} tokens"
        )
        return MalformedMessage(text)
    if not 0 <= min(message.token_ids) <= max(message.token_ids) < limits.vocab_size:
        text = f"token ids must be at least 0 and below {limits.vocab_size}"
        return RequestError(text, param="prompt")
    pooling = message.sampling.pooling
    if not limits.tasks.can(pooling):
        text = f"this node's model cannot be asked for {pooling or 'tokens'}"
        return RequestError(text, code="unsupported", param="model")
    if pooling is not None and not _is_alone(message):
        return MalformedMessage(
            "a prompt to pool has one choice, and no node takes its blocks"
        )
    if num_tokens + (pooling is None) > limits.max_model_len:
        text = f"{num_tokens} tokens and the output exceed the {limits.max_model_len} of this node"
        return RequestError(text, code="context_length_exceeded", param="prompt")
    if num_output >= message.sampling.max_tokens:
        return RequestError("no token is left to generate", param="max_tokens")
    lora = message.sampling.lora
    if lora and lora not in limits.lora_modules and lora not in limits.run_time_loras:
        text = f"this node has no adapter {shown_lora(lora)!r}"
        return RequestError(
            text, code="model_not_found", param="model", http_status=404
        )
    if is_in_use(message):
        return MalformedMessage(f"{message.key} is in use")
    return None


def _is_alone(message: Prefill | Decode) -> bool:
    if isinstance(message, Decode):
        return False
    return message.decode_node is None and message.num_choices == 1


def load_of(pool: BlockPool, num_running: int, num_waiting: int) -> Load:
    """Return the load of a node with this pool, for its routers and the stats line."""
    return Load(
        num_running=num_running,
        num_waiting=num_waiting,
        free_blocks=pool.num_free,
        total_blocks=pool.num_blocks,
        cached_blocks=len(pool.cache),
        quarantined_blocks=pool.num_quarantined,
    )


class Scheduler(Protocol):
    outputs: Outputs
    pool: BlockPool
    tiers: Tiers
    prefetches: Prefetches
    limits: NodeLimits

    def add(self, now_s: float, origin: Origin, message: Prefill | Decode) -> None:
        """Take a request in, or answer `Failed`. It never raises because of a message."""
        ...

    def cancel(self, origin: Origin, keys: tuple[Key, ...]) -> None:
        """End these sequences. `CancelDone` goes out at once; blocks follow when that is safe."""
        ...

    def forget(self, origin: Origin) -> None:
        """End the requests of a router that is gone."""
        ...

    def on_report(self, now_s: float, report: ConnectorReport) -> None: ...

    def plan(self, now_s: float) -> StepPlan | None:
        """Return the next step, or None if there is nothing to compute."""
        ...

    def settle(self, now_s: float, plan: StepPlan, result: StepResult) -> None: ...

    def in_progress(self) -> dict[Origin, list[Key]]:
        """Return the sequences that wait for nothing but this node, by router."""
        ...

    def loras_in_use(self) -> set[str]:
        """Return the adapters that some sequence needs."""
        ...

    def load(self) -> Load: ...
