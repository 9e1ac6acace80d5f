"""Children end with their parents, are told apart from their leftovers, and are started again.

Also what `LocalCluster`, which starts the nodes of one host, gives to them.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from baton.protocol.config import ClusterConfig, EngineConfig, RouterConfig
from baton.runtime import local_cluster
from baton.runtime.channels.endpoint import MAX_IPC_PATH_BYTES
from baton.runtime.local_cluster import LocalCluster, fitted_to_gpus, private_folder
from baton.runtime.process import (
    NOT_STARTED,
    Backoff,
    Child,
    Command,
    Exit,
    Interrupts,
    Supervisor,
)
from tests.support.sources import REPOSITORY
from tests.support.virtual_clock import VirtualClock
from tests.support.waiting import until

MODULE = "tests.support.child_roles"
DEADLINE_S = 30.0


def command(name: str, *args: str) -> Command:
    return Command(name, args, MODULE, (("PYTHONPATH", str(REPOSITORY)),))


@contextmanager
def running(role: str) -> Iterator[Child]:
    """A child that has said something."""
    child = Child(command("child", role))
    try:
        until(lambda: child.tail)
        yield child
    finally:
        child.stop(0.0)


def is_gone(pid: int) -> bool:
    """Return whether nothing but the exit code is left, for the process that adopted it."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_a_child_that_cannot_be_started_again_is_tried_again(monkeypatch):
    now_s = 0.0
    supervisor = Supervisor(
        (Command("c", ("-c", "pass"), module="platform"),), lambda: now_s
    )
    supervisor.start()
    python = sys.executable
    try:
        exits = until(supervisor.poll)
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        for before in exits:
            assert before.restart_in_s is not None
            now_s += before.restart_in_s
        (failed,) = supervisor.poll()
        assert (failed.code, failed.name) == (NOT_STARTED, "c")
        assert "cannot start c" in failed.tail[0]
        assert supervisor.pid_of("c") is None
        monkeypatch.setattr(sys, "executable", python)
        assert failed.restart_in_s is not None
        now_s += failed.restart_in_s
        supervisor.poll()
        assert supervisor.pid_of("c") is not None
    finally:
        supervisor.stop()


def test_a_child_ends_when_it_is_asked_to():
    with running("wait") as child:
        assert child.poll() is None
        assert child.stop() == -signal.SIGTERM
        assert child.stop() == -signal.SIGTERM, "stopping twice is harmless"


def test_what_a_child_leaves_behind_is_cleared_away():
    with running("leave-one") as child:
        until(lambda: child.poll() is not None)
        until(lambda: is_gone(int(child.tail[0])))


def test_a_grandchild_does_not_outlive_a_parent_that_was_killed():
    with running("parent") as child:
        grandchild = int(child.tail[0])
        assert not is_gone(grandchild)
        os.kill(child.pid, signal.SIGKILL)
        until(lambda: is_gone(grandchild))


def test_a_child_that_was_spawned_from_a_thread_outlives_the_thread():
    made: list[Child] = []
    spawner = threading.Thread(target=lambda: made.append(Child(command("c", "wait"))))
    spawner.start()
    spawner.join()
    try:
        until(lambda: made[0].tail)
        assert made[0].poll() is None
    finally:
        made[0].stop(0.0)


def test_a_child_that_dies_is_started_again_after_its_delay():
    clock = VirtualClock()
    supervisor = Supervisor((command("a", "exit", "3"), command("b", "wait")), clock)
    supervisor.start()
    try:
        steady = supervisor.pid_of("b")
        (first,) = until(supervisor.poll)
        assert first == Exit("a", 3, ("first line", "last line"), 1, 0.5)
        assert supervisor.pid_of("a") is None
        assert supervisor.poll() == []
        assert supervisor.pid_of("a") is None, "not before its time"
        clock.advance(0.5)
        assert supervisor.poll() == []
        assert supervisor.pid_of("a") is not None
        (second,) = until(supervisor.poll)
        assert (second.num_exits, second.restart_in_s) == (2, 1.0)
        assert supervisor.pid_of("b") == steady
    finally:
        supervisor.stop(0.0)


def test_a_log_that_is_full_for_a_while_loses_only_the_lines_of_that_while():
    lines: list[str] = []
    tries = iter(range(100))
    with open("/dev/full", "wb", buffering=0) as full:

        def relay(_name: str, line: str) -> None:
            if next(tries) in (1, 2):
                full.write(line.encode())
            lines.append(line)

        child = Child(command("c", "lines", "5"), relay)
        until(lambda: child.poll() is not None)
    assert lines == ["0", "2 lines are missing: the log was not writable", "3", "4"]
    assert child.tail == ("0", "1", "2", "3", "4")


def test_a_child_that_was_told_to_end_may_stay_away():
    clock = VirtualClock()
    supervisor = Supervisor((command("a", "exit", "0"),), clock, may_leave=True)
    supervisor.start()
    (left,) = until(supervisor.poll)
    assert (left.code, left.restart_in_s) == (0, None)
    clock.advance(1e6)
    assert supervisor.poll() == []
    assert supervisor.pid_of("a") is None


def test_stopping_a_supervisor_ends_all_even_the_deaf():
    lines: list[str] = []
    commands = command("a", "deaf"), command("b", "wait")
    supervisor = Supervisor(commands, relay=lambda _, line: lines.append(line))
    supervisor.start()
    until(lambda: len(lines) == 2)
    pids = [supervisor.pid_of(name) for name in ("a", "b")]
    supervisor.stop(grace_s=0.2)
    assert not any(psutil.pid_exists(pid) for pid in pids if pid)
    supervisor.stop()


@pytest.mark.parametrize(
    ("runs_s", "delays_s"),
    [
        ((0,) * 9, (0.5, 1, 2, 4, 8, 16, 30, 30, 30)),
        ((0, 0, 61, 0), (0.5, 1, 0.5, 1)),
    ],
)
def test_restarts_wait_longer_each_time_until_one_went_well(runs_s, delays_s):
    backoff = Backoff()
    assert tuple(backoff.after(ran_s) for ran_s in runs_s) == delays_s


@pytest.mark.parametrize(
    ("number", "is_hurried"), [(signal.SIGTERM, False), (signal.SIGINT, True)]
)
def test_the_first_signal_is_a_request(number, is_hurried):
    with Interrupts(on_second=lambda: None) as interrupts:
        assert not interrupts.wait(0)
        os.kill(os.getpid(), number)
        assert interrupts.wait(DEADLINE_S)
        assert (interrupts.requested, interrupts.is_hurried) == (True, is_hurried)


def test_the_keys_of_clients_do_not_reach_the_nodes():
    router = RouterConfig(api_keys=("a secret",), api_key_file="/a/secret/file")
    nodes = LocalCluster(
        ClusterConfig(prefill=1, decode=1, router=router), "ipc:///control"
    )
    settings = [Path(command.args[-1]).read_text() for command in nodes.commands]
    nodes.stop()
    assert len(settings) == 2
    assert not any("secret" in text for text in settings)


def test_nodes_that_cannot_be_described_leave_no_folder(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError("no space is left on the device")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        LocalCluster(ClusterConfig(), "ipc:///control")
    assert not list(tmp_path.iterdir())


def test_the_folder_of_sockets_has_a_short_path_wherever_temporary_files_go(
    tmp_path, monkeypatch
):
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    folder = private_folder()
    assert len(f"{folder}/peers-decode-9999") <= MAX_IPC_PATH_BYTES
    folder.rmdir()
    assert not list(deep.iterdir())


@pytest.mark.parametrize(
    ("gpus", "settings", "found"),
    [
        ("0", {}, (0, 1, "always")),
        ("0,1", {}, (1, 1, "auto")),
        ("0,1", {"engine": EngineConfig(tensor_parallel_size=2)}, (0, 1, "always")),
        ("0,1,2", {"prefill": 2, "decode": 2}, (0, 3, "always")),
        ("0", {"router": RouterConfig(local_prefill="never")}, (1, 1, "never")),
        ("0", {"engine": EngineConfig(device="cpu")}, (1, 1, "auto")),
        ("", {}, (1, 1, "auto")),
    ],
)
def test_fewer_gpus_than_nodes_are_served_aggregated_and_a_line_says_so(
    gpus, settings, found, monkeypatch, caplog
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(local_cluster, "version", lambda _: "2.13.0")
    config = ClusterConfig(**settings)
    fitted = fitted_to_gpus(config)
    assert (fitted.prefill, fitted.decode, fitted.router.local_prefill) == found
    is_changed = found[0] == 0
    assert ["fewer GPUs" in record.getMessage() for record in caplog.records] == [
        True
    ] * is_changed
    assert (fitted == config) == (not is_changed)
    monkeypatch.setattr(local_cluster, "version", lambda _: "2.13.0+cpu")
    assert fitted_to_gpus(config) == config, "such a torch computes on the CPU"
