"""LoRA adapters as PEFT saves them: what a folder says, checked against its model before loading.

An adapter adds `scaling * B(A(x))` to the outputs of a linear layer. Every tensor must be one that
is read, and every field of adapter_config.json that changes the result is honoured or refused. It
reads headers alone and never imports torch.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from baton.model.checkpoint.expert_lora import (
    ExpertPart,
    check_parameters,
    expert_layers,
)
from baton.model.checkpoint.tensors import EMBEDDING, HEAD, decoder_tensors
from baton.model.checkpoint.weight_files import TensorEntry, tensors_of, text_name
from baton.model.config.decoder_config import DecoderConfig
from baton.model.config.reading import read_json
from baton.protocol.errors import ConfigError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 512
MODULES = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "down_proj",
    "w1",
    "w2",
    "w3",
)
T = TypeVar("T")
_TENSOR = re.compile(r"base_model\.model\.([\w.]+)\.lora_([AB])\.weight")
_WHOLE = re.compile(r"base_model\.model\.([\w.]+)\.weight")
_NAME = re.compile(r"[^\s=,\0]+")
# Fields that do not change what the tensors mean, whatever they say.
_HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
# Ways to begin a training that leave the model's own weights as they are.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


class _Config(msgspec.Struct):
    """The fields of adapter_config.json that baton honours."""

    peft_type: str
    r: Annotated[int, Meta(ge=1, le=MAX_RANK)]
    lora_alpha: float
    target_modules: list[str] | str | None = None
    use_rslora: bool = False
    bias: str = "none"
    init_lora_weights: bool | str | None = True
    # By the end of a layer's name, or a pattern of it, instead of `r` and `lora_alpha`.
    rank_pattern: dict[str, Annotated[int, Meta(ge=1, le=MAX_RANK)]] | None = None
    alpha_pattern: dict[str, float] | None = None
    # Modules that the adapter has whole, instead of the model's.
    modules_to_save: list[str] | None = None
    ensure_weight_tying: bool = False
    target_parameters: list[str] | None = None
    peft_version: str | None = None

    def rank_of(self, layer: str) -> int:
        return _by_pattern(self.rank_pattern, layer, self.r)

    def scaling_of(self, layer: str) -> float:
        rank = self.rank_of(layer)
        alpha = _by_pattern(self.alpha_pattern, layer, self.lora_alpha)
        return alpha / (rank**0.5 if self.use_rslora else rank)


class AdaptedLayer(NamedTuple):
    name: str  # in the adapter's file
    rank: int
    scaling: float
    part: ExpertPart | None = None  # of matrices that all experts of a layer share


class Adapter(NamedTuple):
    name: str
    folder: Path
    # The layers that it changes, by their names in the model, such as model.layers.0.mlp.up_proj.
    layers: dict[str, AdaptedLayer]
    # The tensors that it has instead of the model's, by their names there, and in its file.
    replaced: dict[str, str]

    @property
    def rank(self) -> int:
        return max(layer.rank for layer in self.layers.values())

    @property
    def file(self) -> Path:
        return self.folder / WEIGHTS_FILE


def folders_of(modules: Sequence[str]) -> dict[str, Path]:
    """Return the absolute folder of each adapter by its name. Raises `ConfigError`."""
    found: dict[str, Path] = {}
    for module in modules:
        name, equals, folder = module.partition("=")
        if not equals or not folder or not _NAME.fullmatch(name):
            raise ConfigError(f"model.lora_modules: write {module!r} as name=folder")
        if name in found:
            raise ConfigError(
                f"model.lora_modules: two adapters have the name {name!r}"
            )
        found[name] = Path(folder).expanduser().absolute()
    return found


def read_adapters(
    modules: Sequence[str], config: DecoderConfig | None
) -> tuple[Adapter, ...]:
    """Return the adapters in the order of the settings. Raises a one-line `ConfigError`.

    There is no `config` where transformers' code computes the model, which takes none.
    """
    folders = folders_of(modules)
    if folders:
        check_takes_adapters(config, "model.lora_modules")
    return tuple(
        read_adapter(name, folder, config) for name, folder in folders.items() if config
    )


def check_takes_adapters(config: DecoderConfig | None, setting: str) -> None:
    """Raise `ConfigError` for a model that is computed without adapters."""
    if config is None:
        raise ConfigError(
            f"{setting}: transformers' code computes this model, without any"
        )
    if config.latent is not None:
        raise ConfigError(f"{setting}: latent attention is computed without adapters")


def fingerprint_of(adapters: Sequence[Adapter]) -> bytes:
    """Return a digest of the names and of all bytes of the adapters; empty without any."""
    digest = hashlib.blake2b(digest_size=16)
    for adapter in adapters:
        scalings = sorted((layer, of.scaling) for layer, of in adapter.layers.items())
        digest.update(f"{adapter.name}\0{scalings!r}\0".encode())
        with adapter.file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "blake2b").digest())
    return digest.digest() if adapters else b""


def read_adapter(name: str, folder: Path, config: DecoderConfig) -> Adapter:
    """Return the adapter in a folder. Raises a one-line `ConfigError` if it does not fit."""
    where = f"adapter {name!r} in {folder}"
    file = folder / CONFIG_FILE
    if file.exists() and not file.is_file():  # a pipe would never end
        raise ConfigError(f"{where}: {CONFIG_FILE} is not a file")
    fields = read_json(file, dict[str, object])
    given = read_json(file, _Config)
    if given.peft_type.upper() != "LORA":
        raise ConfigError(
            f"{where}: peft_type {given.peft_type} is not supported, only LORA"
        )
    if given.bias != "none":
        raise ConfigError(f"{where}: bias {given.bias!r} is not supported")
    if given.init_lora_weights not in _INITS:
        raise ConfigError(
            f"{where}: init_lora_weights {given.init_lora_weights!r} changes the model's own "
            "weights: save the adapter as a plain LoRA"
        )
    for field, value in fields.items():
        if value and field not in _HARMLESS and field not in _Config.__struct_fields__:
            raise ConfigError(f"{where}: {field} is not supported")
    for pattern in (*(given.rank_pattern or ()), *(given.alpha_pattern or ())):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"{where}: {pattern!r} is not a valid pattern of layers: {error}"
            ) from None
    layers, replaced = _tensors_of(where, folder, given, config)
    _check_targets(where, given.target_modules, layers)
    if replaced and given.ensure_weight_tying and config.tie_word_embeddings:
        raise ConfigError(
            f"{where}: ensure_weight_tying is not supported with modules_to_save"
        )
    return Adapter(name, folder, layers, replaced)


def _by_pattern(values: dict[str, T] | None, layer: str, default: T) -> T:
    """Return the value whose key names a layer, as PEFT finds it, or the default."""
    for pattern, value in (values or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return default


def _tensors_of(
    where: str, folder: Path, given: _Config, config: DecoderConfig
) -> tuple[dict[str, AdaptedLayer], dict[str, str]]:
    """Return `layers` and `replaced`. Raises `ConfigError` unless all tensors fit the model."""
    if not (folder / WEIGHTS_FILE).is_file():
        raise ConfigError(
            f"{where} has no {WEIGHTS_FILE}: baton reads weights from safetensors"
        )
    tensors = decoder_tensors(config)
    stored = tensors_of(folder / WEIGHTS_FILE)
    for tensor, entry in stored.items():
        if entry.dtype not in ("F32", "F16", "BF16"):
            raise ConfigError(
                f"{where}: {tensor} is {entry.dtype}, which is not supported"
            )
    of_experts = expert_layers(
        where, stored, tensors, given.r, given.peft_version or ""
    )
    check_parameters(where, given.target_parameters or [], of_experts)
    if of_experts and (given.rank_pattern or given.alpha_pattern):
        raise ConfigError(
            f"{where}: target_parameters are not supported beside patterns of layers"
        )
    replaced = _replaced(where, given.modules_to_save or [], stored)
    _check_replaced(where, replaced, stored, config)
    names = {layer.name for layer in of_experts.values()}
    shared = {tensor_of(name, letter) for name in names for letter in "AB"}
    rest = {
        tensor: entry
        for tensor, entry in stored.items()
        if tensor not in shared and tensor not in replaced.values()
    }
    layers = _layers_of(where, given, rest, tensors.shapes())
    if twice := layers.keys() & of_experts.keys():
        raise ConfigError(f"{where}: two tensors are for {min(twice)}")
    scaling = given.scaling_of("")
    for name, layer in of_experts.items():
        layers[name] = AdaptedLayer(layer.name, given.r, scaling, layer.part)
    if not layers:
        raise ConfigError(f"{where} changes no layer")
    return layers, replaced


def _layers_of(
    where: str,
    given: _Config,
    stored: Mapping[str, TensorEntry],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, AdaptedLayer]:
    """Return the layers that have matrices of their own."""
    parts = {"A": dict[str, str](), "B": dict[str, str]()}
    for tensor, entry in stored.items():
        match = _TENSOR.fullmatch(tensor)
        own = match[1] if match else ""
        layer = text_name(own)
        shape = shapes.get(f"{layer}.weight")
        if match is None or shape is None or layer.rpartition(".")[2] not in MODULES:
            raise ConfigError(
                f"{where}: the model has no linear layer for tensor {tensor}"
            )
        outputs, inputs = shape
        rank = given.rank_of(own)
        wanted = (rank, inputs) if match[2] == "A" else (outputs, rank)
        if entry.shape != wanted:
            raise ConfigError(
                f"{where}: {tensor} has the shape {list(entry.shape)}, but r and the model imply "
                f"{list(wanted)}"
            )
        if layer in parts[match[2]]:
            raise ConfigError(f"{where}: two tensors are for {layer}")
        parts[match[2]][layer] = own
    if odd := sorted(parts["A"].items() ^ parts["B"].items()):
        raise ConfigError(f"{where}: {odd[0][0]} has only one of lora_A and lora_B")
    return {
        layer: AdaptedLayer(own, given.rank_of(own), given.scaling_of(own))
        for layer, own in parts["A"].items()
    }


def _check_replaced(
    where: str,
    replaced: Mapping[str, str],
    stored: Mapping[str, TensorEntry],
    config: DecoderConfig,
) -> None:
    """Check that the tensors that an adapter has whole are as large as the model's."""
    wanted = config.vocab_size, config.hidden_size
    for tensor in replaced.values():
        if config.head != "tokens":
            raise ConfigError(
                f"{where}: the model makes no tokens, for which {tensor} is"
            )
        if (shape := stored[tensor].shape) != wanted:
            raise ConfigError(
                f"{where}: {tensor} has the shape {list(shape)}, but the model's is {list(wanted)}"
            )


def _replaced(
    where: str, modules: Sequence[str], tensors: Iterable[str]
) -> dict[str, str]:
    """Return `Adapter.replaced`. Raises `ConfigError` for modules other than these two."""
    replaced: dict[str, str] = {}
    for tensor in tensors:
        match = _WHOLE.fullmatch(tensor)
        name = f"{text_name(match[1])}.weight" if match else ""
        if name in (EMBEDDING, HEAD):
            replaced[name] = tensor
    known = {EMBEDDING: "embed_tokens", HEAD: "lm_head"}
    found = {known[name] for name in replaced}
    named = {module.rpartition(".")[2] for module in modules}
    if odd := sorted(named - set(known.values())):
        raise ConfigError(
            f"{where}: modules_to_save names {odd[0]}, which is not supported"
        )
    if odd := sorted(found ^ named):
        raise ConfigError(
            f"{where}: of {odd[0]}, it has only the tensor or the name in modules_to_save"
        )
    return replaced


def _check_targets(
    where: str, targets: list[str] | str | None, layers: dict[str, AdaptedLayer]
) -> None:
    """Check that no target is without tensors, as in a file that was cut or saved by halves."""
    if not isinstance(targets, list):
        return  # a pattern, which says nothing of what should be there
    for target in targets:
        names = (layer.name for layer in layers.values())
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ConfigError(
                f"{where}: target_modules names {target}, but no tensor is for it"
            )


def tensor_of(layer: str, letter: str) -> str:
    """Return the name of matrix `A` or `B` of a layer, as the adapter's file names the layer."""
    return f"base_model.model.{layer}.lora_{letter}.weight"
