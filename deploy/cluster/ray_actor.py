"""The actor that runs one process of a cluster on a host of Ray.

`ray_binding` makes a Ray actor of it. It puts the key into a private folder of its host and runs
the process as the keeper of `--on local` does: a process that ends is started again, later each
time. When the actor's own process ends, by whatever signal, the child ends too, and Ray starts the
actor again. It knows nothing of Ray.
"""

import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from baton.deploy.cluster.hosts import on_this_machine
from baton.deploy.cluster.keeper import ORDERS, STATUS, Keeper, Orders
from baton.deploy.cluster.platform import ProcessStatus
from baton.deploy.cluster.ray_layout import KEY, RayOrders, at_its_place
from baton.deploy.cluster.running import make_private, write_private
from baton.protocol.errors import NodeError

WATCH_S = 0.1
TAIL_LINES, TAIL_BYTES = 50, 32768
CAME_BACK = "its actor ended, and Ray started it again"


class ActorReport(msgspec.Struct, frozen=True):
    """How an actor and its process are."""

    status: ProcessStatus
    is_over: bool = False  # the process was told to end, and has
    tail: tuple[str, ...] = ()  # its last lines, once that is so


class ProcessActor:
    """One process, kept running until `end`. No method waits for it."""

    def __init__(
        self, process: str, orders: RayOrders, addresses: Sequence[str], *, came_back: bool
    ) -> None:
        """Start the process. `addresses` are the hosts of all processes of the orders.

        Raises `ConfigError` if this host has no place for the private folder.
        """
        # Nobody else can have made a folder with the token in its name.
        self._folder = Path(tempfile.gettempdir()) / f"baton-{orders.token}-{process}"
        make_private(self._folder)
        spec = on_this_machine(at_its_place(orders, process, addresses, str(self._folder)))[0]
        if orders.key:
            write_private(self._folder / KEY, orders.key.encode())
        self._log = Path(orders.logs or self._folder / "logs") / f"{process}.log"
        kept = Orders((spec,), str(self._log.parent))
        write_private(self._folder / ORDERS, msgspec.json.encode(kept))
        # A status of the time before the actor came back.
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
        shutil.rmtree(self._folder, ignore_errors=True)

    def _keep(self) -> None:
        """Keep the process running; the thread of the actor runs it."""
        keeper = Keeper(self._folder)
        last_end = ""
        try:
            keeper.start()
            while not self._ending.wait(WATCH_S):
                keeper.poll()
                self._report = ActorReport(self._seen())
        except NodeError as error:
            last_end = error.message
        finally:
            keeper.stop(is_hurried=self._is_hurried)
            status = self._report.status
            status = msgspec.structs.replace(
                status, state="ended", note="", last_end=last_end or status.last_end
            )
            self._report = ActorReport(status, True, _last_lines(self._log))
            self.discard()

    def _seen(self) -> ProcessStatus:
        """Return what the keeper has noted, and why the process ended when the actor did."""
        noted = (self._folder / STATUS).read_bytes()
        (status,) = msgspec.json.decode(noted, type=list[ProcessStatus])
        last_end = status.last_end or self._report.status.last_end
        return msgspec.structs.replace(status, last_end=last_end)


def _last_lines(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as file:
            file.seek(-min(TAIL_BYTES, path.stat().st_size), os.SEEK_END)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ()
    return tuple(lines[-TAIL_LINES:])
