"""The heads that draft the tokens after the next one: a layer behind those of the model.

The row of a token takes its embedding and a hidden state of the token before it, and gives the
hidden state from which the token after it is drafted. The layer stores keys and values of its own,
at the token's position in the blocks of the model's. Drafts never change what the model samples.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.model.layers.attention import Backend, Batch
from baton.model.layers.decoder import Decoder, Taps
from baton.model.layers.linear import Linear


class DraftHead(Protocol):
    def linears(self) -> Iterator[Linear]: ...

    @property
    def tapped(self) -> tuple[int, ...]:
        """The layers of the model before which it takes the stream."""
        ...

    def states(self, hidden: Tensor, taps: Taps) -> Tensor:
        """Return what the rows of the next tokens take of all rows of the model.

        `hidden` is what the model's own head takes, `[num_tokens, hidden]`.
        """
        ...

    def forward(
        self, batch: Batch, states: Tensor, rows: Tensor, backend: Backend
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the batch.

        `states`, `[num_tokens, hidden]`, are of the token before each. Return what `logits` takes
        of `rows`, and the states that the rows of the tokens after them take.
        """
        ...

    def logits(self, normed: Tensor, backend: Backend) -> Tensor:
        """Return `[num_rows, vocab]`."""
        ...


@dataclass(slots=True, frozen=True)
class NextnHead:
    """A multi-token-prediction layer. The weights of norms, `[hidden]`, are in fp32."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    joint: Linear  # [hidden, 2 * hidden], of the normed embedding and hidden state
    decoder: Decoder  # of one layer, with the last norm and the output projection
    feeds_normed: bool  # the row after it takes what is behind the last norm
    tapped: tuple[int, ...] = ()

    def linears(self) -> Iterator[Linear]:
        yield self.joint
        yield from self.decoder.linears()

    def states(self, hidden: Tensor, taps: Taps) -> Tensor:
        return hidden

    def forward(
        self, batch: Batch, states: Tensor, rows: Tensor, backend: Backend
    ) -> tuple[Tensor, Tensor]:
        decoder = self.decoder
        backend.begin(batch)
        embedded = F.embedding(batch.token_ids, decoder.embedding)
        embedded, _ = backend.add_rms_norm(
            embedded, None, self.embedding_norm, decoder.eps
        )
        states, _ = backend.add_rms_norm(states, None, self.hidden_norm, decoder.eps)
        x = self.joint(torch.cat((embedded, states), dim=1))
        normed, stream = decoder.through(x, batch, rows, backend)
        return normed, normed if self.feeds_normed else stream

    def logits(self, normed: Tensor, backend: Backend) -> Tensor:
        return self.decoder.logits(normed, backend)


@dataclass(slots=True, frozen=True)
class EagleHead:
    """A draft of EAGLE-3, whose attention takes the normed embedding and state side by side."""

    fused: Linear  # [hidden, len(tapped) * hidden]
    hidden_norm: Tensor
    decoder: Decoder  # of one layer, whose first norm is that of embeddings
    tapped: tuple[int, ...]
    # [draft vocabulary]: the tokens of the model; None: the same.
    target_ids: Tensor | None
    vocab_size: int  # of the model

    def linears(self) -> Iterator[Linear]:
        yield self.fused
        yield from self.decoder.linears()

    def states(self, hidden: Tensor, taps: Taps) -> Tensor:
        return self.fused(taps.joined())

    def forward(
        self, batch: Batch, states: Tensor, rows: Tensor, backend: Backend
    ) -> tuple[Tensor, Tensor]:
        decoder = self.decoder
        (layer,) = decoder.layers
        backend.begin(batch)
        embedded = F.embedding(batch.token_ids, decoder.embedding)
        embedded, _ = backend.add_rms_norm(
            embedded, None, layer.attention_norm, decoder.eps
        )
        normed, _ = backend.add_rms_norm(states, None, self.hidden_norm, decoder.eps)
        x = layer.qkv(torch.cat((embedded, normed), dim=1))
        x = decoder.attend(0, backend, batch.positions, x, rows)
        if not len(rows):
            return states[rows], states[rows]
        return decoder.to_head(backend, None, None, x, states[rows])

    def logits(self, normed: Tensor, backend: Backend) -> Tensor:
        logits = self.decoder.logits(normed, backend)
        if self.target_ids is None:
            return logits
        whole = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        whole[:, self.target_ids] = logits
        return whole
