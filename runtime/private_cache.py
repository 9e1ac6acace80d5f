"""A folder for what a user's processes keep from one start to the next, which nobody else may fill.

Another user who could write there could give this user's processes machine code or false digests.
"""

import contextlib
import fcntl
import os
import time
from pathlib import Path

LOCK_POLL_S = 0.1


def cache_folder(name: str) -> Path:
    """Return a folder of the user's cache, which may not exist. Raises `RuntimeError` if no home
    is known."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says to ignore a relative path.
    cache = cache if cache.is_absolute() else Path("~/.cache").expanduser()
    return cache / "baton" / name


def make_private(folder: Path) -> None:
    """Make a folder if it does not exist. Raises `OSError`, or as `check_owner` does."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(folder)


def check_owner(path: Path) -> None:
    """Raise `ValueError` if another user owns `path` or may write to it."""
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ValueError(f"other users can write to {path}")


def lock(descriptor: int, wait_s: float) -> None:
    """Lock a file, but give up if another process, which may be stopped, holds it for too long.

    A process that dies leaves no lock behind.
    """
    give_up_s = time.monotonic() + wait_s
    while time.monotonic() < give_up_s:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(LOCK_POLL_S)
