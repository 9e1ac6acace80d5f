"""Runs a module as a process of its own, for what an interpreter decides once when it starts."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping

from tests.support.sources import REPOSITORY


def said_by(
    module: str, *words: str, env: Mapping[str, str] | None = None
) -> list[str]:
    """Return the lines that `module` printed. Only `env` may set how Triton works."""
    inherited = {
        name: value for name, value in os.environ.items() if name[:7] != "TRITON_"
    }
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        cwd=REPOSITORY,
        env=inherited | dict(env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(),
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        with process.stdout as output:
            said = output.read().decode(errors="replace")
    except BaseException:  # such as the test's timeout
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.wait() == 0, said[-6000:]
    return said.splitlines()
