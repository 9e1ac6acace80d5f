"""Carries the faults of a run out: a thread for each, which signals a process at given moments.

`fault_run.py` enters it around a load. A process is held by a descriptor from the beginning on, so
that an id that was given away again is never signalled. What it stops it continues, and what it
starts it ends, whatever happens to the run: should this process be killed, a guard does it.
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
from types import TracebackType

import msgspec

from baton.bench.figures.faults import FaultSpec, Injected
from baton.protocol.errors import BatonError, ConfigError
from baton.runtime.clock import Clock, monotonic

GONE_WITHIN_S = 10.0
GRACE_S = 5.0
# A shell that waits for a line; if its input ends without one, whoever held it is gone.
GUARD = 'read -r _ || kill -s "$1" -- "$2"'


class FaultInjector:
    """A context manager; nothing happens before `begin`. Times are on the monotonic clock.

    Raises `ConfigError` on entry for a process that does not exist or must not be signalled.
    """

    def __init__(self, specs: Sequence[FaultSpec], clock: Clock = monotonic) -> None:
        self._specs = sorted(specs, key=lambda spec: spec.at_s)
        self._clock = clock
        self._start_s = 0.0
        self._processes: dict[int, _Process] = {}
        self._restarted: list[_Restarted] = []
        self._injected: dict[int, Injected] = {}  # by the place of the fault
        self._stop_read, self._stop_write = -1, -1
        self.has_begun = False
        self._threads = [
            threading.Thread(target=self._run, args=(place,), name=f"fault {spec}", daemon=True)
            for place, spec in enumerate(self._specs)
        ]
        self._errors: dict[int, BaseException] = {}

    def __enter__(self) -> "FaultInjector":
        self._stop_read, self._stop_write = os.pipe()
        try:
            for spec in self._specs:
                if spec.command and shutil.which(spec.command[0]) is None:
                    raise ConfigError(f"fault {spec}: there is no command {spec.command[0]!r}")
                if spec.pid not in self._processes:
                    self._processes[spec.pid] = _Process(spec)
                if spec.kind == "stop":
                    self._processes[spec.pid].guard()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def begin(self, start_s: float) -> None:
        """The schedule starts, or started, at `start_s`. To be called once, from any thread."""
        self._start_s, self.has_begun = start_s, True
        for thread in self._threads:
            thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether there is something left to be done."""
        return any(thread.is_alive() for thread in self._threads)

    def finish(self) -> list[Injected]:
        """What was done by now, in order; no more will be, but the restarted processes go on."""
        self._halt()
        problems = {process.spec: process.problem() for process in self._restarted}
        return [
            msgspec.structs.replace(entry, problem=entry.problem or problems.get(entry.spec, ""))
            for entry in sorted(self._injected.values(), key=lambda entry: entry.at_s)
        ]

    def left_out(self) -> list[str]:
        """After `finish`: the faults that were not carried out, and why."""
        late = "the load ended before it; let it go on for longer"
        return [
            f"fault {spec} was not carried out: {self._errors.get(place, late)}"
            for place, spec in enumerate(self._specs)
            if place not in self._injected
        ]

    # --- the threads ----------------------------------------------------------------------------

    def _run(self, place: int) -> None:
        spec = self._specs[place]
        try:
            if self._sleep_until(self._start_s + spec.at_s):
                self._injected[place] = self._inject(spec)
        except BaseException as error:  # noqa: BLE001  a thread's top: told by `left_out`
            self._errors[place] = error

    def _inject(self, spec: FaultSpec) -> Injected:
        process = self._processes[spec.pid]
        at_s = self._now()
        if spec.kind == "stop":
            until_s = self._clock() + spec.after_s
            process.stopped_until_s = max(process.stopped_until_s, until_s)
        if not process.send(signal.SIGSTOP if spec.kind == "stop" else signal.SIGKILL):
            return Injected(spec, at_s, problem=f"process {spec.pid} had ended before the fault")
        done = Injected(spec, at_s)
        if spec.kind == "stop":
            # Another stop of this process may last for longer.
            while self._clock() < process.stopped_until_s:
                if not self._sleep_until(process.stopped_until_s):
                    break
            goes_on = process.send(signal.SIGCONT)
            return msgspec.structs.replace(done, resumed_s=self._now()) if goes_on else done
        if not _has_gone(process.descriptor, GONE_WITHIN_S):
            problem = f"process {spec.pid} had not ended {GONE_WITHIN_S:g} s after the kill"
            return msgspec.structs.replace(done, problem=problem)
        done = msgspec.structs.replace(done, gone_s=self._now())
        if spec.kind == "restart" and self._sleep_until(self._clock() + spec.after_s):
            try:
                restarted = _Restarted(spec)
            except BatonError as error:
                return msgspec.structs.replace(done, problem=error.message)
            self._restarted.append(restarted)
            done = msgspec.structs.replace(
                done, restarted_s=self._now(), restarted_pid=restarted.pid
            )
        return done

    def _now(self) -> float:
        return self._clock() - self._start_s

    def _sleep_until(self, moment_s: float) -> bool:
        """False if the run ends first."""
        left_s = max(0.0, moment_s - self._clock())
        return not select.select([self._stop_read], [], [], left_s)[0]

    # --- the end --------------------------------------------------------------------------------

    def _halt(self) -> None:
        if self._stop_write >= 0:
            os.close(self._stop_write)
            self._stop_write = -1
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _close(self) -> None:
        """First of all whatever stands still goes on."""
        try:
            for process in self._processes.values():
                process.resume()
            self._halt()
        finally:
            for process in self._processes.values():
                process.resume()
                process.close()
            for restarted in self._restarted:
                restarted.end()
            if self._stop_read >= 0:
                os.close(self._stop_read)
                self._stop_read = -1


class _Process:
    """A process of somebody else's, by descriptor."""

    def __init__(self, spec: FaultSpec) -> None:
        self.stopped_until_s = 0.0  # on the clock of the injector
        self._pid = spec.pid
        self._guard: _Guard | None = None
        try:
            self.descriptor = os.pidfd_open(spec.pid)
        except OSError as error:
            raise ConfigError(f"fault {spec}: there is no process {spec.pid}") from error
        try:
            signal.pidfd_send_signal(self.descriptor, 0)
        except OSError as error:
            os.close(self.descriptor)
            raise ConfigError(f"fault {spec}: {spec.pid}: {error.strerror}") from error

    def guard(self) -> None:
        """From now on it will be continued even if this process is killed."""
        if self._guard is None:
            self._guard = _Guard("CONT", self._pid)

    def send(self, number: signal.Signals) -> bool:
        """False if it has ended."""
        if _has_gone(self.descriptor, 0.0):
            return False
        try:
            signal.pidfd_send_signal(self.descriptor, number)
        except ProcessLookupError:
            return False
        return True

    def resume(self) -> None:
        """Only what this may have stopped: SIGCONT is nobody's business otherwise."""
        if self._guard is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.descriptor, signal.SIGCONT)

    def close(self) -> None:
        if self._guard is not None:
            self._guard.release()
        os.close(self.descriptor)


class _Restarted:
    """A command that this process started in a group of its own, and ends."""

    def __init__(self, spec: FaultSpec) -> None:
        self._spec = spec
        with tempfile.TemporaryFile() as output:
            self._output = os.dup(output.fileno())
        try:
            self._child = subprocess.Popen(
                spec.command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._output)
            raise BatonError(f"cannot start {spec.command[0]!r}: {error.strerror}") from error
        self._descriptor = os.pidfd_open(self._child.pid)
        self._guard = _Guard("KILL", -self._child.pid)

    @property
    def spec(self) -> FaultSpec:
        return self._spec

    @property
    def pid(self) -> int:
        return self._child.pid

    def problem(self) -> str:
        """Empty while it runs."""
        if not _has_gone(self._descriptor, 0.0):
            return ""
        size = os.fstat(self._output).st_size
        tail = os.pread(self._output, 2000, max(0, size - 2000)).decode(errors="replace")
        lines = tail.strip().splitlines() or ["it wrote nothing"]
        return f"{shlex.join(self._spec.command)} ended before the load: {lines[-1][:200]}"

    def end(self) -> None:
        """Asks it, then ends its group; reaped last, so that the id is still its own."""
        if not _has_gone(self._descriptor, 0.0):
            signal.pidfd_send_signal(self._descriptor, signal.SIGTERM)
            _has_gone(self._descriptor, GRACE_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._guard.release()
        self._child.wait()
        os.close(self._descriptor)
        os.close(self._output)


def _has_gone(descriptor: int, within_s: float) -> bool:
    return bool(select.select([descriptor], [], [], within_s)[0])


class _Guard:
    """A process that sends a signal should this one end without `release`."""

    def __init__(self, name: str, target: int) -> None:
        # In a session of its own, Ctrl-C does not reach it.
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", GUARD, "guard", name, str(target)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def release(self) -> None:
        assert self._shell.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._shell.stdin.write(b"\n")
            self._shell.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            self._shell.stdin.close()
        self._shell.wait()
