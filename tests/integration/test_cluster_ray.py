"""`baton up --on ray`: actors on a real Ray of this machine."""

import os
import secrets
import subprocess
import sys
import tempfile
import threading
from http.client import HTTPResponse
from pathlib import Path

import psutil
import pytest

from baton.runtime.channels.keys import write_key
from tests.support.deployed import Deployed
from tests.support.waiting import TIMEOUT_S, until

# Ray puts the address of a network in place of 127.0.0.1, but leaves other loopback addresses.
HEAD = "127.0.0.2"
# Prints everything that Ray still holds: named actors, and CPUs that are not free.
HELD = """
import ray
from ray.util import list_named_actors
ray.init(log_to_driver=False, logging_level="ERROR")
free = ray.available_resources().get("CPU", 0)
print(list_named_actors(all_namespaces=True), ray.cluster_resources()["CPU"] - free)
"""


@pytest.fixture(scope="module")
def ray_env(tmp_path_factory):
    """Run a Ray head with three CPUs, and yield the variables with which a process joins it."""
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    # Ray need not wait for others' work.
    env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
    with tempfile.TemporaryDirectory(
        prefix="ray-", ignore_cleanup_errors=True
    ) as folder:
        words = [
            "--head",
            "--block",
            f"--node-ip-address={HEAD}",
            "--port=0",
            "--no-monitor",
            "--include-dashboard=false",
            "--include-log-monitor=false",
            "--disable-usage-stats",
            "--num-cpus=3",
            "--object-store-memory=100000000",
            "--dashboard-agent-listen-port=0",
            f"--temp-dir={folder}",
        ]
        head = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *words],
            env={**os.environ, **env},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            address = Path(folder) / "ray_current_cluster"
            until(lambda: address.exists() and address.read_text().strip())
            yield {**env, "RAY_ADDRESS": address.read_text().strip()}
            ours = [
                psutil.Process(head.pid),
                *psutil.Process(head.pid).children(recursive=True),
            ]
        finally:
            head.terminate()
            head.wait(TIMEOUT_S)
    assert not psutil.wait_procs(ours, timeout=TIMEOUT_S)[1]


def cluster(folder: Path, env: dict[str, str]) -> Deployed:
    deployed = Deployed(folder, env=env)
    write_key(folder / "cluster.key")
    deployed.content |= {
        "key": "cluster.key",
        "settings": {
            "cache": {"memory_mib": 64},
            "engine": {"threads": 1},
            "router": {"shutdown_timeout_s": TIMEOUT_S},
        },
    }
    return deployed


def stream(deployed: Deployed) -> HTTPResponse:
    return deployed.ask(max_tokens=600, ignore_eos=True, stream=True)


@pytest.fixture
def placed(ray_env, tmp_path):
    """A cluster on Ray that serves, and its driver."""
    placed = cluster(tmp_path, ray_env)
    placed.address = HEAD
    driver = placed.baton("up", "--on", "ray", "--timeout", str(TIMEOUT_S))
    try:
        assert driver.stdout is not None
        lines = iter(driver.stdout.readline, "")
        said = next(line for line in lines if line.startswith("small serves"))
        assert said == f"small serves at http://{HEAD}:{placed.port}/v1\n"
        threading.Thread(target=list, args=(lines,), daemon=True).start()
        yield placed, driver
    finally:
        driver.kill()
        driver.communicate()
    until(lambda: held_by_ray(ray_env) == "[] 0.0")


@pytest.mark.release
def test_a_cluster_on_ray_serves_survives_an_actor_and_drains(placed):
    placed, driver = placed
    assert placed.complete() == " 4071."
    before = placed.processes()
    assert set(before) == {"router-0", "prefill-0", "decode-0"}
    # Ray's own 15 would let nodes wait for everything else on their hosts.
    assert {process.nice() for process in before.values()} == {0}
    secret = (placed.folder / "cluster.key").read_text().split()[1]
    assert not [one for one in psutil.process_iter() if secret in shown_by(one)]
    check_restart(placed, before["decode-0"])
    with stream(placed) as reply:
        first = reply.readline()
        code, said, complained = placed.run("down")
        lines = [line for line in [first, *reply] if line.startswith(b"data: ")]
    assert (code, said, lines[-1]) == (0, "small is down\n", b"data: [DONE]\n"), (
        complained
    )
    assert driver.wait(TIMEOUT_S) == 0
    assert placed.all_gone()


@pytest.mark.release
def test_a_cluster_on_ray_ends_with_its_driver(placed):
    placed, driver = placed
    assert len(placed.processes()) == 3
    driver.kill()
    assert placed.all_gone()


def held_by_ray(env: dict[str, str]) -> str:
    """Return the actors and the number of CPUs that Ray still holds."""
    held = subprocess.run(
        [sys.executable, "-c", HELD],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return held.stdout.strip()


def shown_by(process: psutil.Process) -> str:
    """Return the command line and the environment of a process, as other processes see them."""
    try:
        return f"{process.cmdline()} {process.environ()}"
    except psutil.Error:
        return ""


@pytest.mark.release
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "Ray cannot reserve what all nodes need"),
        (("--timeout", "3"), 1, "not ready within 3 s"),
        (("--detach",), 2, "ray job submit"),
        (("--address", "127.0.0.1:1"), 1, "cannot join Ray at 127.0.0.1:1"),
    ],
)
def test_a_start_on_ray_that_cannot_work_is_one_line(
    words, code, said, ray_env, tmp_path
):
    other = cluster(tmp_path, ray_env)
    other.content |= {"pools": {"decode": {"role": "decode", "gpus": 64}}}
    ended, _, complained = other.run("up", "--on", "ray", *words)
    assert (ended, complained.count("\n"), said in complained) == (code, 1, True), (
        complained
    )
    assert not list(other.state.glob("*.json"))


def check_restart(placed: Deployed, node: psutil.Process) -> None:
    """Ray starts a killed actor again, and its stream goes on."""
    with stream(placed) as reply:
        reply.readline()
        actor = node.parent()
        assert actor is not None
        actor.kill()
        lines = [line for line in reply if line.startswith(b"data: ")]
    assert lines[-1] == b"data: [DONE]\n"
    until(lambda: placed.processes().get("decode-0") not in (None, node))
    code, said, _ = placed.run("status")
    assert (code, "its actor ended, and Ray started it again" in said) == (0, True)
    assert not psutil.wait_procs([node], timeout=TIMEOUT_S)[1]
