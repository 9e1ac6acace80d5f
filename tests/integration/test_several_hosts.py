"""One cluster.yaml, `baton doctor` and `baton up` on several hosts: network namespaces."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from baton.deploy.model_folder import CHECKPOINT
from baton.runtime.channels.keys import write_key
from tests.support.hosts import Hosts, hosts
from tests.support.waiting import until

pytestmark = pytest.mark.release

STOP_TIMEOUT_S = 120.0
ROUTER = 1
DECODE = (2, 3)
BODY = {
    "prompt": "The code of Lima is 4071. The code of Oslo is 2210. " * 3
    + "What is the code of Oslo?",
    "max_tokens": 8,
    "temperature": 0,
}
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


def write_cluster(folder: Path, described: dict[str, object]) -> None:
    shutil.copytree(CHECKPOINT, folder / "demo")
    write_key(folder / "cluster.key")
    (folder / "cluster.yaml").write_text(yaml.safe_dump(described, sort_keys=False))


class Three:
    """Three hosts that have the same cluster.yaml, and `baton up` on each of them."""

    def __init__(self, on: Hosts, folder: Path) -> None:
        self.on = on
        self.folder = folder
        self.up: dict[int, subprocess.Popen[bytes]] = {}
        write_cluster(folder, DESCRIBED)

    def start(self, host: int) -> None:
        words = (
            str(self.folder / "cluster.yaml"),
            "--state",
            str(self.folder / f"state-{host}"),
        )
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
        return str(answer["choices"][0]["text"])

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))


@pytest.fixture
def three(tmp_path):
    with hosts(3) as on:
        cluster = Three(on, tmp_path)
        try:
            yield cluster
        finally:
            for process in cluster.up.values():
                process.send_signal(signal.SIGTERM)
            for process in cluster.up.values():
                process.wait(STOP_TIMEOUT_S)


def test_one_description_serves_on_three_hosts_through_the_loss_of_one(three):
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


def looked_at(on: Hosts, folder: Path, *words: str) -> tuple[int, str]:
    """Look at the cluster from the prefill node's host; return the exit code and what is said."""
    via = on.launcher(folder / "on")
    file = str(folder / "cluster.yaml")
    given = (file, "--via", via, "--state", str(folder / "state"), *words)
    done = on.run(ROUTER, sys.executable, "-m", "baton", "doctor", *given)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def test_every_path_between_hosts_is_measured_as_nodes_would_read(tmp_path):
    # Any transport.
    described = {**DESCRIBED, "settings": {"cache": {"memory_mib": 64}}}
    write_cluster(tmp_path, described)
    with hosts(3) as on:
        code, said = looked_at(on, tmp_path)
        assert code == 0, said
        for host in ("10.0.0.1", "10.0.0.2", "10.0.0.3", "all hosts", "paths"):
            assert f"{host}:\n" in said
        rows = re.findall(
            r"ok +(\S+) reads (\S+)  (\d+\.\d\d) GB/s, \d+\.\d\d ms for a block of 64 KiB, by "
            r"nixl: (\S+)",
            said,
        )
        assert [(row[0], row[1], row[3]) for row in rows] == [
            ("10.0.0.2", "10.0.0.1", "tcp/eth0"),
            ("10.0.0.3", "10.0.0.1", "tcp/eth0"),
        ]
        assert all(float(row[2]) > 0 for row in rows)

        # UCX dials the prefill host; nodes dial the decode host and the router.
        new = "ct state new"
        on.drop(ROUTER, f"ip saddr 10.0.0.3 {new} tcp dport != {{ 5570, 8000 }}")
        on.drop(DECODE[0], f"ip saddr 10.0.0.1 {new} tcp dport 1-65535")
        code, said = looked_at(on, tmp_path, "--timeout", "10")
        assert code == 1
        blocked, unread = re.findall(r"fault +\S+ reads \S+  (.*)", said)
        assert re.search(r"no answer from 10.0.0.2:\d+ within 10 s", blocked)
        assert re.search(r"no answer in time from nixl at 10.0.0.1", unread)
        assert "open all TCP ports of the host that is read" in unread
