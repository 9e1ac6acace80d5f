"""The process that keeps the processes of a cluster running on one host: `--on local`.

`LocalPlatform` starts it with a state folder, from which it reads its orders and to which it writes
the state of the processes; actors of Ray use only the class. A process that ends is restarted,
after a longer delay each time. When the keeper ends, by SIGTERM or by force, its processes end too.
It never sends messages to a router or a node.
"""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from baton.deploy.cluster.platform import ProcessState, ProcessStatus
from baton.deploy.cluster.processes import ProcessSpec
from baton.deploy.cluster.running import write_private
from baton.protocol.config import LogConfig
from baton.runtime.clock import monotonic
from baton.runtime.log import logger, relayed, setup
from baton.runtime.process import Command, Exit, Interrupts, Supervisor, die_with_parent, log_exit

WATCH_S = 0.1
HURRIED_S = 2.5
ORDERS, STATUS = "orders.json", "processes.json"

log = logger("keeper")


class Orders(msgspec.Struct, frozen=True):
    """The orders of a keeper. They hold secrets, so only the user may read their file."""

    processes: tuple[ProcessSpec, ...]
    logs: str  # folder


class Keeper:
    """The processes of one host, from `start` to `stop`. `kill` is safe in a signal handler."""

    def __init__(self, folder: Path, orders: Orders) -> None:
        self._folder = folder
        self._orders = orders
        self._logs = Path(self._orders.logs)
        self._files: dict[str, IO[bytes]] = {}
        self._troubles: dict[str, str] = {}  # why a file cannot be written, by its purpose
        self._ends: dict[str, str] = {}  # why a process ended the last time
        specs = {spec.name: spec for spec in self._orders.processes}
        self._routers = Supervisor(
            tuple(map(_command, _of_role(specs.values(), is_router=True))), monotonic, self._relay
        )
        self._nodes = Supervisor(
            tuple(map(_command, _of_role(specs.values(), is_router=False))),
            monotonic,
            self._relay,
            may_leave=True,
        )

    def start(self) -> None:
        """Spawn every process."""
        self._logs.mkdir(parents=True, exist_ok=True)
        for spec in self._orders.processes:
            self._files[spec.name] = (self._logs / f"{spec.name}.log").open("ab", buffering=0)
        self._routers.start()
        self._nodes.start()
        self._tell()

    def poll(self) -> None:
        """Restart the processes that are due, and write down changes."""
        exits = [*self._routers.poll(), *self._nodes.poll()]
        for ended in exits:
            self._ends[ended.name] = why(ended)
            log_exit(log, ended)
        self._tell()

    def stop(self, *, is_hurried: bool) -> None:
        """End the routers, then the nodes, each with the time that its requests may take.

        If it is hurried, the processes do not wait for their requests.
        """
        for supervisor, is_router in ((self._routers, True), (self._nodes, False)):
            specs = _of_role(self._orders.processes, is_router=is_router)
            grace_s = max((spec.grace_s for spec in specs), default=0.0)
            supervisor.stop(HURRIED_S if is_hurried else grace_s, is_hurried=is_hurried)
        for file in self._files.values():
            file.close()

    def kill(self) -> None:
        self._routers.kill()
        self._nodes.kill()

    def _tell(self) -> None:
        """Write the state of every process, if it has changed."""
        content = msgspec.json.encode([self._status(spec) for spec in self._orders.processes])
        path = self._folder / STATUS
        with self._or_trouble("the state of the processes"):
            if not path.exists() or path.read_bytes() != content:
                write_private(path, content)

    def _status(self, spec: ProcessSpec) -> ProcessStatus:
        supervisor = self._routers if spec.role == "router" else self._nodes
        pid = supervisor.pid_of(spec.name)
        state: ProcessState = "running" if pid is not None else "ended"
        note = f"pid {pid}" if pid is not None else ""
        last_end = self._ends.get(spec.name, "")
        return ProcessStatus(spec.name, spec.role, spec.host, state, note, last_end)

    def _relay(self, name: str, line: str) -> None:
        """Pass on a line of a process; its reader thread calls this."""
        text = relayed(name, line)
        # Without a reader, a process would block as soon as its pipe is full.
        with self._or_trouble(f"the log of {name}"):
            self._files[name].write(f"{text}\n".encode(errors="replace"))
        with contextlib.suppress(OSError):
            print(text, flush=True)

    @contextlib.contextmanager
    def _or_trouble(self, what: str) -> Iterator[None]:
        """Continue if a file cannot be written, as on a full disk, and report it once."""
        try:
            yield
        except OSError as error:
            reason = str(error.strerror)
            if self._troubles.get(what) != reason:
                self._troubles[what] = reason
                log.error(f"cannot write {what}", reason=reason)
        else:
            if self._troubles.pop(what, ""):
                log.info(f"{what} can be written again")


def why(ended: Exit) -> str:
    """Return one line that says why a process ended, with the last line that it printed."""
    last = next((line for line in reversed(ended.tail) if line.strip()), "")
    for start in (f" {ended.name}: ", "baton: "):
        last = last.partition(start)[2] or last
    return f"exit code {ended.code}" + (f": {last.strip()}" if last else "")


def _command(spec: ProcessSpec) -> Command:
    env = {**spec.env, **spec.secret_env}
    return Command(spec.name, spec.argv[1:], env=tuple(env.items()))


def _of_role(specs: Iterable[ProcessSpec], *, is_router: bool) -> list[ProcessSpec]:
    return [spec for spec in specs if (spec.role == "router") is is_router]


def main(folder: Path) -> int:
    """Keep the processes of `folder` until SIGTERM, which lets them drain, or SIGINT.

    A second signal ends everything at once.
    """
    die_with_parent()
    setup(LogConfig(), "keeper")
    keeper = Keeper(folder, msgspec.json.decode((folder / ORDERS).read_bytes(), type=Orders))
    with Interrupts(on_second=keeper.kill) as interrupts:
        try:
            keeper.start()
            while not interrupts.wait(WATCH_S):
                keeper.poll()
        finally:
            keeper.stop(is_hurried=interrupts.is_hurried)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
