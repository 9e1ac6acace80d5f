"""The file of API keys: one hash per line, which is read again when the file changes.

`Access` checks each request with it; `baton api-key` adds lines to it. The file never holds a key
itself, so a person who reads it cannot call the router.
"""

import hashlib
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path

from baton.protocol.errors import ConfigError
from baton.runtime.file_state import state_of
from baton.runtime.log import logger

PREFIX = "sha256:"
KEY_START = "sk-baton-"
# The file's state is read at most this often, because there may be many requests.
LOOK_AGAIN_S = 1.0
_LINE = re.compile(rf"{PREFIX}([0-9a-f]{{64}})(\s.*)?")

log = logger("router")


def digest_of(key: bytes) -> bytes:
    """Return the 32 bytes that identify a key. Keys are random, so no salt is needed."""
    return hashlib.sha256(key).digest()


class KeyFile:
    """The digests in one file. If the file becomes unreadable or wrong, the last good ones stay."""

    def __init__(self, path: str, clock: Callable[[], float]) -> None:
        """Read the file. Raises a `ConfigError` that names the first line that is not a hash."""
        self._path = Path(path)
        self._clock = clock
        self._state = state_of(self._path)
        self._digests = _read(self._path)
        self._look_at_s = clock() + LOOK_AGAIN_S

    def __contains__(self, digest: bytes) -> bool:
        now_s = self._clock()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_AGAIN_S
            self._look()
        return digest in self._digests

    def _look(self) -> None:
        state = state_of(self._path)
        if state == self._state:
            return
        self._state = state
        try:
            self._digests = _read(self._path)
        except ConfigError as error:
            log.warning("the last good API keys stay in use", reason=error.message)
        else:
            log.info("the API keys were read again", file=str(self._path), keys=len(self._digests))


def _read(path: Path) -> frozenset[bytes]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not text"
        raise ConfigError(f"cannot read {path} (router.api_key_file): {reason}") from error
    digests = set()
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"{path} line {number} is not `{PREFIX}` and 64 hexadecimal digits "
                "(router.api_key_file): add keys with `baton api-key FILE NAME`"
            )
        digests.add(bytes.fromhex(match[1]))
    return frozenset(digests)


def add_key(path: Path, name: str) -> str:
    """Make a key, append its hash and `name` to the file, and return the key.

    A missing file is created, readable by this user only. Raises `ConfigError`.
    """
    if not name.isprintable():
        raise ConfigError("the name of a key must be one line of printable characters")
    key = KEY_START + secrets.token_urlsafe(32)
    line = f"{PREFIX}{digest_of(key.encode()).hex()} {name}".rstrip() + "\n"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with open(descriptor, "r+") as file:
            before = file.read()
            file.write(line if not before or before.endswith("\n") else f"\n{line}")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return key
