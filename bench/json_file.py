"""The file of `--json`, for commands that write one report and no pages: `transfer`, `selftest`."""

import os
from pathlib import Path

import msgspec

from baton.protocol.errors import BatonError, ConfigError


def json_file(name: str) -> Path | None:
    """Tried now, so that nothing is measured for a file that cannot be written; None for none."""
    if not name:
        return None
    path = Path(name)
    try:
        is_new = not os.path.lexists(path)
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--json {name}: {error.strerror}") from error
    return path


def save(path: Path, report: msgspec.Struct) -> None:
    """Raises `BatonError` for what has become impossible since."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    except OSError as error:
        raise BatonError(f"--json {path}: {error.strerror}") from error
