"""The tensors of a Hugging Face folder as its files declare them, compared with its decoder's.

Every tensor of every file must be one that the decoder reads, with the shape that config.json
implies: a scale or a bias that nothing reads would give wrong text, and kernels trust the shapes.
It reads headers alone and never imports torch.
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from baton.model.checkpoint.tensors import (
    EMBEDDING,
    HEAD,
    LABELS,
    decoder_tensors,
    layout_of,
)
from baton.model.config.decoder_config import DecoderConfig
from baton.model.config.packing import NESTED_BLOCK, Packing
from baton.model.config.quantization import Quantization, WeightFormat
from baton.model.config.reading import read_json
from baton.model.config.tasks import MODULES
from baton.model.config.tensor_parts import Shape
from baton.protocol.errors import ConfigError

SINGLE = "model.safetensors"
_BASE = "model."  # before the names of the base model's tensors
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_OF_IMAGES = re.compile(
    r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|mm_projector|patch_merger"
    r"|vision_embedder|embed_vision|embed_audio|audio_tower)\..+|(model\.)?image_newline"
)
_DENSE_KIMI = re.compile(r"\.block_sparse_moe\.(gate|up|down)_proj\.")
_DTYPES = ("F32", "F16", "BF16")
_WIDE = ("F64", "I64", "I32", "I16", "BOOL", "C64")  # of no way to quantize
_DERIVABLE = re.compile(r".*\brotary_emb\.inv_freq")  # from config.json
# Of queries, keys, values and their products in FP8, which are computed in the model's own type.
_UNNEEDED_SCALE = re.compile(
    r".*\.self_attn\.((attn\.)?([qkv]|kv|prob|prob_output)|[qkv]_proj\.(output|[qkv]))_scale"
    r"|.*\.input(_global)?_scale"
)
_CHUNK_BYTES = 1 << 24


class TensorEntry(msgspec.Struct):
    """One tensor in a file's header. Offsets are bytes from the file's start."""

    dtype: str
    shape: Shape
    data_offsets: tuple[int, int]


class Stored(msgspec.Struct, frozen=True):
    """A tensor and the file that holds it."""

    file: Path
    name: str  # in the file
    entry: TensorEntry


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


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
            name: msgspec.json.decode(entry, type=TensorEntry)
            for name, entry in raw.items()
        }
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not a safetensors file: {error}") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    size = file.stat().st_size
    for name, entry in entries.items():
        first, last = (8 + length + offset for offset in entry.data_offsets)
        if not 0 <= first <= last <= size:
            raise ConfigError(
                f"{file} ends before tensor {name} does: fetch the file again"
            )
        entry.data_offsets = (first, last)
    try:
        # The library compares all ranges with the shapes, and with each other.
        with safe_open(file, framework="np"):
            return entries
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is not a safetensors file: {error}") from None


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights, as transformers chooses them.

    That is `model.safetensors` if it is there, and otherwise the shards that the index lists.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        raise ConfigError(f"{folder} has neither {SINGLE} nor {INDEX}")
    names = set(read_json(index, _Index).weight_map.values())
    files = sorted(folder / name for name in names)
    if missing := [file.name for file in files if not file.is_file()]:
        raise ConfigError(f"{index} names {missing[0]}, which {folder} does not have")
    return files


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Return every tensor of every file by name, without those that only images need.

    Raises `ConfigError` if one is there twice, with different bytes.
    """
    found: dict[str, Stored] = {}
    for file in weight_files(folder):
        for own, entry in tensors_of(file).items():
            if _OF_IMAGES.fullmatch(own):
                continue
            name = text_name(own)
            tensor = Stored(file, own, entry)
            if name in found and not _are_equal(found[name], tensor):
                raise ConfigError(
                    f"{file} and {found[name].file.name} both have tensor {name}"
                )
            found[name] = tensor
    if EMBEDDING in found or EMBEDDING.removeprefix(_BASE) not in found:
        return found
    # A model that was saved without a head has the names of the base model.
    return {
        name if name in (HEAD, LABELS) else _BASE + name: stored
        for name, stored in found.items()
    }


def as_stored(folder: Path, config: DecoderConfig) -> DecoderConfig:
    """Return the decoder of a folder's files, which may have another head than config.json says.

    Many that make embeddings lack the head, and tokens may be named instead of one for labels.
    """
    stored = stored_tensors(folder)
    if config.head == "labels" and LABELS not in stored and config.label_names:
        return msgspec.structs.replace(config, head="tokens", num_labels=0)
    is_there = config.tie_word_embeddings or HEAD in stored
    if config.head != "tokens" or is_there or not (folder / MODULES).is_file():
        return config
    return msgspec.structs.replace(config, head="none")


def _are_equal(first: Stored, second: Stored) -> bool:
    """Return whether two tensors have one type, shape and content."""
    if (first.entry.dtype, first.entry.shape) != (
        second.entry.dtype,
        second.entry.shape,
    ):
        return False
    return _digest_of(first) == _digest_of(second)


def _digest_of(tensor: Stored) -> bytes:
    begin, end = tensor.entry.data_offsets
    digest = hashlib.blake2b()
    with tensor.file.open("rb") as stream:
        stream.seek(begin)
        for start in range(begin, end, _CHUNK_BYTES):
            digest.update(stream.read(min(_CHUNK_BYTES, end - start)))
    return digest.digest()


def text_name(name: str) -> str:
    """Return the name that a tensor of a model's text has where the model is text alone.

    Nemotron has other names for the model and its embedding, and transformers saves the dense MLP
    of Kimi-Linear by another name than its folders have.
    """
    for prefix in ("model.language_model.", "backbone."):
        if name.startswith(prefix):
            name = "model." + name.removeprefix(prefix)
    if name == "model.embeddings.weight":
        return EMBEDDING
    name = _DENSE_KIMI.sub(r".mlp.\1_proj.", name)
    return name.removeprefix("language_model.")


def check_tensors(folder: Path, config: DecoderConfig) -> None:
    """Raise a one-line `ConfigError` unless the files hold what the decoder reads, and no more."""
    stored = stored_tensors(folder)
    shapes = {name: tensor.entry.shape for name, tensor in stored.items()}
    expected = decoder_tensors(config, layout_of(config, shapes)).shapes()
    if config.tie_word_embeddings and HEAD in stored:
        _check_tied(folder, stored)
        expected[HEAD] = expected[EMBEDDING]
    how = config.quantization
    scales = frozenset[str]()
    dtypes: dict[str, tuple[str, ...]] = {}
    if how is not None:
        scales = _check_scales(how, stored, expected)
        dtypes = _expect_packed(how, stored, expected)
        if not scales and not dtypes:
            raise ConfigError(
                f"{folder}: weights are said to be quantized, but none has scales"
            )
    for name, shape in expected.items():
        if (there := stored.get(name)) is None:
            raise ConfigError(
                f"{folder} has no tensor {name}, which its config.json implies"
            )
        is_scaled = how is not None and _format_of(how, name).scale_of(name) in scales
        if there.entry.dtype not in dtypes.get(name, _DTYPES) and not is_scaled:
            why = "so the weights are quantized, and config.json does not say how"
            if there.entry.dtype in _WIDE:
                why = "which is not supported"
            raise ConfigError(f"{there.file}: {name} is {there.entry.dtype}, {why}")
        if (there.entry.shape or (1,)) != shape:
            raise ConfigError(
                f"{there.file}: {name} has the shape {list(there.entry.shape)}, but config.json "
                f"implies {list(shape)}"
            )
    if how is not None:
        _check_packed(how, stored, expected)
    layers = range(
        config.num_layers, config.num_layers + config.num_nextn_predict_layers
    )
    guessing = (
        *(f"model.layers.{layer}." for layer in layers),
        *config.guessing,
        *_shared(config),
    )
    for name in sorted(stored.keys() - expected.keys() - scales):
        if name.startswith(guessing):
            continue
        if not (_DERIVABLE.fullmatch(name) or _is_unneeded(how, name, stored)):
            raise ConfigError(
                f"{stored[name].file}: nothing in config.json calls for tensor {name}, and without "
                "it the model would compute something else"
            )


def _shared(config: DecoderConfig) -> Iterator[str]:
    """Return the tensors of layers that read the keys of others, which files have nonetheless."""
    for layer in range(config.num_layers):
        if not config.stores_keys(layer):
            for name in ("k_proj", "v_proj", "k_norm", "v_norm"):
                yield f"model.layers.{layer}.self_attn.{name}."


def _is_unneeded(
    how: Quantization | None, name: str, stored: dict[str, Stored]
) -> bool:
    """Return whether a tensor belongs to what is not quantized here, or adds nothing."""
    if how is None:
        return False
    packing = _format_of(how, name).packing
    if (
        packing is not None
        and packing.form == "bnb"
        and name.endswith(f".{packing.state}")
    ):
        return True  # it was checked
    if name.endswith(".weight_format"):  # of bitsandbytes in eight bits: 0 is by rows
        return _bytes_of(stored[name]) == b"\0"
    if packing is not None and name.endswith(".bias"):
        # Some tools write biases for all layers that they pack.
        is_packed = name.removesuffix("bias") + packing.first in stored
        return is_packed and not _numbers_of(stored[name]).any()
    return _UNNEEDED_SCALE.fullmatch(name) is not None


def _format_of(how: Quantization, name: str) -> WeightFormat:
    """Return the format of the layer that a tensor belongs to."""
    return how.of(name.rpartition(".")[0])


def _check_scales(
    how: Quantization, stored: dict[str, Stored], expected: dict[str, Shape]
) -> frozenset[str]:
    """Return the tensors of scales, each of which must fit a weight that is quantized."""
    found = set()
    for name, shape in expected.items():
        there = stored.get(name)
        weights = _format_of(how, name)
        if weights.packing is not None or there is None or not _is_linear(name, shape):
            continue
        if there.entry.dtype != weights.stored:
            continue
        scale = weights.scale_of(name)
        if (values := stored.get(scale)) is None:
            raise ConfigError(
                f"{there.file}: {name} is quantized, but there is no {scale}"
            )
        if values.entry.shape not in weights.scale_shapes(shape):
            raise ConfigError(
                f"{values.file}: {scale} has the shape {list(values.entry.shape)}"
            )
        if values.entry.dtype not in weights.scale_dtypes:
            what = f"scales of type {values.entry.dtype} are not supported"
            raise ConfigError(f"{values.file}: {scale}: {what}")
        _check_above_0(scale, values)
        found.add(scale)
    return frozenset(found)


def _expect_packed(
    how: Quantization, stored: dict[str, Stored], expected: dict[str, Shape]
) -> dict[str, tuple[str, ...]]:
    """Expect the parts of packed weights in their place, and return the types of each part."""
    dtypes = {}
    for name, shape in list(expected.items()):
        packing = _format_of(how, name).packing
        if packing is None or not (_is_linear(name, shape) or len(shape) == 3):
            continue
        layer = name.removesuffix("weight")
        first = stored.get(layer + packing.first)
        if first is None or first.entry.dtype != packing.stored:
            continue
        if packing.form == "bnb":
            _check_state(stored, layer + packing.state, shape, packing)
        del expected[name]
        for suffix, part in packing.parts(shape).items():
            expected[layer + suffix], dtypes[layer + suffix] = part
    return dtypes


class _State(msgspec.Struct):
    """What bitsandbytes says of a weight in four bits."""

    quant_type: str
    blocksize: int
    shape: tuple[int, ...]
    nested_blocksize: int = NESTED_BLOCK


def _check_state(
    stored: dict[str, Stored], name: str, shape: Shape, packing: Packing
) -> None:
    """Check that a weight in four bits is what config.json says of all."""
    if (there := stored.get(name)) is None:
        raise ConfigError(f"there is no tensor {name}, which config.json implies")
    try:
        state = msgspec.json.decode(_bytes_of(there), type=_State)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{there.file}: {name}: {error}") from None
    said = state.quant_type, state.blocksize, state.shape, state.nested_blocksize
    wanted = packing.codebook.kind, packing.group_size, shape, NESTED_BLOCK
    if said != wanted:
        raise ConfigError(
            f"{there.file}: {name} says {said} of type, block, shape and block of scales, but only "
            f"{wanted} is supported here"
        )


def _check_packed(
    how: Quantization, stored: dict[str, Stored], expected: dict[str, Shape]
) -> None:
    """Check the scales of packed weights, and the groups that each of their inputs names."""
    for name, shape in expected.items():
        layer, _, suffix = name.rpartition(".")
        packing = how.of(layer).packing
        if packing is None:
            continue
        if suffix in (packing.scales, packing.fp4.whole):
            # A group of zeros has a scale of zero in FP4.
            _check_above_0(name, stored[name], or_0=packing.form in ("fp4", "bnb"))
        elif suffix == packing.order:
            groups = _numbers_of(stored[name])
            num_groups = packing.groups(shape[0])
            if not ((groups >= 0) & (groups < num_groups)).all():
                raise ConfigError(
                    f"{stored[name].file}: {name} names a group that is not there"
                )


def _check_above_0(name: str, values: Stored, *, or_0: bool = False) -> None:
    numbers = _numbers_of(values)
    is_high = numbers >= 0 if or_0 else numbers > 0
    if not (np.isfinite(numbers) & is_high).all():
        raise ConfigError(
            f"{values.file}: {name} has a scale that is not above 0 and finite"
        )


def _is_linear(name: str, shape: Shape) -> bool:
    return len(shape) == 2 and name != EMBEDDING


def _bytes_of(stored: Stored) -> bytes:
    first, last = stored.entry.data_offsets
    with stored.file.open("rb") as stream:
        stream.seek(first)
        return stream.read(last - first)


def _numbers_of(stored: Stored) -> NDArray[np.float32]:
    """Return the numbers of a small tensor. Raises `ConfigError` for a type that scales lack."""
    data = _bytes_of(stored)
    match stored.entry.dtype:
        case "F32":
            return np.frombuffer(data, "<f4")
        case "F16":
            return np.frombuffer(data, "<f2").astype(np.float32)
        case "BF16":
            return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        case "I32":
            return np.frombuffer(data, "<i4").astype(np.float32)
        case "U8" | "F8_E8M0":
            return _powers_of_2()[np.frombuffer(data, np.uint8)]
        case "F8_E4M3":
            return _numbers_of_fp8()[np.frombuffer(data, np.uint8)]
        case other:
            raise ConfigError(
                f"{stored.file}: scales of type {other} are not supported"
            )


def _powers_of_2() -> NDArray[np.float32]:
    """Return what each byte stands for as an exponent; the last is no number."""
    powers: NDArray[np.float32] = np.exp2(np.arange(-127, 128, dtype=np.float32))
    return np.append(powers, np.float32(np.nan))


def _numbers_of_fp8() -> NDArray[np.float32]:
    """Return what each byte stands for in E4M3."""
    byte = np.arange(256)
    exponent = (byte >> 3) & 15
    fraction = byte & 7
    normal = (1 + fraction / 8) * np.exp2(exponent - 7.0)
    numbers = np.where(exponent == 0, fraction / 8 * np.exp2(-6.0), normal)
    numbers[(byte & 127) == 127] = np.nan
    signed: NDArray[np.float32] = np.where(byte < 128, numbers, -numbers).astype(
        np.float32
    )
    return signed


def _check_tied(folder: Path, stored: dict[str, Stored]) -> None:
    """Check that a head which the configuration ties is a copy of the embedding."""
    if EMBEDDING in stored and _equal(stored[HEAD], stored[EMBEDDING]):
        return
    raise ConfigError(
        f"{folder}: config.json ties {HEAD} to the embedding, but the files hold another one: set "
        "tie_word_embeddings to false, or remove the tensor"
    )


def _equal(one: Stored, other: Stored) -> bool:
    """Return whether two tensors have equal bytes."""
    if (one.entry.dtype, one.entry.shape) != (other.entry.dtype, other.entry.shape):
        return False
    left, end = one.entry.data_offsets
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(left)
        second.seek(other.entry.data_offsets[0])
        while left < end:
            size = min(_CHUNK_BYTES, end - left)
            if first.read(size) != second.read(size):
                return False
            left += size
    return True
