"""Find in UCX's own log which of its lanes carries a transfer.

It must be made before NIXL is loaded, because UCX reads its environment then. Only the two ends of
a measured path and the check of NIXL use it, and no node that serves.
"""

import ctypes
import os
import re
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

COMPLAINT = re.compile(r"UCX +(?:ERROR|WARN) +(.*)")
ROW = re.compile(r"\d+(?:\.\.\w+)?$")


class UcxLog:
    """Makes UCX log its decisions to a file, unless the environment sets something else."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        descriptor, name = tempfile.mkstemp(prefix="baton-ucx-")
        os.close(descriptor)
        self._path = Path(name)
        environment["UCX_PROTO_INFO"] = "y"
        environment["UCX_LOG_FILE"] = name

    def lane(self) -> str:
        """Return the lanes of the last connection, such as `tcp/eth0`; empty if none is logged."""
        return lane_in(self._text())

    def complaint(self) -> str:
        """Return the last error or warning; empty if there is none."""
        return complaint_in(self._text())

    def _text(self) -> str:
        ctypes.CDLL(None).fflush(None)  # UCX writes through a buffer of the C library
        return self._path.read_text(errors="replace")

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


def lane_in(log: str) -> str:
    """Return how the last connection in a log of UCX reads many bytes at once.

    UCX prints a table for each operation, with a row for each range of sizes, the largest last.
    """
    found = ""
    is_read = False
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 1:
            is_read = "remote memory read" in cells[0] or (is_read and "cfg#" not in cells[0])
        elif is_read and len(cells) == 3 and ROW.match(cells[0]):
            found = cells[2]
    return found


def complaint_in(log: str) -> str:
    found = COMPLAINT.findall(log)
    return found[-1] if found else ""
