"""The part of Ray that baton uses. Only this file imports Ray, an optional extra.

`ray` loads it when a cluster on Ray is started, shown or ended. A cluster is a namespace with a
placement group, an actor for each process, and its orders in Ray's control store, which holds what
no argument of an actor may show.
"""

import contextlib
import logging
import os
import signal
import socket
import time
import warnings
from collections.abc import Iterator, Sequence

import msgspec
import ray
from ray.exceptions import ActorDiedError, ActorUnschedulableError, RayError
from ray.experimental import internal_kv
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from baton.deploy.cluster.hosted_commands import CommandSaid
from baton.deploy.cluster.ray_actor import ActorReport, ProcessActor
from baton.deploy.cluster.ray_layout import RESTARTS, STRATEGY, Bundle, RayHost, RayOrders
from baton.protocol.errors import NodeError

GROUP = "processes"  # the name of the placement group in the namespace
STORE = "baton"
# An actor's first answer waits until its process has started and imported baton.
ASK_S = 5.0
CONNECT_S = 5.0
# On a busy host an actor answers late, and nothing else waits for the answer.
COMMAND_S = 30.0
WATCH_S = 0.2


class RayConnection:
    """This process as a driver of a Ray cluster. Use one at a time."""

    def __init__(self, address: str, namespace: str) -> None:
        """Connect. Raises `NodeError` if Ray does not answer or refuses this host."""
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self._namespace = namespace
        self._asked: dict[str, object] = {}  # process -> the answer that is on its way
        if address != "auto":
            _check_answers(address)
        try:
            with _handlers_kept():
                ray.init(
                    address=address,
                    namespace=namespace,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
        except (ConnectionError, RuntimeError, ValueError, AssertionError, RayError) as error:
            raise NodeError(f"cannot join Ray at {address}: {_first_line(error)}") from error
        self.address: str = ray.get_runtime_context().gcs_address

    def close(self) -> None:
        with _handlers_kept():
            ray.shutdown()

    def hosts(self) -> list[RayHost]:
        """Return the live nodes of Ray."""
        return [
            RayHost(
                one["NodeID"],
                one["NodeManagerAddress"],
                dict(one["Resources"]),
                dict(one["Labels"]),
            )
            for one in ray.nodes()
            if one["Alive"]
        ]

    def free(self) -> dict[str, float]:
        """Return the free amount of each resource."""
        return dict(ray.available_resources())

    def orders(self) -> RayOrders | None:
        """Return the orders of any deployment in this namespace."""
        return _orders(self._namespace)

    def start(self, orders: RayOrders, bundles: Sequence[Bundle]) -> bool:
        """Ask for the group and its actors, and return at once.

        Return False, and start nothing, if the namespace has orders already.
        """
        content = msgspec.json.encode(orders)
        if internal_kv._internal_kv_put(self._namespace, content, overwrite=False, namespace=STORE):
            return False
        group = placement_group(
            [bundle.resources for bundle in bundles],
            strategy=STRATEGY,
            name=GROUP,
            lifetime="detached",
            bundle_label_selector=[bundle.labels for bundle in bundles],
        )
        kind = ray.remote(_HostedProcess)
        for index, bundle in enumerate(bundles):
            own = dict(bundle.resources)
            kind.options(
                name=bundle.process,
                namespace=self._namespace,
                lifetime="detached",
                max_restarts=RESTARTS,
                num_cpus=own.pop("CPU"),
                num_gpus=own.pop("GPU", 0),
                memory=own.pop("memory", None),
                resources=own,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            ).remote(bundle.process)
        return True

    def addresses(self) -> list[str]:
        """Return the host of each process, in order; empty for a process without a host yet."""
        return _addresses()

    def ask(self, processes: Sequence[str]) -> tuple[dict[str, ActorReport], dict[str, str]]:
        """Return actors' reports, and why other actors are gone; late ones are in neither."""
        reports: dict[str, ActorReport] = {}
        gone: dict[str, str] = {}
        for process in processes:
            if process not in self._asked:
                try:
                    self._asked[process] = self._actor(process).report.remote()
                except ValueError:
                    gone[process] = "its actor is gone"
        asked = {ref: process for process, ref in self._asked.items()}
        done, _ = (
            ray.wait(list(asked), num_returns=len(asked), timeout=ASK_S) if asked else ([], [])
        )
        for ref in done:
            process = asked[ref]
            del self._asked[process]
            try:
                reports[process] = msgspec.json.decode(ray.get(ref), type=ActorReport)
            except (ActorDiedError, ActorUnschedulableError) as error:
                gone[process] = _last_line(error)
            except RayError:
                continue  # Ray starts it again
        return reports, gone

    def end(self, processes: Sequence[str], *, is_hurried: bool) -> None:
        """Tell actors to end their processes."""
        for process in processes:
            with contextlib.suppress(ValueError):
                self._actor(process).end.remote(is_hurried=is_hurried)

    def start_command(self, process: str, name: str, words: Sequence[str]) -> None:
        """Start a command on the host of a process. Raises `NodeError` if its actor is gone."""
        self._told(self._found(process).start_command.remote(name, list(words)))

    def read_command(self, process: str, name: str) -> CommandSaid:
        """Return the output of a command since the last call. Raises `NodeError`."""
        said = self._told(self._found(process).read_command.remote(name))
        return msgspec.json.decode(said, type=CommandSaid)

    def stop_command(self, process: str, name: str) -> None:
        self._told(self._found(process).stop_command.remote(name))

    def remove(self, processes: Sequence[str]) -> None:
        """Kill the actors, which ends their processes, and give back what they reserved."""
        actors = []
        for process in processes:
            with contextlib.suppress(ValueError):
                actors.append(self._actor(process))
        if actors and any(self.addresses()):
            discarded = [actor.discard.remote() for actor in actors]
            ray.wait(discarded, num_returns=len(discarded), timeout=ASK_S)
        for actor in actors:
            ray.kill(actor, no_restart=True)
        group = _group()
        if group is not None:
            remove_placement_group(group)
        internal_kv._internal_kv_del(self._namespace, namespace=STORE)

    def _found(self, process: str) -> "ray.actor.ActorHandle":
        try:
            return self._actor(process)
        except ValueError as error:
            raise NodeError(f"the actor of {process} is gone") from error

    def _told(self, reference: "ray.ObjectRef[bytes]") -> bytes:
        """Return the answer of an actor. Raises `NodeError` if there is none."""
        try:
            return bytes(ray.get(reference, timeout=COMMAND_S) or b"")
        except RayError as error:
            raise NodeError(f"an actor does not answer: {_last_line(error)}") from error

    def _actor(self, process: str) -> "ray.actor.ActorHandle":
        return ray.get_actor(process, namespace=self._namespace)


class _HostedProcess(ProcessActor):
    """The actor that Ray makes. Its only argument shows no secret."""

    def __init__(self, process: str) -> None:
        # Ray runs actors with a nice value of 15, which the process would inherit.
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        context = ray.get_runtime_context()
        orders = _orders(context.namespace)
        if orders is None:
            raise NodeError(f"{process} was ended before it started")
        # Ray may be looking for a host for another bundle at this moment.
        while not all(addresses := _addresses()):
            time.sleep(WATCH_S)
        came_back = bool(context.was_current_actor_reconstructed)
        super().__init__(process, orders, addresses, _addresses_now, came_back=came_back)


def _orders(namespace: str) -> RayOrders | None:
    content = internal_kv._internal_kv_get(namespace, namespace=STORE)
    return msgspec.json.decode(content, type=RayOrders) if content is not None else None


def _group() -> PlacementGroup | None:
    """Return the placement group of this namespace."""
    try:
        return get_placement_group(GROUP)
    except ValueError:
        return None


def _addresses() -> list[str]:
    """Return the address of each bundle, in order; empty for a bundle without a host yet."""
    group = _group()
    if group is None:
        return []
    hosts = {one["NodeID"]: one["NodeManagerAddress"] for one in ray.nodes() if one["Alive"]}
    placed = placement_group_table(group).get("bundles_to_node_id", {})
    return [hosts.get(node_id, "") for _, node_id in sorted(placed.items())]


def _addresses_now() -> list[str]:
    """Return `_addresses`, or nothing while Ray's control store does not answer."""
    try:
        return _addresses()
    except (RayError, RuntimeError, OSError):
        return []


def _check_answers(address: str) -> None:
    """Raise `NodeError` if nothing listens there, because Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise NodeError(
            f"Ray does not answer at {address} ({error}): give the HOST:PORT that `ray start "
            "--head` has printed, from a host that has joined the Ray cluster"
        ) from error


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Keep the command's signal handlers, which Ray replaces, and keep its stderr clean."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [(number, signal.getsignal(number)) for number in numbers]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)
