"""One schedule: a cluster, its clients, two lanes of faults, and what must hold at the end."""

import asyncio
import gc
import math
import random
import secrets
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from baton.kv_transfer.stores import FolderStore
from baton.node.scheduling import prefix_reads
from baton.node.sockets import LONGEST_WAIT_S
from baton.protocol.config import EngineConfig, TransferConfig
from baton.protocol.ids import Key
from baton.protocol.messages import PROTOCOL_VERSION
from baton.router.core import policy, prefetches
from baton.router.http.api import large_bodies
from baton.router.worker import Worker
from tests.sim.clients import Client
from tests.sim.clock import Process, SimLoop
from tests.sim.executor import Context
from tests.sim.http import Port
from tests.sim.members import SimNode
from tests.sim.nemesis.schedule import Fault, Nemesis, lanes_of
from tests.sim.network import Network
from tests.sim.routers import SimRouter, parse_at_a_cost, work
from tests.sim.transports import Pools

# After the last fault, every client has its tokens, also of a crowded node.
HEALING_S = 150.0
SETTLING_S = 120.0  # after the last client, all memory is given back, at the latest
LEAST_PREFIX_TOKENS = 8  # that are worth a read
AUDIT_S = 0.5  # between two looks at who owns which block
# Then a node in touch runs no attempt any more that nobody wants.
LONGEST_DETOUR_S = 4.0
LONGEST_ABSENCE_S = 5.0  # then a living node in touch with a router is in service there
LATEST_S = 1.0  # that a request waits for nodes beyond its router's limit
LONGEST_HALF_S = 2.0  # that a node goes on while one of its ranks is dead
LONGEST_TURN_S = 0.25  # that other work of a router's loop waits for its turn
PULSE_S = 0.1  # between two looks at how long it waits
# Then a node holds no blocks any more for another one that has ended.
LONGEST_OFFER_S = 1.0
LONGEST_PREFIX_S = 5.0  # that a prompt waits for a prefix that it could compute
PACES = (  # of leases and of reads
    (0.6, (0.6, 1.0, 1.5)),
    (0.6, (0.02, 0.3, 1.2)),
    (2.0, (0.6, 1.0, 1.5)),
    (6.0, (0.001, 0.02, 0.2)),
)
SHAPES = ((1, 1, 1), (2, 1, 1), (2, 2, 2), (2, 1, 2), (1, 2, 2))
RANKS = ((1, 1), (1, 1), (2, 2), (1, 2), (2, 1))  # of each prefill and each decode node


@dataclass(slots=True)
class Result:
    seed: int
    problems: list[str]
    log: list[str]
    fates: Counter[str]
    met: Counter[tuple[str, str]]
    longest_gap_s: float
    virtual_s: float
    longest_turn_s: float
    num_faults: int = 0
    lanes: list[list[Fault]] = field(default_factory=list)


def engine_from(rng: random.Random) -> tuple[EngineConfig, Iterator[int]]:
    """Nodes may serve by the priorities of clients, and may guess tokens."""
    engine = EngineConfig(
        scheduling_policy=rng.choice(("fcfs", "priority")),
        num_speculative_tokens=rng.choice((0, 0, 4)),
        prompt_lookup_min=1,
    )
    return engine, iter(lambda: rng.choice((-1, 0, 0, 5)), None)


class World:
    loses_pools = True  # which no ring of events shows

    def __init__(  # noqa: PLR0915  (a line for each thing that is drawn)
        self,
        loop: SimLoop,
        seed: int,
        lanes: list[list[Fault]] | None = None,
        state_blocks: int = 0,
        *,
        lends: bool = True,
    ) -> None:
        self.loop, self.rng = loop, random.Random(seed)
        self.engine, self.priorities = engine_from(random.Random(f"engine {seed}"))
        # What came to the simulation later has numbers of its own.
        self.later_rng = random.Random(~seed)
        self.state_blocks = state_blocks  # of each sequence
        self.prefix_rng = random.Random(f"prefixes {seed}")
        # Prefill nodes read what decode nodes have cached.
        self.lends = self.prefix_rng.random() < 0.7 and lends and not state_blocks
        # Then those with other bits tell apart who computed a block.
        self.promises_bits = random.Random(f"bits {seed}").random() < 0.5
        # Nodes save what they have cached in slots of a folder, of which some are full soon.
        self.tier_rng = random.Random(f"tiers {seed}")
        self.num_slots = (
            0 if state_blocks else self.tier_rng.choice((0, 6, 24, 200, 200))
        )
        self.root = Context(0, -1, 0, None)
        self.contexts: list[Context] = [self.root]  # whose numbers are in files
        self.context_numbers: dict[int, int] = {}  # by their ids
        # Of all lives, until the schedule ends.
        self.opened_stores: list[FolderStore] = []
        self.disk = Path(tempfile.mkdtemp(prefix="baton-sim-"))
        # That a prompt waits.
        self.least_prefix_s = self.prefix_rng.choice((0.02, 0.5, 3.0))
        rng = self.rng
        self.network = Network(loop, rng, self.problem)
        self.port = Port(loop, rng)
        self.pools: Pools = {}
        self.problems: list[str] = []
        self.log: list[str] = []
        self.fates: Counter[str] = Counter()
        self.transport = rng.choice(("shm", "nixl"))
        self.step_s = rng.choice(((0.005, 0.02), (0.02, 0.08)))
        self.local_prefill = rng.choice(("auto", "never"))
        self.p_leave = rng.choice((0.0, 0.2, 0.5))
        self.lease_s, self.landing_s = rng.choice(PACES)
        self.verifies_kv = self.later_rng.random() < 0.5
        self.transfer = TransferConfig(lease_s=self.lease_s, verify_kv=self.verifies_kv)
        self.key_names = ("key",)  # what the file of the cluster's keys holds
        self.is_exchanging_keys = False
        self.max_queued = rng.choice((3, 1024))
        self.is_tiny = rng.random() < 0.5  # every block is used again at once
        self.max_model_len = 160 if self.is_tiny else 400
        self.num_ranks = dict(
            zip(("prefill", "decode"), rng.choice(RANKS), strict=True)
        )
        num_routers, num_prefill, num_decode = rng.choice(SHAPES)
        # The numbers of API keys. Without any, routers ask for no key.
        self.tenants = range(self.later_rng.choice((0, 2, 3)))
        self.routers: list[SimRouter] = []
        for index in range(num_routers):
            self.routers.append(SimRouter(self, f"r{index}"))
        sizes = (44, 64) if self.is_tiny else rng.choice(((320, 320), (110, 600)))
        self.nodes = [
            *(
                SimNode(self, f"p{index}", "prefill", sizes[0])
                for index in range(num_prefill)
            ),
            *(
                SimNode(self, f"d{index}", "decode", sizes[1])
                for index in range(num_decode)
            ),
        ]
        # That use the name of another, or have another model.
        self.twins: list[SimNode] = []
        num_clients, self.latest_start_s = rng.choice(
            ((20, 35.0), (30, 15.0), (30, 3.0))
        )
        self.clients = [Client(self, number) for number in range(num_clients)]
        # Faults have numbers of their own, so that another kind changes nothing but them.
        lot = random.Random(rng.getrandbits(64))
        self.nemesis = Nemesis(self, lanes_of(lot) if lanes is None else lanes)
        self.healed_s = float("inf")
        self._unwanted_since_s: dict[tuple[Process, Key], float] = {}
        self._calm_since_s: dict[tuple[Process, Process], float] = {}
        self._doubled_s: dict[str, float] = {}  # when a node last had a double
        self.longest_turn_s = 0.0
        self.stepped_back_s = 0.0

    def problem(self, text: str) -> None:
        self.problems.append(self._stamped(text))

    def note(self, text: str) -> None:
        self.log.append(self._stamped(text))

    def _stamped(self, text: str) -> str:
        return f"{self.loop.time() - 1000:8.3f} {text}"

    async def run(self) -> None:
        self.loop.set_exception_handler(self._broke)
        for member in (*self.routers, *self.nodes):
            member.start()
        await asyncio.sleep(1.0)
        asking = [self.loop.create_task(self._client(one)) for one in self.clients]
        audit = self.loop.create_task(self._audit())
        pulses = self.loop.create_task(self._feel_pulses())
        forgetting = self.loop.create_task(self._forget_prefixes())
        async with asyncio.timeout(600):  # each fault has an end
            await self.nemesis.run()
        self.note("no more faults")
        self.healed_s = self.loop.time()
        await asyncio.wait(asking, timeout=HEALING_S)
        for client, task in zip(self.clients, asking, strict=True):
            if task.done():
                task.result()
            else:
                where = client.router.name if client.router is not None else "nowhere"
                self.problem(
                    f"client {client.number} is not done {HEALING_S:g} s after the last fault: it "
                    f"is connected to {where}, silent for {self.loop.time() - client.last_s:.1f} s"
                )
                task.cancel()
        if audit.done():
            audit.result()  # it ends early only by a problem or an error
        audit.cancel()
        pulses.cancel()
        forgetting.cancel()
        if not self.problems:
            await self._settle()

    def _broke(self, _: asyncio.AbstractEventLoop, told: dict[str, Any]) -> None:
        if told["message"].startswith("Task was destroyed"):
            return  # one of a killed process
        error = told.get("exception")
        where = (
            traceback.format_tb(error.__traceback__)[-2:] if error is not None else []
        )
        self.problem(f"{told['message']}: {error!r} {' '.join(where)}")

    async def _client(self, client: Client) -> None:
        await asyncio.sleep(self.rng.uniform(0, self.latest_start_s))
        if self.lends and self.prefix_rng.random() < 0.4:
            await client.go_on()
        await client.run()

    async def _audit(self) -> None:
        while not self.problems:
            await asyncio.sleep(AUDIT_S)
            for client in self.clients:
                client.check_queued()
            for node in (*self.nodes, *self.twins):
                if not node.process.is_dead:
                    node.check_ownership()
                    node.check_tiers()
                    self._check_whole(node)
                    self._check_offers(node)
                    self._check_prefixes(node)
                    if node.role == "decode":
                        self._check_outlived(node)

            for router in self.routers:
                if router.is_up:
                    self._check_limits(router)
                for node in self.nodes:
                    self._check_joined(node, router)

    async def _forget_prefixes(self) -> None:
        """Let prefill nodes forget what they have cached, so that they read it from others.

        Any node may lose what its pool has, but not what its folder has.
        """
        while self.lends or self.num_slots:
            await asyncio.sleep(self.prefix_rng.uniform(0.2, 2.0))
            # Where reads outlast their leases, clusters would not come to rest meanwhile.
            is_calm = self.loop.time() > self.healed_s
            if self.num_slots and self.loses_pools and not is_calm:
                loser = self.tier_rng.choice(self.nodes)
                if loser.is_up:
                    loser.process.call(loser.pool.reset_prefix_cache)
            if not self.lends or self.prefix_rng.random() < 0.5:
                continue
            node = self.prefix_rng.choice(
                [one for one in self.nodes if one.role == "prefill"]
            )
            router = self.prefix_rng.choice(self.routers)
            if router.is_up and router.knows(node):
                router.process.call(partial(router.forget_prefixes, node))

    async def _feel_pulses(self) -> None:
        """Measure how long a callback waits for its turn on each router's loop."""
        while True:
            await asyncio.sleep(PULSE_S)
            for router in self.routers:
                if router.is_up:
                    due_s = self.loop.time()
                    process = router.process
                    process.call(partial(self._feel_pulse, router, process, due_s))

    def _feel_pulse(self, router: SimRouter, process: Process, due_s: float) -> None:
        late_s = self.loop.time() - max(due_s, process.resumed_s)
        self.longest_turn_s = max(self.longest_turn_s, late_s)
        if late_s > LONGEST_TURN_S:
            self.problem(f"the loop of {router.name} was held for {late_s:.2f} s")

    def _check_limits(self, router: SimRouter) -> None:
        """Check that a router keeps to its own limits of what waits."""
        waits_s = dict(router.queued())
        num_first = sum(key.attempt == 0 for key in waits_s)
        if num_first > router.config.max_queued:
            self.problem(f"{num_first} requests wait at {router.name}")
        paused_s = self.loop.time() - router.process.resumed_s
        for key, waited_s in waits_s.items():
            if min(waited_s, paused_s) > router.config.max_queued_s + LATEST_S:
                self.problem(f"{key} has waited for {waited_s:.1f} s at {router.name}")

    def _check_joined(self, node: SimNode, router: SimRouter) -> None:
        """Check that a living node in touch with a router is in service there."""
        pair = (node.process, router.process)
        now_s = self.loop.time()
        is_calm = (
            node.is_up
            and router.is_up
            and not node.is_draining
            and node.speaks == PROTOCOL_VERSION
            and now_s > node.hung_until_s
            and self.network.is_calm(*pair)
            and not self._has_double(node)
        )
        if not is_calm or router.serves(node):
            self._calm_since_s[pair] = now_s
        elif now_s - self._calm_since_s.setdefault(pair, now_s) > LONGEST_ABSENCE_S:
            state = router.state_of(node)
            self.problem(f"{node.name} lives and is {state} at {router.name}")

    def _has_double(self, node: SimNode) -> bool:
        """Return whether a router may refuse a node, which then asks again after a while."""
        for twin in self.twins:
            if twin.name == node.name and not twin.process.is_dead:
                self._doubled_s[node.name] = self.loop.time()
        return (
            self.loop.time()
            < self._doubled_s.get(node.name, -math.inf) + LONGEST_WAIT_S
        )

    def _check_outlived(self, node: SimNode) -> None:
        """Check that a node in touch with a router runs nothing that no client of it wants."""
        for key in node.running():
            deserters = (one for one in self.routers if one.has_deserted(key))
            router = next(deserters, None)
            is_heard = router is not None and router.is_up and node.is_up
            # It may know a double.
            if router is None or not is_heard or not router.knows(node):
                self._unwanted_since_s.pop((node.process, key), None)
                continue
            since_s = self._unwanted_since_s.setdefault(
                (node.process, key), self.loop.time()
            )
            in_touch_s = self.network.in_touch_since_s(node.process, router.process)
            resumed_s = max(node.process.resumed_s, router.process.resumed_s)
            since_s = max(since_s, in_touch_s, node.hung_until_s, resumed_s)
            if self.loop.time() - since_s > LONGEST_DETOUR_S:
                self.problem(f"{node.name} still runs {key}, which nobody wants")

    def _check_whole(self, node: SimNode) -> None:
        """Check that a node ends soon after one of its ranks has died."""
        since_s = node.half_dead_s
        if since_s is None or not node.is_up or self.loop.time() < node.hung_until_s:
            return
        since_s = max(since_s, node.process.resumed_s, node.hung_until_s)
        if self.loop.time() - since_s > LONGEST_HALF_S:
            self.problem(f"{node.name} goes on without one of its ranks")

    def _check_offers(self, node: SimNode) -> None:
        """Check that a node in touch holds nothing for a handoff that its reader has ended."""
        for key, reader in node.offers():
            peer = next((one for one in self.nodes if one.epoch == reader), node)
            is_silent = self.network.silent & {
                (node.name, peer.name),
                (peer.name, node.name),
            }
            # A process that can allocate no message loses its sessions again and again.
            is_short = node.process.is_out_of_memory or peer.process.is_out_of_memory
            if (
                not (node.is_up and peer.is_up and key in peer.ended_receives())
                or is_silent
                or is_short
            ):
                self._unwanted_since_s.pop((node.process, key), None)
                continue
            since_s = self._unwanted_since_s.setdefault(
                (node.process, key), self.loop.time()
            )
            in_touch_s = self.network.in_touch_since_s(
                node.process, peer.process, num=1
            )
            resumed_s = max(node.process.resumed_s, peer.process.resumed_s)
            hung_s = max(node.hung_until_s, peer.hung_until_s)
            since_s = max(since_s, in_touch_s, hung_s, resumed_s)
            if self.loop.time() - since_s > LONGEST_OFFER_S:
                self.problem(
                    f"{node.name} still holds {key}, which {peer.name} has ended"
                )

    def _check_prefixes(self, node: SimNode) -> None:
        """Check that no prompt waits long for a prefix that could be computed."""
        waited_s = min(
            node.longest_prefix_wait_s,
            self.loop.time() - node.process.resumed_s,
            self.loop.time() - node.hung_until_s,
        )
        if node.is_up and waited_s > LONGEST_PREFIX_S:
            self.problem(f"{node.name} has waited for a prefix for {waited_s:.1f} s")

    async def _settle(self) -> None:
        """Wait until nothing is held for any client."""
        by_s = self.loop.time() + SETTLING_S
        while list(self._leaks()) and self.loop.time() < by_s:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(1.0)
        for leak in self._leaks():
            self.problem(f"LEAK: {leak}")

    def _leaks(self) -> Iterator[str]:
        for node in self.nodes:
            load = node.scheduler.load()
            if load.free_blocks + load.quarantined_blocks != load.total_blocks:
                yield f"{node.name} holds blocks: {load}"
            if load.quarantined_blocks or load.num_running or load.num_waiting:
                yield f"{node.name} has work: {load}"
            peers = (
                1
                if node.role == "decode"
                else sum(one.role == "decode" for one in self.nodes)
            )
            if node.num_channels > len(self.routers) + peers:  # idle ones may be closed
                yield f"{node.name} has {node.num_channels} channels"
        for router in self.routers:
            num_timers = self.loop.num_timers(router.process)
            if router.process.tasks or num_timers != 1:  # it ticks
                held = f"{num_timers} timers, {router.process.tasks}"
                yield f"{router.name} has {held}"
            if not router.is_idle:
                yield f"{router.name} has open connections"
            if router.core.num_active:
                yield f"{router.name} has {router.core.num_active} requests"
            for node in router.core.health().nodes:
                if node.state != "ready":
                    yield f"{router.name} says that {node.node_id} is {node.state}"
                if node.num_attempts or node.num_tokens:
                    yield f"{router.name} reserves load at {node.node_id}"

    @contextmanager
    def reading_eagerly(self) -> Iterator[None]:
        """Let nodes read a few tokens, and wait for them for as long as this world does."""
        with (
            mock.patch.object(policy, "MIN_READ_TOKENS", LEAST_PREFIX_TOKENS),
            mock.patch.object(prefetches, "MIN_READ_TOKENS", LEAST_PREFIX_TOKENS),
            mock.patch.object(prefetches, "LEAST_BLOCKS", 1),
            mock.patch.object(prefetches, "HOT_REQUESTS", 2.0),
            mock.patch.object(prefetches, "REST_S", 2.0),
            mock.patch.object(prefix_reads, "MIN_READ_TOKENS", LEAST_PREFIX_TOKENS),
            mock.patch.object(prefix_reads, "MIN_TIMEOUT_S", self.least_prefix_s),
            mock.patch.object(prefix_reads, "FORGET_S", 1.0),
        ):
            yield

    def wall_s(self) -> float:
        """Return the time of day, which may step back."""
        return self.loop.time() - self.stepped_back_s

    def dismiss_strangers(self) -> None:
        """End the nodes of the other model, before a router starts and takes that for its own."""
        for stranger in self.twins:
            if stranger.model == "other":
                stranger.kill()


def simulate(
    seed: int,
    lanes: list[list[Fault]] | None = None,
    state_blocks: int = 0,
    *,
    lends: bool = True,
) -> Result:
    """Run the schedule of a seed, with its own faults or with these, and collect what it leaves.

    Without `lends`, no node reads a prefix that another one has cached.
    """
    if not gc.get_freeze_count():
        gc.freeze()  # what is collected after a schedule is this schedule alone
    try:
        return simulate_once(seed, lanes, state_blocks, lends=lends)
    finally:
        # Here, because its coroutines would else end in the loop of the next.
        gc.collect()


def simulate_once(
    seed: int,
    lanes: list[list[Fault]] | None = None,
    state_blocks: int = 0,
    *,
    lends: bool = True,
) -> Result:
    """Run a schedule in a process that runs no other."""
    loop = SimLoop()
    asyncio.set_event_loop(loop)
    world = World(loop, seed, lanes, state_blocks, lends=lends)
    try:
        with (
            mock.patch.object(
                secrets, "token_hex", lambda size: world.rng.randbytes(size).hex()
            ),
            mock.patch.object(secrets, "randbits", world.rng.getrandbits),
            mock.patch.object(time, "time", world.wall_s),
            mock.patch.object(large_bodies, "parse_body", parse_at_a_cost),
            mock.patch.object(Worker, "run", work),
            world.reading_eagerly(),
        ):
            loop.run_until_complete(world.run())
    finally:
        for member in (*world.routers, *world.nodes, *world.twins):
            member.process.kill()
        for store in world.opened_stores:
            store.close()
        shutil.rmtree(world.disk)
        loop.close()
        asyncio.set_event_loop(None)
    for node in world.nodes:
        counts = node.pool.counts
        world.fates["prefix read"] += counts.prefix_read_tokens
        world.fates["prefix not read"] += counts.failed_prefix_reads
        world.fates["prefetched"] += counts.prefetched_tokens
        world.fates["folder read"] += counts.folder_hit_tokens
    gap_s = max(client.longest_gap_s for client in world.clients)
    return Result(
        seed,
        world.problems,
        world.log,
        world.fates,
        Counter(world.network.met),
        gap_s,
        loop.time() - 1000.0,
        world.longest_turn_s,
        len(world.log) - 1,
        world.nemesis.lanes,
    )
