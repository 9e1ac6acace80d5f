"""Runs a module as a process of its own, for what an interpreter decides once when it starts."""

import os
import subprocess
import sys
from collections.abc import Mapping

from tests.support.sources import REPOSITORY


def said_by(
    module: str,
    *words: str,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 280.0,
) -> list[str]:
    """Return the lines that `module` printed. Only `env` may set how Triton works."""
    inherited = {
        name: value for name, value in os.environ.items() if name[:7] != "TRITON_"
    }
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=REPOSITORY,
        env=inherited | dict(env or {}),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    return done.stdout.splitlines()
