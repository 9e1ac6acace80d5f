"""Carry out the fault of a run: a thread signals a process at a given moment.

A descriptor holds the process from the beginning, so that a process that gets the same id later is
never signalled. The injector continues a process that it stopped, even if the run fails or is
interrupted.
"""

import os
import select
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from msgspec.structs import replace

from baton.bench.figures.faults import FaultSpec, Injected
from baton.protocol.errors import ConfigError
from baton.runtime.clock import monotonic

GONE_WITHIN_S = 10.0


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

    def __enter__(self) -> "FaultInjector":
        try:
            self._process = os.pidfd_open(self._spec.pid)
            try:
                signal.pidfd_send_signal(self._process, 0)
            except OSError:
                os.close(self._process)
                raise
        except OSError as error:
            text = f"fault {self._spec}: process {self._spec.pid}: {error.strerror}"
            raise ConfigError(text) from error
        return self

    def __exit__(self, *_error: object) -> None:
        self._halt()
        os.close(self._process)

    def begin(self, start_s: float) -> None:
        """Carry the fault out in a schedule that starts or started at `start_s`; call it once."""
        self._start_s = start_s
        self._fault = self._thread.submit(self._carry_out)

    def finish(self) -> Injected | None:
        """Return the fault as carried out, or None if the load ended before it."""
        self._halt()
        return None if self._fault is None else self._fault.result()

    def _carry_out(self) -> Injected | None:
        """Carry the fault out in the thread; return None if the run ends first."""
        spec = self._spec
        rest_s = self._start_s + spec.at_s - monotonic()
        if rest_s > 0 and self._over.wait(rest_s):
            return None
        done, is_stop = Injected(spec, self._now()), spec.kind == "stop"
        if not self._send(signal.SIGSTOP if is_stop else signal.SIGKILL):
            return replace(done, problem=f"process {spec.pid} had ended before the fault")
        if is_stop:
            self._over.wait(spec.after_s)  # a run that ends wakes the process early
            return replace(done, resumed_s=self._now()) if self._send(signal.SIGCONT) else done
        if self._has_gone(GONE_WITHIN_S):
            return replace(done, gone_s=self._now())
        problem = f"process {spec.pid} had not ended {GONE_WITHIN_S:g} s after the kill"
        return replace(done, problem=problem)

    def _now(self) -> float:
        return monotonic() - self._start_s

    def _has_gone(self, within_s: float = 0.0) -> bool:
        return bool(select.select([self._process], [], [], within_s)[0])

    def _send(self, number: signal.Signals) -> bool:
        """Return False if the process has ended."""
        if self._has_gone():
            return False
        try:
            signal.pidfd_send_signal(self._process, number)
        except ProcessLookupError:
            return False
        return True

    def _halt(self) -> None:
        self._over.set()
        self._thread.shutdown()
