"""The processes of a simulated cluster, and its nodes, from production's parts."""

import asyncio
import itertools
import os
from collections.abc import Callable, Container, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from baton.decode_node.scheduler import DecodeScheduler
from baton.kv_transfer.connector import NodeConnector
from baton.kv_transfer.stores import FolderStore
from baton.kv_transfer.transports.addresses import ShmAddress
from baton.node.executor import Executor
from baton.node.heartbeat import HEARTBEAT_INTERVAL_S, HeartbeatThread, Vitals
from baton.node.loop import EngineLoop
from baton.node.records import NodeObserver
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.scheduler import NodeLimits
from baton.node.sockets import EngineSockets
from baton.prefill_node.scheduler import PrefillScheduler
from baton.protocol.codec import to_node_codec, to_router_codec
from baton.protocol.config import (
    LogConfig,
)
from baton.protocol.errors import NodeError
from baton.protocol.ids import Epoch, Key, NodeId
from baton.protocol.messages import (
    PREFETCHES,
    PREFIX_READS,
    PROTOCOL_VERSION,
    Crashed,
    Heartbeat,
    Hello,
    KVLayout,
    NodeFacts,
    NodeInfo,
    RankAddress,
    Role,
    StepLimits,
)
from baton.runtime.channels.keys import KeyPair, Keys
from tests.sim.clock import Process
from tests.sim.executor import BLOCK_BYTES, BLOCK_SIZE, NUM_HEADS, VOCAB, SimExecutor
from tests.sim.network import SimChannels, world_call_at
from tests.sim.rules import EOS, SimMasks
from tests.sim.tiers import RECORD_BYTES, SimTier
from tests.sim.transports import Owner, SimNixl, SimPort, SimShm, SimTransport

if TYPE_CHECKING:
    from tests.sim.world import World

COMPILE_S = (0.0, 0.005, 0.05, 0.4)  # that a node's thread takes for a grammar
DRAIN_S = 5.0
HAND_OVER_S = 2.0
FIRST_DOUBLE = 1000  # life of a node that uses the name of another

T = TypeVar("T")


class Member:
    """A place in the cluster, in which one process lives after the other."""

    def __init__(self, world: "World", name: str, life: int = 0) -> None:
        self.world = world
        self.name = name
        self.life = life
        self.process = Process(world.loop, name)
        self.process.is_dead = True

    def start(self) -> None:
        """Begin the next life, unless another fault has begun it."""
        if self.process.is_dead:
            self._begin()

    def _begin(self) -> None:
        self.life += 1
        offset_s = self.world.rng.uniform(0, 5000)
        self.process = Process(self.world.loop, self.name, offset_s)
        self.died = asyncio.Event()
        # A process reads its file at its start.
        self.keys = keys_of(self.world.key_names)

    @property
    def is_up(self) -> bool:
        process = self.process
        return not (process.is_dead or process.is_frozen or process.is_stalled)

    def kill(self) -> None:
        if not self.process.is_dead:
            self.process.kill()
            self.world.network.died(self.process)
            self.died.set()

    def freeze(self) -> None:
        if self.is_up:
            self.process.freeze()
            self.world.network.frozen(self.process)

    def thaw(self, clock_jump_s: float = 0.0, stalled_s: float = 0.0) -> None:
        """Go on, after a suspend with a clock that jumped. The loop may go on later than that."""
        process = self.process
        if process.is_frozen:
            process.clock_offset_s += clock_jump_s
            process.is_frozen = False
            process.is_stalled = True
            self.world.loop.run_at(self.world.loop.time() + stalled_s, self.unstall)

    def stall(self) -> None:
        """Let the loop stand still, and the threads that read and write its sockets work."""
        if self.is_up:
            self.process.is_stalled = True

    def unstall(self) -> None:
        """Let the loop go on, unless the whole process stands still."""
        if self.process.is_stalled and not self.process.is_frozen:
            self.process.thaw()


def keys_of(names: Iterable[str]) -> Keys:
    """Return the keys of a file. Those of the simulation are only names."""
    keys = Keys()
    keys.pairs = tuple(KeyPair(name.encode(), name.encode()) for name in names)
    return keys


class SimNode(Member):
    def __init__(
        self,
        world: "World",
        name: str,
        role: Role,
        num_blocks: int,
        life: int = 0,
        model: str = "model",
    ) -> None:
        super().__init__(world, name, life)
        self.model = model
        self.role: Role = role
        self.speaks = PROTOCOL_VERSION
        # Nodes that lend say the same.
        self.salt = 0 if world.lends else sum(name.encode())
        self.num_blocks = num_blocks
        self.num_ranks = world.num_ranks[role]
        self.hung_until_s = 0.0  # its loop does not turn, but its heartbeats are sent

    def _begin(self) -> None:
        super()._begin()
        self.hung_until_s = 0.0
        self.half_dead_s: float | None = None  # since when a rank of it is dead
        self.hoard: list[int] = []  # blocks that nobody else gets
        self._drain_by_s: float | None = None
        self._turn_at_s = float("inf")
        self._next_turn: asyncio.TimerHandle | None = None
        self.process.run(self._build)
        self.process.start(self._beat())

    def _build(self) -> None:
        world = self.world
        process = self.process
        self.epoch = Epoch(f"{self.name}-{self.life}")
        node_id = NodeId(self.name)
        self.vitals = Vitals()
        wake = self.wake
        endpoints = tuple(router.endpoint for router in world.routers)
        self.channels = SimChannels(world.network, process, wake, self.keys)
        hello = Hello(self.speaks, node_id, self.role, self.epoch)
        self.sockets = EngineSockets(endpoints, hello, self.channels, process.clock)
        heartbeats = SimChannels(world.network, process, lambda: None, self.keys)
        name = f"heartbeats:{self.name}".encode()
        self._heartbeats = [
            heartbeats.dial(endpoint, name, to_router_codec(), to_node_codec())
            for endpoint in endpoints
        ]
        self._heartbeat = HeartbeatThread(
            self.vitals, node_id, self.epoch, (), process.clock
        )
        bind = (
            self.sockets.listen(f"ipc://{self.epoch}") if self.role == "decode" else ""
        )
        self.executor = SimExecutor(
            process,
            self.num_blocks,
            self.salt,
            world.root,
            lambda: world.rng.uniform(*world.step_s),
            SimMasks(process.clock, lambda: world.later_rng.choice(COMPILE_S)),
        )
        self.executor.wake = wake
        self.pool = BlockPool(
            self.num_blocks, BLOCK_SIZE, state_blocks=world.state_blocks
        )
        own = world.pools[self.epoch] = Owner(
            process, self.executor, self.pool, self.num_ranks
        )
        kind = SimNixl if world.transport == "nixl" else SimShm
        self.stores = [
            self._store(rank) for rank in range(self.num_ranks) if world.num_slots
        ]
        transports: list[list[SimTransport]] = [
            [kind(world, own, rank)] for rank in range(self.num_ranks)
        ]
        for rank, store in enumerate(self.stores):
            transports[rank].append(SimTier(world, own, rank, store))
        self.executor.ports = tuple(
            SimPort(own, rank, transports[rank], world, wake)
            for rank in range(self.num_ranks)
        )
        self.memory = own
        address = ShmAddress("host", f"@{self.epoch}", b"n" * 16, self.epoch).encode()
        info = NodeInfo(
            node_id,
            self.epoch,
            self.role,
            bind,
            self.num_blocks,
            KVLayout(
                BLOCK_SIZE,
                BLOCK_BYTES // self.num_ranks,
                "layout",
                NUM_HEADS,
                state_blocks=world.state_blocks,
            ),
            (RankAddress({kind.name: address}),) * self.num_ranks,
            self.model,
            world.max_model_len,
            VOCAB,
            batch_invariant=world.promises_bits,
            compute="sim" if world.lends else self.name,
            reaches=(f"{kind.name}@host",),
            facts=NodeFacts(step=StepLimits(8, 32), features=self._features()),
        )
        self.info = info
        self.loop = self.loop_with(
            self.pool, self.executor, self.sockets, process.clock
        )
        self.scheduler = self.loop.scheduler
        process.state_of = self._state_of
        self.sockets.ready(info)
        self.vitals.note(is_ready=True)
        self.wake()

    def _features(self) -> tuple[str, ...]:
        if not self.world.lends:
            return ()
        return (PREFETCHES, PREFIX_READS) if self.role == "decode" else (PREFETCHES,)

    def _store(self, rank: int) -> FolderStore:
        """Open the files of a rank, which the lives of a node share. A double has others."""
        world = self.world
        is_double = self.life >= FIRST_DOUBLE
        folder = world.disk / (f"{self.name}-{self.life}" if is_double else self.name)
        folder.mkdir(exist_ok=True)
        block_bytes = BLOCK_BYTES // self.num_ranks
        num_bytes = world.num_slots * (block_bytes + RECORD_BYTES)
        maker = self.model.encode().ljust(16)
        store = FolderStore(folder, f"rank{rank}", num_bytes, block_bytes, maker)
        world.opened_stores.append(store)
        return store

    def loop_with(
        self,
        pool: BlockPool,
        executor: Executor,
        links: EngineSockets,
        clock: Callable[[], float],
    ) -> EngineLoop:
        limits = NodeLimits(
            32, 8, self.world.max_model_len, EOS, VOCAB, self.world.engine
        )
        make = DecodeScheduler if self.role == "decode" else PrefillScheduler
        connector = NodeConnector(self.info, self.world.transfer)
        observer = NodeObserver(
            self.vitals, self.info.node_id, LogConfig(stats_s=0.0), clock
        )
        return EngineLoop(
            make(pool, limits), executor, connector, links, observer, clock
        )

    def _state_of(self, request_id: str) -> str:
        scheduler = self.scheduler
        held: dict[str, Iterable[Key]]
        if isinstance(scheduler, DecodeScheduler):
            held = {
                "waiting": scheduler.requests.prompts,
                "running": scheduler._running,
                "leaving": scheduler._leaving,
            }
        else:
            held = {
                "waiting": [request.key for request in scheduler.requests.line],
                "computing": scheduler.requests.admitted,
                "held": scheduler.requests.prompts,
            }
        known = (
            state
            for state, keys in held.items()
            if any(k.request_id == request_id for k in keys)
        )
        return next(known, "unknown")

    @property
    def num_channels(self) -> int:
        return sum(not one.is_closed for one in self.channels.opened)

    def running(self) -> Iterable[Key]:
        return getattr(self.scheduler, "_running", ())

    def offers(self) -> list[tuple[Key, Epoch]]:
        """Return what this node holds for others."""
        sources = self.loop.connector._offers._sources.values()
        return [(source.key, source.peer[1]) for source in sources]

    def ended_receives(self) -> Container[Key]:
        return self.loop.connector._receives._tombstones._answers

    @property
    def longest_prefix_wait_s(self) -> float:
        """Return how long a prompt has waited for blocks of another node, while it had others."""
        waiting = [
            request.read for request in self.scheduler.requests.admitted.values()
        ]
        reads = [
            read
            for read in waiting
            if read is not None and len(read.landing) <= self.pool.num_free
        ]
        return max((self.process.clock() - read.began_s for read in reads), default=0.0)

    def check_tiers(self) -> None:
        """Check that every slot is free, held or written, and no file is larger than its slots."""
        saves = self.scheduler.tiers._saves.values()
        written = [slot for save in saves for slot in save.command.slots]
        for tier in self.scheduler.tiers.by_name.values():
            slots = [*tier._slots.values(), *tier._free, *tier._orphans, *written]
            if sorted(slots) != list(range(tier.num_slots)):
                self.world.problem(
                    f"{self.name} has lost slots, or uses some twice: {slots}"
                )
        for store in self.stores:
            if os.fstat(store._blocks).st_size > store.num_slots * store._block_bytes:
                self.world.problem(
                    f"{self.name} keeps more blocks in a folder than it may"
                )

    def check_ownership(self) -> None:
        """Check that every reference to a block has its owner."""
        owned = [0] * self.num_blocks
        for block in itertools.chain.from_iterable(self._owned()):
            owned[block] += 1
        if owned != self.pool._references:
            self.world.problem(
                f"LEAK: {self.name} has blocks without an owner, or the reverse"
            )

    def _owned(self) -> Iterator[Iterable[int]]:
        yield self.hoard
        scheduler = self.scheduler
        requests = scheduler.requests
        for request in requests.prompts.values():
            yield from (request.prompt.blocks, request.tails)
        if isinstance(scheduler, DecodeScheduler):
            for sequence in (
                *scheduler._running.values(),
                *scheduler._leaving.values(),
            ):
                yield sequence.blocks
        yield from requests.prefixes._lent.values()
        yield requests.prefetches.landing()
        yield from requests.reads._draining.values()
        yield scheduler.tiers.copying()
        for copies in (
            requests.copies._next,
            *(plan.copies for plan in self.loop._launched),
        ):
            yield from copies

    def wake(self) -> None:
        """Let the loop turn soon."""
        self._turn_by(max(self.world.loop.time(), self.hung_until_s))

    def _turn_by(self, at_s: float) -> None:
        if at_s < self._turn_at_s and not self.process.is_dead:
            if self._next_turn is not None:
                self._next_turn.cancel()
            self._turn_at_s = at_s
            self._next_turn = self.process.run(
                self.world.loop.call_at, at_s, self._turn
            )

    def _turn(self) -> None:
        self._turn_at_s = float("inf")
        self._next_turn = None
        if (now_s := self.world.loop.time()) < self.hung_until_s:
            self._turn_by(self.hung_until_s)
            return
        try:
            self.loop.turn()
        # Too much is quarantined, or a rank is dead: its supervisor restarts it.
        except NodeError:
            self._tell_crash()
            world_call_at(self.world.loop, now_s + 1.0, self.start)
            self.kill()
        except Exception as error:  # noqa: BLE001  any error would end the process
            self.world.problem(f"{self.name} CRASHED: {type(error).__name__}: {error}")
            self.kill()
        else:
            if self._has_drained():
                self.kill()
            self._turn_by(now_s + max(self.channels.timeout_s, 0.0001))

    def _tell_crash(self) -> None:
        """Tell the routers which requests were in the step that ends this process, if one does."""
        crashed_in = self.loop.crashed_in
        if crashed_in is not None:
            keys = tuple(part.key for part in crashed_in.slices)
            failure = NodeError(f"{self.name} ends because of an unexpected error")
            self.sockets.broadcast(Crashed(keys, failure.to_failure()))

    def lose_rank(self, rank: int, noticed_after_s: float) -> None:
        """Let the process of a rank die, which the node notices a little later."""
        if self.process.is_dead or self.half_dead_s is not None:
            return
        self.half_dead_s = self.world.loop.time()
        rank %= self.num_ranks
        self.memory.dead_ranks.add(rank)
        self.executor.break_rank(rank)
        self.process.run(
            self.world.loop.call_later, noticed_after_s, self.executor.notice_death
        )

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            now_s = self.process.clock()
            self._heartbeat.note_running(now_s)
            message = self._heartbeat.message(now_s)
            for dialer in self._heartbeats:
                while dialer.receive() is not None:
                    pass
                if dialer.connected:
                    dialer.send(message)

    @property
    def is_draining(self) -> bool:
        return self._drain_by_s is not None

    def drain(self) -> None:
        if self.is_up and self._drain_by_s is None:
            self.process.run(self._drain)

    def _drain(self) -> None:
        self._drain_by_s = self.process.clock() + DRAIN_S
        self.loop.drain(HAND_OVER_S if self.world.lends else 0.0)
        self.vitals.note(is_draining=True)
        load = self.scheduler.load()
        self.sockets.broadcast(
            Heartbeat(NodeId(self.name), self.epoch, load, is_draining=True)
        )
        self.wake()

    def _has_drained(self) -> bool:
        if self._drain_by_s is None:
            return False
        has_ended = self.loop.is_idle and self.loop.has_handed_over
        return has_ended or self.process.clock() > self._drain_by_s
