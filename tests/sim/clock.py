"""An event loop whose time passes only when nothing is left to do, and the processes on it.

What a process schedules runs in its context. So a process can be frozen (its callbacks wait) or
killed (they never run) without its code knowing of it.
"""

import asyncio
import selectors
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
        self.clock_offset_s = clock_offset_s
        self.tasks: set[asyncio.Task[Any]] = set()  # that have not ended
        self.state_of: Callable[[str], str] = lambda _: ""  # of a request, here
        self._waiting: list[Callable[[], None]] = []

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

    def admits(self, callback: Callable[[], None]) -> bool:
        """Return whether a callback may run now. One of a frozen process is kept."""
        if self.is_frozen and not self.is_dead:
            self._waiting.append(callback)
        return not self.is_frozen and not self.is_dead

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            self.call(callback)

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
        self._now_s = 1000.0
        self._readers: dict[int, Callable[[], None]] = {}
        self.listen: Callable[[Process, Callable[[], asyncio.Protocol]], Any]  # at the only port
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self._now_s

    def num_timers(self, process: Process) -> int:
        """Return how many timers of a process are set."""
        timers = (timer for timer in self._scheduled if not timer.cancelled())  # type: ignore[attr-defined]
        return sum(timer._callback.process is process for timer in timers)

    def pass_time(self, seconds: float) -> None:
        self._now_s += seconds

    # What is scheduled belongs to the process that schedules it, or to that of `context`.

    def create_task(
        self, coroutine: Coroutine[Any, Any, T], *, context: Context | None = None, **how: Any
    ) -> "asyncio.Task[T]":  # type: ignore[override]
        task = super().create_task(coroutine, context=context, **how)
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is not None:  # those of a dead process are kept, so that no coroutine is closed
            process.tasks.add(task)
            task.add_done_callback(process.tasks.discard, context=_NOWHERE)
        return task

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        gated = _Gated(callback, args, context)
        gated.handle = super().call_soon(gated, context=context)
        return gated.handle

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:  # fmt: skip
        gated = _Gated(callback, args, context)
        handle = gated.handle = super().call_at(when, gated, context=context)
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
            callback(*args)

        self._readers[fd] = partial(process.call, read)

    def remove_reader(self, fd: int) -> bool:  # type: ignore[override]
        return self._readers.pop(fd, None) is not None

    async def create_server(self, make: Callable[[], Any], *where: Any, **how: Any) -> Any:  # type: ignore[override]
        process = PROCESS.get()
        assert process is not None
        return self.listen(process, make)

    def is_readable(self, fd: int) -> bool:
        """Tell the reader of a descriptor, if it has one."""
        if (reader := self._readers.get(fd)) is not None:
            reader()
        return fd in self._readers


class _Gated:
    """A callback that runs only while its process does."""

    __slots__ = ("_args", "_callback", "handle", "process")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> None:
        self.process = PROCESS.get() if context is None else context.get(PROCESS)
        self._callback, self._args = callback, args
        self.handle: asyncio.Handle | None = None

    def __call__(self) -> None:
        if self.handle is not None and self.handle.cancelled():
            return  # while its process was frozen
        if self.process is None or self.process.admits(self):
            self._callback(*self._args)


class _Selector(selectors.SelectSelector):
    """Selects nothing, and lets the time pass that the loop wants to wait."""

    def __init__(self, loop: SimLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing is left to happen"
        self._loop.pass_time(timeout)
        return []
