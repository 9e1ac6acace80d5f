"""Heartbeats are sent every second, even while the loop hangs, and show for how long."""

from baton.engine.process.heartbeat import HeartbeatThread, Vitals
from baton.protocol.ids import Epoch, NodeId
from baton.protocol.messages import Heartbeat, Load, Starting
from baton.runtime.channels.listener import Received
from baton.runtime.clock import monotonic
from tests.support.channel_ends import ends
from tests.support.virtual_clock import VirtualClock

NODE, EPOCH = NodeId("d0"), Epoch("e")


def thread(vitals: Vitals, *endpoints: str) -> HeartbeatThread:
    return HeartbeatThread(vitals, NODE, EPOCH, endpoints, monotonic)


def test_a_starting_node_says_how_far_it_is():
    vitals = Vitals()
    heartbeats = thread(vitals)
    assert heartbeats.message(0.0) == Starting(NODE, EPOCH, "starting", 0, 0)
    vitals.note(phase="weights", done=3, total=8)
    assert heartbeats.message(0.0) == Starting(NODE, EPOCH, "weights", 3, 8)


def test_a_ready_node_says_how_old_its_step_is():
    clock, vitals = VirtualClock(10.0), Vitals()
    heartbeats = thread(vitals)
    vitals.note(is_ready=True)
    vitals.note(load=Load(1, 2))
    assert heartbeats.message(clock()) == Heartbeat(NODE, EPOCH, Load(1, 2))
    vitals.note(step_started_s=clock(), predicted_s=0.5)
    clock.advance(3.0)
    assert heartbeats.message(clock()) == Heartbeat(NODE, EPOCH, Load(1, 2), 3.0, 0.5)
    vitals.note(step_started_s=None, predicted_s=0.0)
    assert heartbeats.message(clock()) == Heartbeat(NODE, EPOCH, Load(1, 2))


def test_a_loop_that_hangs_outside_of_a_step_shows_in_the_heartbeats():
    clock, vitals = VirtualClock(10.0), Vitals()
    heartbeats = thread(vitals)
    vitals.note(is_ready=True)
    vitals.note(turned_s=clock())
    clock.advance(12.0)
    assert heartbeats.message(clock()) == Heartbeat(NODE, EPOCH, Load(), loop_age_s=12.0)
    vitals.note(turned_s=clock())
    assert heartbeats.message(clock()) == Heartbeat(NODE, EPOCH, Load())


def test_heartbeats_reach_the_router_without_the_loop(tmp_path):
    with ends(tmp_path) as pair:
        vitals = Vitals()
        heartbeats = thread(vitals, pair.listener.endpoint)
        heartbeats.start()
        try:
            starting, heartbeat = (
                Starting(NODE, EPOCH, "starting", 0, 0),
                Heartbeat(NODE, EPOCH, Load()),
            )
            assert pair.hear(1) == [Received(b"heartbeats:d0", starting)]
            vitals.note(is_ready=True)
            # One that was made before, and any number of those that were made since, may be there.
            while (heard := pair.hear(1)) != [Received(b"heartbeats:d0", heartbeat)]:
                assert heard == [Received(b"heartbeats:d0", starting)]
        finally:
            heartbeats.stop()
            heartbeats.stop()
        while (heard := pair.hear(1)) != [Received(b"heartbeats:d0", None, disconnected=True)]:
            assert heard == [Received(b"heartbeats:d0", heartbeat)]
