"""The file of `--json`, for commands that write one report and no pages: `transfer`, `selftest`."""

from pathlib import Path

import msgspec

from baton.protocol.errors import BatonError, ConfigError


def json_file(name: str) -> Path | None:
    """Return the file, or None for no name.

    It is tried now, so that nothing is measured for a file that cannot be written: that raises
    `ConfigError`.
    """
    if not name:
        return None
    path = Path(name)
    try:
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.resolve().unlink()  # a link to it stays
    except OSError as error:
        raise ConfigError(f"--json {name}: {error.strerror}") from error
    return path


def save(path: Path, report: msgspec.Struct) -> None:
    """Write the report. Raises `BatonError` if that has become impossible since."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    except OSError as error:
        raise BatonError(f"--json {path}: {error.strerror}") from error
