"""What changes when a file is written or replaced, for those who read a file again while they run.

The router asks for its files of API keys and certificates. Nothing here reads a file's content.
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
