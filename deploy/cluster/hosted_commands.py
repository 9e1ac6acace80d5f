"""Commands that run beside a process on its host, for a caller on another host.

An actor of Ray has one `HostedCommands`; `ray_command` starts commands there and reads their
output. This file knows nothing of Ray, and waits for nothing.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence

import msgspec

from baton.protocol.errors import ConfigError

CANNOT_RUN = 127  # as a shell says it


class CommandSaid(msgspec.Struct, frozen=True):
    """The output of a command since the last call, and its exit code once it has ended."""

    out: bytes = b""
    complaints: bytes = b""
    code: int | None = None


class HostedCommands:
    """The commands of one process's host, by names that their owners choose."""

    def __init__(self, values: Mapping[str, str]) -> None:
        """`values` holds the text of each variable that the words of a command may contain."""
        self._values = values
        self._running: dict[str, _HostedCommand] = {}

    def start(self, name: str, words: Sequence[str]) -> None:
        """Start a command. If it cannot start, the reason appears as its error output."""
        self._running[name] = _HostedCommand([self._filled(word) for word in words])

    def read(self, name: str) -> bytes:
        """Return `CommandSaid` in JSON. A command that has ended is forgotten."""
        running = self._running.get(name)
        if running is None:
            raise ConfigError(f"no command {name} runs here")
        said = running.read()
        if said.code is not None:
            running.close()
            del self._running[name]
        return msgspec.json.encode(said)

    def stop(self, name: str) -> None:
        """End a command with SIGTERM, and forget it. Idempotent."""
        running = self._running.pop(name, None)
        if running is not None:
            running.terminate()
            running.close()

    def stop_all(self) -> None:
        for name in list(self._running):
            self.stop(name)

    def _filled(self, word: str) -> str:
        for name, value in self._values.items():
            word = word.replace(name, value)
        return word


class _HostedCommand:
    """A child whose output goes to files in memory, so that it never waits for a reader."""

    def __init__(self, words: Sequence[str]) -> None:
        self._out, self._complaints = os.memfd_create("stdout"), os.memfd_create("stderr")
        self._read_bytes = [0, 0]
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._complaints
            )
        except OSError as error:
            os.write(self._complaints, f"cannot run {words[0]}: {error}\n".encode())

    def read(self) -> CommandSaid:
        # This comes first, so that no output of a command that has ended is missed.
        code = CANNOT_RUN if self._process is None else self._process.poll()
        return CommandSaid(self._next(0, self._out), self._next(1, self._complaints), code)

    def terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def close(self) -> None:
        os.close(self._out)
        os.close(self._complaints)

    def _next(self, index: int, descriptor: int) -> bytes:
        size = os.fstat(descriptor).st_size
        found = os.pread(descriptor, size - self._read_bytes[index], self._read_bytes[index])
        self._read_bytes[index] += len(found)
        return found
