"""Load one rank's part of the MLP of a layer: dense, or a router and its experts."""

import torch
from torch import Tensor

from baton.model.checkpoint.tensors import ExpertTensors, LayerTensors, MlpTensors
from baton.model.config.tensor_parts import share
from baton.model.layers.linear import Linear
from baton.model.layers.mlp import (
    DenseMlp,
    ExpertAdapters,
    ExpertMlp,
    GroupedRouter,
    Mlp,
    Router,
    SharedExpert,
    SigmoidRouter,
    SoftmaxRouter,
)
from baton.model.loading.adapters import LoraSite
from baton.model.loading.layer_weights import AnyWeight, LayerWeights
from baton.model.loading.weights import part_of
from baton.protocol.errors import ConfigError


class MlpLoader:
    def __init__(self, weights: LayerWeights) -> None:
        self.weights = weights
        self.config = weights.config
        self.ranks = weights.ranks
        self.read = weights.read
        self.linear = weights.linear
        self.grouped = weights.grouped

    def mlp_or_experts(self, tensors: LayerTensors) -> Mlp | None:
        if tensors.mlp is not None:
            return self._mlp(tensors.mlp)
        return None if tensors.experts is None else self.experts(tensors.experts)

    def _mlp(self, tensors: MlpTensors) -> DenseMlp:
        gate_up = self.weights.columns(tensors.gate_up)
        return DenseMlp(
            gate_up, self.weights.rows(tensors.down), self.config.layers.gate
        )

    def experts(self, tensors: ExpertTensors) -> ExpertMlp:
        """Return the experts, each of which is split over the ranks as a dense MLP is."""
        numbers = range(tensors.num_experts)
        biases = None
        down_biases = None
        if tensors.names.is_interleaved:
            own = share(tensors.width, self.ranks.rank, self.ranks.size)
            biases = deinterleaved(self.read(f"{tensors.stacked_gate_up}_bias"), own)
            # The ranks' results are summed, so one rank alone adds the other biases.
            if self.ranks.rank == 0:
                down_biases = self.read(f"{tensors.stacked_down}_bias")
        return ExpertMlp(
            router=self._router(tensors),
            scales_inputs=tensors.names.routing == "input_sigmoid",
            numbers=torch.arange(tensors.num_experts, device=self.weights.device),
            gate_up=self.grouped(
                (self._gate_up_of(tensors, one) for one in numbers), biases
            ),
            down=self.grouped(
                (self._down_of(tensors, one) for one in numbers), down_biases
            ),
            shared=self._shared(tensors),
            latent=self._latent_pair(tensors),
            gate=self.config.layers.gate,
            adapters=self._adapters(tensors),
        )

    def _adapters(self, tensors: ExpertTensors) -> ExpertAdapters | None:
        width = tensors.width
        hidden = tensors.hidden
        own = share(width, self.ranks.rank, self.ranks.size)
        every = slice(0, hidden)
        experts = [tensors.expert(number) for number in range(tensors.num_experts)]
        gate_ups = [
            tuple(linear.name for linear in expert.gate_up) for expert in experts
        ]
        gate_up = self.weights.expert_lora(
            [LoraSite(names, (own,) * len(names), every) for names in gate_ups]
        )
        down = self.weights.expert_lora(
            [LoraSite((expert.down.name,), (every,), own) for expert in experts]
        )
        if gate_up is None and down is None:
            return None
        loras = self.weights.loras
        num_groups = (len(loras.adapters) + loras.space.num_slots) * tensors.num_experts
        return ExpertAdapters(
            gate_up, down, torch.arange(num_groups, device=self.weights.device)
        )

    def _latent_pair(self, tensors: ExpertTensors) -> tuple[Linear, Linear] | None:
        if tensors.latent is None:
            return None
        inner, outer = tensors.latent
        return self.linear(self.weights.whole(inner)), self.linear(
            self.weights.whole(outer)
        )

    def _router(self, tensors: ExpertTensors) -> Router:
        experts = self.config.experts
        name = tensors.router.name
        assert experts is not None, "the layer has experts"
        how = experts.routing
        choice = (experts.num_experts_per_tok, experts.norm_topk_prob)
        if tensors.names.routing == "input_sigmoid":
            return SigmoidRouter(self.linear(self.read(name + ".weight")), choice[0])
        if how is None:
            bias = self.read(name + ".bias") if tensors.router.has_bias else None
            return SoftmaxRouter(
                self.linear(self.read(name + ".weight"), bias), *choice
            )
        linear = self.linear(self.read(name + ".weight", dtype=torch.float32))
        bias = None
        if tensors.score_bias is not None:
            bias = self.read(tensors.score_bias, dtype=torch.float32)
            if not bias.isfinite().all():
                folder = self.weights.checkpoint.folder
                raise ConfigError(f"{folder}: {tensors.score_bias} is not finite")
        return GroupedRouter(linear, bias, how, *choice)

    def _shared(self, tensors: ExpertTensors) -> SharedExpert | None:
        if tensors.shared is None:
            return None
        gate = None
        if tensors.shared_gate is not None:
            gate = self.linear(self.weights.whole(tensors.shared_gate))
        return SharedExpert(gate, self._mlp(tensors.shared))

    def _gate_up_of(self, tensors: ExpertTensors, number: int) -> AnyWeight:
        width = tensors.width
        name = tensors.stacked_gate_up
        own = share(width, self.ranks.rank, self.ranks.size)
        if tensors.names.is_interleaved:
            if (narrow := self.weights.narrow_item(name, number)) is not None:
                rows = torch.arange(2 * width).view(width, 2)[own].T.flatten()
                return part_of(narrow, rows, slice(0, tensors.hidden))
            return deinterleaved(self.read(name, item=number), own).T.contiguous()
        parts = own, slice(width + own.start, width + own.stop)
        if tensors.layout == "transposed":
            return torch.cat(
                [self.read(name, columns=part, item=number).T for part in parts]
            )
        if tensors.layout == "stacked":
            return torch.cat(
                [self.read(name, rows=rows, item=number) for rows in parts]
            )
        names = [linear.name for linear in tensors.expert(number).gate_up]
        return self.weights.weight(names, (own,) * len(names), None, is_expert=True)

    def _down_of(self, tensors: ExpertTensors, number: int) -> AnyWeight:
        own = share(tensors.width, self.ranks.rank, self.ranks.size)
        name = tensors.stacked_down
        if tensors.names.is_interleaved:
            if (narrow := self.weights.narrow_item(name, number)) is not None:
                return part_of(narrow, slice(0, tensors.hidden), own)
            return self.read(name, rows=own, item=number).T.contiguous()
        if tensors.layout == "transposed":
            return self.read(name, rows=own, item=number).T.contiguous()
        if tensors.layout == "stacked":
            return self.read(name, columns=own, item=number)
        every = slice(0, tensors.hidden)
        return self.weights.weight(
            [tensors.expert(number).down.name], [every], own, is_expert=True
        )


def deinterleaved(x: Tensor, own: slice) -> Tensor:
    """Return gates, then ups, of `own` numbers, of `[…, 2 * width]` with both interleaved."""
    return torch.cat((x[..., ::2][..., own], x[..., 1::2][..., own]), dim=-1)
