"""A crowd of clients that leave at once: real processes give everything back and serve on."""

import asyncio
import json
from pathlib import Path

from tests.support.checkpoints import tiny_cluster
from tests.support.cluster import Cluster

NUM_CLIENTS = 500
DEADLINE_S = 240.0
NEVER_S = 3_600.0
PROMPT = [10 + (i * i + 7 * i) % 241 for i in range(70)]
ALARMS = ("Traceback", "a request broke", "Assertion failed")


async def leave_together(cluster: Cluster) -> None:
    """Open as many streams as there are clients, and cut all connections at once."""

    async def ask(number: int) -> asyncio.StreamWriter:
        # Some prompts take the way through prefill, some are computed by decode alone.
        prompt = [3 + number % 200, *PROMPT[: 20 if number % 4 else 70]]
        body = json.dumps({"prompt": prompt, "max_tokens": 8_000, "stream": True}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        return writer

    async with asyncio.timeout(DEADLINE_S):
        writers = [await ask(number) for number in range(NUM_CLIENTS)]
        while True:
            health = json.loads((await asyncio.to_thread(cluster.get, "/health"))[1])
            if health["num_running"] + health["num_queued"] == NUM_CLIENTS:
                break
            await asyncio.sleep(0.05)
    assert health["num_running"] > 0
    for writer in writers:
        writer.transport.abort()


def test_a_crowd_of_clients_that_leave_at_once_give_everything_back(tmp_path: Path) -> None:
    router = {"max_queued": NUM_CLIENTS, "max_queued_s": NEVER_S}
    config = tiny_cluster(
        cache={"num_blocks": 600}, engine={"max_num_batched_tokens": 64}, router=router
    )
    with Cluster(tmp_path, config) as cluster:
        ask = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        alone = cluster.complete(**ask)["choices"]
        asyncio.run(leave_together(cluster))
        assert cluster.complete(**ask)["choices"] == alone
        cluster.wait_until_unused()
        health = json.loads(cluster.get("/health")[1])
        assert (health["num_running"], health["num_queued"]) == (0, 0)
        assert all(node["num_attempts"] == node["num_tokens"] == 0 for node in health["nodes"])
        assert not [line for line in cluster.lines if any(alarm in line for alarm in ALARMS)]
