"""CPUs that the nodes of one host lend to each other, a step at a time.

Under light load, a prefill node and a decode node that share a host are seldom busy at the same
time. Each writes the number of its computing threads to a file that all of them map. A node that
finds the others idle takes every CPU for its next step, and otherwise its own share. A wrong number
in the file, such as that of a process that was killed, costs time but cannot change a result.
"""

import fcntl
import mmap
import os
from pathlib import Path

from baton.protocol.errors import ConfigError

NUM_SLOTS = 64
# A slot is two numbers: the process that owns it, and the number of threads with which that process
# computes now.
_PID, _THREADS, _WIDTH = 0, 1, 2
_BYTES = NUM_SLOTS * _WIDTH * 4


class SharedCpus:
    """The slot of one process in the file. Only one thread may call it."""

    def __init__(self, path: Path, share: int, total: int) -> None:
        """Take a free slot of the file, which is created if necessary. Raises `ConfigError`."""
        self._share, self._total = share, total
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with open(descriptor, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                os.ftruncate(descriptor, _BYTES)
                self._numbers = memoryview(mmap.mmap(descriptor, _BYTES)).cast("i")
                try:
                    self._own = self._free_slot()
                finally:
                    # The mapping keeps the file open, and with it a lock that this process never
                    # releases.
                    fcntl.flock(file, fcntl.LOCK_UN)
        except OSError as error:
            raise ConfigError(
                f"cannot use {path} (engine.shared_cpus): {error.strerror}"
            ) from error

    def take(self, *, may_borrow: bool = True) -> int:
        """Return how many threads the next step may use, and note that number in the file."""
        self._numbers[self._own + _THREADS] = 0
        is_alone = may_borrow and not any(self._numbers[_THREADS::_WIDTH])
        threads = self._total if is_alone else self._share
        self._numbers[self._own + _THREADS] = threads
        return threads

    def give_back(self) -> None:
        """Note in the file that the step has ended and its threads are idle."""
        self._numbers[self._own + _THREADS] = 0

    def _free_slot(self) -> int:
        for slot in range(0, NUM_SLOTS * _WIDTH, _WIDTH):
            pid = self._numbers[slot + _PID]
            if not pid or not Path(f"/proc/{pid}").exists():
                self._numbers[slot + _PID] = os.getpid()
                self._numbers[slot + _THREADS] = 0
                return slot
        raise ConfigError(f"more than {NUM_SLOTS} nodes share their CPUs (engine.shared_cpus)")
