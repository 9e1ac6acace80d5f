"""One handoff between two connectors, message by message, and what its reader may believe."""

from baton.kv_transfer.interfaces import Landed, Released
from baton.kv_transfer.receive import ReaderLease
from baton.protocol.messages import FirstToken, Offered
from tests.support.connectors import D, P, key, node
from tests.support.transfer_world import Process, World


def settle(world: World) -> None:
    """Everything but the reads, until nothing moves."""
    while True:
        ready = [process for process in world.processes.values() if process.inbox]
        for process in ready:
            world.run(process)
        for session in world.sessions:
            while session.up:
                world.deliver_up(session)
            while session.down:
                world.deliver_down(session)
        for process in world.processes.values():
            for link in [link for link, state in process.links.items() if state == "adding"]:
                world.connect(process, *link)
        if not any(process.inbox for process in world.processes.values()):
            return


def end_reads(world: World, decode: Process) -> None:
    world.now_s += 1.0
    for reading in list(decode.readings.values()):
        world.end_read(decode, reading, None)
    settle(world)


def test_a_prompt_travels_span_by_span_and_both_sides_report_it_once() -> None:
    world = World()
    prefill = world.start(node("p", "prefill", num_ranks=2))
    decode = world.start(node("d", "decode", num_ranks=2))
    for process in (prefill, decode):
        world.list_peers(process)
    target = world.expect(decode, key(), P)
    source = world.offer(prefill, key(), 3, D)
    settle(world)
    assert decode.reports == [Offered(key(), 12, 3, 30.0)]
    world.land(decode, target, 1)
    world.announce(prefill, source, 2)
    settle(world)
    remote, local = source.blocks[1], target.blocks[0]
    assert [(r.rank, r.command.remote, r.command.local) for r in decode.readings.values()] == [
        (0, (remote,), (local,)),
        (1, (remote,), (local,)),
    ]
    end_reads(world, decode)
    world.announce(prefill, source, 1)
    world.complete(prefill, source)
    settle(world)
    assert decode.reports[1:] == []
    end_reads(world, decode)
    assert decode.reports[1:] == [Landed(key(), (FirstToken(3),), 256, 2.0, 1.0)]
    assert prefill.reports == [Released(key())]
    assert [name for name, _ in prefill.sessions] == ["d"]


def test_a_renewal_proves_nothing_until_it_is_confirmed() -> None:
    lease = ReaderLease(now_s=0.0, lease_s=30.0)
    lease.renewed(5.0)
    assert not lease.covers(6.0)
    assert lease.may_cover(6.0)
    assert lease.confirmed()
    assert lease.covers(35.0)
    assert not lease.covers(35.1)


def test_confirmations_belong_to_the_oldest_renewals() -> None:
    lease = ReaderLease(now_s=0.0, lease_s=30.0)
    lease.renewed(1.0)
    lease.renewed(11.0)
    lease.confirmed()
    assert lease.limit_s == 31.0
    lease.confirmed()
    assert lease.limit_s == 41.0
    assert not lease.confirmed()


def test_renewals_are_due_at_a_third_of_the_lease() -> None:
    lease = ReaderLease(now_s=3.0, lease_s=30.0)
    assert lease.renew_at_s == 13.0
    lease.renewed(14.0)
    assert lease.renew_at_s == 24.0


def test_a_source_that_confirms_nothing_is_given_up_after_one_lease() -> None:
    lease = ReaderLease(now_s=3.0, lease_s=30.0)
    lease.renewed(13.0)
    assert lease.limit_s == 33.0
