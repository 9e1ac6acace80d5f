"""Load one rank's `Decoder` from a Hugging Face folder: names, slices, dtype and device.

Only the part of each tensor that the rank keeps is read.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from baton.model.batch_invariance.row_rule import RowThreads, at_once
from baton.model.config.decoder_config import DecoderConfig
from baton.model.config.expert_config import ExpertsConfig
from baton.model.config.lora_files import Adapter
from baton.model.config.transformers_config import AnyConfig
from baton.model.config.weight_files import (
    EMBEDDING,
    HEAD,
    SINKS,
    STACKED_BLOCK,
    STACKED_DOWN,
    STACKED_GATE_UP,
    check_tensors,
    norms_of,
)
from baton.model.layers.attention import Scoring
from baton.model.layers.decoder import Decoder, DecoderLayer, JoinedNorms
from baton.model.layers.latent_attention import LatentAttention, load_latent
from baton.model.layers.linear import Linear, share
from baton.model.layers.mlp import (
    ExpertMlp,
    GatedMlp,
    GroupedRouter,
    Router,
    SharedExpert,
    SoftmaxRouter,
)
from baton.model.layers.rotary import head_order
from baton.model.loading.adapters import LoraLoader
from baton.model.loading.layer_weights import (
    NUM_LINEAR_KINDS,
    AnyWeight,
    LayerWeights,
    RankDevice,
    linears_for,
)
from baton.model.loading.weights import (
    Checkpoint,
)
from baton.model.tensor_parallel import Ranks
from baton.node.executor import Progress
from baton.protocol.errors import ConfigError

NUM_EXPERT_KINDS = 6  # router, gate and up, down; those of a shared expert
NUM_LATENT_KINDS = 3  # queries, each head's keys and values
NUM_LORA_KINDS = 8  # two matrices for each kind but the head


def load_decoder(
    config: DecoderConfig,
    checkpoint: Checkpoint,
    ranks: Ranks,
    place: RankDevice,
    progress: Progress,
    adapters: Sequence[Adapter] = (),
) -> Decoder:
    """Raises `ConfigError` if the ranks cannot share the model or a tensor is not as expected."""
    check_tensors(checkpoint.folder, config)
    check_split(config, ranks.size)
    num_kinds = NUM_LINEAR_KINDS + (NUM_EXPERT_KINDS if config.experts else 0)
    num_kinds += NUM_LATENT_KINDS if config.latent else 0
    num_kinds += NUM_LORA_KINDS if adapters else 0
    linears = linears_for(place, progress, num_kinds)
    loras = LoraLoader(adapters, place.device, place.dtype)
    weights = LayerWeights(config, checkpoint, ranks, place, linears, loras)
    return _Loader(weights, place).load(progress)


def local_heads(config: AnyConfig, size: int) -> tuple[int, int]:
    """Return the numbers of query heads and KV heads of one of `size` ranks."""
    return config.num_heads // size, max(1, config.num_kv_heads // size)


def check_split(config: DecoderConfig, size: int) -> None:
    """Raise `ConfigError` unless `size` ranks can share the model evenly."""
    kv_heads = config.num_kv_heads
    widths = [("heads", config.num_heads)]
    if any(config.experts_of(layer) is None for layer in range(config.num_layers)):
        widths.append(("MLP width", config.intermediate_size))
    if config.experts is not None:
        widths.append(("width of an expert", config.experts.moe_intermediate_size))
        shared = config.experts.shared_expert_intermediate_size
        widths.append(("width of the shared expert", shared))
    for name, units in widths:
        if units % size:
            raise ConfigError(
                f"engine.tensor_parallel_size: {size} does not divide the {name}, {units}"
            )
    if kv_heads % size and size % kv_heads:
        raise ConfigError(
            f"engine.tensor_parallel_size: {size} ranks cannot share {kv_heads} KV heads"
        )


def in_turns(x: Tensor, own: slice) -> Tensor:
    """Return gates, then ups, of `own` numbers, of `[…, 2 * width]` with gates and ups in turns."""
    return torch.cat((x[..., ::2][..., own], x[..., 1::2][..., own]), dim=-1)


class _Loader:
    def __init__(self, weights: LayerWeights, place: RankDevice) -> None:
        self.weights, self.place = weights, place
        self.config, self.ranks = config, ranks = weights.config, weights.ranks
        self.folder = weights.checkpoint.folder
        self.has_stacked_experts = weights.has_stacked_experts
        self.read, self.linear = weights.read, weights.linear
        self.grouped = weights.grouped
        rank, size = ranks.rank, ranks.size
        value_dim = config.head_dim if config.latent is None else config.latent.v_head_dim
        self.heads = share(config.num_heads, rank, size, value_dim)
        self.kv_heads = share(config.num_kv_heads, rank, size, config.head_dim)
        self.features = share(config.intermediate_size, rank, size)
        self.head_order = (
            head_order(config.rope, config.head_dim) if config.latent is None else None
        )

    def load(self, progress: Progress) -> Decoder:
        config, total = self.config, self.config.num_layers + 1
        layers = []
        for number in range(config.num_layers):
            progress("weights", number, total)
            layers.append(self._layer(number))
        progress("weights", config.num_layers, total)
        embedding = self.read(EMBEDDING)
        norm = self._norm("model.norm")
        scale = config.layers.embedding_scale
        if scale is not None:  # rounded, as transformers rounds it
            scale = float(torch.tensor(scale, dtype=self.place.dtype))
        head, is_split = self._head(embedding, norm)
        progress("weights", total, total)
        is_alone_on_cpu = self.place.device.type == "cpu" and self.ranks.size == 1
        return Decoder(
            embedding, tuple(layers), norm, head, is_split, config.rms_norm_eps, self.ranks,
            RowThreads() if is_alone_on_cpu else at_once,
            lora_modules=tuple(adapter.name for adapter in self.weights.loras.adapters),
            of_adapters=tuple(linear for lora in self.weights.made for linear in lora.linears()),
            embedding_scale=scale,
            logit_cap=config.layers.logit_cap,
        )  # fmt: skip

    def _layer(self, number: int) -> DecoderLayer:
        config, name = self.config, f"model.layers.{number}."
        attention, experts = name + "self_attn.", config.experts_of(number)
        qkv, latent = self._into_attention(attention)
        norms = {of: self._norm(name + norm) for of, norm in norms_of(config).items()}
        return DecoderLayer(
            attention_norm=norms["attention_norm"],
            qkv=qkv,
            head_norms=(
                self._head_norms(attention) if config.qk_norm and not config.joins_qk_norm else None
            ),
            joined_norms=self._joined_norms(attention) if config.joins_qk_norm else None,
            output=self.weights.rows(attention + "o_proj", self.heads, has_bias=config.output_bias),
            mlp=(
                self._mlp(name + "mlp.", self.features)
                if experts is None
                else self._experts(name, experts)
            ),
            mlp_norm=norms["mlp_norm"],
            latent=latent,
            output_norm=norms.get("output_norm"),
            mlp_output_norm=norms.get("mlp_output_norm"),
            scoring=self._scoring(number, name + SINKS),
            rotation=int(config.rope_of(number) is not config.rope),
        )

    def _scoring(self, number: int, name: str) -> Scoring:
        config, sinks = self.config, None
        if config.layers.has_sinks:
            own = share(config.num_heads, self.ranks.rank, self.ranks.size)
            sinks = self.read(name, rows=own, dtype=torch.float32)
        cap = config.layers.score_cap
        return Scoring(config.attention_scale, config.window_of(number), cap, sinks)

    def _norm(self, name: str) -> Tensor:
        weight = self.read(name + ".weight", dtype=torch.float32)
        return weight + self.config.layers.norm_offset

    def _into_attention(self, name: str) -> tuple[Linear, LatentAttention | None]:
        config = self.config
        if config.latent is not None:
            heads = share(config.num_heads, self.ranks.rank, self.ranks.size)

            def read(tensor: str, /, *, rows: slice | None = None) -> Tensor:
                return self.read(name + tensor, rows=rows)

            return load_latent(config.latent, heads, read, self.linear, self.weights.grouped)
        qkv = [
            (name + "q_proj", self.heads),
            (name + "k_proj", self.kv_heads),
            (name + "v_proj", self.kv_heads),
        ]
        if config.is_fused:
            sizes = (n * config.head_dim for n in (config.num_heads, *(config.num_kv_heads,) * 2))
            qkv = self._fused(name + "qkv_proj", qkv, sizes)
        return self.weights.columns(qkv, has_bias=config.qkv_bias, order=self._qkv_order()), None

    def _qkv_order(self) -> Tensor | None:
        """Return the outputs of this rank's queries, keys and values as kernels rotate them."""
        if self.head_order is None:
            return None
        num_heads, num_kv_heads = local_heads(self.config, self.ranks.size)
        numbers = torch.arange((num_heads + 2 * num_kv_heads) * self.config.head_dim)
        heads = numbers.view(-1, self.config.head_dim)
        rotated, values = heads[: num_heads + num_kv_heads], heads[num_heads + num_kv_heads :]
        return torch.cat((rotated[:, self.head_order].flatten(), values.flatten()))

    def _fused(
        self, name: str, parts: list[tuple[str, slice]], sizes: Iterable[int]
    ) -> list[tuple[str, slice]]:
        """Return this rank's rows of a tensor that has `parts` of `sizes`, one under the other."""
        if self.ranks.size == 1:
            return [(name, slice(0, sum(sizes)))]
        starts = accumulate(sizes, initial=0)
        return [
            (name, slice(start + own.start, start + own.stop))
            for start, (_, own) in zip(starts, parts, strict=False)
        ]

    def _mlp(self, name: str, features: slice) -> GatedMlp:
        has_bias = self.config.mlp_bias
        parts = [(name + "gate_proj", features), (name + "up_proj", features)]
        if self.config.is_fused:
            parts = self._fused(name + "gate_up_proj", parts, [self.config.intermediate_size] * 2)
        gate_up = self.weights.columns(parts, has_bias=has_bias)
        down = self.weights.rows(name + "down_proj", features, has_bias=has_bias)
        return GatedMlp(gate_up, down, self.config.layers.gate)

    def _experts(self, layer: str, experts: ExpertsConfig) -> ExpertMlp:
        """Return the experts, each of which is split over the ranks as a dense MLP is."""
        block = layer + (STACKED_BLOCK if self.has_stacked_experts else experts.names.block) + "."
        numbers, biases, down_biases = range(experts.num_experts), None, None
        if experts.names.are_turned:
            own = share(experts.moe_intermediate_size, self.ranks.rank, self.ranks.size)
            biases = in_turns(self.read(f"{block}{STACKED_GATE_UP}_bias"), own)
            # The ranks' results are summed, so one rank alone adds the other biases.
            if self.ranks.rank == 0:
                down_biases = self.read(f"{block}{STACKED_DOWN}_bias")
        return ExpertMlp(
            router=self._router(block, experts),
            numbers=torch.arange(experts.num_experts, device=self.place.device),
            gate_up=self.grouped(
                (self._gate_up_of(block, experts, one) for one in numbers), biases
            ),
            down=self.grouped((self._down_of(block, experts, one) for one in numbers), down_biases),
            shared=self._shared(layer, experts),
            gate=self.config.layers.gate,
        )

    def _router(self, block: str, experts: ExpertsConfig) -> Router:
        how, choice = experts.routing, (experts.num_experts_per_tok, experts.norm_topk_prob)
        if how is None:
            name, names = block + experts.names.router, experts.names
            bias = self.read(name + ".bias") if names.are_turned else None
            return SoftmaxRouter(self.linear(self.read(name + ".weight"), bias), *choice)
        linear = self.linear(self.read(block + "gate.weight", dtype=torch.float32))
        bias = None
        if how.is_sigmoid:
            name = block + experts.names.router_bias
            bias = self.read(name, dtype=torch.float32)
            if not bias.isfinite().all():
                raise ConfigError(f"{self.folder}: {name} is not finite")
        return GroupedRouter(linear, bias, how, *choice)

    def _shared(self, layer: str, experts: ExpertsConfig) -> SharedExpert | None:
        ranks, width = self.ranks, experts.shared_expert_intermediate_size
        if not width:
            return None
        names, own = experts.names, share(width, ranks.rank, ranks.size)
        block, gate = f"{layer}{names.block}.", None
        if names.shared_gate:
            gate = self.linear(self.read(f"{block}{names.shared_gate}.weight"))
        return SharedExpert(gate, self._mlp(f"{block}{names.shared}.", own))

    def _gate_up_of(self, block: str, experts: ExpertsConfig, number: int) -> AnyWeight:
        width = experts.moe_intermediate_size
        own = share(width, self.ranks.rank, self.ranks.size)
        if experts.names.are_turned:
            return in_turns(self.read(block + STACKED_GATE_UP, item=number), own).T.contiguous()
        if self.has_stacked_experts:
            places = own, slice(width + own.start, width + own.stop)
            name = block + STACKED_GATE_UP
            return torch.cat([self.read(name, rows=rows, item=number) for rows in places])
        expert = f"{block}experts.{number}."
        names = expert + experts.names.gate, expert + experts.names.up
        return self.weights.weight(names, (own, own), None, is_expert=True)

    def _down_of(self, block: str, experts: ExpertsConfig, number: int) -> AnyWeight:
        own = share(experts.moe_intermediate_size, self.ranks.rank, self.ranks.size)
        if experts.names.are_turned:
            return self.read(block + STACKED_DOWN, rows=own, item=number).T.contiguous()
        if self.has_stacked_experts:
            return self.read(block + STACKED_DOWN, columns=own, item=number)
        name = f"{block}experts.{number}.{experts.names.down}"
        every = slice(0, self.config.hidden_size)
        return self.weights.weight([name], [every], own, is_expert=True)

    def _head(self, embedding: Tensor, norm: Tensor) -> tuple[Linear, bool]:
        """Return the output projection, and whether it is split over the ranks.

        It is split where the number of ranks divides the vocabulary.
        """
        vocab, size = self.config.vocab_size, self.ranks.size
        is_split = size > 1 and vocab % size == 0
        rows = share(vocab, self.ranks.rank, size) if is_split else slice(None)
        is_tied = self.config.tie_word_embeddings
        weight = embedding[rows] if is_tied else self.read(HEAD, rows=rows)
        self._check_logits(weight, norm)
        return self.linear(weight, is_head=True), is_split

    def _check_logits(self, weight: Tensor, norm: Tensor) -> None:
        """Raise `ConfigError` unless a finite hidden state is known to give finite logits.

        Then steps need not look at logits: a logit has `hidden` products, and a normed state has no
        number above `sqrt(hidden)` times the norm's weight. NaN passes no comparison.
        """
        ends = map(torch.aminmax, (weight, norm))
        largest = math.prod(max(-float(low), float(high)) for low, high in ends)
        if not largest * self.config.hidden_size**1.5 < torch.finfo(self.place.dtype).max / 2:
            name = EMBEDDING if self.config.tie_word_embeddings else HEAD
            raise ConfigError(
                f"{self.folder}: {name} or model.norm.weight holds NaN, infinity or "
                "numbers so large that logits would overflow: fetch the files again"
            )

    def _head_norms(self, attention: str) -> Tensor:
        num_heads, kv_heads = local_heads(self.config, self.ranks.size)
        q = self._norm(attention + "q_norm").expand(num_heads, -1)
        k = self._norm(attention + "k_norm").expand(kv_heads, -1)
        norms = torch.cat((q, k))
        return norms if self.head_order is None else norms[:, self.head_order].contiguous()

    def _joined_norms(self, attention: str) -> JoinedNorms:
        config, ranks = self.config, self.ranks
        norms = [self._norm(f"{attention}{one}_norm") for one in "qk"]
        if (order := self.head_order) is not None:
            norms = [norm.view(-1, config.head_dim)[:, order].flatten() for norm in norms]
        copies = max(1, ranks.size // config.num_kv_heads)
        return JoinedNorms(norms[0], norms[1], copies, config.rms_norm_eps, ranks)
