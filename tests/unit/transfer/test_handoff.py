"""One handoff between two connectors, message by message."""

from baton.kv_transfer.interfaces import Landed, Released
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
