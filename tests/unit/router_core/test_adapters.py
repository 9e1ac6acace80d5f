"""Routers and nodes agree on the adapters of run time, in whatever order their messages come."""

import asyncio
import dataclasses
import random
from collections import deque
from types import SimpleNamespace

import pytest

from baton.node.adapters import AGAIN_S, AdapterSlots
from baton.node.executor import AdapterLoad, AdapterOutcome
from baton.node.scheduling.scheduler import NodeLimits
from baton.protocol.adapters import MAX_ENTRIES, AdapterEntry, AdapterList, lora_version
from baton.protocol.errors import BatonError, Overloaded, RequestError
from baton.protocol.ids import Epoch, NodeId
from baton.protocol.messages import (
    AdapterLoaded,
    AdaptersHeld,
    ListAdapters,
    LoadAdapter,
    Ready,
)
from baton.router.core import adapters as router_adapters
from baton.router.core.adapters import ClusterAdapters
from baton.router.core.registry import Registry
from tests.support.async_tests import on_a_loop
from tests.support.choosing import PAIRS, choose, cluster, place
from tests.support.scripted_nodes import hello_of, node_info

MAX_LORAS = 2


class Disk:
    """The executor of a node, which reads the digests of `files` by their path."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files
        self.loads: deque[AdapterLoad] = deque()

    def load_adapter(self, load: AdapterLoad) -> None:
        self.loads.append(load)

    def end(self) -> AdapterOutcome:
        load = self.loads.popleft()
        digest = self.files.get(load.path, "")
        return AdapterOutcome(load, digest, "" if digest else "no such folder")


class World:
    """Routers and nodes with a queue in each direction between each two of them."""

    def __init__(self, num_routers: int, num_nodes: int, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.files = {f"/{name}": f"{name}0" for name in "abcd"}
        self.queues: dict[tuple[str, str], deque[object]] = {}
        self.registries = []
        self.routers = []
        self.in_use: set[str] = set()
        self.now_s = 0.0
        for number in range(num_routers):
            registry = Registry()
            self.registries.append(registry)

            def send(node: NodeId, message: object, number: int = number) -> None:
                self.queues.setdefault((f"r{number}", node), deque()).append(message)

            self.routers.append(
                ClusterAdapters(registry, send, Epoch(f"epoch-{number}"))
            )
        self.nodes: dict[str, AdapterSlots] = {}
        self.disks: dict[str, Disk] = {}
        for number in range(num_nodes):
            self.start(f"n{number}")

    def start(self, name: str, life: int = 0) -> None:
        """Start a node, again if it was there: its queues and adapters are gone."""
        for key in [key for key in self.queues if name in key]:
            del self.queues[key]
        limits = NodeLimits(8, 8, 100, max_loras=MAX_LORAS)
        scheduler = SimpleNamespace(
            limits=limits, loras_in_use=lambda: self.in_use | {""}
        )
        self.disks[name] = Disk(self.files)
        self.nodes[name] = AdapterSlots(scheduler, self.disks[name])
        role = "prefill" if name == "n0" else "decode"
        info = node_info(name, role, epoch=f"{name}-{life}")
        for registry, router in zip(self.registries, self.routers, strict=True):
            for change in registry.gone(NodeId(name)):
                router.left(change.node)
            registry.hello(0.0, NodeId(name), hello_of(info))
            registry.ready(0.0, NodeId(name), Ready(info))
            router.entered(info, is_allowed=True)

    def limits_of(self, name: str) -> set[str]:
        return self.nodes[name]._held

    def step(self) -> bool:
        """Let one thing happen, and return False if there is nothing left."""
        ready = [key for key, queue in self.queues.items() if queue]
        ready += [("disk", name) for name, disk in self.disks.items() if disk.loads]
        if not ready:
            return False
        source, target = self.rng.choice(ready)
        if source == "disk":
            self.nodes[target].loaded(self.now_s, self.disks[target].end())
            self.turn(target)
            return True
        message = self.queues[source, target].popleft()
        match message:
            case LoadAdapter():
                self.nodes[target].load(int(source[1:]), message)
                self.turn(target)
            case ListAdapters(entries=entries):
                self.nodes[target].take_list(int(source[1:]), entries)
                self.turn(target)
            case AdapterLoaded():
                self.routers[int(target[1:])].loaded(NodeId(source), message)
            case AdaptersHeld():
                self.routers[int(target[1:])].held(NodeId(source), message)
        return True

    def turn(self, name: str) -> None:
        node = self.nodes[name]
        node.begin(self.now_s)
        for origin, message in node.take_replies():
            self.queues.setdefault((name, f"r{origin}"), deque()).append(message)
        if (change := node.take_change()) is not None:
            for origin in range(len(self.routers)):
                self.queues.setdefault((name, f"r{origin}"), deque()).append(change)

    async def settle(self, *tasks: "asyncio.Task[None]") -> None:
        """Let everything happen until nothing more does, and the tasks are done."""
        for _ in range(100_000):
            for _ in range(3):
                await asyncio.sleep(0)
            if not self.step() and all(task.done() for task in tasks):
                return
        raise AssertionError("it never ends")

    async def load(
        self, router: int, name: str, path: str, **more: bool
    ) -> BatonError | None:
        how = {"in_place": False, **more}
        loading = asyncio.ensure_future(
            self.routers[router].load(name, path, others=("base",), **how)
        )
        await self.settle(loading)
        error = loading.exception()
        assert error is None or isinstance(error, BatonError)
        return error


def agreed(world: World) -> dict[str, str]:
    """What all routers serve, which all nodes have."""
    served = [router.versions for router in world.routers]
    assert all(each == served[0] for each in served)
    for name in world.nodes:
        assert set(served[0].values()) <= world.limits_of(name)
        for registry in world.registries:
            node = registry.node(NodeId(name))
            assert node is not None
            assert node.loras == world.limits_of(name)
    return served[0]


@on_a_loop
async def test_all_nodes_load_or_none_does():
    world = World(2, 3)
    assert await world.load(0, "sql", "/a") is None
    assert agreed(world) == {"sql": lora_version("sql", "a0")}
    world.disks["n2"].files = {}
    error = await world.load(1, "poems", "/b")
    assert isinstance(error, RequestError)
    assert "n2" in error.message
    world.disks["n2"].files = {"/b": "other"}
    error = await world.load(1, "poems", "/b")
    assert "/b" in str(error)
    assert agreed(world) == {"sql": lora_version("sql", "a0")}


@on_a_loop
async def test_what_cannot_be_loaded_is_refused_by_its_field():
    world = World(1, 2)
    for name, path, param in (
        ("base", "/a", "lora_name"),
        ("two words", "/a", "lora_name"),
        ("a=b", "/a", "lora_name"),
        ("", "/a", "lora_name"),
        ("sql", "/a\0", "lora_path"),
        ("sql", "/no", "lora_path"),
    ):
        error = await world.load(0, name, path)
        assert isinstance(error, RequestError)
        assert (error.http_status, error.param) == (400, param)
    assert await world.load(0, "sql", "/a") is None
    assert "set load_inplace to true" in str(await world.load(0, "sql", "/a"))
    assert await world.load(0, "poems", "/b") is None
    assert "model.max_loras" in str(await world.load(0, "more", "/c"))
    assert await world.load(0, "sql", "/c", in_place=True) is None
    with pytest.raises(RequestError) as missing:
        await world.routers[0].unload("more")
    assert missing.value.http_status == 404
    assert isinstance(await World(1, 0).load(0, "sql", "/a"), Overloaded)


@on_a_loop
async def test_an_adapter_that_requests_use_keeps_its_slot():
    world = World(1, 2)
    await world.load(0, "sql", "/a")
    await world.load(0, "poems", "/b")
    first = world.routers[0].versions["sql"]
    world.in_use = {first}
    assert await world.load(0, "sql", "/c", in_place=True) is None
    assert first in world.limits_of("n0")
    assert "requests still use" in str(await world.load(0, "sql", "/d", in_place=True))
    # A change of another router finds no slot either, until the requests have ended.
    world.in_use.add(lora_version("sql", "c0"))
    later = AdapterEntry("sql", 9, "other", "/d", "d0")
    world.nodes["n1"].take_list(0, (later,))
    world.turn("n1")
    await world.settle()
    assert later.lora not in world.limits_of("n1")
    world.in_use = set()
    world.now_s += AGAIN_S
    for name in world.nodes:
        world.turn(name)
    await world.settle()
    assert agreed(world)["sql"] == later.lora
    assert await world.load(0, "sql", "/d", in_place=True) is None
    assert first not in world.limits_of("n0")
    assert agreed(world)["sql"] == lora_version("sql", "d0")


@on_a_loop
async def test_nodes_that_come_back_load_what_the_others_have():
    world = World(2, 3)
    await world.load(0, "sql", "/a")
    world.start("n1", life=1)
    node = world.registries[0].node(NodeId("n1"))
    assert node is not None
    assert not node.loras
    await world.settle()
    assert agreed(world) == {"sql": lora_version("sql", "a0")}
    world.files["/a"] = "changed"  # so what it reads is another adapter
    world.start("n1", life=2)
    await world.settle()
    assert world.limits_of("n1") == set()
    world.files["/a"] = "a0"  # as when a volume is mounted late
    world.turn("n1")
    assert not world.step()
    world.now_s += AGAIN_S
    assert world.nodes["n1"].has_work
    world.turn("n1")
    await world.settle()
    assert agreed(world) == {"sql": lora_version("sql", "a0")}
    assert not world.nodes["n1"].has_work


@on_a_loop
async def test_a_node_that_leaves_during_a_load_is_not_waited_for():
    world = World(1, 2)
    loading = asyncio.ensure_future(
        world.routers[0].load("sql", "/a", in_place=False, others=())
    )
    await asyncio.sleep(0)
    world.start("n1", life=1)
    await world.settle(loading)
    assert loading.exception() is None
    assert agreed(world) == {"sql": lora_version("sql", "a0")}


@on_a_loop
async def test_a_node_that_never_answers_is_named(monkeypatch):
    monkeypatch.setattr(router_adapters, "LOAD_S", 0.01)
    world = World(1, 2)
    world.queues.clear()
    with pytest.raises(BatonError, match="no answer from n0, n1 within") as error:
        await world.routers[0].load("sql", "/a", in_place=False, others=())
    assert error.value.http_status == 504


@pytest.mark.parametrize("seed", range(40))
@on_a_loop
async def test_routers_agree_after_any_changes_at_once(seed):
    world = World(3, 3, seed)
    rng = random.Random(seed)
    lives = 0
    for _ in range(12):
        router = world.routers[rng.randrange(3)]
        name = rng.choice(("sql", "poems"))
        path = rng.choice(("/a", "/b", "/c", "/none"))
        change = rng.choice(("load", "load", "unload", "restart", "settle"))
        if change == "restart":
            lives += 1
            world.start(f"n{rng.randrange(3)}", lives)
        elif change == "settle":
            await world.settle()
        else:
            work = router.load(name, path, in_place=True, others=())
            if change == "unload":
                work.close()
                work = router.unload(name)
            task = asyncio.ensure_future(work)
            task.add_done_callback(lambda done: done.exception())
            for _ in range(rng.randrange(10)):
                await asyncio.sleep(0)
                world.step()
    await world.settle(
        *(t for t in asyncio.all_tasks() if t is not asyncio.current_task())
    )
    agreed(world)


def test_an_attempt_goes_only_to_nodes_that_have_its_adapter():
    registry = cluster(*PAIRS)
    attempt = dataclasses.replace(place(), lora="sql=00")
    assert choose(registry, attempt) is None
    registry.holds(NodeId("p1"), {"sql=00"})
    version = registry.version
    assert choose(registry, attempt) is None
    registry.holds(NodeId("d0"), {"sql=00", "sql=01"}, are_all=True)
    assert registry.version > version
    assert choose(registry, attempt) == ("p1", "d0")


def test_of_two_changes_the_later_one_counts_in_any_order():
    changes = [
        AdapterEntry("a", 1, "r1", "/a", "0"),
        AdapterEntry("a", 2, "r1"),
        AdapterEntry("a", 2, "r2", "/b", "1"),
        AdapterEntry("b", 1, "r1", "/b", "1"),
    ]
    found = set()
    for seed in range(20):
        mine = AdapterList()
        for change in random.Random(seed).sample(changes, len(changes)):
            mine.merge((change,))
        assert not mine.merge(changes)
        assert not mine.is_ahead_of(changes)
        assert mine.is_ahead_of(changes[:2])
        assert mine.next_number() == 3
        found.add(mine.entries)
    assert found == {(changes[2], changes[3])}


def test_removed_adapters_are_forgotten_before_they_are_too_many():
    mine = AdapterList()
    mine.merge([AdapterEntry("kept", 1, "r", "/a", "0")])
    mine.merge([AdapterEntry(f"n{i}", i + 2, "r") for i in range(2 * MAX_ENTRIES)])
    assert len(mine.entries) == MAX_ENTRIES
    assert set(mine.loaded) == {"kept"}
