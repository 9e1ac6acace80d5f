"""A Ray cluster of two hosts on this machine: two raylets with an address and two CPUs each."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from baton.deploy.cluster.ray_local import OWN_VARIABLES, LocalRay, access_of
from tests.support.deployed import TIMEOUT_S

# Prints what Ray still holds for anybody: named actors, and CPUs that are not free.
HELD = """
import sys, ray
from ray.util import list_named_actors
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
free = ray.available_resources().get("CPU", 0)
print(list_named_actors(all_namespaces=True), ray.cluster_resources()["CPU"] - free)
"""


class RayHosts(msgspec.Struct, frozen=True):
    address: str
    folder: Path  # Ray's own files
    env: dict[str, str]  # with which a process may join

    def held(self) -> str:
        done = subprocess.run(
            [sys.executable, "-c", HELD, self.address],
            env={**os.environ, **self.env}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.strip()


@contextlib.contextmanager
def ray_hosts() -> Iterator[RayHosts]:
    """Run the raylets; they and all that they have started must be gone in the end."""
    with tempfile.TemporaryDirectory() as name:
        head, first = LocalRay.start(Path(name), num_cpus=2)
        second: subprocess.Popen[bytes] | None = None
        ours: list[psutil.Process] = []
        try:
            hosts = RayHosts(head.wait(Path(name)), Path(head.folder), access_of(Path(name)))
            second = _joining(hosts)
            yield hosts
            for one in (psutil.Process(head.process.pid), psutil.Process(second.pid)):
                ours += [one, *one.children(recursive=True)]
        finally:
            if second is not None:
                second.terminate()
                second.wait(TIMEOUT_S)
            head.stop()
            first.wait(TIMEOUT_S)
    assert not psutil.wait_procs(ours, timeout=TIMEOUT_S)[1]


def _joining(hosts: RayHosts) -> "subprocess.Popen[bytes]":
    """Start a second raylet; its CPUs are there once it has joined."""
    words = [
        "--block", f"--address={hosts.address}", "--node-ip-address=127.0.0.3", "--num-cpus=2",
        "--object-store-memory=100000000", "--include-log-monitor=false", "--disable-usage-stats",
        "--dashboard-agent-listen-port=0",
    ]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", *words],
        env={**os.environ, **hosts.env, **OWN_VARIABLES},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
