"""`python -m baton.deploy.cluster.ray_command FOLDER PROCESS WORDS...`: run WORDS beside a process.

`baton doctor` runs it for each host of a cluster on Ray. It joins the Ray cluster of the state
folder, lets the actor of the process start the command, passes on its output, and exits with its
exit code. A signal ends the command.
"""

import contextlib
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from baton.deploy.cluster.platform import PlatformOptions
from baton.deploy.cluster.ray import RayPlatform, deployment_in
from baton.protocol.errors import BatonError, NodeError
from baton.runtime.process import EXIT_TERMINATED, Interrupts

POLL_S = 0.1


def main(folder: Path, process: str, words: Sequence[str]) -> int:
    """Run the command and return its exit code. Raises `BatonError` if it cannot run there."""
    deployment = deployment_in(folder)
    if deployment is None:
        raise NodeError(f"nothing is up on Ray in {folder}")
    connection = RayPlatform(PlatformOptions()).joined(deployment, folder)
    name = secrets.token_hex(8)
    with Interrupts() as interrupts:
        connection.start_command(process, name, words)
        while not interrupts.wait(POLL_S):
            said = connection.read_command(process, name)
            sys.stdout.buffer.write(said.out)
            sys.stderr.buffer.write(said.complaints)
            sys.stdout.flush()
            sys.stderr.flush()
            if said.code is not None:
                return said.code
        with contextlib.suppress(NodeError):
            connection.stop_command(process, name)
    return EXIT_TERMINATED


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
    except BatonError as failure:
        print(f"baton: {failure.message}", file=sys.stderr)
        sys.exit(1)
