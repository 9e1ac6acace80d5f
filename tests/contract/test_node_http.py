"""What a node says of itself, from its start to a loop that hangs, in pages and heartbeats."""

import json
import socket
import urllib.error
import urllib.request
from contextlib import suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.node.heartbeat import HeartbeatThread, Vitals
from baton.node.node_http import DEAD_S, MAX_CONNECTIONS, NodeHttp
from baton.node.sockets import RouterStanding
from baton.protocol.errors import ConfigError
from baton.protocol.ids import Epoch, NodeId
from baton.protocol.messages import Heartbeat, Load, Starting, Totals
from baton.runtime.channels.listener import Received
from baton.runtime.clock import Clock, monotonic
from baton.runtime.metrics import NODE_FAMILIES
from tests.support.channel_ends import ends
from tests.support.scripted_nodes import node_info
from tests.support.virtual_clock import VirtualClock

INFO = node_info("d0", "decode")
REFUSED = RouterStanding(
    "tcp://r1:1", "refused", "another process uses the id d0 at this router"
)


class Bench:
    def __init__(self) -> None:
        self.vitals, self.clock = Vitals(), VirtualClock(100.0)
        self.routers = (RouterStanding("tcp://r0:1", "in service"), REFUSED)
        self.http = NodeHttp(
            self.vitals,
            self.clock,
            ("d0", "decode"),
            "tiny",
            lambda: INFO,
            lambda: self.routers,
        )
        self.http.start("127.0.0.1:0")

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.http.url + path, timeout=30.0) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def status(self, path: str) -> tuple[int, str]:
        code, body = self.get(path)
        return code, json.loads(body)["status"]


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.http.stop()


def test_a_node_is_live_while_it_starts_and_ready_until_it_drains(bench):
    bench.vitals.note(phase="weights", done=3, total=8)
    assert bench.status("/live") == (200, "live")
    assert bench.status("/ready") == (503, "starting: weights")
    bench.vitals.note(is_ready=True)
    assert bench.status("/ready") == (200, "ready")
    bench.vitals.note(is_draining=True)
    assert bench.status("/ready") == (503, "draining")
    assert bench.status("/live") == (200, "live")


def test_a_loop_or_a_step_that_hangs_makes_a_node_dead(bench):
    bench.vitals.note(is_ready=True)
    bench.vitals.note(turned_s=bench.clock())
    bench.clock.advance(DEAD_S + 1.0)
    assert bench.status("/live") == (503, "the node's engine loop hangs")
    bench.vitals.note(turned_s=bench.clock())
    bench.vitals.note(step_started_s=bench.clock(), predicted_s=5.0)
    bench.clock.advance(DEAD_S + 1.0)
    bench.vitals.note(turned_s=bench.clock())
    # Such a step was predicted to be long.
    assert bench.status("/live") == (200, "live")
    bench.vitals.note(step_started_s=bench.clock() - DEAD_S - 1.0, predicted_s=0.1)
    assert bench.status("/live") == (503, "a step of the model hangs")


def test_a_node_shows_its_own_counts_in_the_families_of_nodes(bench):
    bench.vitals.note(load=Load(2, 1, 3, 4))
    bench.vitals.totals = lambda: Totals(steps=7)
    code, text = bench.get("/metrics")
    assert code == 200
    found = {family.name: family for family in text_string_to_metric_families(text)}
    assert {one.name for one in NODE_FAMILIES} == {
        name for name in found if "baton_" in name
    }
    (steps,) = found["baton_node_steps"].samples
    assert steps.value == 7
    assert steps.labels == {"model_name": "tiny", "node": "d0", "role": "decode"}
    assert "process_cpu_seconds_total" in text
    registrations = found["baton_node_in_service"].samples
    assert {one.labels["router"]: one.value for one in registrations} == {
        "tcp://r0:1": 1,
        "tcp://r1:1": 0,
    }


def test_a_node_shows_what_each_router_makes_of_it(bench):
    assert json.loads(bench.get("/ready")[1])["routers"] == [
        {"router": "tcp://r0:1", "state": "in service", "reason": ""},
        {"router": "tcp://r1:1", "state": "refused", "reason": REFUSED.reason},
    ]


def test_connections_that_say_nothing_make_room_for_probes(bench):
    host, port = bench.http.url.removeprefix("http://").split(":")
    links = []
    for number in range(5 * MAX_CONNECTIONS):
        link = socket.create_connection((host, int(port)), 30.0)
        link.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n")
        links.append(link)
        if number % MAX_CONNECTIONS == 0:
            assert bench.status("/live") == (200, "live")
    assert bench.status("/live") == (200, "live")
    for link in links[: -2 * MAX_CONNECTIONS]:
        with suppress(ConnectionResetError):
            assert link.recv(1) == b""
    for link in links:
        link.close()


@pytest.mark.parametrize(
    "address", ["9100", "127.0.0.1:", "127.0.0.1:99999", "no.such.host:1"]
)
def test_an_address_that_cannot_be_served_is_named(address):
    http = NodeHttp(
        Vitals(), VirtualClock(), ("d0", "decode"), "tiny", lambda: None, lambda: ()
    )
    with pytest.raises(ConfigError, match=r"node\.http"):
        http.start(address)
    http.stop()


NODE = NodeId("d0")
EPOCH = Epoch("e")


def thread(
    vitals: Vitals, *endpoints: str, clock: Clock = monotonic
) -> HeartbeatThread:
    return HeartbeatThread(vitals, NODE, EPOCH, endpoints, clock)


def test_a_starting_node_says_how_far_it_is():
    vitals = Vitals()
    heartbeats = thread(vitals)
    assert heartbeats.message(0.0) == Starting(NODE, EPOCH, "starting", 0, 0)
    vitals.note(phase="weights", done=3, total=8)
    assert heartbeats.message(0.0) == Starting(NODE, EPOCH, "weights", 3, 8)


def test_a_ready_node_says_how_old_its_step_is():
    clock = VirtualClock(10.0)
    vitals = Vitals()
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
    clock = VirtualClock(10.0)
    vitals = Vitals()
    heartbeats = thread(vitals)
    vitals.note(is_ready=True)
    vitals.note(turned_s=clock())
    clock.advance(12.0)
    assert heartbeats.message(clock()) == Heartbeat(
        NODE, EPOCH, Load(), loop_age_s=12.0
    )
    vitals.note(turned_s=clock())
    assert heartbeats.message(clock()) == Heartbeat(NODE, EPOCH, Load())


def test_a_process_that_stood_still_as_a_whole_does_not_say_that_its_loop_hangs():
    clock = VirtualClock(10.0)
    vitals = Vitals()
    heartbeats = thread(vitals, clock=clock)
    vitals.note(is_ready=True, turned_s=clock(), step_started_s=clock())
    # This thread is the first that goes on.
    heartbeats.note_running(clock.advance(25.0))
    assert heartbeats.message(clock()) == Heartbeat(NODE, EPOCH, Load())
    for _ in range(11):
        heartbeats.note_running(clock.advance(1.0))
    hanging = Heartbeat(NODE, EPOCH, Load(), step_age_s=11.0, loop_age_s=11.0)
    assert heartbeats.message(clock()) == hanging


def test_heartbeats_reach_the_router_without_the_loop(tmp_path):
    with ends(tmp_path) as pair:
        vitals = Vitals()
        heartbeats = thread(vitals, pair.listener.endpoint)
        heartbeats.start()
        try:
            starting = Starting(NODE, EPOCH, "starting", 0, 0)
            heartbeat = Heartbeat(NODE, EPOCH, Load())
            assert pair.hear(1) == [Received(b"heartbeats:d0", starting)]
            vitals.note(is_ready=True)
            # One that was made before, and any number of those that were made since, may be there.
            while (heard := pair.hear(1)) != [Received(b"heartbeats:d0", heartbeat)]:
                assert heard == [Received(b"heartbeats:d0", starting)]
        finally:
            heartbeats.stop()
            heartbeats.stop()
        while (heard := pair.hear(1)) != [
            Received(b"heartbeats:d0", None, disconnected=True)
        ]:
            assert heard == [Received(b"heartbeats:d0", heartbeat)]
