"""The decoder of the Llama family, dense or with a mixture of experts, from one configuration.

All positions of a packed batch run through the layers at once; what follows the last layer's keys
and values is computed only where a token is sampled. It knows neither blocks nor requests.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.state_reference import StateWeights
from baton.model.batch_invariance.row_rule import ByRows, at_once
from baton.model.layers.attention import (
    PLAIN_KEYS,
    AdaptedRows,
    Backend,
    Batch,
    Keys,
    Scoring,
)
from baton.model.layers.latent_attention import LatentAttention
from baton.model.layers.layer_parts import (
    ExpandedGates,
    ExpertsBeside,
    LayerEnd,
    LayerInputs,
    Packing,
    QueryScales,
)
from baton.model.layers.linear import Linear
from baton.model.layers.lora import Replacements
from baton.model.layers.mlp import Mlp
from baton.model.tensor_parallel import Ranks


@dataclass(slots=True, frozen=True)
class DecoderLayer:
    """This rank's part of one layer's weights. Those of norms are in fp32."""

    attention_norm: Tensor  # [hidden]
    qkv: Linear  # heads of queries, keys and values; or what `latent` or `state` takes
    head_norms: Tensor | None  # [num_heads + kv_heads, head_dim]
    output: Linear
    mlp_norm: Tensor | None  # [hidden]; None: it ends with attention
    mlp: Mlp | None
    number: int  # among the layers that store the same kind of things
    latent: LatentAttention | None = None
    output_norm: Tensor | None = None  # [hidden], of what attention adds
    mlp_output_norm: Tensor | None = None  # [hidden], of what the MLP adds
    scoring: Scoring | None = None  # None: the backend's
    packing: Packing | None = None
    keys: Keys = PLAIN_KEYS
    # Of a layer that keeps a state, whose inputs are `qkv`.
    state: StateWeights | None = None
    num_gates: int = 0  # the last outputs of `qkv`, which gate what attention gives
    query_scales: QueryScales | None = None
    beside: ExpertsBeside | None = None
    end: LayerEnd | None = None


@dataclass(slots=True, frozen=True)
class Decoder:
    """The weights and the forward pass of one rank."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[DecoderLayer, ...]
    final_norm: Tensor  # [hidden]
    # [vocab, hidden], or this rank's rows of it; None: it makes no tokens.
    head: Linear | None
    head_is_split: bool
    eps: float
    ranks: Ranks
    by_rows: ByRows = at_once
    source: str = ""  # whose code computes, if it is not baton's
    lora_modules: tuple[str, ...] = ()  # the names of the adapters
    of_adapters: tuple[Linear, ...] = ()  # their layers
    num_lora_slots: int = 0  # room for adapters at run time
    replacements: Replacements = field(default_factory=Replacements)  # of adapters
    embedding_scale: float | None = None
    logit_cap: float | None = None  # a logit becomes cap * tanh(logit / cap)
    classifier: Tensor | None = None  # [labels, hidden] in fp32
    residual_scale: float | None = None  # of what a layer adds
    logit_divisor: float | None = None
    inputs: LayerInputs | None = None

    @property
    def is_batch_invariant(self) -> bool:
        return all(linear.is_batch_invariant for linear in self.linears())

    def linears(self) -> Iterator[Linear]:
        for layer in self.layers:
            yield from (layer.qkv, layer.output)
            for part in (layer.mlp, layer.latent, layer.beside, layer.end):
                if part is not None:
                    yield from part.linears()
            if isinstance(layer.packing, ExpandedGates):
                yield from layer.packing.linears()
        if self.inputs is not None:
            yield self.inputs.projection
        if self.head is not None:
            yield self.head
        yield from self.of_adapters
        yield from self.replacements.heads.values()

    def forward(self, batch: Batch, rows: Tensor, backend: Backend) -> Tensor:
        """Store the batch's keys and values; return the logits of `rows`."""
        return self.logits(
            self.hidden(batch, rows, backend), backend, batch.adapted_outputs
        )

    def logits(
        self, hidden: Tensor, backend: Backend, adapted: AdaptedRows | None = None
    ) -> Tensor:
        """Return `[num_rows, vocab]`. `adapted` are the rows of `hidden` that adapters change."""
        # A device warms up with tokens in any case.
        if not len(hidden) or self.head is None:
            return hidden.new_zeros(len(hidden), len(self.embedding))
        logits = self.head(hidden)
        if adapted is not None and self.replacements.heads:
            self.replacements.project(logits, hidden, adapted)
        if self.logit_divisor is not None:
            logits = logits / self.logit_divisor
        if self.logit_cap is not None:
            logits = logits.float()
            backend.soft_cap(logits, self.logit_cap)
        return self.ranks.all_gather(logits) if self.head_is_split else logits

    def classify(self, hidden: Tensor) -> Tensor:
        """Return `[num_rows, labels]` in fp32."""
        assert self.classifier is not None, "the model is asked for what it can make"
        return F.linear(hidden.float(), self.classifier)

    def hidden(
        self,
        batch: Batch,
        rows: Tensor,
        backend: Backend,
        *,
        are_many: bool = False,
        taps: "Taps | None" = None,
    ) -> Tensor:
        """Store the batch's keys and values; return what the head takes of `rows`.

        From the last layer on, only `rows` are computed. If they `are_many`, attention computes
        all, because it is faster with whole chunks.
        """
        backend.begin(batch)
        embedded = F.embedding(batch.token_ids, self.embedding)
        if batch.adapted is not None and self.replacements.embeddings:
            self.replacements.embed(embedded, batch.token_ids, batch.adapted)
        if self.embedding_scale is not None:
            embedded = embedded * self.embedding_scale
        x, _ = self.through(
            embedded, batch, rows, backend, are_many=are_many, taps=taps
        )
        return x

    def through(
        self,
        embedded: Tensor,
        batch: Batch,
        rows: Tensor,
        backend: Backend,
        *,
        are_many: bool = False,
        taps: "Taps | None" = None,
    ) -> tuple[Tensor, Tensor]:
        """Let `[num_tokens, hidden]` go through the layers of a batch that has begun.

        Return `rows` of it behind the last norm, and before it.
        """
        inputs = None
        if self.inputs is not None:
            inputs = self.inputs(batch.token_ids, embedded, backend).unbind(1)
        is_apart = batch.adapted is None and inputs is None
        adapted = batch.adapted
        by_rows = self.by_rows if is_apart else at_once
        taps = taps or Taps(())
        x, residual = self.into_attention(0, backend, adapted, embedded, None)
        taps.note(0, residual)
        last = len(self.layers) - 1
        for number in range(last):
            x = self.attend(number, backend, batch.positions, x)
            own = None if inputs is None else inputs[number]
            work = partial(self._to_next, number, backend, adapted, own)
            x, residual = by_rows(work, x, residual)
            taps.note(number + 1, residual)
        x = self.attend(last, backend, batch.positions, x, None if are_many else rows)
        x = x[rows] if are_many else x
        if not len(rows):
            return residual[rows], residual[rows]
        own = None if inputs is None else inputs[last][rows]
        work = partial(self.to_head, backend, batch.adapted_outputs, own)
        return by_rows(work, x, residual[rows])

    def scaled(self, x: Tensor) -> Tensor:
        """Return what a layer adds to the residual stream."""
        return x if self.residual_scale is None else x * self.residual_scale

    def attend(
        self,
        number: int,
        backend: Backend,
        positions: Tensor,
        x: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        layer = self.layers[number]
        if layer.state is not None:
            return backend.advance(layer.number, x, layer.state, rows)
        if layer.scoring is not None:
            backend.scoring = layer.scoring
            backend.keys = layer.keys
        backend.expansion = layer.latent
        if layer.latent is not None and layer.latent.index is not None:
            index = layer.latent.index
            x, queries, weights = index.parted(x)
            backend.choose(index.number, queries, weights)
        if layer.query_scales is not None:
            layer.query_scales.apply(x, positions)
        if not layer.num_gates:
            return backend.attend(layer.number, x, layer.head_norms, rows)
        qkv, gates = x.split((x.shape[1] - layer.num_gates, layer.num_gates), dim=1)
        out = backend.attend(layer.number, qkv.contiguous(), layer.head_norms, rows)
        return backend.sigmoid_mul(out, gates if rows is None else gates[rows])

    def _to_next(
        self,
        number: int,
        backend: Backend,
        adapted: AdaptedRows | None,
        inputs: Tensor | None,
        x: Tensor,
        residual: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute from the attention of a layer to that of the next."""
        x, residual = self._after_attention(number, backend, adapted, x, residual)
        x, stream = self._ended(number, backend, inputs, x, residual)
        return self.into_attention(number + 1, backend, adapted, x, stream)

    def to_head(
        self,
        backend: Backend,
        adapted: AdaptedRows | None,
        inputs: Tensor | None,
        x: Tensor,
        residual: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute from the attention of the last layer to what the head takes."""
        last = len(self.layers) - 1
        x, residual = self._after_attention(last, backend, adapted, x, residual)
        x, stream = self._ended(last, backend, inputs, x, residual)
        return backend.add_rms_norm(x, stream, self.final_norm, self.eps)

    def _ended(
        self,
        number: int,
        backend: Backend,
        inputs: Tensor | None,
        x: Tensor,
        residual: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what is added next, and to what, if anything."""
        end = self.layers[number].end
        if end is None:
            return x, residual
        return end(x, residual, inputs, backend), None

    def into_attention(
        self,
        number: int,
        backend: Backend,
        adapted: AdaptedRows | None,
        x: Tensor,
        residual: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[number]
        x, residual = backend.add_rms_norm(x, residual, layer.attention_norm, self.eps)
        normed = x
        x = layer.qkv(x, adapted)
        if layer.packing is not None:
            x = layer.packing(x, backend)
        if layer.latent is not None:
            x = layer.latent.packed(x, normed, backend)
        return x, residual

    def _after_attention(
        self,
        number: int,
        backend: Backend,
        adapted: AdaptedRows | None,
        x: Tensor,
        residual: Tensor,
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[number]
        if layer.latent is not None and backend.absorbed_rows is None:
            x = layer.latent.expanded(x)
        x = self.scaled(self.ranks.all_reduce(layer.output(x, adapted)))
        if layer.output_norm is not None:
            x, _ = backend.add_rms_norm(x, None, layer.output_norm, self.eps)
        if layer.mlp is None or layer.mlp_norm is None:
            return x, residual
        x, residual = backend.add_rms_norm(x, residual, layer.mlp_norm, self.eps)
        x = self.scaled(self.ranks.all_reduce(layer.mlp(x, backend, adapted)))
        if layer.beside is not None:
            x = layer.beside(x, residual, backend)
        if layer.mlp_output_norm is not None:
            x, _ = backend.add_rms_norm(x, None, layer.mlp_output_norm, self.eps)
        return x, residual


@dataclass(slots=True)
class Taps:
    """The streams of all rows before some layers, as a step computes them."""

    layers: tuple[int, ...]
    streams: dict[int, Tensor] = field(default_factory=dict)

    def note(self, layer: int, stream: Tensor) -> None:
        if layer in self.layers:
            self.streams[layer] = stream

    def joined(self) -> Tensor:
        """Return the streams side by side, `[num_tokens, num_layers * hidden]`."""
        return torch.cat([self.streams[layer] for layer in self.layers], dim=1)
