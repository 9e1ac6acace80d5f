"""Carry out the faults of a run: a thread for each signals a process at given moments.

A descriptor holds each process from the beginning, so that a process that gets the same id later is
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
from collections.abc import Sequence
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

    def __init__(self, specs: Sequence[FaultSpec]) -> None:
        self._specs = sorted(specs, key=lambda spec: spec.at_s)
        self._start_s = 0.0
        self._over = threading.Event()
        self._threads = ThreadPoolExecutor(max(1, len(specs)), thread_name_prefix="fault")
        self._faults: list[Future[Injected | None]] = []  # in the order of `_specs`
        self._processes: dict[int, _Process] = {}
        self._restarted: list[_Restarted] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "FaultInjector":
        with self._stack as stack:
            for spec in self._specs:
                if spec.command and shutil.which(spec.command[0]) is None:
                    raise ConfigError(f"fault {spec}: there is no command {spec.command[0]!r}")
                try:
                    if spec.pid not in self._processes:
                        self._processes[spec.pid] = _Process(spec.pid)
                        stack.callback(self._processes[spec.pid].close)
                    self._processes[spec.pid].check()
                except OSError as error:
                    text = f"fault {spec}: process {spec.pid}: {error.strerror}"
                    raise ConfigError(text) from error
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        # Stopped processes go on before anything else, and restarted ones end before the others.
        for process in self._processes.values():
            process.resume()
        self._halt()
        for restarted in self._restarted:
            self._stack.callback(restarted.close)
        self._stack.close()

    def begin(self, start_s: float) -> None:
        """Carry the faults out in a schedule that starts or started at `start_s`; call it once."""
        self._start_s = start_s
        self._faults = [self._threads.submit(self._carry_out, spec) for spec in self._specs]

    @property
    def is_busy(self) -> bool:
        """Return whether some fault is still under way or to come."""
        return not all(fault.done() for fault in self._faults)

    def finish(self) -> list[Injected]:
        """Return what was done by now, in order. Restarted processes go on, no fault does."""
        self._halt()
        problems = {process.spec: process.problem() for process in self._restarted}
        found = [fault.result() for fault in self._faults if fault.exception() is None]
        return sorted(
            (
                replace(done, problem=done.problem or problems.get(done.spec, ""))
                for done in found
                if done is not None
            ),
            key=lambda done: done.at_s,
        )

    def left_out(self) -> list[str]:
        """Return, after `finish`, the faults that were not carried out, and why."""
        late = "the load ended before it; let it go on for longer"
        errors: list[object] = [
            fault.exception() or (late if fault.result() is None else "") for fault in self._faults
        ] or [late] * len(self._specs)
        return [
            f"fault {spec} was not carried out: {error}"
            for spec, error in zip(self._specs, errors, strict=True)
            if error
        ]

    # --- the threads ----------------------------------------------------------------------------

    def _carry_out(self, spec: FaultSpec) -> Injected | None:
        """Return None if the run ends first."""
        if not self._sleep_until(self._start_s + spec.at_s):
            return None
        process, done = self._processes[spec.pid], Injected(spec, self._now())
        if spec.kind == "stop":
            process.stopped_until_s = max(process.stopped_until_s, monotonic() + spec.after_s)
        if not process.send(signal.SIGSTOP if spec.kind == "stop" else signal.SIGKILL):
            return replace(done, problem=f"process {spec.pid} had ended before the fault")
        return self._resumed(process, done) if spec.kind == "stop" else self._gone(process, done)

    def _resumed(self, process: "_Process", done: Injected) -> Injected:
        # Another stop of this process may last for longer.
        while monotonic() < process.stopped_until_s:
            if not self._sleep_until(process.stopped_until_s):
                break
        return replace(done, resumed_s=self._now()) if process.send(signal.SIGCONT) else done

    def _gone(self, process: "_Process", done: Injected) -> Injected:
        spec = done.spec
        if not process.has_gone(GONE_WITHIN_S):
            problem = f"process {spec.pid} had not ended {GONE_WITHIN_S:g} s after the kill"
            return replace(done, problem=problem)
        done = replace(done, gone_s=self._now())
        if spec.kind != "restart" or not self._sleep_until(monotonic() + spec.after_s):
            return done
        try:
            restarted = _Restarted(spec)
        except OSError as error:
            problem = f"cannot start {spec.command[0]!r}: {error.strerror}"
            return replace(done, problem=problem)
        self._restarted.append(restarted)
        return replace(done, restarted_s=self._now(), restarted_pid=restarted.pid)

    def _now(self) -> float:
        return monotonic() - self._start_s

    def _sleep_until(self, moment_s: float) -> bool:
        """Return False if the run ends first."""
        return not self._over.wait(max(0.0, moment_s - monotonic()))

    def _halt(self) -> None:
        self._over.set()
        self._threads.shutdown()


class _Process:
    """A process, held by a descriptor. Raises `OSError` if it does not exist."""

    def __init__(self, pid: int) -> None:
        self.stopped_until_s = 0.0
        self.descriptor = os.pidfd_open(pid)

    def check(self) -> None:
        """Raise `OSError` if this bench must not signal the process."""
        signal.pidfd_send_signal(self.descriptor, 0)

    def has_gone(self, within_s: float = 0.0) -> bool:
        return bool(select.select([self.descriptor], [], [], within_s)[0])

    def send(self, number: signal.Signals) -> bool:
        """Return False if the process has ended."""
        if self.has_gone():
            return False
        try:
            signal.pidfd_send_signal(self.descriptor, number)
        except ProcessLookupError:
            return False
        return True

    def resume(self) -> None:
        """Continue the process if this bench stopped it."""
        if self.stopped_until_s:
            self.send(signal.SIGCONT)

    def close(self) -> None:
        os.close(self.descriptor)


class _Restarted:
    """A command that this process starts in a group of its own, and ends; raises `OSError`."""

    def __init__(self, spec: FaultSpec) -> None:
        self.spec = spec
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
        """Return why it ended, by its last line; empty while it runs."""
        if not self._process.has_gone():
            return ""
        descriptor = self._output.fileno()
        tail = os.pread(descriptor, 2000, max(0, os.fstat(descriptor).st_size - 2000))
        lines = tail.decode(errors="replace").strip().splitlines() or ["it wrote nothing"]
        return f"{shlex.join(self.spec.command)} ended before the load: {lines[-1][:200]}"

    def close(self) -> None:
        """Ask the process to end, then end its group; reap it last, which keeps its id taken."""
        if self._process.send(signal.SIGTERM):
            self._process.has_gone(GRACE_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._process.close()
        self._child.wait()
        self._stack.close()
