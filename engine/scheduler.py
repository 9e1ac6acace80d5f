"""What the loop asks of a scheduler, and the facts every scheduler is built with.

Prefill and decode nodes each have their own; the loop never learns which it drives. A scheduler is
pure: time comes in as `now_s`, what it wants said goes out through `outputs`. `plan` may be called
again before the last plan is settled.
"""

from typing import Protocol

import msgspec

from baton.engine.outputs import Origin, Outputs
from baton.engine.plan import StepPlan, StepResult
from baton.kv_transfer.interfaces import ConnectorReport
from baton.protocol.codec import MalformedMessage
from baton.protocol.errors import BatonError, RequestError
from baton.protocol.ids import Key
from baton.protocol.messages import Decode, Load, Prefill
from baton.protocol.sampling import MAX_CHOICES


class Limits(msgspec.Struct, frozen=True):
    """What bounds a step and a sequence on this node."""

    chunk_tokens: int  # token budget of one step
    max_num_seqs: int  # sequences in one step
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = 1 << 31  # token ids are below it


def problem_of(message: Prefill | Decode, limits: Limits) -> BatonError | None:
    """Why nobody could work on this: a wrong message ends one request, never a process."""
    num_tokens = len(message.token_ids)
    num_output = num_tokens - message.num_prompt_tokens
    first, end = message.key.choice, message.key.choice + message.num_choices
    if not 0 <= first < end <= MAX_CHOICES:
        return MalformedMessage(f"{message.num_choices} choices from {first} on cannot be")
    if not 0 <= num_output < num_tokens:
        text = f"{message.num_prompt_tokens} of {num_tokens} tokens cannot be the prompt"
        return MalformedMessage(text)
    if not 0 <= min(message.token_ids) <= max(message.token_ids) < limits.vocab_size:
        text = f"token ids must be at least 0 and below {limits.vocab_size}"
        return RequestError(text, param="prompt")
    if num_tokens >= limits.max_model_len:
        text = f"{num_tokens} tokens and the output exceed the {limits.max_model_len} of this node"
        return RequestError(text, code="context_length_exceeded", param="prompt")
    if num_output >= message.sampling.max_tokens:
        return RequestError("no token is left to generate", param="max_tokens")
    return None


class Scheduler(Protocol):
    outputs: Outputs

    def add(self, now_s: float, origin: Origin, message: Prefill | Decode) -> None:
        """Take a request in, or say `Failed`. It never raises for what a message holds."""
        ...

    def cancel(self, origin: Origin, keys: tuple[Key, ...]) -> None:
        """End these sequences; `CancelDone` goes out at once, blocks follow when safe."""
        ...

    def forget(self, origin: Origin) -> None:
        """That router is gone: end everything it asked for."""
        ...

    def on_report(self, now_s: float, report: ConnectorReport) -> None: ...

    def plan(self, now_s: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute."""
        ...

    def settle(self, now_s: float, plan: StepPlan, result: StepResult) -> None: ...

    def load(self) -> Load: ...
