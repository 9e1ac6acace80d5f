"""Faults put into production's code, each of which the schedules must find.

A mutant that survives says what the simulation does not see.
"""

import math
import random
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from unittest import mock

import msgspec
import zmq

from baton.kv_transfer.agent import AgentTurns
from baton.kv_transfer.bookkeeping import ReaderLease, Tombstones
from baton.kv_transfer.interfaces import (
    Effects,
    KVReceived,
    OfferBroken,
    PrefixWanted,
    ReceiveEnded,
    Released,
    TierPart,
)
from baton.kv_transfer.receive import KVReceive
from baton.kv_transfer.stores import FolderStore
from baton.node import loop
from baton.node import sockets as node_sockets
from baton.node import sockets as registration
from baton.node.loop import EngineLoop
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.plan import Outputs, Slice, StepResult
from baton.node.scheduling.prefetches import Prefetches, _Read
from baton.node.scheduling.prefix_reads import PrefixCosts, PrefixOffers
from baton.node.scheduling.prompt_reads import PrefixReads
from baton.node.scheduling.request import Request, Sequence
from baton.node.scheduling.tiers import TierIndex, Tiers
from baton.node.sockets import EngineSockets, PeerName, RouterChannel
from baton.protocol.errors import Failure, NodeError
from baton.protocol.messages import NodeInfo, Offered
from baton.router.core import node_link, registry
from baton.router.core.admission import Admission
from baton.router.core.node_link import NodeLink
from baton.router.core.registry import Node, Registry
from baton.router.core.stream import ReceivedPart, RequestStream
from baton.router.http.api import large_bodies
from baton.runtime.channels import dialer, listener
from baton.runtime.channels.dialer import Dialer
from baton.runtime.channels.wire import ConnectionChange
from tests.sim import tiers as sim_tiers
from tests.sim.clock import Process
from tests.sim.members import SimNode
from tests.sim.nemesis.schedule import Fault, faults_of
from tests.sim.transports import SimShm
from tests.sim.world import Result, simulate

Patch = tuple[object, str, object]


def _store_all(sequence: Sequence, pool: BlockPool) -> None:
    hashes = sequence.hash_blocks(pool.block_size, len(sequence.token_ids))
    pool.store(hashes, sequence.block_table[: len(hashes)])


def _finish_at_once(receive: KVReceive, failure: object, out: object) -> None:
    receive.failure = failure  # type: ignore[assignment]
    receive._finish(out)  # type: ignore[arg-type]


def _any_rank_has_all(receive: KVReceive) -> bool:
    return (
        len(receive._block_ranges) in receive._num_posted and not receive._outstanding
    )


def _release_first_attempts(node: Node, key: object) -> bool:
    return key.attempt == 0 and _RELEASE(node, key)  # type: ignore[attr-defined, arg-type]


def _any_epoch(registry: Registry, node_id: object, _epoch: object) -> Node | None:
    return registry.node(node_id)  # type: ignore[arg-type]


def _hello_alone(channel: RouterChannel) -> None:
    channel.dialer.send(channel._hello)


def _drop_open(sockets: EngineSockets, peer: PeerName) -> None:
    if (dialer := sockets._dialled.pop(peer, None)) is not None:
        sockets._channels.unwatch(dialer.fileno())


def _any_tokens(
    part: ReceivedPart, token_ids: list[int], *, is_end: bool
) -> ReceivedPart:
    num_again = min(part.num_again + len(token_ids), part.num_tokens)
    return msgspec.structs.replace(
        part, num_again=part.num_tokens if is_end else num_again
    )


def _pass_none(*_: object, **__: object) -> int:
    return 0


def _believe(channel: Dialer[object, object], change: ConnectionChange) -> None:
    channel._is_dialling = True
    _CHANGED(channel, change)


def _ask_nothing(channel: Dialer[object, object]) -> None:
    channel._ask_at_s = math.inf


def _read_once_more(link: NodeLink) -> None:
    if link._is_open:
        link._on_batch(link._batch())


def _wall_clock(_process: Process) -> float:
    return time.time()


def _past_of_nothing(*arguments: object) -> Slice:
    part = _SLICE(*arguments)  # type: ignore[arg-type]
    return part if part.past is None else msgspec.structs.replace(part, past=())


def _go_on(loop: EngineLoop, now_s: float) -> StepResult | None:
    try:
        return _SETTLED(loop, now_s)
    except NodeError:
        loop.executor.error = None  # type: ignore[attr-defined]
        return None


def _first_key_alone(dialer: Dialer[object, object]) -> None:
    dialer._num_tried = 0
    _CONNECT(dialer)


def _raise_other_errors(error: zmq.ZMQError) -> str:
    if not isinstance(error, zmq.Again):
        raise error
    return ""


def _take_peers_for_granted(sockets: EngineSockets, info: NodeInfo) -> None:
    with mock.patch.object(node_sockets, "ConfigError", ()):
        _DIAL(sockets, info)


_FAIL = KVReceive._fail
_SLICE = Sequence.slice
_PREFETCH_OFFERED = Prefetches._offered
_PREFETCH_GIVE_UP = Prefetches._give_up
_PREFETCH_STEP = Prefetches.step
_LEND_LOAD = PrefixOffers._load
_SAVE_SOME = Tiers._save_some
_SETTLED = EngineLoop._settled
_CONNECT = Dialer._connect
_DIAL = EngineSockets._dial
_RELEASE = Node.release
_WANTED = PrefixOffers.wanted
_PREFIX_OFFERED = PrefixReads.offered
_CHANGED = Dialer._changed


def _nothing(*_: object) -> None:
    return None


def _always(*_: object) -> bool:
    return True


def _lend_without_holding(offers: PrefixOffers, report: PrefixWanted) -> None:
    _WANTED(offers, report)
    if report.key in offers._lent:
        offers._pool.release(offers._lent[report.key])


def _take_back_nothing(offers: PrefixOffers, report: Released | OfferBroken) -> None:
    if isinstance(report, Released):
        del offers._lent[report.key]


def _compute_where_it_lands(
    reads: PrefixReads, _now_s: float, request: Request
) -> None:
    if not request.is_ended and request.read is not None:
        reads._draining[request.prompt.key] = []
        request.read = None


def _count_as_read(reads: PrefixReads, request: Request, offered: Offered) -> None:
    _PREFIX_OFFERED(reads, request, offered)
    if request.read is not None and request.read.landing:
        end = request.read.num_held_blocks + len(request.read.landing)
        request.prompt.start_at(end * reads._pool.block_size)


LEASES: tuple[Patch, ...] = (
    (ReaderLease, "covers", _always),
    (ReaderLease, "may_cover", _always),
    (ReaderLease, "limit_s", float("inf")),
)
UNASKED: tuple[Patch, ...] = (
    (Dialer, "_ask", _ask_nothing),
    (registration, "JOINING_S", math.inf),
)


def _save_without_holding(tiers: Tiers, tier: TierIndex) -> None:
    with mock.patch.object(BlockPool, "retain", _nothing):
        _SAVE_SOME(tiers, tier)


def _end_load_at_once(receive: KVReceive, failure: Failure, out: Effects) -> None:
    if receive.source is None:
        _finish_at_once(receive, failure, out)
    else:
        _FAIL(receive, failure, out)


def _take_another_slot(tier: TierIndex) -> int:
    tier.num_slots += 1
    return tier.num_slots - 1


def _sum_the_bytes_alone(
    _store: FolderStore, _block_hash: bytes, block: memoryview
) -> int:
    return zlib.crc32(block)


def _cache_what_is_offered(
    prefetches: Prefetches, read: _Read, num_blocks: int
) -> None:
    _PREFETCH_OFFERED(prefetches, read, num_blocks)
    prefetches._pool.store(read.hashes[: len(read.landing)], read.landing)


def _release_while_it_lands(prefetches: Prefetches, read: _Read, why: str) -> None:
    _PREFETCH_GIVE_UP(prefetches, read, why)
    prefetches._pool.release(read.landing)
    read.landing = []


def _give_up_soon(prefetches: Prefetches, now_s: float) -> None:
    _PREFETCH_STEP(prefetches, now_s)
    prefetches.give_way()


def _lend_what_is_loaded(
    offers: PrefixOffers,
    wanted: PrefixWanted,
    parts: list[TierPart],
    hashes: list[bytes],
) -> None:
    _LEND_LOAD(offers, wanted, parts, hashes)
    offers._offer(wanted.key, wanted.reader)
    for load in offers._loads.values():
        offers._pool.store(load.hashes, load.landing)


def _note_loaded(
    offers: PrefixOffers, _load: object, report: KVReceived | ReceiveEnded
) -> None:
    failure = report.failure if isinstance(report, ReceiveEnded) else None
    offers._tiers.loaded(report.key, failure)


MUTANTS: Mapping[str, tuple[Patch, ...]] = {
    "free blocks before their reads have ended": (
        (KVReceive, "_fail", _finish_at_once),
    ),
    "wait for the reads of one rank": (
        (KVReceive, "_have_all_ranges", _any_rank_has_all),
    ),
    "ignore the epoch of heartbeats and Ready": ((Registry, "_node", _any_epoch),),
    "accept reads after their lease": LEASES,
    "ignore generations, too": (*LEASES, (SimShm, "is_stale", lambda *_: False)),
    "cache blocks before they are whole": ((Sequence, "store_prefix", _store_all),),
    "go on from other tokens than the client's": (
        (ReceivedPart, "passing", _any_tokens),
    ),
    "take tokens that the client has for new ones": (
        (RequestStream, "_pass_over", _pass_none),
    ),
    "have no tombstones": (
        (Tombstones, "answer", _nothing),
        (Tombstones, "is_superseded", lambda *_: False),
    ),
    "leak the load of later attempts": ((Node, "release", _release_first_attempts),),
    "introduce half of a node in a new session": (
        (RouterChannel, "_introduce", _hello_alone),
    ),
    "keep the channels of lost peers": ((EngineSockets, "_drop", _drop_open),),
    "answer into the next session": ((Outputs, "drop", _nothing),),
    "forget the cancels of a lost session": (
        (NodeLink, "send_kept_cancels", _nothing),
    ),
    "take an old success of libzmq for a new one": (
        *UNASKED,
        (Dialer, "_changed", _believe),
    ),
    "hear an older connection as a stranger": (
        *UNASKED,
        (listener, "is_invented", lambda _: False),
    ),
    "serve nodes with other weights": ((registry, "differences", lambda *_: {}),),
    "begin a form anew on another node": ((Sequence, "slice", _past_of_nothing),),
    "run ahead of a form": ((Sequence, "may_repeat", False),),
    "go on without a rank": ((EngineLoop, "_settled", _go_on),),
    "blame requests for a killed rank": ((loop, "RANK_KILLED", ""),),
    "try one key alone": ((Dialer, "_connect", _first_key_alone),),
    "let requests wait without a limit": ((Admission, "take_overdue", lambda *_: []),),
    "let in more than may wait": ((Admission, "check_room", lambda *_, **__: []),),
    "believe transports": ((AgentTurns, "_is_corrupt", lambda *_: False),),
    "lend blocks without holding them": (
        *LEASES,
        (SimShm, "is_stale", lambda *_: False),
        (PrefixOffers, "wanted", _lend_without_holding),
        (PrefixOffers, "ended", _take_back_nothing),
    ),
    "compute where a broken read still lands": (
        (PrefixReads, "broken", _compute_where_it_lands),
    ),
    "go on from a prefix that was only offered": (
        (PrefixReads, "offered", _count_as_read),
    ),
    "wait for a prefix without a limit": (
        (PrefixCosts, "timeout_s", lambda *_: 600.0),
    ),
    "save blocks that change": (
        (Tiers, "_save_some", _save_without_holding),
        (Tiers, "_copied", _nothing),
        (SimNode, "check_ownership", _nothing),
        (sim_tiers, "WORK_S", (0.3, 1.0)),
    ),
    "save more blocks than a folder may have": (
        (TierIndex, "take_slot", _take_another_slot),
    ),
    "serve damaged blocks": ((FolderStore, "_checksum", lambda *_: 0),),
    "serve what another hash names": (
        (FolderStore, "_checksum", _sum_the_bytes_alone),
    ),
    "compute where a late load still lands": ((KVReceive, "_fail", _end_load_at_once),),
    "cache what is only offered": ((Prefetches, "_offered", _cache_what_is_offered),),
    "use blocks into which a prefetch lands": (
        (Prefetches, "step", _give_up_soon),
        (Prefetches, "_give_up", _release_while_it_lands),
    ),
    "lend what a tier is still loading": (
        (PrefixOffers, "_load", _lend_what_is_loaded),
        (PrefixOffers, "_loaded", _note_loaded),
    ),
    "end for want of memory": ((dialer, "_why_unsent", _raise_other_errors),),
    "end for want of descriptors": ((EngineSockets, "_dial", _take_peers_for_granted),),
    "tell the time by the wall clock": ((Process, "clock", _wall_clock),),
    "parse large bodies on the loop": ((large_bodies, "SMALL_BYTES", math.inf),),
    "read a backlog once more in each turn": (
        (node_link, "BATCH_S", math.inf),
        (NodeLink, "read", _read_once_more),
        (NodeLink, "_on_readable", _read_once_more),
    ),
}


# The kinds of faults that must strike to show a mutant soon. Others show with any.
SHOWN_BY: Mapping[str, tuple[str, ...]] = {
    "wait for the reads of one rank": ("cut peers",),
    "free blocks before their reads have ended": ("drop peers", "kill node"),
    "take tokens that the client has for new ones": ("kill router",),
    "leak the load of later attempts": ("kill node", "drop peers"),
    "introduce half of a node in a new session": ("cut", "kill router"),
    "keep the channels of lost peers": ("kill node", "cut peers"),
    "take an old success of libzmq for a new one": ("cut", "kill router"),
    "serve nodes with other weights": ("other weights",),
    "tell the time by the wall clock": ("clock steps back",),
    "parse large bodies on the loop": ("large body", "cut"),
    "read a backlog once more in each turn": ("flood", "cut", "refuse"),
    "go on without a rank": ("kill ranks",),
    "blame requests for a killed rank": ("kill ranks",),
    "try one key alone": ("exchange keys",),
    "believe transports": ("lie",),
    "save blocks that change": ("no blocks",),
    "serve damaged blocks": ("damaged disk", "kill node"),
    "serve what another hash names": ("damaged disk", "kill node"),
    "compute where a late load still lands": ("slow disk",),
    "cache what is only offered": ("drain node", "drop peers", "kill node"),
    "use blocks into which a prefetch lands": ("drain node",),
    "lend what a tier is still loading": ("slow disk",),
    "end for want of memory": ("no memory",),
    "end for want of descriptors": ("no descriptors", "kill node"),
}


@contextmanager
def mutated(name: str) -> Iterator[None]:
    with ExitStack() as patches:
        for owner, attribute, value in MUTANTS[name]:
            patches.enter_context(mock.patch.object(owner, attribute, value))
        yield


def first_found(name: str, seeds: Iterable[int]) -> Result | None:
    """Return the first schedule that finds a mutant."""
    with mutated(name):
        results = (simulate(seed, _lanes_for(name, seed)) for seed in seeds)
        return next((found for found in results if found.problems), None)


def _lanes_for(name: str, seed: int) -> list[list[Fault]] | None:
    """Return lanes of the faults that show a mutant; None for those of the seed."""
    kinds = SHOWN_BY.get(name)
    rng = random.Random(seed)
    return None if kinds is None else [faults_of(rng, kinds), faults_of(rng, kinds)]


def shrunk(
    result: Result, run: Callable[[int, list[list[Fault]]], Result] = simulate
) -> Result:
    """Return a schedule of the same seed that fails with as few faults as dropping them leaves."""
    best = result
    for size in (8, 4, 2, 1, 1):  # faults to drop at once
        for lane in range(len(best.lanes)):
            index = 0
            while index < len(best.lanes[lane]):
                fewer = [list(faults) for faults in best.lanes]
                del fewer[lane][index : index + size]
                found = run(best.seed, fewer)
                if found.problems:
                    best = found
                else:
                    index += size
    return best
