"""An event loop whose time passes only when nothing is left to do, and the processes on it.

What a process schedules runs in its context. So a process can be frozen (its callbacks wait) or
killed (they never run) without its code knowing of it.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
PROCESS: ContextVar["Process | None"] = ContextVar("process", default=None)
_NOWHERE = Context()


class Process:
    """One life of a simulated process. It has a clock of its own, which may jump."""

    def __init__(self, loop: "SimLoop", name: str, clock_offset_s: float = 0.0) -> None:
        self.loop = loop
        self.name = name
        self.is_dead = self.is_frozen = False
        self.is_stalled = False  # its loop stands still, and its I/O threads work
        self.is_out_of_descriptors = self.is_out_of_memory = False
        self.resumed_s = loop.time()  # when it last went on
        self._busy_until_s = 0.0
        self.clock_offset_s = clock_offset_s
        self.tasks: set[asyncio.Task[Any]] = set()  # that have not ended
        self.state_of: Callable[[str], str] = lambda _: ""  # of a request, here
        self._waiting: list[_Handle] = []

    def clock(self) -> float:
        return self.loop.time() + self.clock_offset_s

    def run(self, function: Callable[..., T], *args: object) -> T:
        """Call a function as this process does: what it schedules belongs to the process."""
        return self._context().run(function, *args)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        return self.loop.create_task(coroutine, context=self._context())

    def call(self, function: Callable[[], None]) -> None:
        """Let the process call a function soon, or when it thaws, or never if it is dead."""
        self.loop.call_soon(function, context=self._context())

    def admits(self, handle: "_Handle") -> bool:
        """Return whether a callback may run now. One of a frozen process is kept."""
        if self.is_dead:
            return False
        is_busy = self.loop.time() < self._busy_until_s
        if is_busy and not self._waiting:
            self.loop.run_at(self._busy_until_s, self._go_on)
        if is_busy or self.is_frozen or self.is_stalled:
            self._waiting.append(handle)
            return False
        return True

    def spend(self, seconds: float) -> None:
        """Let the callback that runs take time: later ones wait for it."""
        self._busy_until_s = max(self._busy_until_s, self.loop.time()) + seconds

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = self.is_stalled = False
        self.resumed_s = self.loop.time()
        self._go_on()

    def _go_on(self) -> None:
        waiting = self._waiting
        self._waiting = []
        self.loop.run_again(waiting)

    def kill(self) -> None:
        self.is_dead = True
        self._waiting.clear()

    def _context(self) -> Context:
        context = copy_context()
        context.run(PROCESS.set, self)
        return context


class SimLoop(asyncio.SelectorEventLoop):
    """Time is `time()`, in seconds. A wait takes no time in the real world."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 1000.0
        self._timers: list[tuple[float, int, _Handle]] = []
        # Of two timers of one moment the older goes first.
        self._numbers = itertools.count()
        self._readers: dict[int, Callable[[], None]] = {}
        self._are_due: set[int] = set()  # readers that are about to run
        # Descriptors that stay readable until they are read.
        self.are_signalled: set[int] = set()
        # At the only port.
        self.listen: Callable[[Process, Callable[[], asyncio.Protocol]], Any]

    def time(self) -> float:
        return self._now_s

    def num_timers(self, process: Process) -> int:
        """Return how many timers of a process are set."""
        return sum(
            one.process is process and not one.cancelled() for _, _, one in self._timers
        )

    def _run_once(self) -> None:
        """Run what is due, or let the time pass to the next timer."""
        timers, ready = self._timers, self._ready  # type: ignore[attr-defined]
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not ready:
            assert timers, "nothing is left to happen"
            self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            ready.popleft()._run()

    def run_at(self, at_s: float, callback: Callable[[], None]) -> None:
        """Call a function of no process."""
        self.call_at(at_s, callback, context=_NOWHERE.copy())

    def run_again(self, handles: "list[_Handle]") -> None:
        self._ready.extend(handles)  # type: ignore[attr-defined]

    # What is scheduled belongs to the process that schedules it, or to that of `context`.

    def create_task(
        self,
        coroutine: Coroutine[Any, Any, T],
        *,
        context: Context | None = None,
        **how: Any,
    ) -> "asyncio.Task[T]":  # type: ignore[override]
        task = super().create_task(coroutine, context=context, **how)
        process = PROCESS.get() if context is None else context.get(PROCESS)
        # Those of a dead process are kept, so that no coroutine is closed.
        if process is not None:
            process.tasks.add(task)
            task.add_done_callback(process.tasks.discard, context=_NOWHERE)
        return task

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> "_Handle":  # type: ignore[override]
        handle = _Handle(self, self._now_s, callback, args, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> "_Handle":  # type: ignore[override]
        handle = _Handle(self, when, callback, args, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def run_in_executor(  # type: ignore[override]
        self, executor: object, function: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        """Return what a thread would compute, in no time."""
        computed: asyncio.Future[T] = self.create_future()
        try:
            computed.set_result(function(*args))
        except Exception as error:  # noqa: BLE001  the caller awaits it
            computed.set_exception(error)
        return computed

    # Descriptors are numbers of simulated sockets.

    def add_reader(self, fd: int, callback: Callable[..., object], *args: Any) -> None:  # type: ignore[override]
        process = PROCESS.get()
        assert process is not None

        def read() -> None:
            self._are_due.discard(fd)
            callback(*args)
            if fd in self.are_signalled:
                self.is_readable(fd)

        self._readers[fd] = partial(process.call, read)

    def remove_reader(self, fd: int) -> bool:  # type: ignore[override]
        return self._readers.pop(fd, None) is not None

    async def create_server(
        self, make: Callable[[], Any], *where: Any, **how: Any
    ) -> Any:  # type: ignore[override]
        process = PROCESS.get()
        assert process is not None
        return self.listen(process, make)

    def is_readable(self, fd: int) -> bool:
        """Tell the reader of a descriptor, if it has one."""
        reader = self._readers.get(fd)
        if reader is not None and fd not in self._are_due:
            self._are_due.add(fd)
            reader()
        return reader is not None


class _Handle:
    """A callback that runs only while its process does. The loop's own handles cost more."""

    __slots__ = (
        "_args",
        "_callback",
        "_context",
        "_is_cancelled",
        "_loop",
        "_when",
        "process",
    )
    _source_traceback = None  # asyncio looks for it

    def __init__(
        self,
        loop: SimLoop,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: Context | None,
    ) -> None:
        self._loop = loop
        self._when = when
        self._callback = callback
        self._args = args
        self._context = copy_context() if context is None else context
        self.process = self._context.get(PROCESS)
        self._is_cancelled = False

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        self._is_cancelled = True

    def cancelled(self) -> bool:
        return self._is_cancelled

    def _run(self) -> None:
        if self._is_cancelled or (
            self.process is not None and not self.process.admits(self)
        ):
            return
        try:
            self._context.run(self._callback, *self._args)
        except Exception as error:  # noqa: BLE001  as any loop does
            told = {"message": f"an error in {self._callback}", "exception": error}
            self._loop.call_exception_handler(told)
