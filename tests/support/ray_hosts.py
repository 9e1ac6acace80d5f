"""A Ray cluster on this machine: a head with one CPU, and raylets with two CPUs each."""

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
from tests.support.waiting import TIMEOUT_S

HEAD, OTHER = "127.0.0.2", "127.0.0.3"
SPARE = "127.0.0.4"  # of a host that may join later
# Prints everything that Ray still holds: named actors, and CPUs that are not free.
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

    def join(self, address: str) -> None:
        """Start a raylet; its CPUs are there once it has joined."""
        words = [
            "--block", f"--address={self.address}", f"--node-ip-address={address}", "--num-cpus=2",
            "--object-store-memory=100000000", "--include-log-monitor=false",
            "--disable-usage-stats", "--dashboard-agent-listen-port=0",
        ]  # fmt: skip
        self.raylets[address] = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *words],
            env={**os.environ, **self.env, **OWN_VARIABLES},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

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
        head, first = LocalRay.start(Path(name), num_cpus=1)
        raylets: dict[str, subprocess.Popen[bytes]] = {}
        ours: list[psutil.Process] = []
        try:
            access = access_of(Path(name))
            hosts = RayHosts(head.wait(Path(name)), Path(head.folder), access, raylets)
            hosts.join(OTHER)
            yield hosts
            for process in (first, *raylets.values()):
                if process.poll() is None:
                    one = psutil.Process(process.pid)
                    ours += [one, *one.children(recursive=True)]
        finally:
            for raylet in raylets.values():
                raylet.terminate()
            for raylet in raylets.values():
                raylet.wait(TIMEOUT_S)
            head.stop()
            first.wait(TIMEOUT_S)
    assert not psutil.wait_procs(ours, timeout=TIMEOUT_S)[1]
