"""Which of UCX's lanes carries a transfer, as UCX itself logs it.

Made before NIXL is loaded, because UCX reads its environment then. Only `path_ends` uses it: a node
that serves logs nothing of the kind.
"""

import os
import re
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

LANES = re.compile(r"\brma(?:_am|_bw)?\(([^)]+)\)")


class UcxLog:
    """Has UCX write what it decides into a file, unless the environment asks for something else."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        descriptor, name = tempfile.mkstemp(prefix="baton-ucx-")
        os.close(descriptor)
        self._path = Path(name)
        environment.setdefault("UCX_LOG_LEVEL", "info")
        environment["UCX_LOG_FILE"] = name

    def lane(self) -> str:
        """Return the lanes of the last connection, such as `tcp/eth0`; empty if none is logged."""
        return lane_in(self._path.read_text(errors="replace"))

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


def lane_in(log: str) -> str:
    """Return the lanes that the last connection in a log of UCX reads by."""
    found = LANES.findall(log)
    return found[-1] if found else ""
