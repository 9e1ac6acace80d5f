"""The part of a model that drafts tokens, where a setting asks for it."""

from pathlib import Path

import msgspec

from baton.model.checkpoint.weight_files import stored_tensors
from baton.model.config.decoder_config import DecoderConfig
from baton.model.families.table import BY_MODEL_TYPE
from baton.protocol.config import EngineConfig
from baton.protocol.errors import ConfigError

SETTING = "engine.speculative_method"


def with_draft_head(folder: Path, config: DecoderConfig, engine: EngineConfig) -> DecoderConfig:
    """Return the decoder with what drafts tokens, if the settings ask for it.

    Raises `ConfigError` if the model has nothing that does.
    """
    if not engine.num_speculative_tokens or engine.speculative_method == "ngram":
        return config
    family = BY_MODEL_TYPE[config.family]
    names = family.draft
    if names is None or config.head != "tokens":
        raise ConfigError(
            f"{SETTING}: {family.title} has no layer that baton can draft with; use ngram"
        )
    block = names.block or f"model.layers.{config.num_layers}."
    stored = stored_tensors(folder)
    if f"{block}{names.joint}.weight" not in stored:
        raise ConfigError(
            f"{SETTING}: {folder} has no tensors {block}*, which would draft tokens; use ngram"
        )
    if f"{block}{names.head}.weight" not in stored:
        names = msgspec.structs.replace(names, head="")  # it takes the model's
    return msgspec.structs.replace(config, draft=names)
