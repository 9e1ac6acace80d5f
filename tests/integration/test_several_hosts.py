"""Several hosts: README's commands typed on each of them, and one cluster.yaml for all."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from baton import LLM, SamplingParams
from baton.deploy.demo_model import write_demo_model
from baton.runtime.channels.keys import write_key
from tests.support.hosts import Hosts, hosts
from tests.support.sources import REPOSITORY
from tests.support.waiting import until

START_TIMEOUT_S = 120.0
HOST_OF = {"router": 1, "prefill": 2, "decode": 3}
TOLD = "The code of Lima is 4071. The code of Oslo is 2210. " * 3
BODY = json.dumps({"prompt": TOLD + "What is the code of Oslo?", "max_tokens": 8, "temperature": 0})
ASK = """
import sys, urllib.error, urllib.request
url, body = sys.argv[1], sys.argv[2].encode() or None
request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
try:
    print(urllib.request.urlopen(request, timeout=60).read().decode())
except urllib.error.HTTPError as error:
    print(error.read().decode())
except OSError as error:
    print('{"status": "not there"}')
"""


def commands() -> list[list[str]]:
    """Return README's lines that start with `baton` in the block that makes a key."""
    blocks = re.findall(r"(?s)```sh\n(.*?)```", (REPOSITORY / "README.md").read_text())
    (block,) = (block for block in blocks if "baton keygen" in block)
    return [shlex.split(line, comments=True) for line in block.splitlines()]


def ask(
    on: Hosts, path: str, body: str = "", host: int = 1, address: str = "127.0.0.1"
) -> dict[str, object]:
    """Return the answer to a request that a host sends to an address."""
    done = on.run(host, sys.executable, "-c", ASK, f"http://{address}:8000{path}", body)
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


@contextmanager
def typed(on: Hosts, folder: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Run README's commands, each on its host, and wait until the cluster is ready."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    try:
        for command in commands():
            words = [word.replace("/models/qwen3", str(folder / "demo")) for word in command]
            process = on.start(HOST_OF.get(words[1], 1), words, folder / f"{words[1]}.log", env)
            if words[1] == "keygen":
                assert process.wait(60.0) == 0
            else:
                processes[words[1]] = process
        until(lambda: ask(on, "/health")["status"] == "ready", lambda: said(folder))
        yield processes
    finally:
        for process in processes.values():
            process.send_signal(signal.SIGTERM)
        for process in processes.values():
            try:
                process.wait(30.0)
            except subprocess.TimeoutExpired:
                process.kill()


def said(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))


@pytest.mark.slow
def test_readmes_commands_serve_over_the_network(tmp_path: Path) -> None:
    write_demo_model(tmp_path / "demo")
    with hosts(3) as on, typed(on, tmp_path) as processes:
        assert set(processes) == set(HOST_OF)
        answer = ask(on, "/v1/completions", BODY)
        assert answer["choices"][0]["text"] == " 2210.", (answer, said(tmp_path))  # type: ignore[index]
    assert "Traceback" not in said(tmp_path)


ROUTERS, PREFILL, DECODE = (1, 2), 3, (4, 5)
LONG = {"prompt": TOLD + "What is the code of Oslo?", "max_tokens": 32, "ignore_eos": True}
DESCRIBED: dict[str, object] = {
    "name": "five",
    "model": "demo",
    "key": "cluster.key",
    "routers": [{"host": "10.0.0.1"}, {"host": "10.0.0.2"}],
    "pools": {
        "prefill": {"role": "prefill", "hosts": ["10.0.0.3"]},
        "decode": {"role": "decode", "replicas": 2, "hosts": ["10.0.0.4", "10.0.0.5"]},
    },
    "settings": {"transfer": {"transport": "nixl"}, "cache": {"memory_mib": 64}},
    "env": {"UCX_TLS": "tcp"},
}


class Five:
    """Five hosts that have the same cluster.yaml, and `baton up` on each of them."""

    def __init__(self, on: Hosts, folder: Path) -> None:
        self.on = on
        self.folder = folder
        self.up: dict[int, subprocess.Popen[bytes]] = {}
        write_demo_model(folder / "demo")
        write_key(folder / "cluster.key")
        (folder / "other").mkdir()
        write_key(folder / "other/cluster.key")
        (folder / "other/demo").symlink_to(folder / "demo")
        self.describe("cluster.yaml", DESCRIBED)
        late = {"late": {"role": "decode", "hosts": ["10.0.0.5"]}}
        self.describe("other/cluster.yaml", {**DESCRIBED, "pools": late})
        pools = {"decode": {"role": "decode", "replicas": 2, "hosts": ["10.0.0.5", "10.0.0.4"]}}
        self.describe("swapped.yaml", {**DESCRIBED, "pools": pools})

    def describe(self, name: str, content: dict[str, object]) -> None:
        (self.folder / name).write_text(yaml.safe_dump(content, sort_keys=False))

    def baton(self, host: int, *words: str) -> "subprocess.CompletedProcess[str]":
        return self.on.run(host, sys.executable, "-m", "baton", *words)

    def fails(self, host: int, file: str, *words: str) -> str:
        """Return the line that `up` ends with."""
        where = ("--detach", "--state", str(self.folder / "failing"))
        done = self.baton(host, "up", str(self.folder / file), *where, *words)
        lines = [line for line in done.stderr.splitlines() if line.startswith("baton: ")]
        assert (done.returncode, len(lines)) == (1, 1), done.stderr
        return lines[0]

    def state(self, host: int) -> tuple[str, ...]:
        """Return the words that name the description, and the state folder of a host."""
        return (str(self.folder / "cluster.yaml"), "--state", str(self.folder / f"state-{host}"))

    def start(self, host: int) -> None:
        command = [sys.executable, "-m", "baton", "up", *self.state(host)]
        self.up[host] = self.on.start(host, command, self.folder / f"up-{host}.log")

    def wait_until_said(self, host: int, words: str) -> None:
        path = self.folder / f"up-{host}.log"

        def is_said() -> bool:
            assert self.up[host].poll() is None, said(self.folder)
            return words in path.read_text()

        self.wait(is_said)

    def wait(self, condition: Callable[[], bool]) -> None:
        until(condition, lambda: said(self.folder))

    def wait_for_state(self, router: int, node: str, *, is_ready: bool) -> None:
        self.wait(lambda: (self.states(router).get(node) == "ready") is is_ready)

    def states(self, router: int) -> dict[str, str]:
        """Return the nodes that a router knows, and their states."""
        nodes = ask(self.on, "/health", host=router, address=f"10.0.0.{router}").get("nodes", [])
        assert isinstance(nodes, list)
        return {node["node_id"]: node["state"] for node in nodes}

    def complete(self, router: int) -> str:
        body = json.dumps({**LONG, "temperature": 0})
        answer = ask(self.on, "/v1/completions", body, router, f"10.0.0.{router}")
        assert "choices" in answer, (answer, said(self.folder))
        return str(answer["choices"][0]["text"])  # type: ignore[index]

    def end(self) -> None:
        for process in self.up.values():
            process.send_signal(signal.SIGTERM)
        for process in self.up.values():
            process.wait(START_TIMEOUT_S)


@pytest.fixture
def five(tmp_path: Path) -> Iterator[Five]:
    with hosts(5) as on:
        cluster = Five(on, tmp_path)
        try:
            yield cluster
        finally:
            cluster.end()


def completed_locally(folder: Path) -> str:
    params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    with LLM(model=str(folder / "demo")) as local:
        (output,) = local.generate([str(LONG["prompt"])], params)
    return output.outputs[0].text


@pytest.mark.slow
def test_one_description_serves_on_five_hosts_through_the_loss_of_some(five: Five) -> None:
    text = completed_locally(five.folder)
    line = five.fails(PREFILL, "cluster.yaml", "--timeout", "5")
    assert "not ready within 5 s: router-0 on 10.0.0.1 does not answer" in line
    for host in (PREFILL, *DECODE):
        five.start(host)
    for host in (PREFILL, *DECODE):
        five.wait_until_said(host, ": ready ")
    for host in ROUTERS:
        five.start(host)
    for host in five.up:
        five.wait_until_said(host, "Ctrl-C ends it")
    assert [five.complete(router) for router in ROUTERS] == [text, text]

    # A host that has another key, and one that gives a node the id of another.
    line = five.fails(DECODE[1], "other/cluster.yaml")
    assert "router-0 on 10.0.0.1 refuses the key of this host" in line
    line = five.fails(DECODE[1], "swapped.yaml")
    assert "decode-0 on 10.0.0.5: router-0 already has a node with this id" in line
    assert set(five.states(ROUTERS[0])) == {"prefill-0", "decode-0", "decode-1"}

    five.on.plug(DECODE[0], is_in=False)
    five.wait_for_state(ROUTERS[0], "decode-0", is_ready=False)
    assert [five.complete(router) for router in ROUTERS] == [text, text]
    five.on.plug(DECODE[0], is_in=True)
    for router in ROUTERS:
        five.wait_for_state(router, "decode-0", is_ready=True)
    assert five.complete(ROUTERS[1]) == text

    killed = five.up.pop(ROUTERS[0])
    killed.kill()
    killed.wait()
    assert five.complete(ROUTERS[1]) == text
    done = five.baton(ROUTERS[0], "down", *five.state(ROUTERS[0]))
    assert done.returncode == 0, done.stderr
    (five.folder / f"up-{ROUTERS[0]}.log").unlink()
    five.start(ROUTERS[0])
    five.wait_until_said(ROUTERS[0], "Ctrl-C ends it")
    assert five.complete(ROUTERS[0]) == text
    assert "Traceback" not in said(five.folder)
