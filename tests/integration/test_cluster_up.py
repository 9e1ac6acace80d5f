"""`baton up`, `status`, `down` and `render` work on this machine, and leave nothing behind."""

import signal

import msgspec
import pytest

from baton.deploy.cluster.state import DEPLOYMENT, Deployment
from baton.runtime.channels.keys import write_key
from tests.support.deployed import Deployed
from tests.support.waiting import TIMEOUT_S, until

HASTY = {"node": {"start_timeout_s": 0.01}}


@pytest.fixture
def small(tmp_path):
    deployed = Deployed(tmp_path)
    yield deployed
    deployed.processes()
    deployed.run("down")
    assert deployed.all_gone()


def test_a_detached_cluster_serves_until_it_is_down(small):
    """The disk of one log is full from the first line on, which may disturb nothing."""
    small.content["logs"] = "logs"
    (small.folder / "logs").mkdir()
    (small.folder / "logs/decode-0.log").symlink_to("/dev/full")
    code, said, complained = small.run("up", "--detach")
    assert code == 0, complained
    assert f"small serves at http://127.0.0.1:{small.port}/v1" in said
    assert small.complete() == " 4071."
    before = small.processes()
    assert set(before) == {"router-0", "prefill-0", "decode-0"}
    assert (small.state.stat().st_mode & 0o777, list(small.state.glob("*.json"))) == (
        0o700,
        [
            path
            for path in small.state.glob("*.json")
            if path.stat().st_mode & 0o777 == 0o600
        ],
    )
    code, _, complained = small.run("up", "--detach")
    assert (code, "is up already" in complained) == (2, True)
    # The supervisor starts a process again, and the cluster serves as before.
    before["decode-0"].kill()
    until(lambda: small.processes().get("decode-0") not in (None, before["decode-0"]))
    until(
        lambda: {one["health"] for one in small.rows().values()} == {"ready"},
        small.rows,
    )
    code, said, _ = small.run("status")
    assert (code, [line.split()[3] for line in said.splitlines()[2:]]) == (
        0,
        ["ready"] * 3,
    )
    assert said.startswith("small: ready · demo · baton ")
    # Its first heartbeat.
    until(lambda: small.rows()["decode-0"]["kv_used"] == 0.0, small.rows)
    before = small.processes()
    code, said, complained = small.run("restart", "decode-0")
    assert (code, said) == (0, "decode-0 is ready again\n"), complained
    after = small.processes()
    assert [name for name, process in after.items() if process != before[name]] == [
        "decode-0"
    ]
    assert small.complete() == " 4071."
    code, _, complained = small.run("restart", "decode-7")
    assert (code, "did you mean decode-0?" in complained) == (2, True)
    rows = small.rows()
    assert (
        "cannot write the log of decode-0"
        in (small.state / "supervisor.log").read_text()
    )
    assert rows["prefill-0"]["num_handoffs"] == 2
    code, said, _ = small.run("down")
    assert (code, said) == (0, "small is down\n")
    assert small.all_gone()
    code, _, complained = small.run("down")
    assert (code, "nothing is up" in complained) == (2, True)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.release), signal.SIGKILL]
)
def test_a_cluster_in_front_ends_with_its_command(number, small):
    process = small.baton("up")
    for line in process.stdout:
        if "Ctrl-C ends it" in line:
            break
    assert set(small.processes()) == {"router-0", "prefill-0", "decode-0"}
    process.send_signal(number)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == (0 if number == signal.SIGINT else -signal.SIGKILL)
    assert small.all_gone()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_down_ends_a_cluster_in_front(is_frozen, small):
    """Of a command that stands still, only the wait is shorter here."""
    process = small.baton("up")
    for line in process.stdout:
        if "Ctrl-C ends it" in line:
            break
    assert set(small.processes()) == {"router-0", "prefill-0", "decode-0"}
    if is_frozen:
        process.send_signal(signal.SIGSTOP)
        record = small.state / DEPLOYMENT
        deployment = msgspec.json.decode(record.read_bytes(), type=Deployment)
        assert deployment.stop_timeout_s > 60.0
        hasty = msgspec.structs.replace(deployment, stop_timeout_s=0.5)
        record.write_bytes(msgspec.json.encode(hasty))
    assert small.run("down")[:2] == (0, "small is down\n")
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == (-signal.SIGKILL if is_frozen else 0)
    assert small.all_gone()


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        (
            {"model": "/nowhere"},
            2,
            "router-0 on 127.0.0.1: model /nowhere does not exist",
        ),
        (
            {"pools": {"decode": {"role": "decode", "settings": HASTY}}},
            1,
            "decode-0 on 127.0.0.1 ended while starting (exit code 1: no progress for 0.01 s",
        ),
        (
            {
                "pools": {"decode": {"role": "decode", "hosts": ["198.51.100.7"]}},
                "routers": [{"host": "198.51.100.7"}],
                "settings": {"keys": {"insecure": True}},
            },
            2,
            "none of the description's hosts is this machine (198.51.100.7)",
        ),
    ],
)
def test_a_failed_start_is_one_line_and_leaves_nothing(changes, code, said, small):
    small.content |= changes
    ended, _, complained = small.run("up", "--detach")
    (line,) = [line for line in complained.splitlines() if line.startswith("baton: ")]
    assert (ended, line.startswith("baton: ") and said in line) == (code, True), (
        complained
    )
    assert not list(small.state.glob("*.json"))
    assert "Traceback" not in complained


LATE = "127.0.0.2"  # another host, as far as the description goes


@pytest.mark.parametrize(
    ("changes", "words", "said"),
    [
        (
            {"pools": {"decode": {"role": "decode", "hosts": [LATE]}}},
            (),
            f"decode-0 on {LATE}: router-0 already has a node with this id",
        ),
        pytest.param(
            {"routers": [{"host": "127.0.0.1", "port": 1, "control_port": 2}]},
            ("--timeout", "5"),
            "not ready within 5 s: router-0 on 127.0.0.1 does not answer",
            marks=pytest.mark.release,
        ),
    ],
    ids=["id", "host"],
)
def test_a_host_that_does_not_fit_is_named_and_the_cluster_serves_on(
    changes, words, said, joined
):
    late = Deployed(joined.folder / "late")
    late.content = {
        **joined.content,
        "pools": {"late": {"role": "decode", "hosts": [LATE]}},
        **changes,
    }
    late.content["key"] = str(joined.folder / "cluster.key")
    before = joined.processes()
    code, _, complained = late.run("up", "--detach", "--host", LATE, *words)
    lines = [line for line in complained.splitlines() if line.startswith("baton: ")]
    assert (code != 0, len(lines)) == (True, 1), complained
    assert said in lines[0]
    assert "Traceback" not in complained
    assert not list(late.state.glob("*.json"))
    assert joined.processes() == before
    assert joined.complete() == " 4071."


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    """A cluster with a key that serves on one host of two."""
    folder = tmp_path_factory.mktemp("joined")
    (folder / "late").mkdir()
    write_key(folder / "cluster.key")
    deployed = Deployed(folder)
    (router,) = deployed.content["routers"]
    here = ["127.0.0.1"]
    deployed.content |= {
        "key": "cluster.key",
        "routers": [{**router, "host": here[0]}],
        "pools": {
            "prefill": {"role": "prefill", "hosts": here},
            "decode": {"role": "decode", "hosts": here},
        },
    }
    try:
        code, _, complained = deployed.run("up", "--detach")
        assert code == 0, complained
        yield deployed
    finally:
        deployed.processes()
        deployed.run("down")
        assert deployed.all_gone()


def test_status_of_a_url_needs_no_deployment(joined):
    code, said, _ = joined.run("status", "--url", f"http://127.0.0.1:{joined.port}")
    assert (code, said.count("ready")) == (0, 4)
