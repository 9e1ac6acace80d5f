"""A folder for what a user's processes keep from one start to the next, which nobody else may fill.

Another user who could write there could give this user's processes machine code or false digests.
"""

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_POLL_S = 0.1
LOCK_WAIT_S = 60.0


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


def read_whole(file: Path) -> bytes:
    """Return what `write_whole` wrote. Raises `OSError` without a file, `ValueError` if it is torn
    or others can write to it."""
    check_owner(file.parent)
    check_owner(file)
    digest, _, content = file.read_bytes().partition(b"\n")
    if digest != _digest(content):
        raise ValueError(f"{file} is damaged")
    return content


def write_whole(file: Path, content: bytes) -> None:
    """Replace a file as a whole, behind a line with a digest of its content."""
    make_private(file.parent)
    descriptor, temporary = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as target:
            target.write(_digest(content) + b"\n" + content)
        Path(temporary).replace(file)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


@contextlib.contextmanager
def compiling_alone(name: str) -> Iterator[None]:
    """Wait until no other process of this user fills the folder, and make later ones wait.

    If the folder cannot be locked, processes compile side by side. A process that dies leaves no
    lock behind.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            folder = cache_folder(name)
            make_private(folder)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, descriptor)
            lock(descriptor, LOCK_WAIT_S)
        yield


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
