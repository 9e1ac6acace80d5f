"""`baton doctor` on this machine and between two of its processes."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from baton.__main__ import main
from baton.protocol import VERSION
from baton.runtime.channels.keys import write_key

DOCTOR = (sys.executable, "-m", "baton", "doctor")
# A machine that others use needs long to start an interpreter; nothing here waits for it to pass.
TIMEOUT_S = 240.0


def doctor(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*DOCTOR, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


@contextmanager
def listening(*words: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Run the end that listens on this machine; yield it and its address."""
    with subprocess.Popen(
        [*DOCTOR, "--listen", "127.0.0.1", *words], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process, process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def test_this_machine_is_looked_at():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = f"127.0.0.1:{listener.getsockname()[1]}"
        done = doctor(
            "--json", "--port", taken, "--reach", taken, "--model", "/no/such/model"
        )
    report = json.loads(done.stdout)
    levels = {one["check"]: one["level"] for one in report["findings"]}
    assert done.returncode == 1
    assert {name for name, level in levels.items() if level == "fault"} == {
        "model",
        "ports",
    }
    assert levels["torch"] == levels["reach"] == levels["memory"] == "ok"
    assert VERSION in report["version"]


def test_two_processes_of_a_host_measure_their_shared_memory():
    with listening() as (reader, address):
        done = doctor("--connect", address)
        assert reader.wait(TIMEOUT_S) == 0
    assert done.returncode == 0, done.stdout + done.stderr
    path, _ = done.stdout.splitlines()
    assert re.fullmatch(
        r"  ok       127.0.0.1 reads 127.0.0.1  \d+\.\d\d GB/s, \d+\.\d\d ms for a block of 64 "
        r"KiB, by shm",
        path,
    )


def test_what_does_not_fit_is_a_line_that_names_the_address(tmp_path):
    # Bound, but nothing listens.
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{bound.getsockname()[1]}"
        done = doctor("--connect", nowhere, "--timeout", "1")
    assert done.returncode == 1
    assert f"no answer from {nowhere} within 1 s" in done.stdout
    for name in ("ours.key", "theirs.key"):
        write_key(tmp_path / name)
    with listening("--keys", str(tmp_path / "ours.key")) as (_, address):
        done = doctor("--connect", address, "--keys", str(tmp_path / "theirs.key"))
    assert done.returncode == 1
    assert f"{address} refuses this host's key" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--connect", "10.0.0.9:5"), "reaches beyond this host: make a key"),
        (
            ("cluster.yaml", "--listen", "127.0.0.1"),
            "give one of FILE, --listen and --connect",
        ),
    ],
)
def test_a_mistake_is_one_line(words, said, capsys):
    assert main(["doctor", *words]) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert (shown.out, said in line) == ("", True)
