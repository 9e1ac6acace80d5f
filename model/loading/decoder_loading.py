"""Load one rank's `Decoder` from a Hugging Face folder: names, slices, dtype and device.

Only the part of each tensor that the rank keeps is read.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.model.batch_invariance.row_rule import RowThreads, at_once
from baton.model.checkpoint.tensors import (
    EMBEDDING,
    HEAD,
    LABELS,
    IndexTensors,
    LatentTensors,
    LayerTensors,
    units_of_rank,
)
from baton.model.checkpoint.weight_files import check_tensors
from baton.model.config.decoder_config import DecoderConfig
from baton.model.config.tensor_parts import LinearTensors, NormTensor, share
from baton.model.config.transformers_config import AnyConfig
from baton.model.layers.attention import Keys, Scoring
from baton.model.layers.decoder import Decoder, DecoderLayer
from baton.model.layers.key_index import IndexWeights
from baton.model.layers.latent_attention import (
    LatentAttention,
    LatentWeights,
    make_latent,
)
from baton.model.layers.linear import Linear
from baton.model.layers.lora import Lora
from baton.model.layers.rotary import head_order
from baton.model.loading.adapters import LoraLoader
from baton.model.loading.layer_weights import (
    NUM_LINEAR_KINDS,
    LayerWeights,
    RankDevice,
    linears_for,
)
from baton.model.loading.mlp_loading import MlpLoader
from baton.model.loading.part_loading import PartLoader
from baton.model.loading.state_loading import load_state
from baton.model.loading.weights import (
    Checkpoint,
)
from baton.model.tensor_parallel import Ranks
from baton.node.executor import Progress
from baton.protocol.errors import ConfigError

NUM_EXPERT_KINDS = 6  # router, gate and up, down; those of a shared expert
NUM_INPUT_KINDS = 3  # all layers' inputs, and a layer's gate and projection
# What reads the hidden state, and what writes it; two that expand gates.
NUM_STATE_KINDS = 4
NUM_LATENT_KINDS = 4  # queries, each head's keys and values, and both of all heads
NUM_INDEX_KINDS = 2  # queries, the heads' weights
NUM_LORA_KINDS = 8  # two matrices for each kind but the head


def load_decoder(
    config: DecoderConfig,
    checkpoint: Checkpoint,
    ranks: Ranks,
    place: RankDevice,
    progress: Progress,
    loras: LoraLoader | None = None,
) -> Decoder:
    """Raises `ConfigError` if the ranks cannot share the model or a tensor is not as expected."""
    check_tensors(checkpoint.folder, config)
    check_split(config, ranks.size)
    num_kinds = num_linear_kinds(config)
    loras = loras or LoraLoader((), place.device, place.dtype)
    num_kinds += NUM_LORA_KINDS if loras.adapters or loras.space.num_slots else 0
    linears = linears_for(place, progress, num_kinds)
    weights = LayerWeights(config, checkpoint, ranks, place, linears, loras)
    return DecoderLoader(weights, place).load(progress)


def num_linear_kinds(config: DecoderConfig) -> int:
    """Return how many kinds of linear layers a decoder has, without those of adapters."""
    num_kinds = NUM_LINEAR_KINDS + (NUM_EXPERT_KINDS if config.experts else 0)
    num_kinds += NUM_LATENT_KINDS if config.latent else 0
    num_kinds += NUM_INDEX_KINDS if config.index else 0
    num_kinds += NUM_STATE_KINDS if config.state else 0
    num_kinds += NUM_LINEAR_KINDS + NUM_INPUT_KINDS if config.kinds else 0
    return num_kinds


def local_heads(config: AnyConfig, size: int) -> tuple[int, int]:
    """Return the numbers of query heads and KV heads of one of `size` ranks."""
    return config.num_heads // size, max(1, config.num_kv_heads // size)


def check_split(config: DecoderConfig, size: int) -> None:
    """Raise `ConfigError` unless `size` ranks can share the model evenly."""
    kv_heads = config.num_kv_heads
    if config.state is not None:
        config.state.shape(kv_heads, size)
    widths = [("heads", config.num_heads)]
    experts = [config.experts_of(layer) for layer in range(config.num_layers)]
    dense = [one is None or one.names.is_beside_mlp for one in experts]
    if any(is_dense and config.has_mlp(layer) for layer, is_dense in enumerate(dense)):
        widths.append(("MLP width", config.intermediate_size))
    if config.experts is not None:
        widths.append(("width of an expert", config.experts.moe_intermediate_size))
        shared = config.experts.shared_expert_intermediate_size
        widths.append(("width of the shared expert", shared))
    if config.kinds is not None and config.kinds.kv_heads != kv_heads:
        widths.append(("KV heads of layers that see everything", config.kinds.kv_heads))
    for name, units in widths:
        if units % size:
            raise ConfigError(
                f"engine.tensor_parallel_size: {size} does not divide the {name}, {units}"
            )
    if kv_heads % size and size % kv_heads:
        raise ConfigError(
            f"engine.tensor_parallel_size: {size} ranks cannot share {kv_heads} KV heads"
        )


class DecoderLoader:
    def __init__(self, weights: LayerWeights, place: RankDevice) -> None:
        self.weights = weights
        self.place = place
        self.config, self.ranks = config, _ = weights.config, weights.ranks
        self.folder = weights.checkpoint.folder
        self.read = weights.read
        self.linear = weights.linear
        self.grouped = weights.grouped
        self.head_order = (
            head_order(config.rope, config.head_dim) if config.latent is None else None
        )
        self.parts, self.mlps = PartLoader(weights, self.head_order), MlpLoader(weights)

    def load(self, progress: Progress) -> Decoder:
        config = self.config
        total = self.config.num_layers + 1
        layers = []
        for number, tensors in enumerate(self.weights.tensors.layers):
            progress("weights", number, total)
            layers.append(self.layer(number, tensors))
        progress("weights", config.num_layers, total)
        embedding = self.read(EMBEDDING)
        norm = self.weights.norm(self.weights.tensors.norm)
        scale = config.layers.embedding_scale
        if scale is not None:
            scale = self.weights.rounded(scale)
        head, is_split = self._head(embedding, norm)
        progress("weights", total, total)
        is_alone_on_cpu = self.place.device.type == "cpu" and self.ranks.size == 1
        return Decoder(
            embedding,
            tuple(layers),
            norm,
            head,
            is_split,
            config.rms_norm_eps,
            self.ranks,
            RowThreads() if is_alone_on_cpu else at_once,
            lora_modules=tuple(adapter.name for adapter in self.weights.loras.adapters),
            of_adapters=tuple(
                linear for lora in self._loras() for linear in lora.linears()
            ),
            num_lora_slots=self.weights.loras.space.num_slots,
            replacements=self.weights.loras.replacements,
            embedding_scale=scale,
            logit_cap=config.layers.logit_cap,
            classifier=self._classifier(),
            residual_scale=config.layers.residual_scale,
            logit_divisor=config.layers.logit_divisor,
            inputs=self.parts.inputs(),
        )

    def _loras(self) -> list[Lora]:
        return [
            *(lora for _, lora in self.weights.loras.sites),
            *self.weights.expert_loras,
        ]

    def layer(self, number: int, tensors: LayerTensors) -> DecoderLayer:
        config = self.config
        joins_norms = self.config.joins_qk_norm
        latent = state = None
        packing = self.parts.packing(number, tensors)
        if tensors.state is not None:
            qkv, state, packing = load_state(self.weights, tensors.state)
        elif tensors.latent is not None:
            qkv, latent = self._latent(tensors.latent, number)
        else:
            qkv = self.weights.columns(tensors.qkv, self._order_of(tensors.qkv))
        norms = {role: self.weights.norm(norm) for role, norm in tensors.norms.items()}
        qk_norms = (tensors.q_norm, tensors.k_norm)
        experts = None
        if tensors.beside is not None and tensors.experts is not None:
            experts = self.mlps.experts(tensors.experts)
        return DecoderLayer(
            attention_norm=norms["attention_norm"],
            qkv=qkv,
            head_norms=None
            if joins_norms
            else self.parts.head_norms(number, *qk_norms),
            packing=packing,
            output=self.weights.rows(tensors.output),
            mlp=self.mlps.mlp_or_experts(tensors),
            beside=self.parts.beside(tensors, experts),
            end=self.parts.end(tensors.end),
            mlp_norm=norms.get("mlp_norm"),
            latent=latent,
            output_norm=norms.get("output_norm"),
            mlp_output_norm=norms.get("mlp_output_norm"),
            scoring=self._scoring(number, tensors.sinks),
            keys=Keys(
                rotation=config.rotations.index(config.rotation_of(number)),
                chunk_size=config.chunk_of(number),
                are_wide=config.is_wide(number),
                are_stored=config.stores_keys(number),
            ),
            number=config.stored_number(number),
            state=state,
            num_gates=self._num_gates() if state is None else 0,
            query_scales=self.parts.query_scales(number),
        )

    def _num_gates(self) -> int:
        heads, _ = local_heads(self.config, self.ranks.size)
        return (
            heads * self.config.head_dim if self.config.layers.has_output_gates else 0
        )

    def _scoring(self, number: int, sinks_name: str | None) -> Scoring:
        config = self.config
        sinks = None
        if sinks_name is not None:
            heads = share(config.num_heads, self.ranks.rank, self.ranks.size)
            sinks = self.read(sinks_name, rows=heads, dtype=torch.float32)
        cap = config.layers.score_cap
        return Scoring(config.attention_scale, config.window_of(number), cap, sinks)

    def _latent(
        self, tensors: LatentTensors, number: int
    ) -> tuple[Linear, LatentAttention]:
        sizes = self.config.latent
        assert sizes is not None, "the layer has latent attention"
        q_down = None if tensors.q_down is None else self.weights.whole(tensors.q_down)
        weights = LatentWeights(
            q_down=q_down,
            q_norm=None
            if tensors.q_norm is None
            else self._latent_norm(tensors.q_norm),
            q_up=self._of_heads(tensors.q_up),
            row_down=self.weights.whole(tensors.row_down),
            row_norm=self._latent_norm(tensors.row_norm),
            row_up=self._of_heads(tensors.row_up),
            of_index=None
            if tensors.index is None
            else self._index(tensors.index, number),
        )
        return make_latent(
            sizes,
            weights,
            self.linear,
            self.grouped,
            expands=self.place.expands_prompts,
        )

    def _index(self, tensors: IndexTensors, number: int) -> IndexWeights:
        config = self.config
        index = self.config.index
        assert index is not None, "the layer has an index"
        queries = self.weights.whole(tensors.queries).view(
            index.num_heads, index.head_dim, -1
        )
        norm = [
            self.read(f"{tensors.key_norm.name}.{part}").float()
            for part in ("weight", "bias")
        ]
        return IndexWeights(
            number=index.layers.index(number),
            queries=queries,
            key=self.weights.whole(tensors.keys),
            key_norm=torch.stack(norm),
            weights=self.read(tensors.weights.name + ".weight", dtype=torch.float32),
            rotated=config.rotary_dim,
            is_interleaved=index.is_interleaved,
        )

    def _latent_norm(self, norm: NormTensor) -> Tensor:
        return self.read(norm.name + ".weight").float()

    def _of_heads(self, linear: LinearTensors) -> Tensor:
        """Return this rank's heads, `[num_heads, width, inputs]`."""
        (heads,) = linear.outputs
        rows = heads.of_rank(self.ranks.rank, self.ranks.size)
        return self.read(linear.name + ".weight", rows=rows).view(
            -1, heads.width, linear.inputs.size
        )

    def _order_of(self, linears: Sequence[LinearTensors]) -> Tensor | None:
        """Return the outputs of this rank's joined layers as kernels rotate them."""
        has_gates = self.config.layers.has_output_gates
        width = self.config.head_dim
        if self.head_order is None and not has_gates:
            return None
        head_order = torch.arange(width) if self.head_order is None else self.head_order
        order = []
        gates = []
        first = 0
        for count, units in units_of_rank(linears, self.ranks.rank, self.ranks.size):
            numbers = torch.arange(first, first + count * units.width).view(
                count, units.width
            )
            gates.append(numbers[:, width:].flatten())  # behind those of a head's query
            order.append(
                (numbers[:, head_order] if units.is_rotated else numbers).flatten()
            )
            first += count * units.width
        return torch.cat(order + gates)

    def _classifier(self) -> Tensor | None:
        """Return the weight, `[labels, hidden]` in fp32, that a last hidden state meets."""
        if self.config.num_labels:
            return self.read(LABELS, dtype=torch.float32)
        if not self.config.label_token_ids:
            return None
        name = EMBEDDING if self.config.tie_word_embeddings else HEAD
        checkpoint = self.weights.checkpoint
        token_ids = self.config.label_token_ids
        first, *others = (
            checkpoint.read(name, rows=slice(token_id, token_id + 1)).to(
                self.place.device, torch.float32
            )
            for token_id in token_ids
        )
        return first - others[0] if others else first

    def _head(self, embedding: Tensor, norm: Tensor) -> tuple[Linear | None, bool]:
        """Return the output projection, and whether it is split over the ranks.

        It is split where the number of ranks divides the vocabulary.
        """
        if self.config.head != "tokens":
            self.weights.loras.add_heads(slice(None), None)
            return None, False
        vocab = self.config.vocab_size
        size = self.ranks.size
        is_split = size > 1 and vocab % size == 0
        rows = share(vocab, self.ranks.rank, size) if is_split else slice(None)
        is_tied = self.config.tie_word_embeddings
        weight = embedding[rows] if is_tied else self.read(HEAD, rows=rows)
        name = EMBEDDING if is_tied else HEAD
        self._check_logits(weight, norm, f"{self.folder}: {name} or model.norm.weight")

        def replacing_head(weight: Tensor) -> Linear:
            self._check_logits(weight, norm, "the adapter's lm_head")
            return self.linear(weight, is_head=True)

        self.weights.loras.add_heads(rows, replacing_head)
        return self.linear(weight, is_head=True), is_split

    def _check_logits(self, weight: Tensor, norm: Tensor, where: str) -> None:
        """Raise `ConfigError` unless a finite hidden state is known to give finite logits.

        Then steps need not look at logits: a logit has `hidden` products, and a normed state has no
        number above `sqrt(hidden)` times the norm's weight. NaN passes no comparison.
        """
        ends = map(torch.aminmax, (weight, norm))
        largest = math.prod(max(-float(low), float(high)) for low, high in ends)
        if (
            not largest * self.config.hidden_size**1.5
            < torch.finfo(self.place.dtype).max / 2
        ):
            raise ConfigError(
                f"{where} holds NaN, infinity or numbers so large that logits would overflow: "
                "fetch the files again"
            )
