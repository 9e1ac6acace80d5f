"""Read the tensors of a Hugging Face folder by name, a slice at a time, and fingerprint them.

`fingerprint` lets two nodes refuse to exchange blocks of different weights. This module does not
know names, shapes or layout of a model, and never writes a file.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.engine.compute.model_config import TensorEntry, tensors_of
from baton.protocol.errors import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Fields of config.json that may differ between copies of one model.
INCIDENTAL_FIELDS = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})
WHOLE_BYTES = 65536  # a tensor up to this size is hashed in full
SAMPLES = 16
SAMPLE_BYTES = 512


class Checkpoint:
    """`model.safetensors` or the shards that `model.safetensors.index.json` lists.

    A file is opened, and read through a memory map, when one of its tensors is first read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shard_of = _shards_by_name(folder)
        self._open: dict[Path, _OpenFile] = {}

    def names(self) -> frozenset[str]:
        return frozenset(self._shard_of)

    def read(self, name: str, *, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """Return a tensor or slice in the checkpoint's dtype; `columns` needs two dimensions.

        The tensor may be a view of the memory map, shared with other processes: never write to it.
        Raises `ConfigError` if there is no such tensor or its file is damaged.
        """
        shard = self._shard_of.get(name)
        if shard is None:
            raise ConfigError(f"{self.folder} has no tensor {name}")
        try:
            handle = self._handle(shard)
            if rows is None and columns is None:
                return handle.get_tensor(name)
            view = handle.get_slice(name)
            rows = rows or slice(None)
            return view[rows] if columns is None else view[rows, columns]
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{shard}: tensor {name} cannot be read: {error}") from None

    def _handle(self, shard: Path) -> "_OpenFile":
        if shard not in self._open:
            self._open[shard] = safe_open(shard, framework="pt", device="cpu")
        return self._open[shard]


def fingerprint(folder: Path, dtype: str) -> str:
    """Return a text that is equal for equal models in `dtype`, in any split into files.

    It covers the configuration, all names, shapes and types, and bytes sampled from every tensor.
    So two trainings of one architecture differ, and a folder of any size takes well under a second.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(dtype.encode())
    digest.update(_significant_config(folder / "config.json"))
    places: dict[str, tuple[Path, TensorEntry]] = {}
    for shard in sorted(set(_shards_by_name(folder).values())):
        places |= {name: (shard, entry) for name, entry in tensors_of(shard).items()}
    for name, (shard, entry) in sorted(places.items()):
        digest.update(f"\0{name} {entry.dtype} {entry.shape}".encode())
        for sample in _samples(shard, entry.data_offsets):
            digest.update(sample)
    return digest.hexdigest()


class _View(Protocol):
    def __getitem__(self, index: slice | tuple[slice, slice]) -> Tensor: ...


class _OpenFile(Protocol):
    """The part of `safe_open` that is used here, because safetensors declares no types."""

    def get_tensor(self, name: str) -> Tensor: ...

    def get_slice(self, name: str) -> _View: ...


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _shards_by_name(folder: Path) -> dict[str, Path]:
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        try:
            names = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        except msgspec.DecodeError as error:
            raise ConfigError(f"{index}: {error}") from None
        missing = sorted(file for file in set(names.values()) if not (folder / file).is_file())
        if missing:
            raise ConfigError(f"{index} names {missing[0]}, which {folder} does not have")
        return {name: folder / file for name, file in names.items()}
    if single.is_file():
        return dict.fromkeys(tensors_of(single), single)
    raise ConfigError(f"{folder} has neither {SINGLE} nor {INDEX}")


def _samples(file: Path, block_range: tuple[int, int]) -> Iterator[bytes]:
    first, last = block_range
    with file.open("rb") as stream:
        if last - first <= WHOLE_BYTES:
            stream.seek(first)
            yield stream.read(last - first)
            return
        for number in range(SAMPLES):
            stream.seek(first + (last - first - SAMPLE_BYTES) * number // (SAMPLES - 1))
            yield stream.read(SAMPLE_BYTES)


def _significant_config(file: Path) -> bytes:
    """Return config.json in canonical form, without the fields that do not change the model."""
    try:
        fields = msgspec.json.decode(file.read_bytes(), type=dict[str, object])
    except FileNotFoundError:
        raise ConfigError(f"{file.parent} has no config.json") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: {error}") from None
    kept = {name: value for name, value in fields.items() if name not in INCIDENTAL_FIELDS}
    return msgspec.json.encode(kept, order="sorted")
