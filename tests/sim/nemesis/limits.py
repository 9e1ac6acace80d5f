"""More than a process can take: floods, large bodies, no descriptors, no memory, no blocks."""

import asyncio
from typing import TYPE_CHECKING

from baton.protocol.codec import to_node_codec, to_router_codec
from baton.protocol.ids import Epoch, NodeId
from baton.protocol.messages import Heartbeat, Load
from tests.sim.clock import Process
from tests.sim.http import Exchange
from tests.sim.members import SimNode
from tests.sim.network import SimChannels
from tests.sim.routers import SimRouter, key_header
from tests.sim.tiers import DAMAGES, damage

if TYPE_CHECKING:
    from tests.sim.world import World

NUM_FLOODING = 24_000  # messages at once, of one peer
LARGE_BYTES = 3 << 20  # of a body


async def flood(
    world: "World", _node: SimNode, router: SimRouter, _seconds: float
) -> None:
    """Let a peer say more than the router can hear at once."""
    process = Process(world.loop, "flood")
    channels = SimChannels(world.network, process, lambda: None, router.keys)
    name = NodeId("flood")
    dialer = channels.dial(
        router.endpoint,
        f"heartbeats:{name}".encode(),
        to_router_codec(),
        to_node_codec(),
    )
    await asyncio.sleep(1.0)
    for number in range(NUM_FLOODING):
        dialer.send(Heartbeat(name, Epoch("flood"), Load(number)))
    await asyncio.sleep(3.0)
    dialer.close()
    process.kill()


async def send_large_body(
    world: "World", _node: SimNode, _router: SimRouter, _seconds: float
) -> None:
    """Send a prompt that no model can take, which any router may get."""
    body = {"model": "sim", "prompt": "x" * LARGE_BYTES}
    tenant = world.tenants[0] if world.tenants else None
    headers = {"Content-Type": "application/json", **key_header(tenant)}
    exchange = Exchange(
        world.port, "POST /v1/completions", lambda *_: None, body, headers
    )
    if exchange.begin():
        await asyncio.wait([exchange.ended], timeout=5.0)
        exchange.leave()


async def take_descriptors(
    world: "World", node: SimNode, router: SimRouter, seconds: float
) -> None:
    """Let a process open and accept nothing, as after EMFILE."""
    member = world.later_rng.choice((node, router))
    process = member.process
    process.is_out_of_descriptors = True
    await asyncio.sleep(seconds)
    process.is_out_of_descriptors = False


async def take_memory(
    world: "World", node: SimNode, router: SimRouter, seconds: float
) -> None:
    """Let some of what a process sends fail, as with ENOMEM and ENOBUFS."""
    member = world.later_rng.choice((node, router))
    process = member.process
    process.is_out_of_memory = True
    await asyncio.sleep(seconds)
    process.is_out_of_memory = False


async def fill_disk(
    _world: "World", node: SimNode, _router: SimRouter, seconds: float
) -> None:
    """Let a node write nothing more to its folder."""
    memory = node.memory
    memory.has_full_disk = True
    await asyncio.sleep(seconds)
    memory.has_full_disk = False


async def slow_disk(
    _world: "World", node: SimNode, _router: SimRouter, seconds: float
) -> None:
    """Let a node's folder take seconds for everything."""
    memory = node.memory
    memory.has_slow_disk = True
    await asyncio.sleep(seconds)
    memory.has_slow_disk = False


async def damage_disk(
    world: "World", node: SimNode, _router: SimRouter, _seconds: float
) -> None:
    """Damage the files of a node's folder."""
    for store in node.stores:
        damage(store, world.tier_rng.choice(DAMAGES), world.tier_rng.randrange(1 << 20))


async def take_blocks(
    _world: "World", node: SimNode, _router: SimRouter, seconds: float
) -> None:
    """Let a pool have no free block, as with sequences that end later."""
    if node.process.is_dead or node.hoard:
        return
    hoard = node.hoard
    pool = node.pool
    hoard += pool.allocate(pool.num_free)
    await asyncio.sleep(seconds)
    pool.release(hoard)
    hoard.clear()
    node.wake()
