"""Load one rank's part of the head that drafts tokens, from the model's files or its own."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from baton.model.checkpoint.draft_files import TARGETS
from baton.model.checkpoint.tensors import EMBEDDING, eagle_tensors
from baton.model.config.decoder_config import DecoderConfig, EagleConfig
from baton.model.config.tensor_parts import share
from baton.model.layers.decoder import Decoder, DecoderLayer
from baton.model.layers.draft_head import DraftHead, EagleHead, NextnHead
from baton.model.layers.linear import Linear
from baton.model.loading.adapters import LoraLoader
from baton.model.loading.decoder_loading import DecoderLoader, num_linear_kinds
from baton.model.loading.layer_weights import LayerWeights, RankDevice, linears_for
from baton.model.loading.weights import Checkpoint
from baton.model.tensor_parallel import Ranks
from baton.node.executor import Progress

NUM_DRAFT_KINDS = 1  # what joins an embedding and a hidden state, or several of them


def load_draft_head(
    config: DecoderConfig,
    checkpoint: Checkpoint,
    place: RankDevice,
    progress: Progress,
    decoder: Decoder,
) -> DraftHead | None:
    """Return the head that drafts behind `decoder`, if `config` has one.

    It takes the embedding of `decoder`, and its output projection unless it has its own.
    """
    if not config.has_draft_head:
        return None
    num_kinds = num_linear_kinds(config) + NUM_DRAFT_KINDS
    linears = linears_for(place, progress, num_kinds)
    no_adapters = LoraLoader((), place.device, place.dtype)

    def weights_of(own: DecoderConfig, files: Checkpoint) -> LayerWeights:
        return LayerWeights(own, files, decoder.ranks, place, linears, no_adapters)

    if config.eagle is not None:
        files = Checkpoint(Path(config.eagle.folder))
        weights = weights_of(config.eagle.decoder, files)
        return _eagle_head(config, config.eagle, DecoderLoader(weights, place), decoder)
    return _nextn_head(
        config, DecoderLoader(weights_of(config, checkpoint), place), decoder
    )


def _nextn_head(
    config: DecoderConfig, loader: DecoderLoader, decoder: Decoder
) -> NextnHead:
    weights = loader.weights
    tensors = weights.tensors.draft
    assert tensors is not None, "a layer of the model drafts"
    assert config.draft is not None, "a layer of the model drafts"
    layer = loader.layer(config.num_layers, tensors.layer)
    head = decoder.head, decoder.head_is_split
    if tensors.head:
        head = _output(loader, tensors.head, tensors.vocab_size, decoder.ranks)
    return NextnHead(
        embedding_norm=weights.norm(tensors.embedding_norm),
        hidden_norm=weights.norm(tensors.hidden_norm),
        joint=weights.columns([tensors.joint]),
        decoder=replace(
            decoder,
            layers=(layer,),
            final_norm=weights.norm(tensors.norm),
            head=head[0],
            head_is_split=head[1],
        ),
        feeds_normed=config.draft.feeds_normed,
    )


def _eagle_head(
    config: DecoderConfig, eagle: EagleConfig, loader: DecoderLoader, decoder: Decoder
) -> EagleHead:
    weights = loader.weights
    tensors = eagle_tensors(eagle)
    head, is_split = _output(loader, tensors.head, tensors.vocab_size, decoder.ranks)
    embedding = decoder.embedding
    if eagle.has_embedding:
        embedding = loader.read(EMBEDDING)
    return EagleHead(
        fused=weights.columns([tensors.fused]),
        hidden_norm=weights.norm(tensors.hidden_norm),
        decoder=Decoder(
            embedding,
            (_behind(config, eagle, loader.layer(0, tensors.layer)),),
            weights.norm(tensors.norm),
            head,
            is_split,
            eagle.decoder.rms_norm_eps,
            decoder.ranks,
            decoder.by_rows,
        ),
        tapped=eagle.taps,
        target_ids=_target_ids(eagle, loader),
        vocab_size=config.vocab_size,
    )


def _behind(
    config: DecoderConfig, eagle: EagleConfig, layer: DecoderLayer
) -> DecoderLayer:
    """Return a draft's layer as the last one in the blocks of the model."""
    (rotation,) = eagle.decoder.rotations
    keys = layer.keys._replace(rotation=config.rotations.index(rotation))
    return replace(layer, number=config.num_kv_layers - 1, keys=keys)


def _target_ids(eagle: EagleConfig, loader: DecoderLoader) -> Tensor | None:
    """Return which tokens of the model those of the draft are; None: they are the same."""
    checkpoint = loader.weights.checkpoint
    name = f"{eagle.prefix}{TARGETS}"
    if not checkpoint.dtype_of(name):
        return None
    ids = torch.arange(eagle.decoder.vocab_size) + checkpoint.read(name)
    return ids.to(loader.weights.device)


def _output(
    loader: DecoderLoader, name: str, vocab_size: int, ranks: Ranks
) -> tuple[Linear, bool]:
    """Return this rank's part of an output projection, and whether ranks share it."""
    is_split = ranks.size > 1 and vocab_size % ranks.size == 0
    rows = share(vocab_size, ranks.rank, ranks.size) if is_split else slice(None)
    return loader.linear(loader.read(name, rows=rows), is_head=True), is_split
