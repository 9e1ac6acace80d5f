"""The contract between a node's loop and the executor that computes its steps.

`InProcessExecutor` runs one rank in threads of this process, `WorkerExecutor` one process per rank.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from baton.kv_transfer.interfaces import TransferPort
from baton.node.scheduling.plan import DraftCost, StepPlan, StepResult
from baton.protocol.messages import KVLayout, NodeFacts, RankAddress

RANK_KILLED = "rank_killed"  # the error's code if a signal from outside ended a rank

# Called with (phase, done, total) at least once a second during start.
Progress = Callable[[str, int, int], None]


class ExecutorInfo(msgspec.Struct, frozen=True):
    """What an executor knows once it has loaded; all but the last two are fields of `NodeInfo`."""

    num_blocks: int
    layout: KVLayout
    ranks: tuple[RankAddress, ...]
    model: str  # fingerprint of configuration and weights
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    batch_invariant: bool = False  # a token's bits depend on its own sequence alone
    compute: str = ""  # equal for nodes that compute the same bits
    facts: NodeFacts = NodeFacts()
    draft_cost: DraftCost = DraftCost()
    # It promises bits, but those of a prompt's tokens are others than those of a response's.
    has_two_orders: bool = False


class AdapterLoad(msgspec.Struct, frozen=True):
    """A LoRA adapter to load at run time, and the slot that it takes on every rank."""

    name: str
    path: str  # the adapter's folder
    slot: int


class AdapterOutcome(msgspec.Struct, frozen=True):
    """An adapter is in use in the steps that are submitted from now on, or there is a problem."""

    load: AdapterLoad
    digest: str = ""  # of its files, in hex
    problem: str = ""


class Executor(Protocol):
    def start(self, progress: Progress) -> ExecutorInfo:
        """Load and allocate, within a deadline. Raises `ConfigError` or `NodeError`."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Queue a step. At most two may be unsettled; their results are returned in order."""
        ...

    def poll(self) -> StepResult | None:
        """Return the next finished step or None at once. Raises `NodeError` if a rank died."""
        ...

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` may return something.

        Calling `poll` until it returns None clears the signal.
        """
        ...

    def profile(self, name: str) -> None:
        """Record the steps that follow, or write the profile's traces if `name` is empty.

        Each rank logs its file's name. No error in it ends the node.
        """
        ...

    def load_adapter(self, load: AdapterLoad) -> None:
        """Load an adapter while steps run. No step that is submitted may use what its slot had.

        One is loaded at a time, and `poll_adapter` returns the outcome. No error in it ends the
        node.
        """
        ...

    def poll_adapter(self) -> AdapterOutcome | None:
        """Return the outcome of the load, or None at once; `fileno` signals it too."""
        ...

    @property
    def ports(self) -> Sequence[TransferPort]:
        """Return one port per rank, in rank order; valid after `start`."""
        ...

    def close(self) -> None:
        """End every thread and process within 5 s. A second call does nothing."""
        ...
