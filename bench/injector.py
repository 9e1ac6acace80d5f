"""Carry out the fault of a run: a thread signals a process at a given moment.

A descriptor holds the process from the beginning, so that a process that gets the same id later is
never signalled. The injector continues what it stopped and ends what it started, also when the run
fails or is interrupted.
"""

import contextlib
import os
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from msgspec.structs import replace

from baton.bench.figures.faults import FaultSpec, Injected
from baton.protocol.errors import ConfigError
from baton.runtime.clock import monotonic

GONE_WITHIN_S = 10.0
GRACE_S = 5.0


class FaultInjector:
    """A context manager; nothing happens before `begin`. Times are on the monotonic clock.

    Entering it raises `ConfigError` for a process that does not exist or must not be signalled.
    """

    def __init__(self, spec: FaultSpec) -> None:
        self._spec = spec
        self._start_s = 0.0
        self._over = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fault")
        self._fault: Future[Injected | None] | None = None
        self._restarted: _Restarted | None = None
        self._is_stopped = False

    def __enter__(self) -> "FaultInjector":
        spec = self._spec
        if spec.command and shutil.which(spec.command[0]) is None:
            raise ConfigError(f"fault {spec}: there is no command {spec.command[0]!r}")
        try:
            self._process = _Process(spec.pid)
        except OSError as error:
            text = f"fault {spec}: process {spec.pid}: {error.strerror}"
            raise ConfigError(text) from error
        return self

    def __exit__(self, *_error: object) -> None:
        # A stopped process goes on before anything else.
        if self._is_stopped:
            self._process.send(signal.SIGCONT)
        self._halt()
        if self._restarted is not None:
            self._restarted.close()
        self._process.close()

    def begin(self, start_s: float) -> None:
        """Carry the fault out in a schedule that starts or started at `start_s`; call it once."""
        self._start_s = start_s
        self._fault = self._thread.submit(self._carry_out)

    @property
    def is_busy(self) -> bool:
        """Return whether the fault is still under way or to come."""
        return self._fault is not None and not self._fault.done()

    def finish(self) -> Injected | None:
        """Return what was done by now, or None if the load ended before the fault.

        A restarted process goes on, the fault does not.
        """
        self._halt()
        done = None if self._fault is None else self._fault.result()
        if done is None or done.problem or self._restarted is None:
            return done
        return replace(done, problem=self._restarted.problem())

    # --- the thread -----------------------------------------------------------------------------

    def _carry_out(self) -> Injected | None:
        """Return None if the run ends first."""
        spec, process = self._spec, self._process
        if not self._sleep_until(self._start_s + spec.at_s):
            return None
        done, self._is_stopped = Injected(spec, self._now()), spec.kind == "stop"
        if not process.send(signal.SIGSTOP if self._is_stopped else signal.SIGKILL):
            return replace(done, problem=f"process {spec.pid} had ended before the fault")
        if not self._is_stopped:
            return self._gone(done)
        self._sleep_until(monotonic() + spec.after_s)
        return replace(done, resumed_s=self._now()) if process.send(signal.SIGCONT) else done

    def _gone(self, done: Injected) -> Injected:
        spec = done.spec
        if not self._process.has_gone(GONE_WITHIN_S):
            problem = f"process {spec.pid} had not ended {GONE_WITHIN_S:g} s after the kill"
            return replace(done, problem=problem)
        done = replace(done, gone_s=self._now())
        if spec.kind != "restart" or not self._sleep_until(monotonic() + spec.after_s):
            return done
        try:
            self._restarted = _Restarted(spec)
        except OSError as error:
            problem = f"cannot start {spec.command[0]!r}: {error.strerror}"
            return replace(done, problem=problem)
        return replace(done, restarted_s=self._now(), restarted_pid=self._restarted.pid)

    def _now(self) -> float:
        return monotonic() - self._start_s

    def _sleep_until(self, moment_s: float) -> bool:
        """Return False if the run ends first."""
        return not self._over.wait(max(0.0, moment_s - monotonic()))

    def _halt(self) -> None:
        self._over.set()
        self._thread.shutdown()


class _Process:
    """A process, held by a descriptor.

    Raises `OSError` if the process does not exist or this bench must not signal it.
    """

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(self._descriptor, 0)
        except OSError:
            self.close()
            raise

    def has_gone(self, within_s: float = 0.0) -> bool:
        return bool(select.select([self._descriptor], [], [], within_s)[0])

    def send(self, number: signal.Signals) -> bool:
        """Return False if the process has ended."""
        if self.has_gone():
            return False
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        os.close(self._descriptor)


class _Restarted:
    """A command that this process starts in a group of its own, and ends; raises `OSError`."""

    def __init__(self, spec: FaultSpec) -> None:
        self._spec = spec
        with contextlib.ExitStack() as stack:
            self._output = stack.enter_context(tempfile.TemporaryFile())
            self._child = subprocess.Popen(
                spec.command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._process = _Process(self._child.pid)
            self._stack = stack.pop_all()

    @property
    def pid(self) -> int:
        return self._child.pid

    def problem(self) -> str:
        """Return why the command ended, by its last line; empty while it runs."""
        if not self._process.has_gone():
            return ""
        descriptor = self._output.fileno()
        tail = os.pread(descriptor, 2000, max(0, os.fstat(descriptor).st_size - 2000))
        lines = tail.decode(errors="replace").strip().splitlines() or ["it wrote nothing"]
        return f"{shlex.join(self._spec.command)} ended before the load: {lines[-1][:200]}"

    def close(self) -> None:
        """Ask the process to end, then end its group; reap it last, which keeps its id taken."""
        if self._process.send(signal.SIGTERM):
            self._process.has_gone(GRACE_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._process.close()
        self._child.wait()
        self._stack.close()
