"""What UCX, below NIXL, says on this machine: its complaints, and the lane of a transfer.

`python -m baton.deploy.doctor.nixl_check [DEVICE]` makes an agent as a node does, in a process of
its own, because a library that does not fit the machine may end the process. It prints why there is
no agent, and nothing if there is one.
"""

import ctypes
import os
import re
import sys
import tempfile
from pathlib import Path

from baton.kv_transfer.transports.nixl_binding import make_agent
from baton.protocol.errors import ConfigError

COMPLAINT = re.compile(r"UCX +(?:ERROR|WARN) +(.*)")
ROW = re.compile(r"\d+(?:\.\.\w+)?$")


class UcxLog:
    """Makes UCX log its decisions to a file.

    Make it before NIXL is loaded, because UCX reads its environment then.
    """

    def __init__(self) -> None:
        descriptor, name = tempfile.mkstemp(prefix="baton-ucx-")
        os.close(descriptor)
        self._path = Path(name)
        os.environ |= {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": name}

    def text(self) -> str:
        ctypes.CDLL(None).fflush(None)  # UCX writes through a buffer of the C library
        return self._path.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


def lane_in(log: str) -> str:
    """Return how the last connection in a log of UCX reads many bytes at once, as `tcp/eth0`.

    UCX prints a table for each operation, with a row for each range of sizes, the largest last.
    """
    found = ""
    is_read = False
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 1:
            is_read = "remote memory read" in cells[0] or (
                is_read and "cfg#" not in cells[0]
            )
        elif is_read and len(cells) == 3 and ROW.match(cells[0]):
            found = cells[2]
    return found


def complaint_in(log: str) -> str:
    """Return the last error or warning in a log of UCX; empty if there is none."""
    found = COMPLAINT.findall(log)
    return found[-1] if found else ""


def main(device: str) -> None:
    log = UcxLog()
    failure = ""
    try:
        make_agent("doctor", device)
    except ConfigError as error:
        # NIXL itself gives no reason.
        failure = f"{error.message}: {complaint_in(log.text())}"
    log.close()
    os.write(1, f"\n{failure}\n".encode())
    # The exit skips UCX's cleanup.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:2] or ("",))
