"""The decoder of the Llama family, dense or with a mixture of experts, from one configuration.

All positions of a packed batch run through the layers at once; what follows the last layer's keys
and values is computed only where a token is sampled. It knows neither blocks nor requests.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.state_reference import StateWeights
from baton.model.batch_invariance.row_rule import ByRows, at_once
from baton.model.layers.attention import AdaptedRows, Backend, Batch, Scoring
from baton.model.layers.latent_attention import LatentAttention
from baton.model.layers.linear import Linear
from baton.model.layers.mlp import Mlp
from baton.model.tensor_parallel import Ranks


@dataclass(slots=True, frozen=True)
class JoinedNorms:
    """The norm of the queries of all heads together, those of other ranks too, and of the keys."""

    queries: Tensor  # [num_heads * head_dim] in fp32
    keys: Tensor  # [num_kv_heads * head_dim]
    copies: int  # how many ranks have the same heads of keys
    eps: float
    ranks: Ranks

    def __call__(self, x: Tensor, backend: Backend) -> Tensor:
        """Return `x`, `[num_rows, queries, then keys, then values of this rank]`, normed."""
        rank, size = self.ranks.rank, self.ranks.size
        ends = len(self.queries) // size, len(self.keys) * self.copies // size
        *parts, values = x.split((*ends, x.shape[1] - sum(ends)), dim=1)
        for number, (norm, copies) in enumerate(((self.queries, 1), (self.keys, self.copies))):
            width = parts[number].shape[1]
            every = self.ranks.all_gather(parts[number]).view(len(x), size, width)
            every = every[:, ::copies].reshape(len(x), -1)
            first = rank // copies * width
            normed, _ = backend.add_rms_norm(every, None, norm, self.eps)
            parts[number] = normed[:, first : first + width]
        return torch.cat((*parts, values), dim=1)


@dataclass(slots=True, frozen=True)
class QueryScales:
    """Queries grow with the number of whole spans of tokens up to them (Llama 4)."""

    scales: Tensor  # [num_spans] fp32
    span: int  # tokens
    width: int  # numbers of a token's queries, the first of the packed projection

    def apply(self, x: Tensor, positions: Tensor) -> None:
        """Scale the queries of packed projections in place."""
        scales = self.scales[(positions + 1) // self.span]
        queries = x[:, : self.width]
        queries.copy_(queries * scales[:, None])


@dataclass(slots=True, frozen=True)
class DecoderLayer:
    """This rank's part of one layer's weights. Those of norms are in fp32."""

    attention_norm: Tensor  # [hidden]
    qkv: Linear  # heads of queries, keys and values; or what `latent` or `state` takes
    head_norms: Tensor | None  # [num_heads + kv_heads, head_dim]
    output: Linear
    mlp_norm: Tensor  # [hidden]
    mlp: Mlp
    number: int  # among the layers that store the same kind of things
    latent: LatentAttention | None = None
    output_norm: Tensor | None = None  # [hidden], of what attention adds
    mlp_output_norm: Tensor | None = None  # [hidden], of what the MLP adds
    scoring: Scoring | None = None  # None: the backend's
    joined_norms: JoinedNorms | None = None
    rotation: int = 0  # the number of the backend's rotary table
    state: StateWeights | None = None  # of a layer that keeps a state, whose inputs are `qkv`
    num_gates: int = 0  # the last outputs of `qkv`, which gate what attention gives
    chunk_size: int = 0  # tokens of the chunks in which it attends; 0: it sees all
    query_scales: QueryScales | None = None


@dataclass(slots=True, frozen=True)
class Decoder:
    """The weights and the forward pass of one rank."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[DecoderLayer, ...]
    final_norm: Tensor  # [hidden]
    head: Linear | None  # [vocab, hidden], or this rank's rows of it; None: it makes no tokens
    head_is_split: bool
    eps: float
    ranks: Ranks
    by_rows: ByRows = at_once
    source: str = ""  # whose code computes, if it is not baton's
    lora_modules: tuple[str, ...] = ()  # the names of the adapters
    of_adapters: tuple[Linear, ...] = ()  # their layers
    embedding_scale: float | None = None
    logit_cap: float | None = None  # a logit becomes cap * tanh(logit / cap)
    classifier: Tensor | None = None  # [labels, hidden] in fp32
    residual_scale: float | None = None  # of what a layer adds
    logit_divisor: float | None = None

    @property
    def is_batch_invariant(self) -> bool:
        return all(linear.is_batch_invariant for linear in self.linears())

    def linears(self) -> Iterator[Linear]:
        for layer in self.layers:
            yield from (layer.qkv, layer.output, *layer.mlp.linears())
            if layer.latent is not None:
                yield from layer.latent.linears()
        if self.head is not None:
            yield self.head
        yield from self.of_adapters

    def forward(self, batch: Batch, rows: Tensor, backend: Backend) -> Tensor:
        """Store the batch's keys and values; return the logits of `rows`."""
        return self.logits(self.hidden(batch, rows, backend), backend)

    def logits(self, hidden: Tensor, backend: Backend) -> Tensor:
        """Return `[num_rows, vocab]`."""
        if not len(hidden) or self.head is None:  # a device warms up with tokens in any case
            return hidden.new_zeros(len(hidden), len(self.embedding))
        logits = self.head(hidden)
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
        self, batch: Batch, rows: Tensor, backend: Backend, *, are_many: bool = False
    ) -> Tensor:
        """Store the batch's keys and values; return what the head takes of `rows`.

        From the last layer on, only `rows` are computed. If they `are_many`, attention computes
        all, because it is faster with whole chunks.
        """
        backend.begin(batch)
        embedded = F.embedding(batch.token_ids, self.embedding)
        if self.embedding_scale is not None:
            embedded = embedded * self.embedding_scale
        adapted, by_rows = batch.adapted, self.by_rows if batch.adapted is None else at_once
        x, residual = self._into_attention(0, backend, adapted, embedded, None)
        last = len(self.layers) - 1
        for number in range(last):
            x = self._attend(number, backend, batch.positions, x)
            x, residual = by_rows(partial(self._to_next, number, backend, adapted), x, residual)
        x = self._attend(last, backend, batch.positions, x, None if are_many else rows)
        x = x[rows] if are_many else x
        if not len(rows):
            return residual[rows]
        work = partial(self._after_attention, last, backend, batch.adapted_outputs)
        x, residual = by_rows(work, x, residual[rows])
        x, _ = backend.add_rms_norm(x, residual, self.final_norm, self.eps)
        return x

    def scaled(self, x: Tensor) -> Tensor:
        """Return what a layer adds to the residual stream."""
        return x if self.residual_scale is None else x * self.residual_scale

    def _attend(
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
            backend.scoring, backend.rotation = layer.scoring, layer.rotation
            backend.chunk_size = layer.chunk_size
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
        x: Tensor,
        residual: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute from the attention of a layer to that of the next."""
        x, residual = self._after_attention(number, backend, adapted, x, residual)
        return self._into_attention(number + 1, backend, adapted, x, residual)

    def _into_attention(
        self,
        number: int,
        backend: Backend,
        adapted: AdaptedRows | None,
        x: Tensor,
        residual: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[number]
        x, residual = backend.add_rms_norm(x, residual, layer.attention_norm, self.eps)
        x = layer.qkv(x, adapted)
        if layer.joined_norms is not None:
            x = layer.joined_norms(x, backend)
        return x if layer.latent is None else layer.latent.packed(x, backend), residual

    def _after_attention(
        self,
        number: int,
        backend: Backend,
        adapted: AdaptedRows | None,
        x: Tensor,
        residual: Tensor,
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[number]
        x = x if layer.latent is None else layer.latent.expanded(x)
        x = self.scaled(self.ranks.all_reduce(layer.output(x, adapted)))
        if layer.output_norm is not None:
            x, _ = backend.add_rms_norm(x, None, layer.output_norm, self.eps)
        x, residual = backend.add_rms_norm(x, residual, layer.mlp_norm, self.eps)
        x = self.scaled(self.ranks.all_reduce(layer.mlp(x, backend, adapted)))
        if layer.mlp_output_norm is not None:
            x, _ = backend.add_rms_norm(x, None, layer.mlp_output_norm, self.eps)
        return x, residual
