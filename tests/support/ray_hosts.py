"""A Ray cluster on this machine: a head without CPUs, and two raylets with three CPUs each."""

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

ADDRESSES = ("127.0.0.3", "127.0.0.4")
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
    raylets: dict[str, "subprocess.Popen[bytes]"]  # by address

    def lose(self, address: str) -> None:
        """End all processes of a host at once, as a power cut does."""
        started = psutil.Process(self.raylets[address].pid)
        for process in [*started.children(recursive=True), started]:
            process.kill()

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
        head, first = LocalRay.start(Path(name), num_cpus=0)
        started = [first]
        ours: list[psutil.Process] = []
        try:
            hosts = RayHosts(head.wait(Path(name)), Path(head.folder), access_of(Path(name)), {})
            for address in ADDRESSES:
                hosts.raylets[address] = _joining(hosts, address)
                started.append(hosts.raylets[address])
            yield hosts
            for process in started:
                if process.poll() is None:
                    one = psutil.Process(process.pid)
                    ours += [one, *one.children(recursive=True)]
        finally:
            for raylet in started[1:]:
                raylet.terminate()
                raylet.wait(TIMEOUT_S)
            head.stop()
            first.wait(TIMEOUT_S)
    assert not psutil.wait_procs(ours, timeout=TIMEOUT_S)[1]


def _joining(hosts: RayHosts, address: str) -> "subprocess.Popen[bytes]":
    """Start a raylet; its CPUs are there once it has joined."""
    words = [
        "--block", f"--address={hosts.address}", f"--node-ip-address={address}", "--num-cpus=3",
        "--object-store-memory=100000000", "--include-log-monitor=false", "--disable-usage-stats",
        "--dashboard-agent-listen-port=0",
    ]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", *words],
        env={**os.environ, **hosts.env, **OWN_VARIABLES},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
