"""The decoder of the Llama family: Llama, Mistral, Qwen2 and Qwen3, from one configuration.

The runner calls it with a packed batch. All positions run through the layers at once; logits are
computed only where a token is drawn. The backend holds what differs between devices, and the KV
cache holds the pool; this file knows neither blocks nor requests.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from baton.engine.attention.backend import Backend, Batch
from baton.engine.layers.linear import Linear
from baton.engine.tensor_parallel import Ranks


@dataclass(slots=True, frozen=True)
class DecoderLayer:
    """This rank's part of one layer's weights."""

    attention_norm: Tensor  # [hidden]
    qkv: Linear  # heads of queries, then of keys, then of values
    head_norms: Tensor | None  # [num_heads + kv_heads, head_dim]
    output: Linear
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear  # gates first
    down: Linear


@dataclass(slots=True, frozen=True)
class Decoder:
    """The weights and the forward pass of one rank."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[DecoderLayer, ...]
    final_norm: Tensor  # [hidden]
    head: Linear  # [vocab, hidden], or this rank's rows of it
    head_is_split: bool
    eps: float
    ranks: Ranks

    def linears(self) -> Iterator[Linear]:
        """Yield all linear layers."""
        for layer in self.layers:
            yield from (layer.qkv, layer.output, layer.gate_up, layer.down)
        yield self.head

    def forward(self, batch: Batch, rows: Tensor, backend: Backend) -> Tensor:
        """Store the batch's keys and values; return the logits of `rows`.

        Logits are `[len(rows), vocab]` in fp32.
        """
        backend.begin(batch)
        x, residual = F.embedding(batch.token_ids, self.embedding), None
        for number, layer in enumerate(self.layers):
            x, residual = backend.add_rms_norm(x, residual, layer.attention_norm, self.eps)
            x = layer.output(backend.attend(number, layer.qkv(x), layer.head_norms))
            x = self.ranks.all_reduce(x)
            x, residual = backend.add_rms_norm(x, residual, layer.mlp_norm, self.eps)
            x = layer.down(backend.silu_mul(layer.gate_up(x)))
            x = self.ranks.all_reduce(x)
        if residual is not None:
            residual = residual[rows]
        x, _ = backend.add_rms_norm(x[rows], residual, self.final_norm, self.eps)
        logits = self.head(x).float()
        return self.ranks.all_gather(logits) if self.head_is_split else logits
