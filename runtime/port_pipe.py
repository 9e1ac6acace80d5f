"""How a child process that picks its own port tells its parent: a pipe, named in the environment.

`serve` holds the reading end, the router it starts writes its port once it listens. A router that
nobody started this way has no such variable, and `tell_parent` does nothing.
"""

import contextlib
import os

PORT_FD_VARIABLE = "BATON_PORT_FD"


class PortPipe:
    """The parent's end. Pass `env` and `pass_fds` to the child's `Command`.

    The pipe stays open, so that the same command can start another child when the first has died.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._said = b""

    @property
    def env(self) -> tuple[tuple[str, str], ...]:
        return ((PORT_FD_VARIABLE, str(self._write_end)),)

    @property
    def pass_fds(self) -> tuple[int, ...]:
        return (self._write_end,)

    def poll(self) -> int:
        """Return the first child's port, or 0 until the child has told it. Never blocks."""
        if not self._said.endswith(b"\n"):
            with contextlib.suppress(BlockingIOError):
                self._said += os.read(self._read_end, 16)
        return int(self._said) if self._said.endswith(b"\n") else 0

    def close(self) -> None:
        """Close both ends."""
        os.close(self._write_end)
        os.close(self._read_end)


def tell_parent(port: int) -> None:
    """Write `port` to the parent that asked for it; called by the child once it listens."""
    inherited = os.environ.pop(PORT_FD_VARIABLE, "")
    if not inherited.isdecimal():
        return
    # A parent that is gone by now needs no answer.
    with contextlib.suppress(OSError):
        os.write(int(inherited), b"%d\n" % port)
        os.close(int(inherited))
