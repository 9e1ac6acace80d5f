"""The state of a file, by which a process notices that the file was written or replaced.

Channels use it for the file of the cluster's key, and the router for its files of API keys and
certificates. Nothing here reads the content of a file.
"""

from pathlib import Path

FileState = tuple[int, int, int]


def state_of(path: Path) -> FileState:
    """Return inode, size and time of the last change; zeros for a file that is not there."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns
