"""A Ray cluster on this host alone, which `baton up --on ray` starts if it is given no other.

Ray listens on all interfaces, so only processes with the token in the state folder can join. `ray`
ends it by its process id, because `ray stop` would end every Ray of this user.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from baton.deploy.cluster.running import ProcessId, write_private
from baton.protocol.errors import NodeError
from baton.runtime.clock import monotonic
from baton.runtime.settings import VARIABLE_PREFIX

HERE = "127.0.0.1"
# Ray puts the address of a network in place of 127.0.0.1, but leaves other loopback addresses.
NODE_ADDRESS = "127.0.0.2"
TOKEN, LOG = "ray-token", "ray.log"
ADDRESS_FILE = "ray_current_cluster"  # in its folder, written once it is up
START_S, STOP_S, POLL_S = 120.0, 30.0, 0.05
# Nothing of baton goes through Ray's object store; this is about the least that Ray accepts.
STORE_BYTES = 100_000_000
# By default Ray would run its workers, and so the nodes, with a nice value of 15. At its end, it
# need not wait for work of others.
OWN_VARIABLES = {"RAY_worker_niceness": "0", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}


class LocalRay(msgspec.Struct, frozen=True):
    """A Ray cluster that a command has started, and that a later one may end."""

    process: ProcessId
    folder: str  # its sockets and logs; their paths must be short

    @classmethod
    def start(cls, state: Path, num_cpus: int) -> "tuple[LocalRay, subprocess.Popen[bytes]]":
        """Start it and return at once, with the process for its parent. Raises `NodeError`."""
        write_private(state / TOKEN, secrets.token_hex(32).encode())
        folder = tempfile.mkdtemp(prefix="baton-ray-")
        words = [
            "--head", "--block", f"--node-ip-address={NODE_ADDRESS}", "--port=0", "--no-monitor",
            "--include-dashboard=false", "--include-log-monitor=false", "--disable-usage-stats",
            f"--num-cpus={num_cpus}", f"--object-store-memory={STORE_BYTES}",
            "--dashboard-agent-listen-port=0", f"--temp-dir={folder}",
        ]  # fmt: skip
        env = {k: text for k, text in os.environ.items() if not k.startswith(VARIABLE_PREFIX)}
        env |= access_of(state) | OWN_VARIABLES
        env.pop("RAY_ADDRESS", None)
        try:
            with (state / LOG).open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "ray.scripts.scripts", "start", *words],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise NodeError(f"cannot start Ray: {error}") from error
        return cls(ProcessId.of(process.pid), folder), process

    def wait(self, state: Path) -> str:
        """Return its address once it is up. Raises `NodeError` if it ends before."""
        deadline_s = monotonic() + START_S
        path = Path(self.folder) / ADDRESS_FILE
        while self.process.is_alive and monotonic() < deadline_s:
            if path.exists() and (address := path.read_text().strip()):
                return address
            time.sleep(POLL_S)
        raise NodeError(f"Ray did not start on this host: see {state / LOG}")

    def stop(self) -> None:
        """End it with everything in it, and return when it is gone. A second call does nothing."""
        if self.process.signal(signal.SIGTERM) and not self.process.wait(STOP_S):
            # Ray's processes end with the one that has started them.
            self.process.signal(signal.SIGKILL)
            self.process.wait(STOP_S)
        shutil.rmtree(self.folder, ignore_errors=True)


def access_of(state: Path) -> dict[str, str]:
    """Return the variables that a process needs to join the Ray cluster of a state folder."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(state / TOKEN),
    }
