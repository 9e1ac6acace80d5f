"""The actor that runs one process of a cluster on a host of Ray.

`ray_binding` makes a Ray actor from it. It runs the process as the keeper of `--on local` does: a
process that ends is restarted, after a longer delay each time. When the actor's own process ends,
by any signal, the child ends too, and Ray restarts the actor. Secrets stay in the memory of the
actor, so a failed host has none on its disk. This file knows nothing of Ray.
"""

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from baton.deploy.cluster.hosted_commands import HostedCommands
from baton.deploy.cluster.hosts import on_this_machine
from baton.deploy.cluster.keeper import STATUS, Keeper, Orders
from baton.deploy.cluster.platform import ProcessStatus
from baton.deploy.cluster.processes import ProcessSpec
from baton.deploy.cluster.ray_layout import KEY_FILE, PYTHON, RayOrders, at_its_place
from baton.deploy.cluster.running import make_private, write_private
from baton.protocol.errors import NodeError
from baton.runtime.channels.endpoint import SCHEME
from baton.runtime.clock import monotonic

WATCH_S = 0.1
FOLLOW_S = 2.0  # between two looks at the routers' addresses
ROUTERS = "BATON_NODE_ROUTERS"
TAIL_LINES, TAIL_BYTES = 50, 32768
CAME_BACK = "its actor ended, and Ray started it again"


class ActorReport(msgspec.Struct, frozen=True):
    """The state of an actor and its process."""

    status: ProcessStatus
    is_over: bool = False  # the process was told to end and has ended
    tail: tuple[str, ...] = ()  # its last lines, after that


class ProcessActor:
    """One process, which is kept running until `end`. No method waits for it."""

    def __init__(
        self,
        process: str,
        orders: RayOrders,
        addresses: Sequence[str],
        look: Callable[[], Sequence[str]],
        *,
        came_back: bool,
    ) -> None:
        """Start the process. `addresses` are the hosts of all processes of the orders.

        `look` returns later addresses. An address that Ray is still looking for is empty, and all
        are missing while Ray does not answer.

        Raises `ConfigError` if this host has no place for the private folder.
        """
        self._process, self._orders, self._look = process, orders, look
        # No other user can have created a folder with the token in its name.
        self._folder = Path(tempfile.gettempdir()) / f"baton-{orders.token}-{process}"
        make_private(self._folder)
        key_file = _in_memory(orders.key)
        self._commands = HostedCommands({KEY_FILE: key_file, PYTHON: sys.executable})
        spec = on_this_machine(at_its_place(orders, process, addresses, key_file))[0]
        spec = self._following(spec)
        self._log = Path(orders.logs or self._folder / "logs") / f"{process}.log"
        self._keeper = Keeper(self._folder, Orders((spec,), str(self._log.parent)))
        # A status from before the restart of the actor.
        (self._folder / STATUS).unlink(missing_ok=True)
        last_end = CAME_BACK if came_back else ""
        status = ProcessStatus(spec.name, spec.role, spec.host, "waiting", "", last_end)
        self._report = ActorReport(status)
        self._ending = threading.Event()
        self._is_hurried = False
        self._thread = threading.Thread(target=self._keep, name=process, daemon=True)
        self._thread.start()

    def report(self) -> bytes:
        """Return an `ActorReport` in JSON, which hosts with another baton can read, too."""
        return msgspec.json.encode(self._report)

    def end(self, *, is_hurried: bool) -> None:
        """Begin to end the process, with its `grace_s` unless it is hurried."""
        self._is_hurried = is_hurried
        self._ending.set()

    def discard(self) -> None:
        """Delete the private folder, before the actor is killed."""
        self._commands.stop_all()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start_command(self, name: str, words: Sequence[str]) -> None:
        """Start a command beside the process. `read_command` returns its output."""
        self._commands.start(name, words)

    def read_command(self, name: str) -> bytes:
        return self._commands.read(name)

    def stop_command(self, name: str) -> None:
        self._commands.stop(name)

    def _keep(self) -> None:
        """Keep the process running; the thread of the actor runs it."""
        last_end = ""
        follow_at_s = monotonic() + FOLLOW_S
        try:
            self._keeper.start()
            while not self._ending.wait(WATCH_S):
                self._keeper.poll()
                self._report = ActorReport(self._seen())
                if self._follows and monotonic() >= follow_at_s:
                    self._follow()
                    follow_at_s = monotonic() + FOLLOW_S
        except NodeError as error:
            last_end = error.message
        finally:
            self._keeper.stop(is_hurried=self._is_hurried)
            status = self._report.status
            status = msgspec.structs.replace(
                status, state="ended", note="", last_end=last_end or status.last_end
            )
            self._report = ActorReport(status, True, _last_lines(self._log))
            self.discard()

    def _following(self, spec: ProcessSpec) -> ProcessSpec:
        """Return the process with files as router addresses, because routers may move."""
        self._follows = spec.role != "router" and not self._orders.loopback
        if not self._follows:
            return spec
        names = [SCHEME + str(path) for path in self._write_routers(spec)]
        return msgspec.structs.replace(spec, env=spec.env | {ROUTERS: ",".join(names)})

    def _follow(self) -> None:
        """Write down the routers' addresses if Ray has moved one."""
        addresses = self._look()
        if addresses and all(addresses):
            self._write_routers(at_its_place(self._orders, self._process, addresses)[0])

    def _write_routers(self, spec: ProcessSpec) -> list[Path]:
        """Write the address of each router of a node into its file, if it has changed."""
        paths = []
        for index, endpoint in enumerate(spec.env[ROUTERS].split(",")):
            path = self._folder / f"router-{index}"
            if not path.exists() or path.read_text() != endpoint:
                write_private(path, endpoint.encode())
            paths.append(path)
        return paths

    def _seen(self) -> ProcessStatus:
        """Return the keeper's notes, and why the process ended when the actor ended."""
        noted = (self._folder / STATUS).read_bytes()
        (status,) = msgspec.json.decode(noted, type=list[ProcessStatus])
        last_end = status.last_end or self._report.status.last_end
        return msgspec.structs.replace(status, last_end=last_end)


def _in_memory(key: str) -> str:
    """Return the path of a private file that vanishes with this process."""
    if not key:
        return ""
    descriptor = os.memfd_create("baton-key")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, key.encode())
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _last_lines(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as file:
            file.seek(-min(TAIL_BYTES, path.stat().st_size), os.SEEK_END)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ()
    return tuple(lines[-TAIL_LINES:])
