"""Load one rank's part of the head that drafts tokens."""

from baton.model.checkpoint.tensors import DraftTensors
from baton.model.config.decoder_config import DecoderConfig
from baton.model.config.tensor_parts import share
from baton.model.layers.decoder import Decoder
from baton.model.layers.draft_head import DraftHead
from baton.model.layers.linear import Linear
from baton.model.loading.adapters import LoraLoader
from baton.model.loading.decoder_loading import DecoderLoader, num_linear_kinds
from baton.model.loading.layer_weights import LayerWeights, RankDevice, linears_for
from baton.model.loading.weights import Checkpoint
from baton.model.tensor_parallel import Ranks
from baton.node.executor import Progress

NUM_DRAFT_KINDS = 1  # what joins an embedding and a hidden state


def load_draft_head(
    config: DecoderConfig,
    checkpoint: Checkpoint,
    ranks: Ranks,
    place: RankDevice,
    progress: Progress,
    decoder: Decoder,
) -> DraftHead | None:
    """Return the head that drafts behind `decoder`, if `config` has one.

    It takes the embedding of `decoder`, and its output projection unless it has its own.
    """
    if config.draft is None:
        return None
    num_kinds = num_linear_kinds(config) + NUM_DRAFT_KINDS
    linears = linears_for(place, progress, num_kinds)
    no_adapters = LoraLoader((), place.device, place.dtype)
    weights = LayerWeights(config, checkpoint, ranks, place, linears, no_adapters)
    loader = DecoderLoader(weights, place)
    tensors = weights.tensors.draft
    assert tensors is not None, "the configuration has a layer that drafts"
    norm = weights.norm(tensors.norm)
    one_layer = Decoder(
        decoder.embedding,
        (loader.layer(config.num_layers, tensors.layer),),
        norm,
        _output(loader, tensors, decoder),
        decoder.head_is_split,
        decoder.eps,
        ranks,
        decoder.by_rows,
        logit_cap=decoder.logit_cap,
        logit_divisor=decoder.logit_divisor,
        residual_scale=decoder.residual_scale,
    )
    return DraftHead(
        embedding_norm=weights.norm(tensors.embedding_norm),
        hidden_norm=weights.norm(tensors.hidden_norm),
        joint=weights.columns([tensors.joint]),
        decoder=one_layer,
        feeds_normed=config.draft.feeds_normed,
    )


def _output(loader: DecoderLoader, tensors: DraftTensors, decoder: Decoder) -> Linear | None:
    """Return this rank's part of the output projection, split as that of the model is."""
    if not tensors.head:
        return decoder.head
    ranks = loader.ranks
    rows = slice(None)
    if decoder.head_is_split:
        rows = share(tensors.vocab_size, ranks.rank, ranks.size)
    weight = loader.read(tensors.head, rows=rows)
    return loader.linear(weight, is_head=True)
