"""Compute LoRA adapters beside the linear layers that they change.

A row goes through the two small matrices of its own adapter, whose rows are computed together, as
those of an expert are; so a token's bits do not depend on the adapters of other rows. Layers that
the decoder has joined (queries, keys and values; gates and ups) have one pair of matrices: `A` of
each part below one another, and `B` of each in the block of its outputs and of its `A`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor

from baton.model.layers.attention import AdaptedRows
from baton.model.layers.linear import Linear
from baton.model.layers.mlp import GroupedLinear


@dataclass(slots=True)
class Lora:
    """The matrices of all adapters for one linear layer of the decoder.

    Those of adapters that come or go at run time are replaced between two steps.
    """

    shrink: GroupedLinear  # [width, inputs] of each adapter
    expand: GroupedLinear  # [outputs, width]

    def __call__(self, y: Tensor, x: Tensor, adapted: AdaptedRows) -> Tensor:
        """Add to the outputs `[num_rows, outputs]` of a layer with the inputs `x`, in place."""
        order = adapted.order
        ends = adapted.ends
        added = self.expand(self.shrink(x[order], ends), ends)
        return y.index_copy_(0, order, y[order] + added)

    def linears(self) -> Iterator[Linear]:
        yield from self.shrink.linears()
        yield from self.expand.linears()


@dataclass(slots=True)
class Replacements:
    """What adapters have instead of the model's head and embedding, by the adapters' numbers."""

    heads: dict[int, Linear] = field(default_factory=dict)
    embeddings: dict[int, Tensor] = field(default_factory=dict)  # [vocab, hidden]

    def set(self, number: int, head: Linear | None, embedding: Tensor | None) -> None:
        """Note what an adapter has; None where it takes the model's."""
        self.heads.pop(number, None)
        self.embeddings.pop(number, None)
        if head is not None:
            self.heads[number] = head
        if embedding is not None:
            self.embeddings[number] = embedding

    def embed(self, embedded: Tensor, token_ids: Tensor, adapted: AdaptedRows) -> None:
        """Replace rows of `embedded`, `[num_rows, hidden]`."""
        for number, rows in _rows_by_number(adapted, self.embeddings):
            embedded[rows] = F.embedding(token_ids[rows], self.embeddings[number])

    def project(self, logits: Tensor, hidden: Tensor, adapted: AdaptedRows) -> None:
        """Replace rows of `logits`, `[num_rows, vocab]`."""
        for number, rows in _rows_by_number(adapted, self.heads):
            logits[rows] = self.heads[number](hidden[rows])


def _rows_by_number(
    adapted: AdaptedRows, numbers: Mapping[int, object]
) -> Iterator[tuple[int, Tensor]]:
    """Yield the rows of those of these adapters that have any.

    It waits for the device, which steps without such an adapter never do.
    """
    for number, (first, end) in enumerate(pairwise((0, *adapted.ends.tolist()))):
        if number in numbers and first < end:
            yield number, adapted.order[first:end]
