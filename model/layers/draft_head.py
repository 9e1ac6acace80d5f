"""The head that drafts the tokens after the next one: a layer behind those of the model.

The row of a token takes its embedding and the hidden state of the token before it, and gives the
hidden state from which the token after it is drafted. The layer stores keys and values of its own,
at the token's position in the blocks of the model's. Drafts never change what the model samples.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.model.layers.attention import Backend, Batch
from baton.model.layers.decoder import Decoder
from baton.model.layers.linear import Linear


@dataclass(slots=True, frozen=True)
class DraftHead:
    """The weights of one rank. Those of norms, `[hidden]`, are in fp32."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    joint: Linear  # [hidden, 2 * hidden], of the normed embedding and hidden state
    decoder: Decoder  # of one layer, with the last norm and the output projection
    feeds_normed: bool  # the row after it takes what is behind the last norm

    def linears(self) -> Iterator[Linear]:
        yield self.joint
        yield from self.decoder.linears()

    def forward(
        self, batch: Batch, hidden: Tensor, rows: Tensor, backend: Backend
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the batch.

        `hidden` is `[num_tokens, hidden]`: of the token before each. Return what `logits` takes of
        `rows`, and what the rows of the tokens after them take as their hidden states.
        """
        decoder = self.decoder
        backend.begin(batch)
        embedded = F.embedding(batch.token_ids, decoder.embedding)
        embedded, _ = backend.add_rms_norm(embedded, None, self.embedding_norm, decoder.eps)
        hidden, _ = backend.add_rms_norm(hidden, None, self.hidden_norm, decoder.eps)
        x = self.joint(torch.cat((embedded, hidden), dim=1))
        normed, stream = decoder.through(x, batch, rows, backend)
        return normed, normed if self.feeds_normed else stream

    def logits(self, normed: Tensor, backend: Backend) -> Tensor:
        """Return `[num_rows, vocab]`."""
        return self.decoder.logits(normed, backend)
