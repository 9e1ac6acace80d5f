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
from baton.protocol.ids import Key
from baton.protocol.messages import Decode, Load, Prefill


class Limits(msgspec.Struct, frozen=True):
    """What bounds a step and a sequence on this node."""

    chunk_tokens: int  # token budget of one step
    max_num_seqs: int  # sequences in one step
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()


class Scheduler(Protocol):
    outputs: Outputs

    def add(self, now_s: float, origin: Origin, message: Prefill | Decode) -> None: ...

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
