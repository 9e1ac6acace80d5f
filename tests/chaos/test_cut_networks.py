"""Hosts whose network fails while they serve: every stream is what it would have been.

Blocks travel through NIXL over TCP, and the hosts share nothing but the network.
"""

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from baton.deploy.startup import HealthReply, ask_health
from baton.protocol.config import NodeConfig
from baton.runtime.settings import to_yaml
from tests.support.checkpoints import tiny_cluster
from tests.support.hosts import Hosts, hosts
from tools.soak.streams import Record, Streams, draw

ROUTER = 1
PREFILL = 2
DECODES = (3, 4)
CONTROL = 5570
PEERS = 7000
HTTP = 8000
CONFIG = tiny_cluster(
    cache={"num_blocks": 400},
    engine={"max_num_batched_tokens": 64, "threads": 1},
    router={
        "control": f"tcp://10.0.0.{ROUTER}:{CONTROL}",
        "port": HTTP,
        "max_attempts": 8,
        "local_prefill": "never",
    },
    transfer={"transport": "nixl", "device": "eth0"},
    keys={"insecure": True},
)
NUM_CLIENTS = 6
NUM_BEFORE = 12
HOLD_S = 6.0  # longer than it takes a router to give a silent node up
START_TIMEOUT_S = 180.0


@contextmanager
def cluster(on: Hosts, folder: Path) -> Iterator[None]:
    roles = {ROUTER: "router", PREFILL: "prefill", **dict.fromkeys(DECODES, "decode")}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for host, role in roles.items():
            node = NodeConfig(
                id=f"{role}-{host}",
                routers=(f"tcp://10.0.0.{ROUTER}:{CONTROL}",),
                bind=f"tcp://10.0.0.{host}:{PEERS}",
            )
            settings = folder / f"{host}.yaml"
            settings.write_text(to_yaml(msgspec.structs.replace(CONFIG, node=node)))
            command = [sys.executable, "-m", "baton", role, "--config", str(settings)]
            log = folder / f"{host}.log"
            started.append(on.start(host, command, log, {"UCX_TLS": "tcp"}))
        yield
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            try:
                process.wait(30.0)
            except subprocess.TimeoutExpired:
                process.kill()


async def until_ready(url: str) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while len((ask_health(url) or HealthReply()).ready_ids) < 1 + len(DECODES):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def streams_through(
    fail: Callable[[], None], heal: Callable[[], None]
) -> list[Record]:
    """Run streams before a failure, during it and after it."""
    url = f"http://127.0.0.1:{HTTP}"
    await until_ready(url)
    streams = Streams(url, "tiny", draw(1, 12, 250), lambda _: False)
    await streams.learn()
    num_begun = 0
    is_over = False

    def may_begin() -> bool:
        nonlocal num_begun
        num_begun += not is_over
        return not is_over

    async with asyncio.TaskGroup() as group:
        clients = [
            group.create_task(streams.run(random.Random(number), 0.2, may_begin))
            for number in range(NUM_CLIENTS)
        ]
        while num_begun < NUM_BEFORE or not streams.num_running:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
        fail()
        await asyncio.sleep(HOLD_S)
        heal()
        await until_ready(url)
        is_over = True
    return [
        record for client in clients for record in client.result()
    ] + await streams.verify()


@pytest.mark.release
@pytest.mark.parametrize("what", ["link", "pair", "blocks", "control"])
def test_a_network_that_fails_and_heals_alters_no_token(what, tmp_path):
    """One decode host loses its cable, prefill, the path of blocks alone, or the router."""
    victim = DECODES[0]
    with hosts(4) as on, cluster(on, tmp_path), ThreadPoolExecutor(1) as thread:
        on.drop(victim)

        def fail() -> None:
            if what == "link":
                on.plug(victim, is_in=False)
            elif what == "pair":
                on.drop(victim, f"ip saddr 10.0.0.{PREFILL}")
            elif what == "blocks":
                # What prefill sends to other ports than that of its messages.
                on.drop(victim, f"ip saddr 10.0.0.{PREFILL} tcp dport != {PEERS}")
            else:
                on.drop(victim, f"ip saddr 10.0.0.{ROUTER}")

        def heal() -> None:
            on.plug(victim, is_in=True)
            on.drop(victim)

        thread.submit(on.enter, ROUTER).result()
        records = thread.submit(asyncio.run, streams_through(fail, heal)).result()
    logs = "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert "Traceback" not in logs, logs
    assert max(record.ended_s - record.began_s for record in records) < 60.0, (
        "one was left waiting"
    )
    # There is another decode node, so a stream moves to it within 5 s.
    if what == "pair":
        gaps = [record.longest_gap(0.0, float("inf")) for record in records]
        assert max(gaps) < 3 * 5.0
    ends = {record.outcome for record in records}
    assert ends == {"whole", "aborted"}, [
        record.detail for record in records if record.detail
    ]
