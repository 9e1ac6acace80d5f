"""Triton's cache of compiled kernels, with a digest beside each file.

Triton takes what its cache holds. A file that lost its end, as in a power failure, would stop every
later start, so one without its digest counts as absent here and is compiled again.
"""

import hashlib
import json
from pathlib import Path

from triton.runtime.cache import FileCacheManager

SUFFIX = ".digest"


class CheckedCache(FileCacheManager):  # type: ignore[misc]  # Triton has no types
    """Holds the files of one kernel. `TRITON_CACHE_MANAGER` names this class to Triton."""

    def put(self, data: object, filename: str, binary: bool = True) -> str:
        path: str = super().put(data, filename, binary)
        super().put(_digest_of(Path(path)), filename + SUFFIX)
        return path

    def get_file(self, filename: str) -> str | None:
        path: str | None = super().get_file(filename)
        return path if path is not None and _is_whole(Path(path)) else None

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the files of a kernel by their names; None if one of them is damaged or gone."""
        group = self.get_file(f"__grp__{filename}")
        if group is None:
            return None
        files: dict[str, str] = json.loads(Path(group).read_text())["child_paths"]
        return files if all(_is_whole(Path(path)) for path in files.values()) else None


def _is_whole(file: Path) -> bool:
    try:
        return _digest_of(file).encode() == Path(f"{file}{SUFFIX}").read_bytes()
    except OSError:
        return False


def _digest_of(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
