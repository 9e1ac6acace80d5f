"""Load what layers of some families do around attention and the MLP, on one rank."""

import torch
from torch import Tensor

from baton.model.checkpoint.tensors import (
    INPUT_NORM,
    INPUT_PROJECTION,
    INPUTS,
    EndTensors,
    LayerTensors,
)
from baton.model.config.tensor_parts import NormTensor
from baton.model.layers.layer_parts import (
    ExpertsBeside,
    InputPart,
    JoinedNorms,
    LayerEnd,
    LayerInputs,
    Packing,
    QueryScales,
    ValueNorms,
)
from baton.model.layers.mlp import ExpertMlp
from baton.model.loading.layer_weights import LayerWeights


class PartLoader:
    def __init__(self, weights: LayerWeights, head_order: Tensor | None) -> None:
        self.weights = weights
        self.config = weights.config
        self.ranks = weights.ranks
        self.read = weights.read
        self.linear = weights.linear
        # Of numbers as kernels rotate them, if it is another one.
        self.head_order = head_order

    def packing(self, number: int, tensors: LayerTensors) -> Packing | None:
        if self.config.joins_qk_norm:
            return self._joined_norms(tensors.q_norm, tensors.k_norm)
        return self._value_norms(number)

    def _joined_norms(
        self, q_norm: NormTensor | None, k_norm: NormTensor | None
    ) -> JoinedNorms:
        assert q_norm is not None, "the family has norms of queries and keys"
        assert k_norm is not None, "the family has norms of queries and keys"
        config = self.config
        ranks = self.ranks
        norms = [self.weights.norm(q_norm), self.weights.norm(k_norm)]
        if (order := self.head_order) is not None:
            norms = [
                norm.view(-1, config.head_dim)[:, order].flatten() for norm in norms
            ]
        copies = max(1, ranks.size // config.num_kv_heads)
        return JoinedNorms(norms[0], norms[1], copies, config.rms_norm_eps, ranks)

    def _value_norms(self, number: int) -> ValueNorms | None:
        config = self.config
        kinds = self.config.kinds
        if kinds is None or not config.stores_keys(number):
            return None
        _, kv_heads, width = self._heads_of(number)
        ones = torch.ones(width, device=self.weights.device)
        are_keys = kinds.values_are_keys and config.is_wide(number)
        return ValueNorms(ones, kv_heads, are_keys, config.rms_norm_eps)

    def head_norms(
        self, number: int, q_norm: NormTensor | None, k_norm: NormTensor | None
    ) -> Tensor | None:
        num_heads, kv_heads, width = self._heads_of(number)
        chunks = self.config.chunks
        if chunks is not None and chunks.norms_rotated and self.config.rotates(number):
            # Llama 4 norms what it has rotated, which is as long as before.
            return torch.ones(num_heads + kv_heads, width, device=self.weights.device)
        if q_norm is None:
            return None
        norms = self.weights.norm(q_norm).expand(num_heads, -1)
        if k_norm is not None:  # of a layer that stores keys
            norms = torch.cat((norms, self.weights.norm(k_norm).expand(kv_heads, -1)))
        norms = norms.contiguous()
        return (
            norms if self.head_order is None else norms[:, self.head_order].contiguous()
        )

    def query_scales(self, number: int) -> QueryScales | None:
        config = self.config
        chunks = self.config.chunks
        if chunks is None or chunks.temperature is None or config.rotates(number):
            return None
        span = chunks.temperature.span
        spans = torch.arange(config.max_position_embeddings // span + 1)
        scales = spans.float().log1p() * chunks.temperature.growth + 1.0
        num_heads, _, width = self._heads_of(number)
        return QueryScales(scales.to(self.weights.device), span, num_heads * width)

    def beside(
        self, tensors: LayerTensors, experts: ExpertMlp | None
    ) -> ExpertsBeside | None:
        beside = tensors.beside
        if beside is None:
            return None
        assert experts is not None, "the layer has experts"
        norms = {role: self.weights.norm(norm) for role, norm in beside.norms.items()}
        to_router = (
            self.read(beside.input_scale, dtype=torch.float32) * beside.hidden**-0.5
        )
        return ExpertsBeside(
            experts=experts,
            router_norm=to_router,
            expert_scales=self.read(beside.expert_scale, dtype=torch.float32),
            eps=self.config.rms_norm_eps,
            ranks=self.ranks,
            **norms,
        )

    def end(self, tensors: EndTensors | None) -> LayerEnd | None:
        if tensors is None:
            return None
        factor = self.read(tensors.factor).view(1)
        if tensors.gate is None or tensors.projection is None or tensors.norm is None:
            return LayerEnd(factor)
        gate, projection = (
            self.linear(self.weights.whole(linear))
            for linear in (tensors.gate, tensors.projection)
        )
        eps = self.config.rms_norm_eps
        how = self.config.layers.gate
        assert how is not None, "layers with inputs have gates"
        norm = self.weights.norm(tensors.norm)
        return LayerEnd(factor, InputPart(gate, projection, norm, how, eps))

    def inputs(self) -> LayerInputs | None:
        inputs = None if self.config.kinds is None else self.config.kinds.inputs
        if inputs is None:
            return None
        return LayerInputs(
            embedding=self.read(INPUTS),
            scale=self.weights.rounded(inputs.width**0.5),
            projection=self.linear(self.read(f"{INPUT_PROJECTION}.weight")),
            projection_scale=self.config.hidden_size**-0.5,
            norm=self.weights.norm(NormTensor(INPUT_NORM, inputs.width)),
            eps=self.config.rms_norm_eps,
        )

    def _heads_of(self, number: int) -> tuple[int, int, int]:
        """Return this rank's heads of queries and of keys, and the numbers of a head."""
        kv_heads, width = self.config.heads_of(number)
        size = self.ranks.size
        return self.config.num_heads // size, max(1, kv_heads // size), width
