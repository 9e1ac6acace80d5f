"""Damage that the bytes of a single tensor show: rows of zeros, and numbers that are NaN.

A sparse copy, or a download with holes, has zeros where weights should be. But whole models have
zeros too: layers and experts that were switched off, padded rows, and rows of embeddings for ids
that the tokenizer never gives. The rules must not refuse those.
"""

import math
import re
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.model.checkpoint.weight_files import TensorEntry
from baton.model.config.reading import read_json
from baton.protocol.errors import ConfigError

MIN_ROWS = 16  # a matrix with fewer may have many rows of zeros
# A row has only zeros if it begins with this many, and then only if the rest says so as well.
FIRST_BYTES = 8

# Zeros of these mean something, and nobody trains them.
_IS_NO_WEIGHT = re.compile(r".*(bias|zeros|zero_point|g_idx|weight_shape)")
_HAS_ROW_PER_ID = re.compile(r".*(embed|lm_head|\b(wte|wpe)\b).*")
# What these give is added to the hidden states, so zeros switch off a layer or an expert.
_CAN_BE_OFF = re.compile(
    r".*(\bexperts\.|\b(o_proj|down_proj|out_proj|c_proj|dense|dense_4h_to_h|fc2|w2|wo)\.).*"
)


class _Float(NamedTuple):
    """A type of numbers, read as integers: the least NaN is one above `infinity`."""

    unsigned: str
    signed: str
    infinity: int
    sign: int


_FLOATS = {
    "F64": _Float("<u8", "<i8", 0x7FF0_0000_0000_0000, 1 << 63),
    "F32": _Float("<u4", "<i4", 0x7F80_0000, 1 << 31),
    "F16": _Float("<u2", "<i2", 0x7C00, 1 << 15),
    "BF16": _Float("<u2", "<i2", 0x7F80, 1 << 15),
    # Its largest number, since it has no infinity.
    "F8_E4M3": _Float("u1", "i1", 0x7E, 1 << 7),
    "F8_E5M2": _Float("u1", "i1", 0x7C, 1 << 7),
}


class TensorRows:
    """The rows of a tensor as stored, of which a reader shows some at a time, in order."""

    def __init__(self, name: str, entry: TensorEntry, max_bytes: int) -> None:
        """`max_bytes` limits a chunk; a tensor with longer rows is looked at for NaN alone."""
        first, last = entry.data_offsets
        self.name = name
        self._float = _FLOATS.get(entry.dtype)
        self._is_weight = _IS_NO_WEIGHT.fullmatch(name) is None
        *stacked, num_rows, _ = entry.shape if len(entry.shape) > 1 else (1, 1)
        self._num_matrices = math.prod(stacked)
        self._num_rows = num_rows
        self._row_bytes = (last - first) // max(1, self._num_matrices * num_rows)
        has_rows = (
            self._is_weight
            and num_rows >= MIN_ROWS
            and 0 < self._row_bytes <= max_bytes
        )
        self._has_rows = has_rows
        # Chunks are of whole rows.
        self.chunk_bytes = (
            max_bytes - max_bytes % self._row_bytes if has_rows else max_bytes
        )
        self._has_nan = False
        self._zero_rows: list[NDArray[np.bool_]] = []

    def show(self, chunk: memoryview) -> None:
        """Look at the next `chunk_bytes`, or at those that are left."""
        if not self._is_weight:
            return
        if (kind := self._float) is not None:
            # An integer comparison of the largest is much faster than `isnan`.
            largest = np.frombuffer(chunk, kind.unsigned).max()
            largest_positive = np.frombuffer(chunk, kind.signed).max()
            is_nan = (
                largest > kind.sign + kind.infinity or largest_positive > kind.infinity
            )
            self._has_nan = self._has_nan or bool(is_nan)
        if self._has_rows:
            rows = np.frombuffer(chunk, np.uint8).reshape(-1, self._row_bytes)
            is_zero: NDArray[np.bool_] = np.logical_not(
                rows[:, :FIRST_BYTES].any(axis=1)
            )
            if is_zero.any():
                is_zero[is_zero] = np.logical_not(rows[is_zero].any(axis=1))
            self._zero_rows.append(is_zero)

    def problem(self, folder: Path) -> str:
        """Return what is wrong with a tensor that was shown whole; empty if nothing is."""
        if self._has_nan:
            return "holds NaN"
        if not self._zero_rows:
            return ""
        is_zero = np.concatenate(self._zero_rows).reshape(
            self._num_matrices, self._num_rows
        )
        if not is_zero.any():
            return ""
        if _HAS_ROW_PER_ID.fullmatch(self.name):
            is_zero = is_zero[:, : _num_ids(folder, is_zero)]
        shares = is_zero.mean(axis=1)
        if _CAN_BE_OFF.fullmatch(self.name):
            shares = shares[shares < 1]
        if (shares < 0.5).all():
            return ""
        return f"has {shares.max():.0%} rows of zeros"


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = msgspec.field(
        default_factory=dict
    )


class _AddedToken(msgspec.Struct):
    id: int


class _Tokenizer(msgspec.Struct):
    model: _Model = msgspec.field(default_factory=_Model)
    added_tokens: tuple[_AddedToken, ...] = ()


def _num_ids(folder: Path, is_zero: NDArray[np.bool_]) -> int:
    """Return how many rows have ids of the tokenizer; without one, those up to the last in use."""
    try:
        read = read_json(folder / "tokenizer.json", _Tokenizer)
    except ConfigError:
        used = np.flatnonzero(~is_zero.all(axis=0))
        return int(used[-1]) + 1 if len(used) else is_zero.shape[1]
    vocab = read.model.vocab
    ids = vocab.values() if isinstance(vocab, dict) else [len(vocab) - 1]
    added = [token.id for token in read.added_tokens]
    last: int = max([*ids, *added], default=is_zero.shape[1] - 1)
    return last + 1
