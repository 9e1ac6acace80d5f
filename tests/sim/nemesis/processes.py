"""Faults of processes and of their host: they die, end and stand still, and others replace them."""

import asyncio
import contextlib
from typing import TYPE_CHECKING, cast

from baton.protocol.messages import PROTOCOL_VERSION
from tests.sim.members import DRAIN_S, FIRST_DOUBLE, Member, SimNode
from tests.sim.routers import SimRouter

if TYPE_CHECKING:
    from tests.sim.world import World


async def kill_node(
    _world: "World", node: SimNode, _router: SimRouter, seconds: float
) -> None:
    node.kill()
    await asyncio.sleep(seconds / 2)
    node.start()


async def kill_ranks(
    world: "World", node: SimNode, _router: SimRouter, seconds: float
) -> None:
    """Kill the process of a rank, then of a node to which requests may go on.

    A node has to end whole, and to start again.
    """
    rng = world.later_rng
    others = [one for one in world.nodes if one.role == node.role and one is not node]
    for victim in (node, *others[:1]):
        died = victim.died
        victim.lose_rank(rng.randrange(2), rng.choice((0.0, 0.05, 0.5)))
        with contextlib.suppress(TimeoutError):  # a frozen node learns of it later
            async with asyncio.timeout(seconds):
                await died.wait()
        await asyncio.sleep(rng.choice((0.1, 0.5)))


async def drain_node(
    _world: "World", node: SimNode, _router: SimRouter, seconds: float
) -> None:
    if node.is_up:
        node.drain()
        await node.died.wait()
        await asyncio.sleep(seconds / 4)
        node.start()


async def freeze_node(
    _world: "World", node: SimNode, _router: SimRouter, seconds: float
) -> None:
    node.freeze()
    await asyncio.sleep(seconds)
    node.thaw()


async def suspend_node(
    _world: "World", node: SimNode, _router: SimRouter, seconds: float
) -> None:
    node.freeze()
    await asyncio.sleep(seconds)
    node.thaw(60.0)


async def hang_node(
    world: "World", node: SimNode, _router: SimRouter, seconds: float
) -> None:
    node.hung_until_s = max(node.hung_until_s, world.loop.time() + 2 * seconds)
    await asyncio.sleep(2 * seconds)


async def kill_router(
    _world: "World", _node: SimNode, router: SimRouter, seconds: float
) -> None:
    router.kill()
    await asyncio.sleep(seconds / 2)
    router.start()


async def end_router(
    _world: "World", _node: SimNode, router: SimRouter, seconds: float
) -> None:
    if router.is_up:
        router.end()
        await router.died.wait()
        await asyncio.sleep(seconds / 2)
        router.start()


async def freeze_router(
    _world: "World", _node: SimNode, router: SimRouter, seconds: float
) -> None:
    router.freeze()
    await asyncio.sleep(seconds)
    router.thaw()


async def stall_router(
    _world: "World", _node: SimNode, router: SimRouter, seconds: float
) -> None:
    router.stall()
    await asyncio.sleep(seconds)
    router.unstall()


async def kill_router_freeze_node(
    world: "World", node: SimNode, router: SimRouter, seconds: float
) -> None:
    """Let a router die, and its node answer to no other for a while."""
    router.kill()
    await asyncio.sleep(world.rng.uniform(0, 0.3))
    node.freeze()
    await asyncio.sleep(0.2)
    router.start()
    await asyncio.sleep(seconds)
    node.thaw()


async def start_other_version(
    _world: "World", node: SimNode, _router: SimRouter, seconds: float
) -> None:
    """Start the next version of a node too early, and go back to the one before."""
    for node.speaks, after_s in (
        (PROTOCOL_VERSION + 1, seconds),
        (PROTOCOL_VERSION, 0.0),
    ):
        node.kill()
        node.start()
        await asyncio.sleep(after_s)


async def double_node(
    world: "World", node: SimNode, _router: SimRouter, seconds: float
) -> None:
    """Run another process of the same name, from a frozen one's place or refused."""
    twin = SimNode(
        world, node.name, node.role, node.num_blocks, FIRST_DOUBLE + len(world.twins)
    )
    world.twins.append(twin)
    twin.start()
    await asyncio.sleep(seconds)
    twin.drain()
    await twin.died.wait()


async def bring_other_weights(
    world: "World", node: SimNode, _router: SimRouter, seconds: float
) -> None:
    """Run a node with other weights, which a router that has the model must refuse."""
    if all(router.is_up and router.core.registry.model for router in world.routers):
        name = f"w{len(world.twins)}"
        stranger = SimNode(world, name, node.role, node.num_blocks, model="other")
        world.twins.append(stranger)
        stranger.start()
        await asyncio.sleep(seconds)
        stranger.kill()


async def pause_all(
    world: "World", _node: SimNode, _router: SimRouter, seconds: float
) -> None:
    """Let the host stand still. Then threads go on in any order."""
    for member in _members(world):
        member.freeze()
    await asyncio.sleep(seconds * world.rng.choice((1, 4)))
    await _thaw_all(world)


async def slow_motion(
    world: "World", _node: SimNode, _router: SimRouter, seconds: float
) -> None:
    """Let each process, or its threads alone, run for moments only, as on a host that swaps."""
    rng = world.rng
    members = _members(world)
    lasts_s = 3 * seconds
    ends_s = world.loop.time() + lasts_s
    for member in members:
        member.freeze()
    while world.loop.time() < ends_s:
        member = rng.choice(members)
        member.thaw(stalled_s=rng.choice((0.0, 0.02, lasts_s)))
        await asyncio.sleep(rng.choice((0.005, 0.02, 0.2, 1.0)))
        member.freeze()
        await asyncio.sleep(rng.choice((0.0, 0.05, 0.3, 1.0)))
    await _thaw_all(world)


async def exchange_keys(
    world: "World", _node: SimNode, _router: SimRouter, seconds: float
) -> None:
    """Exchange the cluster's key in three steps, with a restart of every process after each."""
    if world.is_exchanging_keys:
        return
    world.is_exchanging_keys = True
    (old,) = world.key_names
    new = f"{old}'"
    for world.key_names in ((old, new), (new, old), (new,)):
        for member in _members(world):
            await _restart(world, member, seconds)
    world.is_exchanging_keys = False


async def _restart(world: "World", member: Member, seconds: float) -> None:
    """End a process, gently or not, and start the next one, unless another fault does it."""
    before = member.process
    died = member.died
    if member.is_up and world.later_rng.random() < 0.5:
        end = (
            member.drain
            if isinstance(member, SimNode)
            else cast("SimRouter", member).end
        )
        end()
        with contextlib.suppress(TimeoutError):  # it may be frozen meanwhile
            async with asyncio.timeout(2 * DRAIN_S):
                await died.wait()
    if member.process is before:
        member.kill()
    await asyncio.sleep(seconds / 8)
    member.start()


async def step_clock_back(
    world: "World", _node: SimNode, _router: SimRouter, _seconds: float
) -> None:
    world.stepped_back_s += world.rng.choice((1.0, 60.0, 3600.0))


async def _thaw_all(world: "World") -> None:
    members = _members(world)
    world.rng.shuffle(members)
    for member in members:
        member.thaw(stalled_s=world.rng.choice((0.0, 0.0, 0.1, 1.0, 3.0)))
        await asyncio.sleep(world.rng.choice((0.0, 0.1, 1.0)))


def _members(world: "World") -> list[Member]:
    return [*world.routers, *world.nodes]
