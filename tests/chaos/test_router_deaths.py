"""Clients go on with streams whose router died, and no token is lost or doubled."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.checkpoints import tiny_cluster
from tests.support.cluster import Cluster
from tests.support.waiting import until

PROMPT = [10 + (i * i + 7 * i) % 241 for i in range(70)]
# So many that none has come whole when the last client has its first.
NUM_TOKENS = 400
DEADLINE_S = 120.0
KEY = "one"
# The stop string never comes, so the text before it is held back again and again.
ASKS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0, "stream_options": {"include_usage": True}},
    "sampled": {"temperature": 1.0, "seed": 7, "return_token_ids": True},
    "choices": {"n": 2, "seed": 3, "temperature": 0.8, "return_token_ids": True},
    "short": {"temperature": 0.7, "seed": 11, "max_tokens": 60},
}


class Client:
    """Reads one stream, and takes it up again after the last event that it got."""

    def __init__(self, cluster: Cluster, ask: dict[str, object]) -> None:
        self.texts: dict[int, str] = defaultdict(str)
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, tuple[str, object]] = {}
        self.usage: object = None
        self.num_events = 0
        self.num_taken_up = 0
        self._cluster = cluster
        self._event_id = ""
        self._body = json.dumps(
            {
                "model": "tiny",
                "prompt": PROMPT,
                "max_tokens": NUM_TOKENS,
                "ignore_eos": True,
            }
            | {"stream": True, **ask}
        ).encode()

    def read(self) -> "Client":
        """Read the whole stream; the router may be away for a while."""
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            try:
                if self._read_on():
                    return self
            except urllib.error.HTTPError as refusal:
                with refusal:
                    if refusal.code != 503:
                        raise
            except (http.client.HTTPException, OSError):
                pass  # the router died, or is not there again yet
            time.sleep(0.05)
        raise AssertionError("the stream does not go on")

    def result(self) -> object:
        return dict(self.texts), dict(self.tokens), self.ends, self.usage

    def _read_on(self) -> bool:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        headers["Accept"] = "text/event-stream"  # so that events have ids
        if self._event_id:
            headers["Last-Event-ID"] = self._event_id
        url = self._cluster.url("/v1/completions")
        with urllib.request.urlopen(
            urllib.request.Request(url, self._body, headers), timeout=DEADLINE_S
        ) as reply:
            self.num_taken_up += bool(self._event_id)
            for line in reply:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name == "id":
                    event_id = value
                elif name == "data" and value == "[DONE]":
                    return True
                elif name == "data":
                    self._event(json.loads(value))
                    self._event_id = event_id
        return False

    def _event(self, event: dict[str, object]) -> None:
        assert "error" not in event, event
        self.num_events += 1
        if isinstance(usage := event.get("usage"), dict):
            self.usage = {**usage, "prompt_tokens_details": None, "resumed": None}
        for choice in event.get("choices", ()):
            index = choice["index"]
            assert index not in self.ends, "an event after the end"
            self.texts[index] += choice["text"]
            self.tokens[index] += choice.get("token_ids", ())
            if choice["finish_reason"] is not None:
                self.ends[index] = choice["finish_reason"], choice["stop_reason"]


@pytest.mark.timeout(300)
def test_streams_outlive_a_router_that_is_killed(tmp_path):
    config = tiny_cluster(
        cache={"num_blocks": 800},
        engine={"max_num_batched_tokens": 64},
        decode=2,
        router={"local_prefill": "never", "api_keys": (KEY,)},
    )
    with (
        Cluster(tmp_path, config) as cluster,
        ThreadPoolExecutor(len(ASKS) + 1) as pool,
    ):
        told = Client(cluster, {"temperature": 0, "max_tokens": 200}).read().texts[0]
        # One more ends at a stop string late in its text.
        late = {"temperature": 0, "stop": [told[-5:], "never said", told[-30:]]}
        asks = [*ASKS.values(), late]
        expected = list(
            pool.map(lambda ask: Client(cluster, ask).read().result(), asks)
        )
        clients = [Client(cluster, ask) for ask in asks]
        reading = [pool.submit(client.read) for client in clients]
        until(lambda: all(client.num_events >= 3 for client in clients))
        cluster.kill("router")
        cluster.start_router()
        assert [one.result().result() for one in reading] == expected
        assert any(client.num_taken_up for client in clients)
