"""The class that starts a child process which owns KV blocks, for the tools that measure reads.

The child is a module of a tool. It takes a struct as JSON, fills its pool with marks, publishes its
address with `publish`, and waits for its parent to end it. `tools.gpu.lender` and
`tools.transfer.marked_blocks` are such modules.
"""

import queue
from types import TracebackType

import msgspec

from baton.protocol.errors import NodeError
from baton.protocol.messages import RankAddress
from baton.runtime.clock import monotonic
from baton.runtime.process import Child, Command

START_TIMEOUT_S = 60.0
PREFIX = "owner "


class BlockOwner:
    """The process, as a context manager. Raises `NodeError` if it does not start."""

    def __init__(self, module: str, owned: msgspec.Struct) -> None:
        self._command = Command("owner", (msgspec.json.encode(owned).decode(),), module)
        self._lines: queue.Queue[str] = queue.Queue()
        self._child: Child | None = None
        self.address = RankAddress({})

    def __enter__(self) -> "BlockOwner":
        self._child = Child(self._command, lambda _, line: self._lines.put(line))
        try:
            self.address = self._wait(self._child)
        except BaseException:
            self._child.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._child is not None
        self._child.stop()

    def _wait(self, child: Child) -> RankAddress:
        deadline_s = monotonic() + START_TIMEOUT_S
        while child.poll() is None and monotonic() < deadline_s:
            try:
                line = self._lines.get(timeout=0.2)
            except queue.Empty:
                continue
            if line.startswith(PREFIX):
                return msgspec.json.decode(line[len(PREFIX) :], type=RankAddress)
        why = child.tail[-1] if child.tail else f"no word within {START_TIMEOUT_S:g} s"
        raise NodeError(f"the process that owns the blocks did not start: {why}")


def publish(address: RankAddress) -> None:
    """Tell the parent how the blocks of this process can be read."""
    print(PREFIX + msgspec.json.encode(address).decode(), flush=True)
