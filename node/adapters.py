"""The LoRA adapters that a node loads at run time, as its routers ask and as their list says.

A node loads one at a time, into a slot that no adapter of the list and no sequence needs. A removed
adapter keeps its slot until another one needs it, so requests that were let in before can finish.
"""

import math
from collections import deque

import msgspec

from baton.node.executor import AdapterLoad, AdapterOutcome, Executor
from baton.node.scheduling.plan import NO_ROUTER, Origin
from baton.node.scheduling.scheduler import Scheduler
from baton.protocol.adapters import AdapterEntry, AdapterList, lora_version
from baton.protocol.messages import (
    AdapterLoaded,
    AdaptersHeld,
    LoadAdapter,
    ToRouter,
)
from baton.runtime.log import logger

NOT_ALLOWED = "it was started without model.allow_runtime_lora_updating"

# After which an adapter of the list that could not be loaded is tried again.
AGAIN_S = 30.0

log = logger("node")


class WantedAdapter(msgspec.Struct, frozen=True):
    """An adapter that waits to be loaded: a router asks for it, or the list has it."""

    origin: Origin
    name: str
    path: str
    digest: str = ""  # that its files must have; empty: any


class AdapterSlots:
    """`scheduler.limits.run_time_loras` holds the adapters that requests may name."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._max_loras = scheduler.limits.max_loras
        self._held = scheduler.limits.run_time_loras
        self._list = AdapterList()
        # The version in each slot, in the order of loading: the one that is there longest first.
        self._slots: dict[int, str] = {}
        if self._max_loras:
            self._slots = dict.fromkeys(range(self._max_loras + 1), "")
        self._wanted: deque[WantedAdapter] = deque()
        self._loading: WantedAdapter | None = None
        self._replies: list[tuple[Origin, ToRouter]] = []
        self._asking: list[Origin] = []  # routers that wait for the state
        self._is_changed = False
        self._again_s = math.inf  # when what failed is tried again
        self._failed: set[str] = set()  # versions of the list that could not be loaded

    @property
    def is_loading(self) -> bool:
        return self._loading is not None

    @property
    def has_work(self) -> bool:
        """Return whether there is anything to do or to say, at once or later."""
        has_loads = (
            self._loading is not None or self._wanted or self._again_s < math.inf
        )
        return bool(has_loads or self._replies or self._asking or self._is_changed)

    def load(self, origin: Origin, message: LoadAdapter) -> None:
        """Load an adapter that is not in the list yet. `AdapterLoaded` answers."""
        self._wanted.append(WantedAdapter(origin, message.name, message.path))

    def take_list(self, origin: Origin, entries: tuple[AdapterEntry, ...]) -> None:
        """Take over a router's list, and load what is missing. `AdaptersHeld` answers."""
        self._is_changed = self._list.merge(entries) or self._is_changed
        self._want_missing()
        self._asking.append(origin)

    def forget(self, origin: Origin) -> None:
        """Drop what a router has asked for that is gone."""
        self._wanted = deque(
            one for one in self._wanted if one.origin != origin or one.digest
        )
        self._replies = [reply for reply in self._replies if reply[0] != origin]
        self._asking = [asking for asking in self._asking if asking != origin]

    def begin(self, now_s: float) -> None:
        """Give the executor the next load if it has none."""
        if now_s >= self._again_s:
            self._want_missing()
        while self._loading is None and self._wanted:
            wanted = self._wanted.popleft()
            if wanted.digest and lora_version(wanted.name, wanted.digest) in self._held:
                continue
            problem, slot = self._slot_for(wanted)
            if problem:
                self._answer(now_s, wanted, "", problem)
                continue
            self._is_changed = self._is_changed or bool(self._slots[slot])
            self._held.discard(self._slots.pop(slot))
            self._slots[slot] = ""
            self._loading = wanted
            self._executor.load_adapter(AdapterLoad(wanted.name, wanted.path, slot))

    def loaded(self, now_s: float, outcome: AdapterOutcome) -> None:
        """Note that a load has ended."""
        wanted = self._loading
        self._loading = None
        assert wanted is not None, "an outcome follows a load"
        problem = outcome.problem
        if not problem and wanted.digest not in ("", outcome.digest):
            problem = "its files differ from those that other nodes have loaded"
        version = lora_version(wanted.name, outcome.digest)
        if not problem and version not in self._held:
            self._slots[outcome.load.slot] = version
            self._held.add(version)
        self._is_changed = True
        self._answer(now_s, wanted, outcome.digest, problem)

    def take_replies(self) -> list[tuple[Origin, ToRouter]]:
        replies = self._replies
        asking = self._asking
        self._replies = []
        self._asking = []
        return replies + [(origin, self._state()) for origin in asking]

    def take_change(self) -> AdaptersHeld | None:
        """Return the state for all routers if it has changed since the last call."""
        is_changed = self._is_changed
        self._is_changed = False
        return self._state() if is_changed else None

    def _want_missing(self) -> None:
        """Load what the list has and this node has not."""
        self._again_s = math.inf
        self._wanted = deque(one for one in self._wanted if not one.digest)
        for entry in self._list.loaded.values() if self._max_loras else ():
            if entry.lora not in self._held:
                self._wanted.append(
                    WantedAdapter(NO_ROUTER, entry.name, entry.path, entry.digest)
                )

    def _state(self) -> AdaptersHeld:
        return AdaptersHeld(self._list.entries, tuple(sorted(self._held)))

    def _slot_for(self, wanted: WantedAdapter) -> tuple[str, int]:
        """Return why an adapter cannot be loaded, or an empty text and its slot."""
        if not self._max_loras:
            return NOT_ALLOWED, 0
        listed = self._list.loaded
        if not wanted.digest and len(listed.keys() - {wanted.name}) >= self._max_loras:
            text = f"{len(listed)} adapters are loaded, as many as model.max_loras allows: unload"
            return f"{text} another one first", 0
        needed = {
            entry.lora for entry in listed.values()
        } | self._scheduler.loras_in_use()
        free = [
            slot for slot, lora in self._slots.items() if not lora or lora not in needed
        ]
        if not free:
            return "requests still use adapters that were unloaded: try again later", 0
        return "", min(free, key=lambda slot: bool(self._slots[slot]))

    def _answer(
        self, now_s: float, wanted: WantedAdapter, digest: str, problem: str
    ) -> None:
        if problem and wanted.origin == NO_ROUTER:
            self._again_s = now_s + AGAIN_S
        if wanted.origin != NO_ROUTER:
            reply = AdapterLoaded(wanted.name, wanted.path, digest, problem)
            self._replies.append((wanted.origin, reply))
        if not problem:
            log.info("an adapter was loaded", adapter=wanted.name, path=wanted.path)
        elif (
            wanted.origin == NO_ROUTER
            and (wanted.name + wanted.digest) not in self._failed
        ):
            self._failed.add(wanted.name + wanted.digest)
            log.warning(
                "an adapter of the cluster cannot be loaded here, so its requests go elsewhere",
                adapter=wanted.name,
                path=wanted.path,
                reason=problem,
            )
