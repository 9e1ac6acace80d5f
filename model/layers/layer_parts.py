"""What layers of some families do around attention and the MLP.

Everything here treats each row apart, so a token's bits do not depend on the batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.constants import Gate
from baton.model.layers.attention import Backend
from baton.model.layers.linear import Linear
from baton.model.layers.mlp import ExpertMlp
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
        rank = self.ranks.rank
        size = self.ranks.size
        ends = len(self.queries) // size, len(self.keys) * self.copies // size
        *parts, values = torch.split(x, [*ends, x.shape[1] - sum(ends)], dim=1)
        for number, (norm, copies) in enumerate(
            ((self.queries, 1), (self.keys, self.copies))
        ):
            width = parts[number].shape[1]
            every = self.ranks.all_gather(parts[number]).view(len(x), size, width)
            every = every[:, ::copies].reshape(len(x), -1)
            first = rank // copies * width
            normed, _ = backend.add_rms_norm(every, None, norm, self.eps)
            parts[number] = normed[:, first : first + width]
        return torch.cat((*parts, values), dim=1)


@dataclass(slots=True, frozen=True)
class ValueNorms:
    """An RMS norm without a weight of each head's values."""

    weight: Tensor  # [head_dim] ones
    kv_heads: int  # of this rank
    # The projection has no values; they are the keys before any norm or rotation.
    are_keys: bool
    eps: float

    def __call__(self, x: Tensor, backend: Backend) -> Tensor:
        """Return `x`, `[num_rows, queries, then keys, then values if any]`, with normed values."""
        width = self.kv_heads * len(self.weight)
        rest, values = torch.split(x, [x.shape[1] - width, width], dim=1)
        heads = values.reshape(-1, len(self.weight))
        normed, _ = backend.add_rms_norm(heads, None, self.weight, self.eps)
        return torch.cat(
            (x if self.are_keys else rest, normed.view(len(x), width)), dim=1
        )


@dataclass(slots=True, frozen=True)
class ExpandedGates:
    """The gates and steps of a layer with a state, each from a short row (Kimi-Linear)."""

    gates: Linear
    steps: Linear
    start: int  # of the two rows, which betas follow
    width: int  # of a row

    def __call__(self, x: Tensor, _: Backend) -> Tensor:
        """Return `x` with what the rows expand to in their place."""
        end = self.start + self.width
        gates = self.gates(x[:, self.start : end].contiguous())
        steps = self.steps(x[:, end : end + self.width].contiguous())
        return torch.cat(
            (x[:, : self.start], gates, steps, x[:, end + self.width :]), dim=1
        )

    def linears(self) -> Iterator[Linear]:
        yield from (self.gates, self.steps)


# Makes a packed projection of what a layer's linear gives.
Packing = JoinedNorms | ValueNorms | ExpandedGates


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
class ExpertsBeside:
    """Experts that take the same sum as the MLP, by norms of their own (Gemma 4)."""

    experts: ExpertMlp
    router_norm: Tensor  # [hidden] in fp32, as those below
    input_norm: Tensor
    mlp_norm: Tensor  # of what the MLP gives
    output_norm: Tensor
    expert_scales: Tensor  # [num_experts] fp32
    eps: float
    ranks: Ranks

    def __call__(self, mlp: Tensor, stream: Tensor, backend: Backend) -> Tensor:
        """Return the sum of what the MLP and the experts give, both normed."""
        to_router, _ = backend.add_rms_norm(stream, None, self.router_norm, self.eps)
        weights, chosen = self.experts.router(to_router)
        x, _ = backend.add_rms_norm(stream, None, self.input_norm, self.eps)
        y = self.experts.of(x, weights * self.expert_scales[chosen], chosen, backend)
        y, _ = backend.add_rms_norm(
            self.ranks.all_reduce(y), None, self.output_norm, self.eps
        )
        mlp, _ = backend.add_rms_norm(mlp, None, self.mlp_norm, self.eps)
        return mlp + y

    def linears(self) -> Iterator[Linear]:
        yield from self.experts.linears()


@dataclass(slots=True, frozen=True)
class LayerInputs:
    """The embeddings of a token for all layers, with a projection of its common embedding."""

    embedding: Tensor  # [vocab, num_layers * width]
    scale: float  # of the embedding
    projection: Linear
    projection_scale: float
    norm: Tensor  # [width] in fp32
    eps: float

    def __call__(self, token_ids: Tensor, embedded: Tensor, backend: Backend) -> Tensor:
        """Return `[num_tokens, num_layers, width]`."""
        own = F.embedding(token_ids, self.embedding) * self.scale
        projected = self.projection(embedded) * self.projection_scale
        width = len(self.norm)
        normed, _ = backend.add_rms_norm(
            projected.view(-1, width), None, self.norm, self.eps
        )
        return (normed + own.view(-1, width)).mul(0.5**0.5).view(len(own), -1, width)


@dataclass(slots=True, frozen=True)
class InputPart:
    """How a layer takes its own input."""

    gate: Linear
    projection: Linear
    norm: Tensor  # [hidden] in fp32
    how: Gate
    eps: float

    def __call__(self, x: Tensor, own: Tensor, backend: Backend) -> Tensor:
        """Return what is added to `x`, `[num_rows, hidden]`, of its inputs `[num_rows, width]`."""
        gated = backend.gate_mul(torch.cat((self.gate(x), own), dim=1), self.how)
        y, _ = backend.add_rms_norm(self.projection(gated), None, self.norm, self.eps)
        return y


@dataclass(slots=True, frozen=True)
class LayerEnd:
    """What follows the MLP of a layer."""

    factor: Tensor  # [1], of the whole sum
    part: InputPart | None = None

    def __call__(
        self, added: Tensor, residual: Tensor, inputs: Tensor | None, backend: Backend
    ) -> Tensor:
        """Return the sum that the next layer takes."""
        stream = residual + added
        if self.part is not None:
            assert inputs is not None, "the model has inputs of layers"
            stream = stream + self.part(stream, inputs, backend)
        return stream * self.factor

    def linears(self) -> Iterator[Linear]:
        if self.part is not None:
            yield from (self.part.gate, self.part.projection)
