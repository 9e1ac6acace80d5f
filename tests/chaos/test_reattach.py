"""Clients resume streams whose router died, and no token is lost or doubled."""

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path

from baton.protocol.config import ClusterConfig
from tests.support.checkpoints import tiny_cluster
from tests.support.cluster import Cluster

PROMPT = [10 + (i * i + 7 * i) % 241 for i in range(70)]
NUM_TOKENS = 300
DEADLINE_S = 240.0
KEY = "one"
# The stop string never comes, so the text before it is held back again and again.
ASKS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0, "stream_options": {"include_usage": True}},
    "sampled": {"temperature": 1.0, "seed": 7, "return_token_ids": True},
    "choices": {"n": 2, "seed": 3, "temperature": 0.8, "return_token_ids": True},
    "short": {"temperature": 0.7, "seed": 11, "max_tokens": 60},
}


def settings(**nodes: int) -> ClusterConfig:
    return tiny_cluster(
        cache={"num_blocks": 800}, engine={"max_num_batched_tokens": 64},
        node={"detached_s": DEADLINE_S},
        router={"local_prefill": "never", "api_keys": (KEY,)}, **nodes,
    )  # fmt: skip


class Client:
    """Reads one stream, and takes it up again after the last event that it got."""

    def __init__(self, cluster: Cluster, ask: dict[str, object]) -> None:
        self.texts: dict[int, str] = defaultdict(str)
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, tuple[str, object]] = {}
        self.usage: object = None
        self.event_id = ""
        self.is_done = False
        self.error: dict[str, object] | None = None
        self._cluster = cluster
        self._moved = threading.Condition()
        self._body = json.dumps(
            {"model": "tiny", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True}
            | {"stream": True, **ask}
        ).encode()
        self._read_on("POST", "/v1/completions")

    def come_back(self, *, by_get: bool) -> None:
        """Ask until the router answers, then read on a thread."""
        self.join()
        self.error = None
        name = self.event_id.partition(":")[0]
        path = f"/v1/streams/{name}" if by_get else "/v1/completions"
        self._read_on("GET" if by_get else "POST", path)

    def wait_for(self, num_tokens: int) -> None:
        with self._moved:
            moved = self._moved.wait_for(
                lambda: self.is_done or self.error or self._num_events >= num_tokens, DEADLINE_S
            )
        assert moved, "the stream stands still"

    def join(self) -> None:
        """Wait until the connection has ended."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def finish(self) -> "Client":
        self.join()
        assert self.is_done, self.error
        return self

    def result(self) -> object:
        return dict(self.texts), dict(self.tokens), self.ends, self.usage

    def _read_on(self, method: str, path: str) -> None:
        self._num_events = 0
        self._thread = threading.Thread(target=self._read, args=(method, path))
        self._thread.start()

    def _read(self, method: str, path: str) -> None:
        headers = {
            "Authorization": f"Bearer {KEY}",
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
        }
        if self.event_id:
            headers["Last-Event-ID"] = self.event_id
        data = self._body if method == "POST" else None
        url = self._cluster.url(path)
        request = urllib.request.Request(url, data, headers, method=method)
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            try:
                with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
                    for line in reply:
                        self._take(line.decode())
                return
            except urllib.error.HTTPError as refusal:
                with refusal, self._moved:
                    self.error = json.loads(refusal.read())["error"]
                    self._moved.notify_all()
                if refusal.code != 503:
                    return
            except (http.client.HTTPException, OSError):
                if self._num_events:
                    return  # the router died
            time.sleep(0.05)  # it is not there again yet

    def _take(self, line: str) -> None:
        with self._moved:
            name, _, value = line.rstrip("\n").partition(": ")
            if name == "id":
                self._next_id = value
            elif name == "data":
                self._event(value)
                self.event_id = self._next_id
                self._moved.notify_all()

    def _event(self, data: str) -> None:
        self._num_events += 1
        if data == "[DONE]":
            self.is_done = True
            return
        event = json.loads(data)
        self.error = event.get("error")
        if event.get("usage") is not None:
            self.usage = {**event["usage"], "prompt_tokens_details": None}  # it starts anew
        for choice in event.get("choices", ()):
            index = choice["index"]
            assert index not in self.ends, "an event after the end"
            self.texts[index] += choice["text"]
            self.tokens[index] += choice.get("token_ids", ())
            if choice["finish_reason"] is not None:
                self.ends[index] = choice["finish_reason"], choice["stop_reason"]


def asks_of(cluster: Cluster) -> dict[str, dict[str, object]]:
    """Those above, and one that ends at a stop string late in its text."""
    told = Client(cluster, {"temperature": 0, "max_tokens": 200}).finish().texts[0]
    return {**ASKS, "stopped": {"temperature": 0, "stop": [told[-5:], "never said", told[-30:]]}}


def test_streams_outlive_a_router_that_is_killed(tmp_path: Path) -> None:
    with Cluster(tmp_path, settings(decode=2)) as cluster:
        asks = asks_of(cluster)
        expected = {name: Client(cluster, ask).finish().result() for name, ask in asks.items()}
        clients = {name: Client(cluster, ask) for name, ask in asks.items()}
        for client in clients.values():
            client.wait_for(20)
        cluster.kill("router")
        cluster.start_router()
        for number, client in enumerate(clients.values()):
            client.come_back(by_get=number % 2 == 0)
        results = {name: client.finish().result() for name, client in clients.items()}
        assert results == expected
