"""Bad requests are refused by name, quickly, and at the cost of nobody else."""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tests.support.bad_requests import BadRequest, bad_requests
from tests.support.cluster import Cluster
from tests.support.oracle import prompt
from tests.support.waiting import until

# Both are three times what a machine of two idle cores may take, and ten times what it takes.
REFUSED_WITHIN_S = 30.0
SERVED_WITHIN_S = 6.0
PAUSE_S = 0.05  # between two requests of the other client


def complaint_about(cluster: Cluster, asked: BadRequest) -> str:
    """What is wrong with the response to a bad request; "" if it is as it should be."""
    begun_s = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", cluster.port, timeout=60.0)
    headers = {"Content-Type": asked.content_type, "Content-Encoding": asked.encoding}
    headers = {name: value for name, value in headers.items() if value}
    with contextlib.closing(connection):
        # Refused while it is sent.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request(asked.method, asked.path, asked.body, headers)
        reply = connection.getresponse()
        text = reply.read().decode()
    found = json.loads(text).get("error") or {}
    took_s = time.monotonic() - begun_s
    problems = []
    wanted = asked.param if asked.status != 200 else None
    if reply.status != asked.status or not blames(found.get("param"), wanted):
        problems.append(f"status {reply.status} {text[:300]}")
    is_whole = (
        found.keys() == {"message", "type", "param", "code"} and len(text) <= 2000
    )
    if not is_whole and asked.status != 200:
        problems.append(f"not an error that clients can show: {text[:300]}")
    if took_s > REFUSED_WITHIN_S:
        problems.append(f"it took {took_s:.1f} s")
    return (
        "; ".join(problems)
        and f"{asked.path} {asked.body[:150]!r} {asked.param}: {problems}"
    )


def blames(param: str | None, wanted: str | None) -> bool:
    """Whether an error names the field, which it may cut off, or something inside it."""
    if param is None or wanted is None:
        return param == wanted
    return param[:100] == wanted[:100] or param.startswith((f"{wanted}[", f"{wanted}."))


@contextlib.contextmanager
def served_beside(cluster: Cluster) -> Iterator[list[float]]:
    """Another client, and the seconds that each of its requests took."""
    took_s: list[float] = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.wait(PAUSE_S):
            begun_s = time.monotonic()
            cluster.complete(prompt=prompt(9), max_tokens=2, temperature=0)
            took_s.append(time.monotonic() - begun_s)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield took_s
        finally:
            ended.set()
        asking.result()


def test_a_thousand_bad_requests_are_refused_by_name_while_others_are_served(cluster):
    asked = bad_requests()
    assert len(asked) > 1000
    pids = {name: child.pid for name, child in cluster.children.items()}
    with served_beside(cluster) as took_s, ThreadPoolExecutor(8) as pool:
        complaints = list(pool.map(lambda one: complaint_about(cluster, one), asked))
    assert not "\n".join(filter(None, complaints))
    assert took_s
    assert max(took_s) < SERVED_WITHIN_S
    cluster.wait_until_healthy()
    assert {name: child.pid for name, child in cluster.children.items()} == pids
    assert not any("Traceback" in line for line in cluster.lines)
    until(lambda: cluster.num_used_blocks() == 0, lambda: "blocks are still in use")
