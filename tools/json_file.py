"""The file of `--json`, to which a tool writes its figures."""

from pathlib import Path

import msgspec

from baton.protocol.errors import BatonError, ConfigError


def json_file(name: str) -> Path | None:
    """Return the file, or None for no name.

    A trial write before the measurement raises `ConfigError` if the file cannot be written.
    """
    if not name:
        return None
    path = Path(name)
    try:
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.resolve().unlink()  # a symbolic link to the file stays
    except OSError as error:
        raise ConfigError(f"--json {name}: {error.strerror}") from error
    return path


def save(path: Path, report: msgspec.Struct) -> None:
    """Write the report. Raises `BatonError` if the file can no longer be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    except OSError as error:
        raise BatonError(f"--json {path}: {error.strerror}") from error
