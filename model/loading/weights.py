"""Read the tensors of a Hugging Face folder by name, a slice at a time, and fingerprint them.

`fingerprint` lets two nodes refuse to exchange blocks of different weights. This module does not
know names, shapes or layout of a model, and never writes a file.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol, overload

import msgspec
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.kernels.reference import FP4, NarrowWeight
from baton.model.checkpoint.weight_files import stored_tensors
from baton.model.config.packing import NESTED_BLOCK, Packing
from baton.model.config.reading import read_json
from baton.protocol.errors import ConfigError

# Fields of config.json that may differ between copies of one model.
INCIDENTAL_FIELDS = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}
)


class Checkpoint:
    """The tensors of the files that `weight_files` chooses.

    A file is opened, and read through a memory map, when one of its tensors is first read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stored = stored_tensors(folder)
        self._open: dict[Path, OpenFile] = {}

    def dtype_of(self, name: str) -> str:
        """Return the type in which a tensor is stored, or "" if there is none."""
        stored = self._stored.get(name)
        return "" if stored is None else stored.entry.dtype

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.entry.shape for name, stored in self._stored.items()}

    def read(
        self,
        name: str,
        *,
        rows: slice | None = None,
        columns: slice | None = None,
        item: int | None = None,
    ) -> Tensor:
        """Return a tensor or slice in the checkpoint's dtype; `columns` needs two dimensions.

        `item` takes one matrix of a tensor with three dimensions.

        The tensor may be a view of the memory map, shared with other processes: never write to it.
        Raises `ConfigError` if there is no such tensor or its file is damaged.
        """
        stored = self._stored.get(name)
        if stored is None:
            raise ConfigError(f"{self.folder} has no tensor {name}")
        shard = stored.file
        try:
            if shard not in self._open:
                self._open[shard] = safe_open(shard, framework="pt", device="cpu")
            handle = self._open[shard]
            if rows is None and columns is None and item is None:
                return handle.get_tensor(stored.name)
            view = handle.get_slice(stored.name)
            rows = rows or slice(None)
            if item is not None:
                return view[item, rows, columns or slice(None)]
            return view[rows] if columns is None else view[rows, columns]
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{shard}: tensor {name} cannot be read: {error}"
            ) from None


def fingerprint(folder: Path, dtype: str, weights: bytes, adapters: bytes = b"") -> str:
    """Return a text that is equal for equal models in `dtype`, in any split into files.

    `weights` is the digest of all tensors, `adapters` that of the adapters beside them.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(dtype.encode() + adapters)
    digest.update(_significant_config(folder / "config.json"))
    digest.update(weights)
    return digest.hexdigest()


def scaled(weight: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Return the fp32 numbers `[outputs, inputs]` that a quantized weight stands for.

    The scales are one, one for each output, or one for each block of rows and columns. Bytes are
    exponents of 2.
    """
    scales = in_fp32(scales)
    if block is not None:
        for dim, side in enumerate(block):
            scales = scales.repeat_interleave(side, dim).narrow(
                dim, 0, weight.shape[dim]
            )
    elif scales.numel() > 1:
        scales = scales.view(-1, 1)
    return weight.float() * scales


def in_fp32(scales: Tensor) -> Tensor:
    """Return scales as numbers; bytes are exponents of 2, of which 127 stands for 0."""
    return (
        torch.exp2(scales.float() - 127)
        if scales.dtype == torch.uint8
        else scales.float()
    )


def of_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the fp32 numbers `[inputs, outputs]` of an expert in MXFP4, two in each byte."""
    return (_pairs(blocks) * in_fp32(scales)[..., None]).flatten(1).T


def of_codebook(
    packing: Packing, shape: tuple[int, ...], read: Callable[[str], Tensor]
) -> Tensor:
    """Return the fp32 numbers `[outputs, inputs]` of four bits of bitsandbytes.

    `read` returns one of the tensors by the end of its name.
    """
    codes = read("weight").flatten().int()
    scales = read("weight.absmax")
    numbers = read("weight.quant_map").float()[
        torch.stack((codes >> 4, codes & 15), -1).flatten()
    ]
    if packing.codebook.is_nested:
        nested = read("weight.nested_absmax").repeat_interleave(NESTED_BLOCK)[
            : len(scales)
        ]
        offset = msgspec.json.decode(
            read(packing.state).numpy().tobytes(), type=_Offset
        )
        scales = (
            read("weight.nested_quant_map")[scales.int()] * nested
            + offset.nested_offset
        )
    blocks = scales.repeat_interleave(packing.group_size)[: len(numbers)]
    return (numbers * blocks)[: shape[0] * shape[1]].view(shape)


class _Offset(msgspec.Struct):
    nested_offset: float


def of_fp4(packing: Packing, read: Callable[[str], Tensor]) -> Tensor:
    """Return the fp32 numbers `[outputs, inputs]` of FP4, two in each byte, by groups of inputs.

    `read` returns one of the packed tensors by the end of its name.
    """
    names = packing.fp4
    scales = in_fp32(read(names.scales))
    if names.whole:
        whole = read(names.whole).float()
        scales = scales / whole if names.divides else scales * whole
    numbers = _pairs(read(names.codes))
    return (
        numbers * scales.repeat_interleave(packing.group_size, 1)[:, : numbers.shape[1]]
    )


def _pairs(codes: Tensor) -> Tensor:
    """Return the two numbers in each byte of `[…, count]` as `[…, 2 * count]`, the lower first."""
    numbers = torch.cat((FP4, -FP4))
    byte = torch.arange(256)
    pairs = torch.stack((numbers[byte & 15], numbers[byte >> 4]), dim=-1)
    return F.embedding(codes.int(), pairs).flatten(-2)


# Where AWQ puts each of eight neighbouring outputs in a word.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class Packed(NamedTuple):
    """Output o stands for `(numbers[o, i] - zeros[o, g]) * scales[o, g]` with `g = groups[i]`."""

    numbers: Tensor  # [outputs, inputs] int32
    scales: Tensor  # [outputs, groups] fp32
    zeros: Tensor  # [outputs, groups] int32
    groups: Tensor  # [inputs] int64

    def values(self) -> Tensor:
        """Return `[outputs, inputs]` in fp32."""
        return (self.numbers - self.zeros[:, self.groups]) * self.scales[:, self.groups]

    def narrow(self, size: int, bits: int) -> NarrowWeight | None:
        """Return the whole in four or eight bits; None if its groups are not `size` neighbours.

        Eight bits have to be symmetric.
        """
        if not torch.equal(self.groups, torch.arange(len(self.groups)) // size):
            return None
        if bits == 4:
            codes = self.numbers.to(torch.uint8)
            return NarrowWeight(codes, self.scales, self.zeros, size)
        middle = 128
        if bits != 8 or not bool((self.zeros == middle).all()):
            return None
        codes = (self.numbers - middle).to(torch.int8)
        return NarrowWeight(codes, self.scales, torch.zeros_like(self.zeros), size)


def narrow_fp4(packing: Packing, read: Callable[[str], Tensor]) -> NarrowWeight | None:
    """Return a weight in MXFP4; None if scales are not powers of two.

    `read` returns one of the packed tensors by the end of its name.
    """
    names = packing.fp4
    if names.whole:
        return None
    return mxfp4(read(names.codes), read(names.scales), packing.group_size)


def mxfp4(codes: Tensor, scales: Tensor, group: int) -> NarrowWeight:
    """Return a weight of codes `[outputs, inputs / 2]` and scales `[outputs, groups]`."""
    halves = codes.view(torch.uint8)
    codes = torch.stack((halves & 15, halves >> 4), -1).flatten(1)
    numbers = in_fp32(scales)
    zeros = torch.zeros(numbers.shape, dtype=torch.int32)
    return NarrowWeight(codes, numbers, zeros, group, is_fp4=True)


def narrow_bytes(
    weight: Tensor, scales: Tensor, block: tuple[int, int] | None
) -> NarrowWeight | None:
    """Return a weight of FP8 or int8 with its scales as `scaled` takes them; None if it has NaN."""
    outputs, inputs = weight.shape
    if weight.float().isnan().any():
        return None
    scales = in_fp32(scales)
    if block is None:
        scales = scales.view(-1, 1).expand(outputs, 1)
    else:
        scales = scales.repeat_interleave(block[0], 0)[:outputs]
    zeros = torch.zeros(scales.shape, dtype=torch.int32)
    return NarrowWeight(weight, scales, zeros, inputs if block is None else block[1])


@overload
def in_order(weight: Tensor, order: Tensor | None) -> Tensor: ...


@overload
def in_order(
    weight: Tensor | NarrowWeight, order: Tensor | None
) -> Tensor | NarrowWeight: ...


def in_order(
    weight: Tensor | NarrowWeight, order: Tensor | None
) -> Tensor | NarrowWeight:
    """Return outputs in `order`; None keeps theirs."""
    if order is None:
        return weight
    if isinstance(weight, NarrowWeight):
        return part_of(weight, order, slice(0, weight.codes.shape[1]))
    return weight[order.to(weight.device)]


def part_of(weight: NarrowWeight, rows: slice | Tensor, columns: slice) -> NarrowWeight:
    """Return rows and columns, which may begin within a group."""
    size = math.gcd(weight.group, columns.start)
    of = torch.arange(columns.start, columns.stop, size) // weight.group
    return replace(
        weight,
        codes=weight.codes[rows, columns],
        scales=weight.scales[rows][:, of],
        zeros=weight.zeros[rows][:, of],
        group=size,
    )


def unpacked(
    packing: Packing, shape: tuple[int, ...], read: Callable[[str], Tensor]
) -> Packed:
    """Return the integers of packed tensors, of which `read` returns one by the end of its name."""
    outputs, inputs = shape
    bits = packing.bits
    scales = read(packing.scales).float()
    groups = torch.arange(inputs) // (packing.group_size or inputs)
    if packing.form == "compressed-tensors":
        numbers = _integers(read("weight_packed"), bits, 1)[:, :inputs]
        zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.int32)
        if packing.has_zeros:
            zeros = _integers(read("weight_zero_point"), bits, 0)[:outputs]
        if packing.has_order:
            groups = read(packing.order).long()
    else:
        is_awq = packing.form == "awq"
        order = _AWQ_ORDER if is_awq else None
        numbers = _integers(read("qweight"), bits, int(is_awq), order).T
        zeros = _integers(read("qzeros"), bits, 1, order).T + packing.zero_offset
        zeros = zeros & ((1 << bits) - 1)
        scales = scales.T
        if packing.order:
            groups = read(packing.order).long()
    return Packed(numbers, scales, zeros, groups)


def joined(parts: Sequence[NarrowWeight | None]) -> NarrowWeight | None:
    """Return parts with equal groups, one under the other; None where kernels cannot read them."""
    found = [part for part in parts if part is not None]
    if (
        len(found) < len(parts)
        or len({(part.group, part.kind) for part in found}) > 1
        or not found[0].is_whole
    ):
        return None
    codes, scales, zeros = (
        torch.cat(of)
        for of in zip(*((p.codes, p.scales, p.zeros) for p in found), strict=True)
    )
    return replace(found[0], codes=codes, scales=scales, zeros=zeros)


def _integers(
    words: Tensor, bits: int, dim: int, order: Sequence[int] | None = None
) -> Tensor:
    """Return the integers of `bits` in each word, side by side along `dim`, the lowest first."""
    places = torch.tensor(order or range(32 // bits), dtype=torch.int32) * bits
    places = places.view(-1, *(1,) * (1 - dim))
    return ((words.unsqueeze(dim + 1) >> places) & ((1 << bits) - 1)).flatten(
        dim, dim + 1
    )


class _View(Protocol):
    def __getitem__(
        self, index: slice | tuple[slice, slice] | tuple[int, slice, slice]
    ) -> Tensor: ...


class OpenFile(Protocol):
    """The part of `safe_open` that is used here, because safetensors declares no types."""

    def get_tensor(self, name: str) -> Tensor: ...

    def get_slice(self, name: str) -> _View: ...


def _significant_config(file: Path) -> bytes:
    """Return config.json in canonical form, without the fields that do not change the model."""
    fields = read_json(file, dict[str, object]).items()
    kept = {name: value for name, value in fields if name not in INCIDENTAL_FIELDS}
    return msgspec.json.encode(kept, order="sorted")
