"""The tensors of a decoder, declared once: their names, shapes, parts for ranks, and order.

The check of a folder, the loader, adapters and quantized weights all read these declarations. This
module never imports torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Literal, NamedTuple

import msgspec

from baton.model.config.decoder_config import DecoderConfig, EagleConfig
from baton.model.config.expert_config import ExpertsConfig
from baton.model.config.kinds_config import KindsConfig, LayerInputs
from baton.model.config.latent_config import LatentConfig
from baton.model.config.state_config import StateTensors, state_tensors
from baton.model.config.tensor_parts import LinearTensors, NormTensor, Shape, Units
from baton.model.families.family import DraftNames, Experts, MlpNames

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# Of models whose layers take an embedding of each token of their own.
INPUTS = "model.embed_tokens_per_layer.weight"
INPUT_NORM = "model.per_layer_projection_norm"
INPUT_PROJECTION = "model.per_layer_model_projection"
LABELS = "score.weight"  # a head that makes a number for each label
# As transformers keeps experts, and saves them with `save_original_format=False`.
STACKED_BLOCK = "mlp"
STACKED_GATE_UP = "experts.gate_up_proj"
STACKED_DOWN = "experts.down_proj"

# Each expert has tensors of its own, or one tensor has all of a layer: [outputs, inputs] each, or
# transposed.
ExpertLayout = Literal["apart", "stacked", "transposed"]


class MlpTensors(NamedTuple):
    gate_up: tuple[LinearTensors, ...]  # gates first
    down: LinearTensors

    def shapes(self) -> Iterator[tuple[str, Shape]]:
        for linear in (*self.gate_up, self.down):
            yield from linear.shapes()


class LatentPair(NamedTuple):
    """The layers around experts that take and give fewer numbers than the hidden state has."""

    inner: LinearTensors
    outer: LinearTensors

    def shapes(self) -> Iterator[tuple[str, Shape]]:
        for linear in self:
            yield from linear.shapes()


class IndexTensors(NamedTuple):
    """The tensors of a layer's index, all of which each rank has."""

    queries: LinearTensors
    keys: LinearTensors
    key_norm: NormTensor
    weights: LinearTensors  # of the index's heads

    def shapes(self) -> Iterator[tuple[str, Shape]]:
        for tensors in (self.queries, self.keys, self.key_norm, self.weights):
            yield from tensors.shapes()


class LatentTensors(msgspec.Struct, frozen=True):
    """The tensors of latent attention, of which all ranks have those without heads."""

    q_down: LinearTensors | None  # None: `q_up` takes the hidden state
    q_norm: NormTensor | None
    q_up: LinearTensors
    row_down: LinearTensors
    row_norm: NormTensor
    row_up: LinearTensors
    index: IndexTensors | None

    def shapes(self) -> Iterator[tuple[str, Shape]]:
        every = (
            self.q_down,
            self.q_norm,
            self.q_up,
            self.row_down,
            self.row_norm,
            self.row_up,
            self.index,
        )
        for tensors in every:
            if tensors is not None:
                yield from tensors.shapes()


class ExpertTensors(msgspec.Struct, frozen=True):
    """A router and its experts, each of which ranks share as they share a dense MLP."""

    router: LinearTensors
    score_bias: str | None  # changes the choice alone
    shared: MlpTensors | None
    shared_gate: LinearTensors | None
    block: str  # before the names of the experts
    names: Experts
    num_experts: int
    width: int  # of one expert
    hidden: int  # of what an expert takes and gives
    layout: ExpertLayout
    latent: LatentPair | None

    @property
    def stacked_gate_up(self) -> str:
        stacked = self.names.stacked
        return self.block + (STACKED_GATE_UP if stacked is None else stacked[0])

    @property
    def stacked_down(self) -> str:
        stacked = self.names.stacked
        return self.block + (STACKED_DOWN if stacked is None else stacked[1])

    def expert(self, number: int) -> MlpTensors:
        """Return the tensors of one expert, where each has its own."""
        names = self.names
        prefix = f"{self.block}experts.{number}."
        return _mlp(prefix, names.gate_up, names.down, self.hidden, self.width)

    def shapes(self) -> Iterator[tuple[str, Shape]]:
        yield from self.router.shapes()
        if self.score_bias is not None:
            yield self.score_bias, (self.num_experts,)
        if self.shared is not None:
            yield from self.shared.shapes()
        for tensors in (self.shared_gate, self.latent):
            if tensors is not None:
                yield from tensors.shapes()
        if self.names.is_interleaved:
            yield self.stacked_gate_up, (self.num_experts, self.hidden, 2 * self.width)
            yield f"{self.stacked_gate_up}_bias", (self.num_experts, 2 * self.width)
            yield self.stacked_down, (self.num_experts, self.width, self.hidden)
            yield f"{self.stacked_down}_bias", (self.num_experts, self.hidden)
        elif self.layout == "transposed":
            yield self.stacked_gate_up, (self.num_experts, self.hidden, 2 * self.width)
            yield self.stacked_down, (self.num_experts, self.width, self.hidden)
        elif self.layout == "stacked":
            yield self.stacked_gate_up, (self.num_experts, 2 * self.width, self.hidden)
            yield self.stacked_down, (self.num_experts, self.hidden, self.width)
        else:
            for number in range(self.num_experts):
                yield from self.expert(number).shapes()


class BesideTensors(msgspec.Struct, frozen=True):
    """What experts beside a dense MLP have of their own."""

    norms: dict[str, NormTensor]  # by their names in `ExpertsBeside`
    input_scale: str  # [hidden]
    expert_scale: str  # [num_experts]
    hidden: int
    num_experts: int

    def shapes(self) -> Iterator[tuple[str, Shape]]:
        for norm in self.norms.values():
            yield from norm.shapes()
        yield self.input_scale, (self.hidden,)
        yield self.expert_scale, (self.num_experts,)


class EndTensors(msgspec.Struct, frozen=True):
    """What follows the MLP of a layer: the layer's own input, and a factor of the sum."""

    factor: str  # [1]
    gate: LinearTensors | None  # None: there are no inputs
    projection: LinearTensors | None
    norm: NormTensor | None

    def shapes(self) -> Iterator[tuple[str, Shape]]:
        yield self.factor, (1,)
        for tensors in (self.gate, self.projection, self.norm):
            if tensors is not None:
                yield from tensors.shapes()


class LayerTensors(msgspec.Struct, frozen=True):
    """The tensors of one layer."""

    norms: dict[str, NormTensor]  # by their names in `DecoderLayer`
    # Queries, keys and values; none with `latent` or `state`.
    qkv: tuple[LinearTensors, ...]
    output: LinearTensors
    q_norm: NormTensor | None
    k_norm: NormTensor | None
    sinks: str | None
    num_heads: int
    latent: LatentTensors | None
    state: StateTensors | None
    # None with `experts`, but for those with `beside`, and without an MLP.
    mlp: MlpTensors | None
    experts: ExpertTensors | None
    beside: BesideTensors | None
    end: EndTensors | None

    def shapes(self) -> Iterator[tuple[str, Shape]]:
        for norm in (*self.norms.values(), self.q_norm, self.k_norm):
            if norm is not None:
                yield from norm.shapes()
        for linear in self.qkv:
            yield from linear.shapes()
        if self.latent is not None:
            yield from self.latent.shapes()
        if self.state is None:
            yield from self.output.shapes()
        else:
            yield from self.state.shapes()
        if self.mlp is not None:
            yield from self.mlp.shapes()
        if self.experts is not None:
            yield from self.experts.shapes()
        for tensors in (self.beside, self.end):
            if tensors is not None:
                yield from tensors.shapes()
        if self.sinks is not None:
            yield self.sinks, (self.num_heads,)


class DraftTensors(msgspec.Struct, frozen=True):
    """The tensors of the layer that drafts tokens, and of what is around it."""

    embedding_norm: NormTensor
    hidden_norm: NormTensor
    joint: LinearTensors
    layer: LayerTensors
    norm: NormTensor
    head: str  # empty: that of the model
    vocab_size: int

    def shapes(self) -> Iterator[tuple[str, Shape]]:
        for tensors in (
            self.embedding_norm,
            self.hidden_norm,
            self.joint,
            self.layer,
            self.norm,
        ):
            yield from tensors.shapes()
        if self.head:
            yield self.head, (self.vocab_size, self.norm.size)


class EagleTensors(msgspec.Struct, frozen=True):
    """The tensors of a folder with a draft of EAGLE-3."""

    fused: LinearTensors  # of the streams that it takes
    hidden_norm: NormTensor
    layer: LayerTensors
    norm: NormTensor
    head: str
    vocab_size: int  # of the draft

    def shapes(self) -> Iterator[tuple[str, Shape]]:
        for tensors in (self.fused, self.hidden_norm, self.layer, self.norm):
            yield from tensors.shapes()
        yield self.head, (self.vocab_size, self.norm.size)


class DecoderTensors(msgspec.Struct, frozen=True):
    """All tensors that a decoder reads."""

    vocab_size: int
    hidden: int
    layers: tuple[LayerTensors, ...]
    norm: NormTensor
    has_own_head: bool  # that makes tokens, and is not tied to the embedding
    num_labels: int
    inputs: LayerInputs | None
    draft: DraftTensors | None

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of each tensor by name."""
        shapes: dict[str, Shape] = {EMBEDDING: (self.vocab_size, self.hidden)}
        for layer in self.layers:
            shapes.update(layer.shapes())
        shapes.update(self.norm.shapes())
        if self.has_own_head:
            shapes[HEAD] = (self.vocab_size, self.hidden)
        if self.num_labels:
            shapes[LABELS] = (self.num_labels, self.hidden)
        if self.inputs is not None:
            width = len(self.layers) * self.inputs.width
            shapes[INPUTS] = (self.inputs.vocab_size, width)
            shapes[f"{INPUT_PROJECTION}.weight"] = (width, self.hidden)
            shapes[f"{INPUT_NORM}.weight"] = (self.inputs.width,)
        if self.draft is not None:
            shapes.update(self.draft.shapes())
        return shapes


def decoder_tensors(
    config: DecoderConfig, layout: ExpertLayout = "apart"
) -> DecoderTensors:
    """Return what the decoder of `config` reads from files with such a layout of experts."""
    return DecoderTensors(
        vocab_size=config.vocab_size,
        hidden=config.hidden_size,
        layers=tuple(
            _layer(config, number, layout) for number in range(config.num_layers)
        ),
        norm=NormTensor(f"model.{config.names.last_norm}", config.hidden_size),
        has_own_head=config.head == "tokens" and not config.tie_word_embeddings,
        num_labels=config.num_labels,
        inputs=None if config.kinds is None else config.kinds.inputs,
        draft=None if config.draft is None else _draft(config, config.draft, layout),
    )


def layout_of(config: DecoderConfig, shapes: Mapping[str, Shape]) -> ExpertLayout:
    """Return the layout of experts in files whose tensors have these shapes."""
    if (
        config.experts is not None
        and (names := config.experts.names).stacked is not None
    ):
        # Tools that quantize write the experts of Llama 4 apart.
        if names.is_transposed and any(
            f".{names.block}.experts.0." in name for name in shapes
        ):
            return "apart"
        return "transposed" if names.is_transposed else "stacked"
    for name, shape in shapes.items():
        if config.experts is None or not name.endswith(
            f".{STACKED_BLOCK}.{STACKED_GATE_UP}"
        ):
            continue
        width = config.experts.moe_intermediate_size
        hidden = config.hidden_size
        down = shapes.get(name.removesuffix(STACKED_GATE_UP) + STACKED_DOWN, ())
        is_transposed = (shape[1:], down[1:]) == ((hidden, 2 * width), (width, hidden))
        return "transposed" if is_transposed else "stacked"
    return "apart"


def units_of_rank(
    linears: Sequence[LinearTensors], rank: int, size: int
) -> Iterator[tuple[int, Units]]:
    """Return each block of the outputs of joined layers, with how many of its units a rank has."""
    for units in chain.from_iterable(linear.outputs for linear in linears):
        part = units.of_rank(rank, size)
        yield (part.stop - part.start) // units.width, units


def _layer(config: DecoderConfig, number: int, layout: ExpertLayout) -> LayerTensors:
    layer = config.prefix_of(number)
    attention = f"{layer}{config.names.attention}."
    hidden, (kv_heads, width) = Units(config.hidden_size), config.heads_of(number)
    latent = config.latent
    value_dim = width if latent is None else latent.v_head_dim
    output = LinearTensors(
        attention + config.names.output,
        (hidden,),
        Units(config.num_heads, value_dim),
        config.output_bias,
        splits_inputs=True,
    )
    experts = config.experts_of(number)
    is_beside = experts is not None and experts.names.is_beside_mlp
    state = None
    if config.has_state(number):
        assert config.state is not None, "the model has layers with a state"
        state = state_tensors(config.state, layer, config.hidden_size)
    q_norm = k_norm = None
    if config.qk_norm and state is None:
        q_size = width
        k_size = width
        if config.joins_qk_norm:
            q_size = config.num_heads * width
            k_size = kv_heads * width
        q_norm = NormTensor(attention + config.names.q_norm, q_size)
        if config.stores_keys(number):
            k_norm = NormTensor(attention + config.names.k_norm, k_size)
    has_dense = config.has_mlp(number) and (experts is None or is_beside)
    return LayerTensors(
        norms=_norms(config, number),
        qkv=_qkv(config, number, attention) if latent is None and state is None else (),
        output=output if state is None else state.output,
        q_norm=q_norm,
        k_norm=k_norm,
        sinks=f"{attention}sinks" if config.layers.has_sinks else None,
        num_heads=config.num_heads,
        latent=None
        if latent is None or state
        else _latent(latent, attention, config, number),
        state=state,
        mlp=_dense_mlp(config, number) if has_dense else None,
        experts=None if experts is None else _experts(config, experts, number, layout),
        beside=_beside(experts, layer, hidden.size) if experts and is_beside else None,
        end=None if config.kinds is None else _end(config.kinds, layer, hidden),
    )


def _draft(
    config: DecoderConfig, names: DraftNames, layout: ExpertLayout
) -> DraftTensors:
    number = config.num_layers
    hidden = config.hidden_size
    block = names.block or config.prefix_of(number)
    whole = Units(1, hidden)  # which each rank has
    return DraftTensors(
        embedding_norm=NormTensor(block + names.embedding_norm, hidden),
        hidden_norm=NormTensor(block + names.hidden_norm, hidden),
        joint=LinearTensors(block + names.joint, (whole,), Units(1, 2 * hidden)),
        layer=_layer(config, number, layout),
        norm=NormTensor(block + names.norm, hidden),
        head=f"{block}{names.head}.weight" if names.head else "",
        vocab_size=config.vocab_size,
    )


def eagle_tensors(eagle: EagleConfig) -> EagleTensors:
    """Return what a draft of EAGLE-3 reads from its folder."""
    config = eagle.decoder
    hidden = config.hidden_size
    streams = Units(1, len(eagle.taps) * hidden)
    return EagleTensors(
        fused=LinearTensors(f"{eagle.prefix}fc", (Units(1, hidden),), streams),
        hidden_norm=NormTensor(f"{config.prefix_of(0)}hidden_norm", hidden),
        layer=_layer(config, 0, "apart"),
        norm=NormTensor(f"{eagle.prefix}{config.names.last_norm}", hidden),
        head=HEAD,
        vocab_size=config.vocab_size,
    )


def _beside(experts: ExpertsConfig, layer: str, hidden: int) -> BesideTensors:
    names = {
        "mlp_norm": "post_feedforward_layernorm_1",
        "input_norm": "pre_feedforward_layernorm_2",
        "output_norm": "post_feedforward_layernorm_2",
    }
    return BesideTensors(
        norms={role: NormTensor(layer + name, hidden) for role, name in names.items()},
        input_scale=f"{layer}router.scale",
        expert_scale=f"{layer}router.per_expert_scale",
        hidden=hidden,
        num_experts=experts.num_experts,
    )


def _end(kinds: KindsConfig, layer: str, hidden: Units) -> EndTensors:
    factor = f"{layer}layer_scalar"
    if kinds.inputs is None:
        return EndTensors(factor, None, None, None)
    width = Units(kinds.inputs.width)
    return EndTensors(
        factor=factor,
        gate=LinearTensors(f"{layer}per_layer_input_gate", (width,), hidden),
        projection=LinearTensors(f"{layer}per_layer_projection", (hidden,), width),
        norm=NormTensor(f"{layer}post_per_layer_input_norm", hidden.size),
    )


def _norms(config: DecoderConfig, number: int) -> dict[str, NormTensor]:
    names = {
        "attention_norm": config.names.attention_norm,
        "mlp_norm": config.names.mlp_norm,
    }
    if config.blocks:
        numbers = zip(names.items(), config.numbers_in_files(number), strict=True)
        return {
            role: NormTensor(f"model.layers.{of}.{name}", config.hidden_size)
            for (role, name), of in numbers
            if of is not None
        }
    layer = config.prefix_of(number)
    if config.layers.has_output_norms:
        names["output_norm"] = names["mlp_norm"]
        names["mlp_norm"] = "pre_feedforward_layernorm"
        names["mlp_output_norm"] = "post_feedforward_layernorm"
    return {
        role: NormTensor(layer + name, config.hidden_size)
        for role, name in names.items()
    }


def _qkv(
    config: DecoderConfig, number: int, attention: str
) -> tuple[LinearTensors, ...]:
    hidden, (kv_heads, width) = Units(config.hidden_size), config.heads_of(number)
    if config.joins_inputs:
        hidden = Units(2 * config.hidden_size)
    is_gated = config.layers.has_output_gates
    queries = Units(config.num_heads, 2 * width if is_gated else width, is_rotated=True)
    keys = Units(kv_heads, width, is_rotated=True)
    values = Units(kv_heads, width)
    if config.is_fused:
        blocks = (queries, keys, values)
        return (LinearTensors(f"{attention}qkv_proj", blocks, hidden, config.qkv_bias),)
    parts = [("q", queries), ("k", keys), ("v", values)]
    if not config.stores_keys(number):
        parts = parts[:1]
    elif (
        config.kinds is not None
        and config.kinds.values_are_keys
        and config.is_wide(number)
    ):
        parts = parts[:2]
    return tuple(
        LinearTensors(f"{attention}{name}_proj", (units,), hidden, config.qkv_bias)
        for name, units in parts
    )


def _latent(
    latent: LatentConfig, attention: str, config: DecoderConfig, number: int
) -> LatentTensors:
    hidden = Units(config.hidden_size)
    heads = config.num_heads
    queries = Units(heads, latent.qk_head_dim)
    expanded = Units(heads, latent.qk_nope_head_dim + latent.v_head_dim)
    q_down = q_norm = None
    q_up = LinearTensors(f"{attention}q_proj", (queries,), hidden)
    if latent.q_lora_rank is not None:
        rank = Units(1, latent.q_lora_rank)
        q_down = LinearTensors(f"{attention}q_a_proj", (rank,), hidden)
        q_norm = NormTensor(f"{attention}q_a_layernorm", latent.q_lora_rank)
        q_up = LinearTensors(f"{attention}q_b_proj", (queries,), rank)
    return LatentTensors(
        q_down=q_down,
        q_norm=q_norm,
        q_up=q_up,
        row_down=LinearTensors(
            f"{attention}kv_a_proj_with_mqa", (Units(1, latent.row_dim),), hidden
        ),
        row_norm=NormTensor(f"{attention}kv_a_layernorm", latent.kv_lora_rank),
        row_up=LinearTensors(
            f"{attention}kv_b_proj", (expanded,), Units(1, latent.kv_lora_rank)
        ),
        index=_index(latent, f"{attention}indexer.", hidden, number),
    )


def _index(
    latent: LatentConfig, prefix: str, hidden: Units, number: int
) -> IndexTensors | None:
    index = latent.index
    if index is None or number not in index.layers:
        return None
    assert latent.q_lora_rank is not None, (
        "an index makes its queries from a latent row"
    )
    heads = Units(index.num_heads, index.head_dim)
    rank = Units(1, latent.q_lora_rank)
    return IndexTensors(
        queries=LinearTensors(f"{prefix}wq_b", (heads,), rank),
        keys=LinearTensors(f"{prefix}wk", (Units(1, index.head_dim),), hidden),
        key_norm=NormTensor(f"{prefix}k_norm", index.head_dim, has_bias=True),
        weights=LinearTensors(
            f"{prefix}weights_proj", (Units(index.num_heads),), hidden
        ),
    )


def _dense_mlp(config: DecoderConfig, number: int) -> MlpTensors:
    hidden = Units(config.hidden_size)
    width = Units(config.mlp_width_of(number))
    names = config.mlp
    block = f"{config.mlp_prefix_of(number)}{names.block}."
    if len(names.gate_up) > 1 or not names.has_gate:
        return _mlp(
            block,
            names.gate_up,
            names.down,
            hidden.size,
            width.size,
            has_bias=config.mlp_bias,
        )
    gate_up = block + names.gate_up[0]
    return MlpTensors(
        (LinearTensors(gate_up, (width, width), hidden, config.mlp_bias),),
        LinearTensors(
            block + names.down, (hidden,), width, config.mlp_bias, splits_inputs=True
        ),
    )


def _mlp(
    prefix: str,
    gate_up: tuple[str, ...],
    down: str,
    hidden: int,
    width: int,
    *,
    has_bias: bool = False,
) -> MlpTensors:
    inputs = Units(hidden)
    outputs = Units(width)
    return MlpTensors(
        tuple(
            LinearTensors(prefix + name, (outputs,), inputs, has_bias)
            for name in gate_up
        ),
        LinearTensors(prefix + down, (inputs,), outputs, has_bias, splits_inputs=True),
    )


def _experts(
    config: DecoderConfig, experts: ExpertsConfig, number: int, layout: ExpertLayout
) -> ExpertTensors:
    names = experts.names
    hidden = config.hidden_size
    layer = config.mlp_prefix_of(number)
    block = f"{layer}{names.block}." if names.block else layer
    is_own = layout == "apart" or names.stacked is not None
    experts_block = block if is_own else f"{layer}{STACKED_BLOCK}."
    shared = shared_gate = None
    if names.adds_mlp:
        shared = _dense_mlp(config, number)
    elif width := experts.shared_expert_intermediate_size:
        of_shared = names.shared_mlp or MlpNames(
            names.shared, names.gate_up, names.down
        )
        prefix = f"{block}{names.shared}."
        shared = _mlp(prefix, of_shared.gate_up, of_shared.down, hidden, width)
        if names.shared_gate:
            gate = f"{block}{names.shared_gate}"
            shared_gate = LinearTensors(gate, (Units(1),), Units(hidden))
    latent = None
    if experts.latent_size is not None:
        inner = Units(experts.latent_size)
        latent = LatentPair(
            LinearTensors(f"{block}fc1_latent_proj", (inner,), Units(hidden)),
            LinearTensors(f"{block}fc2_latent_proj", (Units(hidden),), inner),
        )
    is_scored = experts.routing is not None and experts.routing.is_sigmoid
    return ExpertTensors(
        router=LinearTensors(
            f"{experts_block}{names.router}",
            (Units(experts.num_experts),),
            Units(hidden),
            has_bias=names.is_interleaved,
        ),
        score_bias=f"{experts_block}{names.router_bias}" if is_scored else None,
        shared=shared,
        shared_gate=shared_gate,
        block=experts_block,
        names=names,
        num_experts=experts.num_experts,
        width=experts.moe_intermediate_size,
        hidden=experts.latent_size or hidden,
        layout=layout,
        latent=latent,
    )
