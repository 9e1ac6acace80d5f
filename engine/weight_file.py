"""Read which tensors a safetensors file holds, and where, without reading any of them.

`weights` calls it for each file that it reads, and the check of a model folder before any process
is started, so it never loads torch.
"""

from pathlib import Path

import msgspec

from baton.protocol.errors import ConfigError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class TensorEntry(msgspec.Struct):
    """One tensor in a file's header. Offsets are bytes from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def tensors_of(file: Path) -> dict[str, TensorEntry]:
    """Return the table at the head of a safetensors file: 8 bytes of length, then JSON.

    Raises `ConfigError` unless the file holds all of its tensors.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= MAX_HEADER_BYTES:
                raise ConfigError(f"{file} is not a safetensors file")
            raw = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {
            name: msgspec.json.decode(entry, type=TensorEntry) for name, entry in raw.items()
        }
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not a safetensors file: {error}") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    size = file.stat().st_size
    for name, entry in entries.items():
        first, last = (8 + length + offset for offset in entry.data_offsets)
        if not 0 <= first <= last <= size:
            raise ConfigError(f"{file} ends before tensor {name} does: fetch the file again")
        entry.data_offsets = (first, last)
    return entries
