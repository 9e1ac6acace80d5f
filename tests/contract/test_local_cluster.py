"""The launcher of one host: nodes are started, started again, and all gone at the end."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from baton.protocol.config import ClusterConfig, RouterConfig
from baton.runtime.channels.endpoint import MAX_IPC_PATH_BYTES
from baton.runtime.local_cluster import LocalCluster, private_folder
from tests.support.checkpoints import tiny_cluster
from tests.support.waiting import until

HTTP_PORT = 18_000
# An address of this process alone on this host, so that its ports are free.
ADDRESS = "127." + ".".join(str(byte) for byte in os.getpid().to_bytes(3, "big"))
NODES = ("prefill-0", "decode-0", "decode-1")


def cluster(folder: Path, lines: list[str], model: str | Path = "qwen3") -> LocalCluster:
    node = {"http": f"{ADDRESS}:{HTTP_PORT}"}
    config = tiny_cluster(model, decode=2, cache={"num_blocks": 16}, node=node)
    control = f"ipc://{folder}/control"
    return LocalCluster(config, control, lambda name, line: lines.append(f"{name} | {line}"))


def wait_for_ready(lines: list[str], count: int) -> None:
    until(lambda: sum(": ready " in line for line in lines) >= count, lambda: "\n".join(lines))


def test_nodes_live_as_long_as_their_cluster(tmp_path: Path) -> None:
    lines: list[str] = []
    nodes = cluster(tmp_path, lines)
    nodes.start()
    try:
        wait_for_ready(lines, 3)
        assert nodes._supervisor is not None
        node_pid = nodes._supervisor.pid_of
        share = max(1, len(os.sched_getaffinity(0)) // 3)
        assert sum(f" threads={share} " in line for line in lines) == 3
        pids = {name: node_pid(name) for name in NODES}
        assert len(set(pids.values())) == 3
        for number, name in enumerate(NODES):
            page = f"http://{ADDRESS}:{HTTP_PORT + number}"
            assert any(f" {name}: " in line and line.endswith(page) for line in lines)
        assert nodes.poll() == []
        killed = pids["decode-1"]
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        (ended,) = until(nodes.poll)
        assert (ended.name, ended.code) == ("decode-1", -signal.SIGKILL)
        until(lambda: list(nodes.poll()) == [] and node_pid("decode-1"))
        wait_for_ready(lines, 4)
        assert node_pid("decode-0") == pids["decode-0"]
        last = [node_pid(name) for name in NODES]
    finally:
        nodes.stop()
    assert not any(pid is not None and psutil.pid_exists(pid) for pid in last)
    nodes.stop()


def test_the_keys_of_clients_do_not_reach_the_nodes(tmp_path: Path) -> None:
    router = RouterConfig(api_keys=("a secret",), api_key_file="/a/secret/file")
    nodes = LocalCluster(ClusterConfig(prefill=1, decode=1, router=router), "ipc:///control")
    settings = [Path(command.args[-1]).read_text() for command in nodes._commands(tmp_path)]
    assert len(settings) == 2
    assert not any("secret" in text for text in settings)


def test_the_folder_of_sockets_has_a_short_path_wherever_temporary_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    folder = private_folder()
    assert len(f"{folder}/peers-decode-9999") <= MAX_IPC_PATH_BYTES
    folder.rmdir()
    assert not list(deep.iterdir())
