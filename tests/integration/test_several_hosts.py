"""One cluster.yaml and `baton up` on each of several hosts, which are network namespaces."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from baton.deploy.model_folder import write_demo_model
from baton.runtime.channels.keys import write_key
from tests.support.hosts import Hosts, hosts
from tests.support.waiting import until

pytestmark = pytest.mark.release

STOP_TIMEOUT_S = 120.0
ROUTER, DECODE = 1, (2, 3)
BODY = {
    "prompt": "The code of Lima is 4071. The code of Oslo is 2210. " * 3
    + "What is the code of Oslo?",
    "max_tokens": 8, "temperature": 0,
}  # fmt: skip
DESCRIBED: dict[str, object] = {
    "name": "three",
    "model": "demo",
    "key": "cluster.key",
    "routers": [{"host": "10.0.0.1"}],
    "pools": {
        "prefill": {"role": "prefill", "hosts": ["10.0.0.1"]},
        "decode": {"role": "decode", "replicas": 2, "hosts": ["10.0.0.2", "10.0.0.3"]},
    },
    "settings": {"transfer": {"transport": "nixl"}, "cache": {"memory_mib": 64}},
    "env": {"UCX_TLS": "tcp"},
}
ASK = """
import sys, urllib.error, urllib.request
url, body = sys.argv[1], sys.argv[2].encode() or None
request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
try:
    print(urllib.request.urlopen(request, timeout=60).read().decode())
except urllib.error.HTTPError as error:
    print(error.read().decode())
"""


class Three:
    """Three hosts that have the same cluster.yaml, and `baton up` on each of them."""

    def __init__(self, on: Hosts, folder: Path) -> None:
        self.on = on
        self.folder = folder
        self.up: dict[int, subprocess.Popen[bytes]] = {}
        write_demo_model(folder / "demo")
        write_key(folder / "cluster.key")
        (folder / "cluster.yaml").write_text(yaml.safe_dump(DESCRIBED, sort_keys=False))

    def start(self, host: int) -> None:
        words = (str(self.folder / "cluster.yaml"), "--state", str(self.folder / f"state-{host}"))
        command = [sys.executable, "-m", "baton", "up", *words]
        self.up[host] = self.on.start(host, command, self.folder / f"up-{host}.log")

    def serves(self, host: int) -> bool:
        assert self.up[host].poll() is None, self.logs()
        return "Ctrl-C ends it" in (self.folder / f"up-{host}.log").read_text()

    def ask(self, path: str, body: str = "") -> dict[str, object]:
        url = f"http://10.0.0.1:8000{path}"
        done = self.on.run(ROUTER, sys.executable, "-c", ASK, url, body)
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    def state_of(self, node: str) -> str:
        nodes = self.ask("/health")["nodes"]
        assert isinstance(nodes, list)
        return next((one["state"] for one in nodes if one["node_id"] == node), "absent")

    def complete(self) -> str:
        answer = self.ask("/v1/completions", json.dumps(BODY))
        assert "choices" in answer, (answer, self.logs())
        return str(answer["choices"][0]["text"])  # type: ignore[index]

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Three]:
    with hosts(3) as on:
        cluster = Three(on, tmp_path)
        try:
            yield cluster
        finally:
            for process in cluster.up.values():
                process.send_signal(signal.SIGTERM)
            for process in cluster.up.values():
                process.wait(STOP_TIMEOUT_S)


def test_one_description_serves_on_three_hosts_through_the_loss_of_one(three: Three) -> None:
    for host in (*DECODE, ROUTER):
        three.start(host)
    for host in three.up:
        until(lambda host=host: three.serves(host), three.logs)
    assert three.complete() == " 2210."
    three.on.plug(DECODE[0], is_in=False)
    until(lambda: three.state_of("decode-0") != "ready", three.logs)
    assert three.complete() == " 2210."
    three.on.plug(DECODE[0], is_in=True)
    until(lambda: three.state_of("decode-0") == "ready", three.logs)
    assert "Traceback" not in three.logs()
