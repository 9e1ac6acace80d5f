"""Child processes that never outlive their parent, their supervisor, and signals to this process.

A child leads a process group of its own, so Ctrl-C reaches the parent alone, which then ends its
children in order. Signals go only to children that are not yet reaped; nothing searches for
processes by name.
"""

import contextlib
import ctypes
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import IO

import msgspec

from baton.protocol.errors import NodeError
from baton.runtime.clock import Clock, monotonic
from baton.runtime.log import Log, relayed

DEATH_FD_VARIABLE = "BATON_DEATH_FD"
DEATH_SIGNAL_VARIABLE = "BATON_DEATH_SIGNAL"
TAIL_LINES = 20
GRACE_S = 3.5
POLL_S = 0.02
GOOD_RUN_S = 60.0
# Takes the place of an exit code if the system could not start the process.
NOT_STARTED = 127
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
_PR_SET_PDEATHSIG = 1

# Called with (child name, line) from a reader thread.
RelayLine = Callable[[str, str], None]
SignalHandler = Callable[[int, FrameType | None], object] | int | None


class Command(msgspec.Struct, frozen=True):
    """`python -m module args...` or `program args...`, with `env` on top of the parent's."""

    name: str
    args: tuple[str, ...]
    module: str = "baton"
    env: tuple[tuple[str, str], ...] = ()
    pass_fds: tuple[int, ...] = ()
    program: str = ""


def die_with_parent() -> None:
    """End this process by SIGKILL as soon as the process that spawned it through `Child` is gone.

    Call it first in a child's main; it does nothing in a process that no `Child` spawned.
    """
    inherited = os.environ.pop(DEATH_FD_VARIABLE, "")
    by_signal = os.environ.pop(DEATH_SIGNAL_VARIABLE, "")
    if not inherited.isdecimal():
        return
    descriptor = int(inherited)
    os.set_inheritable(descriptor, False)
    # The pipe also covers a parent that died before the signal was asked for.
    threading.Thread(
        target=_watch, args=(descriptor,), name="death pipe", daemon=True
    ).start()
    if by_signal and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(
            _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0
        )


def _watch(descriptor: int) -> None:
    os.read(descriptor, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def to_stderr(name: str, line: str) -> None:
    """Write a child's line to stderr, with the child's name if the line does not show it."""
    sys.stderr.write(relayed(name, line) + "\n")
    sys.stderr.flush()


class Child:
    """One spawned process. Use it from one thread; another thread reads the output."""

    def __init__(self, command: Command, relay: RelayLine = to_stderr) -> None:
        """Spawn the process at once. Raises `NodeError` if the system cannot start it."""
        self.name = command.name
        self.exit_code: int | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        # The child gets its settings from its arguments, into which this process has put the
        # variables.
        env = {
            key: text
            for key, text in os.environ.items()
            if not key.startswith("BATON_")
        }
        env |= {**dict(command.env), "PYTHONUNBUFFERED": "1"}
        # The signal comes when the spawning *thread* ends, so only the main one may ask for it.
        if threading.current_thread() is threading.main_thread():
            env[DEATH_SIGNAL_VARIABLE] = "1"
        with contextlib.ExitStack() as undo:
            try:
                read_end, self._death_pipe = os.pipe()
                undo.callback(os.close, self._death_pipe)
                with contextlib.closing(os.fdopen(read_end)):
                    self._process = subprocess.Popen(
                        [*_program_of(command), *command.args],
                        env=env | {DEATH_FD_VARIABLE: str(read_end)},
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        pass_fds=(read_end, *command.pass_fds),
                        start_new_session=True,
                    )
            except OSError as error:
                raise NodeError(f"cannot start {command.name}: {error}") from error
            undo.pop_all()
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=self._read,
            args=(self._process.stdout, relay),
            name=command.name,
            daemon=True,
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def tail(self) -> tuple[str, ...]:
        return tuple(self._tail)

    def poll(self) -> int | None:
        """Return the exit code (negative: the signal that ended the child), None while it runs."""
        if self.exit_code is None:
            # WNOWAIT keeps the id taken while the rest of its group is killed.
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self.pid, options) is not None:
                self._kill_group()
                self.exit_code = self._process.wait()
                os.close(self._death_pipe)
                self._reader.join(1.0)
        return self.exit_code

    def terminate(self, *, is_hurried: bool = False) -> None:
        """Ask the child to drain and end (SIGTERM), or to end without a drain (SIGINT)."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGINT if is_hurried else signal.SIGTERM)

    def kill(self) -> None:
        """End the child and everything in its group (SIGKILL), without waiting."""
        if self.exit_code is None:
            self._kill_group()

    def wait(self, deadline_s: float) -> bool:
        """Return whether the child is gone by `deadline_s` on the monotonic clock."""
        while self.poll() is None:
            if monotonic() >= deadline_s:
                return False
            time.sleep(POLL_S)
        return True

    def stop(self, grace_s: float = GRACE_S, *, is_hurried: bool = False) -> int:
        """Ask the child to end, wait, kill its group, and return the exit code. Idempotent."""
        self.terminate(is_hurried=is_hurried)
        if not self.wait(monotonic() + grace_s):
            self.kill()
            self.wait(monotonic() + 1.0)
        return self.exit_code if self.exit_code is not None else -signal.SIGKILL

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _read(self, output: IO[bytes], relay: RelayLine) -> None:
        num_lost = 0
        with output:
            for raw in output:
                line = raw.decode(errors="replace").rstrip("\n")
                self._tail.append(line)
                # The child blocks once its pipe is full, so a full disk must not end the reading.
                try:
                    if num_lost:
                        relay(
                            self.name,
                            f"{num_lost} lines are missing: the log was not writable",
                        )
                    num_lost = 0
                    relay(self.name, line)
                except OSError:
                    num_lost += 1


def _program_of(command: Command) -> tuple[str, ...]:
    return (
        (command.program,)
        if command.program
        else (sys.executable, "-m", command.module)
    )


class Exit(msgspec.Struct, frozen=True):
    """A supervised child ended by itself, or could not be started again (`NOT_STARTED`).

    The supervisor restarts it in `restart_in_s`, if that is set.
    """

    name: str
    code: int
    tail: tuple[str, ...]
    num_exits: int  # since the supervisor started
    restart_in_s: float | None


def log_exit(log: Log, ended: Exit) -> None:
    """Log that a supervised child has ended, and whether it starts again."""
    if ended.restart_in_s is None:
        log.info("process was told to end and is not restarted", process=ended.name)
    elif ended.code == NOT_STARTED:
        log.error(
            "process could not be started and is tried again",
            process=ended.name,
            reason=ended.tail[-1],
            in_s=ended.restart_in_s,
        )
    else:
        log.warning(
            "process ended and will start again",
            process=ended.name,
            code=ended.code,
            in_s=ended.restart_in_s,
            exits=ended.num_exits,
        )


class Backoff:
    """The delay before the next attempt. It doubles each time, and starts anew after a good run."""

    def __init__(self, first_s: float = 0.5, longest_s: float = 30.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def after(self, ran_s: float) -> float:
        if ran_s >= GOOD_RUN_S:
            self._next_s = self._first_s
        delay_s = self._next_s
        self._next_s = min(2 * self._next_s, self._longest_s)
        return delay_s


@dataclass(slots=True)
class _Supervised:
    command: Command
    child: Child | None = None
    started_s: float = 0.0
    restart_at_s: float = 0.0
    is_restarting: bool = False  # it was told to end, and starts again when it has
    num_exits: int = 0
    backoff: Backoff = field(default_factory=Backoff)


class Supervisor:
    """Keeps a set of children running. `poll` it a few times a second; it never blocks.

    With `may_leave`, a child that exits with 0 was told to end, and is not started again.
    """

    def __init__(
        self,
        commands: tuple[Command, ...],
        clock: Clock = monotonic,
        relay: RelayLine = to_stderr,
        *,
        may_leave: bool = False,
    ) -> None:
        self._may_leave = may_leave
        self._supervised = [_Supervised(command) for command in commands]
        self._clock = clock
        self._relay = relay

    def start(self) -> None:
        """Start all children. Raises `NodeError` if the system cannot start entry."""
        for entry in self._supervised:
            self._spawn(entry)

    def poll(self) -> list[Exit]:
        """Restart the children that are due, and return the exits since the last call."""
        exits = []
        for entry in self._supervised:
            if entry.child is not None:
                if (code := entry.child.poll()) is not None:
                    ran_s = self._clock() - entry.started_s
                    exits.append(self._ended(entry, code, entry.child.tail, ran_s))
            elif self._clock() >= entry.restart_at_s:
                try:
                    self._spawn(entry)
                # The system may lack memory or processes for a while.
                except NodeError as error:
                    exits.append(self._ended(entry, NOT_STARTED, (error.message,), 0.0))
        return exits

    def restart(self, name: str) -> None:
        """Let a child drain and start again, at once if it has ended."""
        for entry in self._supervised:
            if entry.command.name != name:
                continue
            if entry.child is None:
                entry.restart_at_s = 0.0
            elif not entry.is_restarting:
                entry.is_restarting = True
                entry.child.terminate()

    def pid_of(self, name: str) -> int | None:
        for entry in self._supervised:
            if entry.command.name == name:
                return entry.child.pid if entry.child is not None else None
        return None

    def stop(self, grace_s: float = GRACE_S, *, is_hurried: bool = False) -> None:
        """End all children at the same time, by force after `grace_s`. A second call does nothing.

        Children that are hurried do not drain.
        """
        children = [
            entry.child for entry in self._supervised if entry.child is not None
        ]
        for child in children:
            child.terminate(is_hurried=is_hurried)
        deadline_s = monotonic() + grace_s
        for child in children:
            if not child.wait(deadline_s):
                child.kill()
        for child in children:
            child.wait(monotonic() + 1.0)

    def kill(self) -> None:
        """End all children by force without waiting. A signal handler may call it."""
        for entry in self._supervised:
            if entry.child is not None:
                entry.child.kill()

    def hang_up(self) -> None:
        """Send SIGHUP to all children. A signal handler may call it."""
        for entry in self._supervised:
            if entry.child is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(entry.child.pid, signal.SIGHUP)

    def _spawn(self, entry: _Supervised) -> None:
        entry.child = Child(entry.command, self._relay)
        entry.started_s = self._clock()

    def _ended(
        self, entry: _Supervised, code: int, tail: tuple[str, ...], ran_s: float
    ) -> Exit:
        entry.child = None
        entry.num_exits += 1
        delay_s = None if self._may_leave and code == 0 else entry.backoff.after(ran_s)
        if entry.is_restarting:
            entry.is_restarting = False
            delay_s = 0.0
        entry.restart_at_s = math.inf if delay_s is None else self._clock() + delay_s
        return Exit(entry.command.name, code, tail, entry.num_exits, delay_s)


def end_by_signal() -> None:
    """Let SIGTERM end this process until `Interrupts` takes over.

    Otherwise the kernel drops the signal if the process is the first one of a container, and the
    container would end only after its model has been fetched.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_TERMINATED))


def on_hangup(act: Callable[[], object]) -> None:
    """Call `act` at each SIGHUP, by which services are asked to read files again.

    The signal keeps its meaning where `nohup` has it ignored, and where it says that the terminal
    is gone.
    """
    has_terminal = sys.stdin is not None and sys.stdin.isatty()
    if not has_terminal and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: act())


class Interrupts:
    """A context in which signals are noted; enter it from the main thread."""

    def __init__(
        self,
        on_first: Callable[[], object] | None = None,
        on_second: Callable[[], object] | None = None,
    ) -> None:
        """Take two callbacks that run in the handler; exit with 130 right after `on_second`."""
        self.requested = False
        self.is_hurried = False  # the stop was requested by SIGINT
        self._on_first = on_first
        self._on_second = on_second
        self._previous: list[tuple[signal.Signals, SignalHandler]] = []
        self._read_end = -1
        self._write_end = -1

    def __enter__(self) -> "Interrupts":
        self._read_end, self._write_end = os.pipe()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous.append((number, signal.signal(number, self._on_signal)))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous:
            signal.signal(number, handler)
        os.close(self._read_end)
        os.close(self._write_end)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable once a stop was requested."""
        return self._read_end

    def wait(self, timeout_s: float) -> bool:
        """Sleep up to `timeout_s`; return True as soon as a stop was requested."""
        # Not threading.Event: setting one in a handler can deadlock with the thread waiting on it.
        select.select([self._read_end], [], [], timeout_s)
        return self.requested

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.requested:
            if self._on_second is not None:
                self._on_second()
            os._exit(EXIT_INTERRUPTED)
        self.requested, self.is_hurried = True, number == signal.SIGINT
        os.write(self._write_end, b"!")
        if self._on_first is not None:
            self._on_first()
