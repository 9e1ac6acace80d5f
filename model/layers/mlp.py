"""The MLP of a layer: dense, or a mixture of experts of which each token chooses a few.

Rows are grouped by expert, so a step reads the weights of each chosen expert once. A token's bits
do not depend on the batch: a tie between experts goes to the lower number, each product gives a row
the same bits among any rows, and a token's experts are added in fp32 in the order of its choice.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.constants import SILU, Gate
from baton.model.config.expert_config import GroupedRouting
from baton.model.layers.attention import AdaptedRows, Backend
from baton.model.layers.linear import Adaptation, Linear

# Rows [num_rows, in] in the order of their experts, weights [num_experts, out, in], the end of each
# expert's rows [num_experts] int32, and biases [num_experts, out] -> [num_rows, out]. It never
# waits for the device.
GroupedProduct = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class Mlp(Protocol):
    def __call__(
        self, x: Tensor, backend: Backend, adapted: AdaptedRows | None = None
    ) -> Tensor:
        """Return `[num_rows, hidden]` for `[num_rows, hidden]`: this rank's part of the sum."""
        ...

    def linears(self) -> Iterator[Linear]: ...


def activated(x: Tensor, gate: Gate | None, backend: Backend) -> Tensor:
    """Return the gated numbers of `[num_rows, 2 * features]`, or the squares of a ReLU of `x`."""
    return x.relu().square_() if gate is None else backend.gate_mul(x, gate)


@dataclass(slots=True, frozen=True)
class DenseMlp:
    gate_up: Linear  # gates first, if there are any
    down: Linear
    gate: Gate | None = SILU

    def __call__(
        self, x: Tensor, backend: Backend, adapted: AdaptedRows | None = None
    ) -> Tensor:
        return self.down(
            activated(self.gate_up(x, adapted), self.gate, backend), adapted
        )

    def linears(self) -> Iterator[Linear]:
        yield from (self.gate_up, self.down)


class GroupedLinear(Protocol):
    """One linear layer of each expert."""

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return `[num_rows, outputs]` for `[num_rows, inputs]` in the order of the experts.

        `ends`, `[num_experts]` int32, counts the rows up to the last one of each expert.
        """
        ...

    def linears(self) -> Iterator[Linear]:
        """Return the layers whose bits a search at load has to vouch for."""
        ...


@dataclass(slots=True, frozen=True)
class HostExperts:
    """The layers on a CPU, one after the other, or all in one call of the compiled kernels."""

    layers: tuple[Linear, ...]
    at_once: Callable[[Tensor, Sequence[int]], Tensor] | None = None  # rows, `ends`

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        bounds = ends.tolist()
        if self.at_once is not None:
            return self.at_once(x, bounds)
        parts = zip(self.layers, pairwise((0, *bounds)), strict=True)
        return torch.cat(
            [layer(x[first:end]) for layer, (first, end) in parts if first < end]
        )

    def linears(self) -> Iterator[Linear]:
        yield from self.layers


@dataclass(slots=True, frozen=True)
class StackedExperts:
    """The layers on a GPU, where one kernel finds the rows of each expert."""

    weight: Tensor  # [num_experts, outputs, inputs]
    product: GroupedProduct
    biases: Tensor | None = None  # [num_experts, outputs]

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.product(x, self.weight, ends, self.biases)

    def linears(self) -> Iterator[Linear]:
        return iter(())  # the kernel has one order of sums


@dataclass(slots=True, frozen=True)
class SharedExpert:
    """An expert that every token takes, in some families with a weight of its own."""

    gate: Linear | None  # [1, hidden]
    mlp: DenseMlp

    def __call__(
        self, x: Tensor, backend: Backend, adapted: AdaptedRows | None = None
    ) -> Tensor:
        """Return `sigmoid(gate(x)) * mlp(x)` in fp32, or `mlp(x)` without a gate."""
        y = self.mlp(x, backend, adapted)
        return y if self.gate is None else sigmoid(self.gate(x).float()) * y


def sigmoid(x: Tensor) -> Tensor:
    """On CPUs, `torch.sigmoid` rounds the last rows of a batch in another way, but not `softmax`.

    A pair of each number and 0 has the sigmoid as its first share.
    """
    return F.pad(x[..., None], (0, 1)).softmax(dim=-1)[..., 0]


class Router(Protocol):
    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return fp32 weights and experts of each row, the best first: `[num_rows, top_k]`."""
        ...

    @property
    def linear(self) -> Linear: ...


@dataclass(slots=True, frozen=True)
class SoftmaxRouter:
    linear: Linear  # [num_experts, hidden]
    num_experts_per_tok: int
    norm_topk_prob: bool

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.linear(x).softmax(dim=-1, dtype=torch.float32)
        # Unlike `topk`, a stable sort says which of two equal experts comes first.
        shares, chosen = shares.sort(dim=-1, descending=True, stable=True)
        weights = shares[:, : self.num_experts_per_tok]
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, chosen[:, : self.num_experts_per_tok]


@dataclass(slots=True, frozen=True)
class SigmoidRouter:
    """Llama 4's router: the weight of an expert depends on its own score alone."""

    linear: Linear  # [num_experts, hidden]
    num_experts_per_tok: int

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, chosen = self.linear(x).sort(dim=-1, descending=True, stable=True)
        weights = sigmoid(scores[:, : self.num_experts_per_tok].float())
        return weights, chosen[:, : self.num_experts_per_tok]


@dataclass(slots=True, frozen=True)
class GroupedRouter:
    """DeepSeek's router, in fp32: the best groups of experts, and of these the best experts.

    V2 takes softmax and a group's best expert, V3 the sigmoid, a bias that changes the choice
    alone, and the sum of a group's two best.
    """

    linear: Linear  # [num_experts, hidden] in fp32
    bias: Tensor | None  # [num_experts] fp32; None: V2
    how: GroupedRouting
    num_experts_per_tok: int
    norm_topk_prob: bool

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.linear(x.float())
        scores = logits.softmax(dim=-1) if self.bias is None else sigmoid(logits)
        ranked = scores if self.bias is None else scores + self.bias
        if self.how.topk_group < self.how.n_group:
            groups = ranked.view(len(ranked), self.how.n_group, -1)
            best = groups.sort(dim=-1, descending=True).values
            of_group = (
                best[..., 0] if self.bias is None else best[..., 0] + best[..., 1]
            )
            order = of_group.sort(dim=-1, descending=True, stable=True).indices
            is_out = torch.ones_like(of_group, dtype=torch.bool)
            is_out.scatter_(1, order[:, : self.how.topk_group], value=False)
            ranked = groups.masked_fill(is_out[..., None], float("-inf")).flatten(1)
        chosen = ranked.sort(dim=-1, descending=True, stable=True).indices
        chosen = chosen[:, : self.num_experts_per_tok]
        weights = scores.gather(1, chosen)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + self.how.least_sum)
        return weights * self.how.routed_scaling_factor, chosen


@dataclass(slots=True, frozen=True)
class ExpertAdapters:
    """What adapters add to the layers of each expert, in groups: adapter after adapter."""

    gate_up: Adaptation | None
    down: Adaptation | None
    groups: Tensor  # [num_adapters * num_experts] int64: 0, 1, 2, …

    def rows_of(
        self, chosen: Tensor, order: Tensor, adapted: AdaptedRows, num_experts: int
    ) -> AdaptedRows:
        """Return the rows of experts that adapters change, in the order of the groups.

        `chosen` `[num_rows, top_k]` has each row's experts, and `order` the place of each of these
        pairs among the rows of experts. Nothing here waits for the device.
        """
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        of_rows = torch.arange(len(adapted.order), device=order.device)
        adapters = torch.searchsorted(adapted.ends, of_rows, right=True)
        groups = adapters[:, None] * num_experts + chosen[adapted.order]
        numbers, by_group = groups.flatten().sort(stable=True)
        ends = torch.searchsorted(numbers, self.groups, right=True, out_int32=True)
        return AdaptedRows(
            places.view_as(chosen)[adapted.order].flatten()[by_group], ends
        )


@dataclass(slots=True, frozen=True)
class ExpertMlp:
    """A router, which no adapter changes, and the experts that it chooses from."""

    router: Router
    numbers: Tensor  # [num_experts] int64: 0, 1, 2, …
    gate_up: GroupedLinear  # gates first, if there are any
    down: GroupedLinear
    shared: SharedExpert | None = None
    gate: Gate | None = SILU
    # Weights multiply what experts take, not what they give.
    scales_inputs: bool = False
    latent: tuple[Linear, Linear] | None = None  # before the experts, and after them
    adapters: ExpertAdapters | None = None

    def __call__(
        self, x: Tensor, backend: Backend, adapted: AdaptedRows | None = None
    ) -> Tensor:
        weights, chosen = self.router(x)
        if self.latent is None:
            total = self.of(x, weights, chosen, backend, adapted)
        else:
            inner, outer = self.latent
            total = outer(self.of(inner(x), weights, chosen, backend, adapted))
        if self.shared is None:
            return total
        return (total + self.shared(x, backend, adapted)).to(x.dtype)

    def of(
        self,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        backend: Backend,
        adapted: AdaptedRows | None = None,
    ) -> Tensor:
        """Return the weighted sum of chosen experts, `weights` and numbers `[num_rows, top_k]`."""
        numbers, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(numbers, self.numbers, right=True, out_int32=True)
        rows = x[order // chosen.shape[1]]
        if self.scales_inputs:
            rows = rows * weights.to(x.dtype).flatten()[order, None]
            weights = torch.ones_like(weights)
        if adapted is None or self.adapters is None:
            rows = self.down(
                activated(self.gate_up(rows, ends), self.gate, backend), ends
            )
        else:
            changed = self.adapters.rows_of(chosen, order, adapted, len(self.numbers))
            y = _adapt(self.adapters.gate_up, self.gate_up(rows, ends), rows, changed)
            rows = activated(y, self.gate, backend)
            rows = _adapt(self.adapters.down, self.down(rows, ends), rows, changed)
        by_token = torch.empty_like(rows).index_copy_(0, order, rows)
        return backend.add_experts(by_token.view(*chosen.shape, -1), weights)

    def linears(self) -> Iterator[Linear]:
        yield self.router.linear
        yield from self.gate_up.linears()
        yield from self.down.linears()
        yield from self.latent or ()
        if self.shared is not None:
            yield from () if self.shared.gate is None else (self.shared.gate,)
            yield from self.shared.mlp.linears()


def _adapt(adapt: Adaptation | None, y: Tensor, x: Tensor, rows: AdaptedRows) -> Tensor:
    return y if adapt is None else adapt(y, x, rows)
