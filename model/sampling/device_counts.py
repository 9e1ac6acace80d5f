"""The tokens of sequences with penalties, counted in a device's memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from baton.kernels.constants import BIAS_SHIFT
from baton.node.scheduling.plan import Slice
from baton.protocol.errors import InvariantBroken
from baton.protocol.ids import Key
from baton.protocol.sampling import MAX_BIASES, Penalties

NO_ROW = (-1, 0)  # of a sample without penalties
# Does what `kernels.reference.penalize_counted` does.
CountKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Counted(NamedTuple):
    row: int
    has_token: bool  # whether the slice's token is to be counted
    has_mask: bool  # whether more than penalties decides what may come


@dataclass(slots=True)
class NewRows:
    """Rows that sequences have just got, and the words that are not 0 in them."""

    rows: list[int] = field(default_factory=list)
    factors: list[tuple[float, float, float]] = field(default_factory=list)
    biases: list[list[float]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)


class DeviceCounts:
    """Penalties of sequences whose tokens are counted in the device's memory.

    A sequence has a row while every plan has it, and a slice with `past` begins anew. The host
    sends what a sequence begins with; from then on the device counts the tokens that it has
    sampled, so steps need not wait for them and can be replayed.
    """

    def __init__(
        self, num_rows: int, vocab_size: int, device: torch.device, kernel: CountKernel
    ) -> None:
        self._kernel = kernel
        self._words = torch.zeros(
            num_rows, vocab_size, dtype=torch.int32, device=device
        )
        self._factors = torch.ones(num_rows, 3, dtype=torch.float64, device=device)
        self._biases = torch.zeros(
            num_rows, MAX_BIASES, dtype=torch.float64, device=device
        )
        self._free = list(range(num_rows))
        self._rows: dict[Key, tuple[int, bool]] = {}  # and whether there is a mask

    def begin_step(self, slices: Sequence[Slice]) -> None:
        """Take the rows of sequences that a plan leaves out."""
        if self._rows:
            for key in self._rows.keys() - {part.key for part in slices}:
                self._free.append(self._rows.pop(key)[0])

    def follow(self, part: Slice, new: NewRows) -> Counted | None:
        """Return the row of a sequence, which may be added to `new`; None without penalties."""
        if not part.samples or part.sampling is None:
            return None
        if part.past is None:
            row, has_mask = self._rows.get(part.key, (-1, False))
            return Counted(row, True, has_mask) if row >= 0 else None
        penalties = part.sampling.penalties
        if penalties is None:
            return None
        row, _ = self._rows.get(part.key, (-1, False))
        if row < 0 and not self._free:
            raise InvariantBroken("more sequences have penalties than a step can have")
        row = row if row >= 0 else self._free.pop()
        self._rows[part.key] = row, part.sampling.has_mask
        self._begin(row, part, penalties, new)
        return Counted(row, not part.token_ids, part.sampling.has_mask)

    def write(self, inputs: Sequence[Tensor]) -> None:
        """Write new rows, which are given as the fields of `NewRows`, in the device's order."""
        rows, factors, biases, places, words = inputs
        self._words.index_fill_(0, rows, 0)
        self._words.view(-1).index_copy_(0, places, words)
        self._factors.index_copy_(0, rows, factors)
        self._biases[:, : biases.shape[1]].index_copy_(0, rows, biases)

    def penalize(
        self, logits: Tensor, counted: Tensor, token_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Count the tokens; return changed logits of the samples that have a row, and the rows."""
        tables = self._words, self._factors, self._biases
        return self._kernel(logits, *tables, counted, token_ids.contiguous()), counted

    def _begin(self, row: int, part: Slice, penalties: Penalties, new: NewRows) -> None:
        vocab = self._words.shape[1]
        known = (*(part.past or ()), *part.token_ids)
        end = part.start + len(part.token_ids)
        output = known[len(known) - max(0, end - part.num_prompt_tokens) :]
        prompt = known[: len(known) - len(output)]
        words = {
            token_id: i << BIAS_SHIFT
            for i, (token_id, _) in enumerate(penalties.bias, 1)
        }
        for token_id in set(prompt) if penalties.repetition != 1.0 else ():
            words[token_id] = words.get(token_id, 0) + 1
        for token_id in output:
            words[token_id] = words.get(token_id, 0) + 2
        known_words = {
            token_id: word for token_id, word in words.items() if token_id < vocab
        }
        new.rows.append(row)
        new.factors.append(
            (penalties.presence, penalties.frequency, penalties.repetition)
        )
        new.biases.append([bias for _, bias in penalties.bias])
        new.places += [row * vocab + token_id for token_id in known_words]
        new.words += [_signed(word) for word in known_words.values()]


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
