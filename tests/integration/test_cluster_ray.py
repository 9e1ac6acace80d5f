"""`--on ray`: actors on real raylets of this machine, and a Ray cluster of baton's own."""

import json
import tempfile
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path

import psutil
import pytest

from baton.runtime.channels.keys import write_key
from tests.support.cluster import free_port
from tests.support.deployed import Deployed
from tests.support.ray_hosts import HEAD, OTHER, SPARE, RayHosts, ray_hosts
from tests.support.waiting import TIMEOUT_S, until

NAMES = {"router-0", "prefill-0", "decode-0"}
NUM_TOKENS = 600
# The head of the Ray cluster has room for this node alone.
POOLS = {
    "prefill": {"role": "prefill", "resources": {"node:__internal_head__": "0.1"}},
    "decode": {"role": "decode"},
}
SETTINGS = {"cache": {"memory_mib": 64}, "engine": {"threads": 1}, "router": {"drain_s": TIMEOUT_S}}


@pytest.fixture(scope="module")
def hosts() -> Iterator[RayHosts]:
    with ray_hosts() as hosts:
        yield hosts


@pytest.fixture(scope="module")
def placed(hosts: RayHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """A cluster with a key that is up on the two hosts."""
    deployed = cluster(tmp_path_factory.mktemp("placed"), hosts.env)
    # The second raylet may join later.
    code, said, complained = deployed.run("up", *at(hosts.address), "--timeout", str(TIMEOUT_S))
    assert code == 0, complained
    assert f"small serves at http://{OTHER}:{deployed.port}/v1\n" in said
    deployed.address = OTHER
    try:
        yield deployed
    finally:
        deployed.run("down")


def cluster(folder: Path, env: dict[str, str]) -> Deployed:
    deployed = Deployed(folder, env=env)
    write_key(folder / "cluster.key")
    deployed.content |= {"key": "cluster.key", "settings": SETTINGS, "pools": POOLS}
    return deployed


def at(address: str) -> tuple[str, ...]:
    return "--on", "ray", "--address", address


def stream(deployed: Deployed) -> HTTPResponse:
    return deployed.ask(max_tokens=NUM_TOKENS, ignore_eos=True, stream=True)


def text_of(lines: list[bytes]) -> str:
    """Return the text of a whole stream."""
    events = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]\n"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["text"] for choice in choices)


def test_actors_serve_and_show_no_key(placed: Deployed, hosts: RayHosts) -> None:
    assert placed.complete() == " 4071."
    code, said, _ = placed.run("status")
    rows = [line.split() for line in said.splitlines()[2:]]
    assert (code, [row[3] for row in rows]) == (0, ["ready"] * 3)
    assert [row[2] for row in rows] == [OTHER, HEAD, OTHER]
    processes = placed.processes()
    assert set(processes) == NAMES
    # Ray's own 15 would let nodes wait for everything else on their hosts.
    assert {process.nice() for process in processes.values()} == {0}
    secret = (placed.folder / "cluster.key").read_bytes().split()[1]
    shown = [path for path in hosts.folder.rglob("*") if path.is_file()]
    assert not [path for path in shown if secret in path.read_bytes()]
    assert not [one for one in psutil.process_iter() if secret.decode() in said_of(one)]


def actor_of(process: psutil.Process) -> psutil.Process:
    actor = process.parent()
    assert actor is not None
    return actor


def said_of(process: psutil.Process) -> str:
    """Return the command line and the environment of a process, as other processes see them."""
    try:
        return f"{process.cmdline()} {process.environ()}"
    except psutil.Error:
        return ""


def test_a_stream_goes_on_when_ray_starts_a_killed_actor_again(placed: Deployed) -> None:
    with stream(placed) as reply:
        expected = text_of(list(reply))
    before = placed.processes()
    with stream(placed) as reply:
        first = reply.readline()
        actor_of(before["decode-0"]).kill()
        assert text_of([first, *reply]) == expected
    until(lambda: placed.processes().get("decode-0") not in (None, before["decode-0"]))
    code, said, _ = placed.run("status")
    assert (code, "its actor ended, and Ray started it again" in said) == (0, True)
    assert not psutil.wait_procs([before["decode-0"]], timeout=TIMEOUT_S)[1]


@pytest.mark.parametrize(
    ("changes", "words", "outcome"),
    [
        (
            {"pools": {"decode": {"role": "decode", "gpus": 64}}},
            (),
            (2, "the cluster needs 64 GPU, and all hosts of Ray together have 0 GPU"),
        ),
        (
            {"pools": {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}}},
            ("--timeout", "3"),
            (1, "router-0 is waiting; Ray has not reserved 3 CPU yet, of which are free: 0 CPU"),
        ),
        ({"name": "small"}, (), (2, "already, from another state folder")),
    ],
)
def test_a_start_that_fails_is_one_line_and_touches_no_other_cluster(
    changes: dict[str, object],
    words: tuple[str, ...],
    outcome: tuple[int, str],
    placed: Deployed,
    hosts: RayHosts,
    tmp_path: Path,
) -> None:
    other = cluster(tmp_path, hosts.env)
    other.content |= {"name": "other", **changes}
    code, _, complained = other.run("up", *at(hosts.address), *words)
    (line,) = [line for line in complained.splitlines() if line.startswith("baton: ")]
    assert (code, outcome[1] in line) == (outcome[0], True), complained
    assert "Traceback" not in complained
    assert not list(other.state.glob("*.json"))
    assert placed.complete() == " 4071."


@pytest.mark.release
def test_doctor_runs_beside_the_processes_on_their_hosts(placed: Deployed) -> None:
    code, said, complained = placed.run("doctor", "cluster.yaml", "--json")
    findings = json.loads(said)
    faults = [one for one in findings if one["level"] == "fault"]
    assert (code, faults) == (0, []), complained
    assert {one["host"] for one in findings} == {HEAD, OTHER, "all hosts", "paths"}
    (path,) = [one for one in findings if one["host"] == "paths"]
    assert path["check"] == f"{OTHER} reads {HEAD}"
    assert "by shm: mapped memory" in path["text"]


@pytest.mark.release
def test_what_ray_moves_from_a_lost_host_is_found_again_and_no_key_stays(
    placed: Deployed, hosts: RayHosts
) -> None:
    hosts.lose(OTHER)
    hosts.join(SPARE)
    until(lambda: serves_on(placed, [SPARE, HEAD, SPARE]), lambda: placed.run("status"))
    placed.address = SPARE
    assert placed.complete() == " 4071."
    secret = (placed.folder / "cluster.key").read_bytes().split()[1]
    left = [path for path in Path(tempfile.gettempdir()).glob("baton-*/**/*") if path.is_file()]
    assert left
    assert not [path for path in left if secret in path.read_bytes()]


def serves_on(deployed: Deployed, hosts: list[str]) -> bool:
    rows = deployed.rows().values()
    return [(row["health"], row["host"]) for row in rows] == [("ready", host) for host in hosts]


def test_a_cluster_on_ray_drains_and_leaves_nothing(placed: Deployed, hosts: RayHosts) -> None:
    actors = [actor_of(process) for process in placed.processes().values()]
    with stream(placed) as reply:
        first = reply.readline()
        code, said, complained = placed.run("down")
        text_of([first, *reply])
    assert (code, said) == (0, "small is down\n"), complained
    assert placed.all_gone()
    assert not psutil.wait_procs(actors, timeout=TIMEOUT_S)[1]
    assert [path.suffix for path in placed.state.rglob("*") if path.is_file()] == [".log"] * 3
    assert hosts.held() == "[] 0.0"


def test_an_address_without_ray_is_named(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    code, _, complained = cluster(tmp_path, {}).run("up", *at(address))
    (line,) = complained.splitlines()
    assert (code, f"baton: Ray does not answer at {address}" in line) == (1, True)


def test_a_ray_cluster_of_its_own_ends_with_a_start_that_fails(tmp_path: Path) -> None:
    own = Deployed(tmp_path)
    hasty = {"node": {"start_timeout_s": 0.01}}
    own.content["pools"] = {"decode": {"role": "decode", "settings": hasty}}
    code, _, complained = own.run("up", "--on", "ray")
    (line,) = [line for line in complained.splitlines() if line.startswith("baton: ")]
    assert code == 1
    assert "decode-0 on 127.0.0.1 ended while starting (exit code 1: not ready within" in line
    # Its processes have the path of its token in their environment.
    assert not [one for one in psutil.process_iter() if str(own.state) in said_of(one)]
    assert [path.name for path in own.state.iterdir()] == ["logs", "ray.log"]
