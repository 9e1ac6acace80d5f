"""What drafts tokens where a setting asks for it: a layer of the model's files, or a draft's own.

It raises a one-line `ConfigError`, before anything is loaded, for a model that cannot be drafted
for and a draft that does not belong to it.
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.model.checkpoint.tensors import EMBEDDING, eagle_tensors
from baton.model.checkpoint.weight_files import stored_tensors
from baton.model.config.decoder_config import DecoderConfig, EagleConfig, decoder_config
from baton.model.config.latent_config import IndexConfig, LatentConfig
from baton.model.config.reading import converted, read_fields
from baton.model.families.dense import EAGLE_3
from baton.model.families.table import BY_MODEL_TYPE
from baton.protocol.config import EngineConfig
from baton.protocol.errors import ConfigError

METHOD = "engine.speculative_method"
MODEL = "engine.speculative_model"
# The tensor that says how far the ids of a draft are from those of the model.
TARGETS = "d2t"

_Layer = Annotated[int, Meta(ge=0)]


class _RawTaps(msgspec.Struct):
    eagle_aux_hidden_state_layer_ids: tuple[_Layer, ...] | None = None


class _RawEagle(msgspec.Struct):
    """The fields of a draft's config.json that Llama does not have."""

    vocab_size: Annotated[int, Meta(gt=0)]
    num_hidden_layers: Annotated[int, Meta(gt=0)] = 1
    draft_vocab_size: Annotated[int, Meta(gt=0)] | None = None
    eagle_aux_hidden_state_layer_ids: tuple[_Layer, ...] | None = None
    eagle_config: _RawTaps | None = None


def check_drafts(
    folder: Path, config: DecoderConfig | None, engine: EngineConfig
) -> None:
    """Raise `ConfigError` if the settings ask for drafts that a model cannot have.

    `config` is None for a model that runs in transformers' code.
    """
    if config is not None:
        with_draft_head(folder, config, engine)
    elif engine.has_draft_head:
        raise ConfigError(f"{METHOD}: transformers' code drafts no tokens; use ngram")


def with_draft_head(
    folder: Path, config: DecoderConfig, engine: EngineConfig
) -> DecoderConfig:
    """Return the decoder with what drafts tokens, if the settings ask for it."""
    if not engine.has_draft_head:
        return config
    if engine.speculative_method == "eagle3":
        if not engine.speculative_model:
            raise ConfigError(
                f"{MODEL}: name the folder of an EAGLE-3 draft (--speculative-model)"
            )
        eagle = _eagle(Path(engine.speculative_model), config)
        return msgspec.structs.replace(config, eagle=eagle)
    family = BY_MODEL_TYPE[config.family]
    names = family.draft
    if names is None or config.head != "tokens":
        raise ConfigError(
            f"{METHOD}: {family.title} has no layer that baton can draft with; use ngram"
        )
    block = names.block or f"model.layers.{config.num_layers}."
    stored = stored_tensors(folder)
    if f"{block}{names.joint}.weight" not in stored:
        raise ConfigError(
            f"{METHOD}: {folder} has no tensors {block}*, which would draft tokens; use ngram"
        )
    if f"{block}{names.head}.weight" not in stored:
        names = msgspec.structs.replace(names, head="")  # it takes the model's
    if config.latent is not None and config.latent.index is not None:
        config = _with_indexed_draft(config, config.latent, config.latent.index)
    return msgspec.structs.replace(config, draft=names)


def _with_indexed_draft(
    config: DecoderConfig, latent: LatentConfig, index: IndexConfig
) -> DecoderConfig:
    """Return the decoder whose layer that drafts has an index of its own, as in all files."""
    layers = (*index.layers, config.num_layers)
    index = msgspec.structs.replace(index, layers=layers)
    latent = msgspec.structs.replace(latent, index=index)
    return msgspec.structs.replace(config, latent=latent)


def _eagle(folder: Path, model: DecoderConfig) -> EagleConfig:
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"{MODEL}: {folder} is not a folder with a config.json of a draft"
        )
    fields = read_fields(file)
    raw = converted(file, fields, _RawEagle)
    has_embedding = EMBEDDING in (stored := stored_tensors(folder))
    prefix = EMBEDDING.removesuffix("embed_tokens.weight") if has_embedding else ""
    own = decoder_config(
        folder, fields | {"vocab_size": raw.draft_vocab_size or raw.vocab_size}, EAGLE_3
    )
    names = msgspec.structs.replace(own.names, layer=f"{prefix}{own.names.layer}")
    eagle = EagleConfig(
        str(folder),
        msgspec.structs.replace(own, names=names, joins_inputs=True),
        _taps(raw, model.num_layers),
        prefix,
        has_embedding,
    )
    _check_fit(file, raw, eagle, model)
    for name, shape in eagle_tensors(eagle).shapes():
        there = stored.get(name)
        if there is None:
            raise ConfigError(
                f"{MODEL}: {folder} has no tensor {name.removeprefix(prefix)}"
            )
        if there.entry.shape != shape:
            raise ConfigError(
                f"{there.file}: {name} has the shape {list(there.entry.shape)}, but config.json "
                f"implies {list(shape)}"
            )
    return eagle


def _taps(raw: _RawEagle, num_layers: int) -> tuple[int, ...]:
    """Return the layers before which the draft takes the stream; EAGLE has a rule for most."""
    named = raw.eagle_aux_hidden_state_layer_ids
    if named is None and raw.eagle_config is not None:
        named = raw.eagle_config.eagle_aux_hidden_state_layer_ids
    return (2, num_layers // 2, num_layers - 3) if named is None else named


def _check_fit(
    file: Path, raw: _RawEagle, eagle: EagleConfig, model: DecoderConfig
) -> None:
    own = eagle.decoder
    sizes = ("hidden_size", "num_heads", "num_kv_heads", "head_dim")
    different = [name for name in sizes if getattr(own, name) != getattr(model, name)]
    has_targets = f"{eagle.prefix}{TARGETS}" in stored_tensors(file.parent)
    refusals = (
        (
            model.latent is not None
            or model.state is not None
            or model.kinds is not None,
            f"no draft can share the blocks of {BY_MODEL_TYPE[model.family].title}",
        ),
        (bool(different), f"{', '.join(different)} must be those of the model"),
        (
            raw.vocab_size != model.vocab_size,
            f"the model has {model.vocab_size} tokens",
        ),
        (raw.num_hidden_layers != 1, "a draft with one layer is needed"),
        (own.quantization is not None, "a draft that is not quantized is needed"),
        (
            not all(layer < model.num_layers for layer in eagle.taps),
            f"the model has no layers {list(eagle.taps)}, before which the draft takes its input",
        ),
        (
            own.vocab_size != model.vocab_size and not has_targets,
            f"the draft has {own.vocab_size} tokens, but no tensor {TARGETS} says which",
        ),
    )
    for is_refused, text in refusals:
        if is_refused:
            raise ConfigError(f"{MODEL}: {file}: {text}")
