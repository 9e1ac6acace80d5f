"""Faults of the network: it refuses, cuts, drops and delays what processes say to one another."""

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tests.sim.members import Member, SimNode
from tests.sim.network import Pair
from tests.sim.routers import SimRouter

if TYPE_CHECKING:
    from tests.sim.world import World


async def cut(world: "World", node: SimNode, router: SimRouter, seconds: float) -> None:
    await _cut(world, (node.name, router.name), seconds)


async def cut_peers(
    world: "World", node: SimNode, _router: SimRouter, seconds: float
) -> None:
    await _cut(world, (node.name, _peer_of(world, node).name), seconds)


async def drop(
    world: "World", node: SimNode, router: SimRouter, seconds: float
) -> None:
    await _silence(world, _both_ways(node, router), 3 * seconds)


async def drop_peers(
    world: "World", node: SimNode, _router: SimRouter, seconds: float
) -> None:
    await _silence(world, _both_ways(node, _peer_of(world, node)), 3 * seconds)


async def drop_one_way(
    world: "World", node: SimNode, router: SimRouter, seconds: float
) -> None:
    direction = world.rng.choice(_both_ways(node, router))
    await _silence(world, [direction], 3 * seconds)


async def drop_peers_one_way(
    world: "World", node: SimNode, _router: SimRouter, seconds: float
) -> None:
    direction = world.rng.choice(_both_ways(node, _peer_of(world, node)))
    await _silence(world, [direction], 3 * seconds)


async def isolate_node(
    world: "World", node: SimNode, _router: SimRouter, seconds: float
) -> None:
    """Silence a node, whose memory can still be read, and which can read that of others."""
    await _silence(world, _directions(node, (*world.routers, *world.nodes)), seconds)


async def refuse(
    world: "World", node: SimNode, router: SimRouter, seconds: float
) -> None:
    """Refuse new sessions, as between processes that have not the same keys."""
    pair = node.name, router.name
    world.network.cut.add(pair)
    await asyncio.sleep(3 * seconds)
    world.network.cut.discard(pair)


async def slow_names(
    world: "World", _node: SimNode, _router: SimRouter, seconds: float
) -> None:
    world.network.resolving_s = seconds
    await asyncio.sleep(seconds)
    world.network.resolving_s = 0.0
    world.network.resolved_s = world.loop.time() + seconds


async def strand_node(
    world: "World", node: SimNode, router: SimRouter, seconds: float
) -> None:
    """Let streams leave a node that no router reaches, then kill all who know of it."""
    directions = _directions(node, world.routers)
    for direction in directions:
        world.network.fall_silent(direction)
    await asyncio.sleep(4.0 + seconds)
    gone = [
        router,
        *(one for one in world.nodes if one.role == "decode" and one is not node),
    ]
    for one in gone:
        one.kill()
    for direction in directions:
        world.network.speak_again(direction)
    await asyncio.sleep(3.0)
    for one in gone:
        one.start()


async def drain_silent_node(
    world: "World", node: SimNode, _router: SimRouter, seconds: float
) -> None:
    """End a node whose last words reach the routers after those of the next process."""
    directions = [(node.name, router.name) for router in world.routers]
    for direction in directions:
        world.network.fall_silent(direction)
    node.drain()
    await asyncio.sleep(min(seconds / 2, 2.0))
    node.kill()
    node.start()
    for direction in directions:
        world.network.speak_again(direction)


def _peer_of(world: "World", node: SimNode) -> SimNode:
    role = "decode" if node.role == "prefill" else "prefill"
    return world.rng.choice([one for one in world.nodes if one.role == role])


def _both_ways(one: Member, other: Member) -> list[Pair]:
    return [(one.name, other.name), (other.name, one.name)]


def _directions(node: SimNode, others: Iterable[Member]) -> list[Pair]:
    return [
        pair
        for other in others
        if other is not node
        for pair in _both_ways(node, other)
    ]


async def _cut(world: "World", pair: Pair, seconds: float) -> None:
    world.network.cut.add(pair)
    world.network.sever(*pair)
    await asyncio.sleep(seconds)
    world.network.cut.discard(pair)


async def _silence(world: "World", directions: list[Pair], seconds: float) -> None:
    for direction in directions:
        world.network.fall_silent(direction)
    await asyncio.sleep(seconds)
    for direction in directions:
        world.network.speak_again(direction)


async def lie(
    world: "World", node: SimNode, _router: SimRouter, seconds: float
) -> None:
    """Let a node's transports report what they did not read, where checksums can tell."""
    if world.verifies_kv and not node.process.is_dead:
        memory = node.memory
        memory.lies = True
        await asyncio.sleep(3 * seconds)
        memory.lies = False
