"""The LoRA adapters that clients load and unload at run time: on all nodes, or on none.

A load asks each node in service to read the folder. Only when all have read the same files does the
router write it into its list, which it sends to the nodes; they pass it on to their other routers.
Of two changes of a name the later one counts everywhere. A node that joins gets the list, and no
request of an adapter before it has loaded it.
"""

import asyncio
import re
from collections.abc import Callable, Collection

import msgspec

from baton.protocol.adapters import (
    MAX_NAME,
    MAX_PATH,
    AdapterEntry,
    AdapterList,
    lora_version,
)
from baton.protocol.errors import NodeError, Overloaded, RequestError
from baton.protocol.ids import Epoch, NodeId
from baton.protocol.messages import (
    AdapterLoaded,
    AdaptersHeld,
    ListAdapters,
    LoadAdapter,
    NodeInfo,
    ToNode,
)
from baton.router.core.admission import ROLES
from baton.router.core.registry import Node, Registry
from baton.runtime.log import logger

LOAD_S = 300.0  # in which a node must have read an adapter
LIST_S = 10.0  # in which it must have taken over the list
_NAME = re.compile(r"[^\s=,\0]+")

log = logger("router")


class _Pending(msgspec.Struct):
    """A load for which nodes have yet to answer."""

    name: str
    path: str
    waits_for: dict[NodeId, Epoch]
    digests: dict[NodeId, str] = {}
    problem: str = ""


class ClusterAdapters:
    def __init__(
        self, registry: Registry, send: Callable[[NodeId, ToNode], None], epoch: Epoch
    ) -> None:
        self._registry = registry
        self._send = send
        self._epoch = epoch
        self._list = AdapterList()
        self._reported: dict[NodeId, tuple[AdapterEntry, ...]] = {}
        self._pending: _Pending | None = None
        self._changing = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def versions(self) -> dict[str, str]:
        """Return the name in requests of each adapter that is loaded, by the name for clients."""
        return {name: entry.lora for name, entry in self._list.loaded.items()}

    async def load(
        self, name: str, path: str, *, in_place: bool, others: Collection[str]
    ) -> None:
        """Load an adapter on all nodes in service. `others` are names that it cannot have.

        Raises `RequestError` with the first node's reason if one cannot load it; then none offers
        it. Raises `NodeError` for a node that does not answer, and `Overloaded` without nodes.
        """
        if not _NAME.fullmatch(name) or len(name) > MAX_NAME or name in others:
            text = f"an adapter's name has 1 to {MAX_NAME} characters, without spaces, = and commas"
            if name in others:
                text = f"the server already has a model of the name {name!r}"
            raise RequestError(text, param="lora_name")
        if len(path) > MAX_PATH or "\0" in path:
            raise RequestError(
                "lora_path is not the path of a folder", param="lora_path"
            )
        async with self._changing:
            if name in self._list.loaded and not in_place:
                text = (
                    f"the lora adapter {name!r} has already been loaded: set load_inplace to true "
                    "to load it in place"
                )
                raise RequestError(text, param="lora_name")
            digest = await self._read_everywhere(name, path)
            await self._enter(name, path, digest)

    async def unload(self, name: str) -> None:
        """Take an adapter out of service. Requests that use it go on.

        Raises a `RequestError` with status 404 if it is not loaded.
        """
        async with self._changing:
            if name not in self._list.loaded:
                text = f"the lora adapter {name!r} cannot be found"
                raise RequestError(
                    text, code="model_not_found", param="lora_name", http_status=404
                )
            await self._enter(name)

    # --- nodes ----------------------------------------------------------------------------------

    def entered(self, info: NodeInfo, *, is_allowed: bool) -> None:
        """Give a node the list, and ask for its own, which a router may lack that was away."""
        if is_allowed or self._list.entries:
            self._send(info.node_id, ListAdapters(self._list.entries))

    def left(self, node: NodeId) -> None:
        self._reported.pop(node, None)
        if self._pending is not None:  # it loads the adapter when it is back
            self._pending.waits_for.pop(node, None)
        self._changed.set()

    def loaded(self, node: NodeId, message: AdapterLoaded) -> None:
        pending = self._pending
        if pending is None or (pending.name, pending.path) != (
            message.name,
            message.path,
        ):
            return
        if pending.waits_for.pop(node, None) is None:
            return
        if message.problem:
            pending.problem = pending.problem or f"{node}: {message.problem}"
        else:
            pending.digests[node] = message.digest
            self._registry.holds(node, {lora_version(message.name, message.digest)})
        self._changed.set()

    def held(self, node: NodeId, message: AdaptersHeld) -> None:
        """Take over what a node has heard from other routers, and tell the nodes that lack it."""
        self._registry.holds(node, message.loras, are_all=True)
        self._reported[node] = message.entries
        if self._list.merge(message.entries):
            self._registry.changed()
            self._spread()
        elif self._list.is_ahead_of(message.entries):
            self._send(node, ListAdapters(self._list.entries))
        self._changed.set()

    # --- inside --------------------------------------------------------------------------------

    def _nodes(self) -> list[Node]:
        return [node for role in ROLES for node in self._registry.in_service(role)]

    def _spread(self) -> None:
        for node in self._registry.nodes:
            if node.info is not None:
                self._send(node.node_id, ListAdapters(self._list.entries))

    async def _read_everywhere(self, name: str, path: str) -> str:
        """Return the digest of an adapter that all nodes in service have read."""
        pending = _Pending(
            name, path, {node.node_id: node.epoch for node in self._nodes()}
        )
        self._pending = pending
        try:
            for node in pending.waits_for:
                self._send(node, LoadAdapter(name, path))
            async with asyncio.timeout(LOAD_S):
                while pending.waits_for and not pending.problem:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            slow = ", ".join(sorted(pending.waits_for))
            text = f"the adapter {name!r} was not loaded: no answer from {slow} within {LOAD_S:g} s"
            raise NodeError(text, http_status=504) from None
        finally:
            self._pending = None
        if pending.problem:
            text = f"the adapter {name!r} was not loaded: {pending.problem}"
            raise RequestError(text, code="adapter_not_loaded", param="lora_path")
        if not pending.digests:
            text = "no node is in service that could load an adapter"
            raise Overloaded(text, code="no_nodes", retry_after_s=1.0)
        if len(set(pending.digests.values())) > 1:
            first, *rest = sorted(pending.digests)
            other = next(
                node for node in rest if pending.digests[node] != pending.digests[first]
            )
            text = f"the adapter {name!r} was not loaded: {first} and {other} find other files at"
            raise RequestError(
                f"{text} {path}", code="adapter_not_loaded", param="lora_path"
            )
        return next(iter(pending.digests.values()))

    async def _enter(self, name: str, path: str = "", digest: str = "") -> None:
        """Write a change into the list, and wait until the nodes in service have it."""
        entry = AdapterEntry(name, self._list.next_number(), self._epoch, path, digest)
        self._list.merge((entry,))
        self._registry.changed()
        self._spread()
        log.info(
            "an adapter was " + ("loaded" if path else "unloaded"),
            adapter=name,
            path=path,
        )
        try:
            async with asyncio.timeout(LIST_S):
                while any(self._lacks(node.node_id) for node in self._nodes()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            log.warning("a node has not answered the list of adapters", adapter=name)

    def _lacks(self, node: NodeId) -> bool:
        return self._list.is_ahead_of(self._reported.get(node, ()))
