"""Changes to the logits of one sequence: biases, and penalties for tokens that came before.

They are a function of `Sampling`, the prompt and the output so far, and each logit is changed
alone, so a token is the same in any batch, node or attempt.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.protocol.sampling import Penalties

BIAS, DIVISOR, MINUEND = range(3)  # the rows of `CountedTokens.changes`
_NO_CHANGE = ((0.0,), (1.0,), (0.0,))


class CountedTokens:
    """The tokens of one sequence, and how penalties change their logits."""

    def __init__(self, penalties: Penalties) -> None:
        self._penalties = penalties
        self._places: dict[int, int] = {}
        self._counts: list[int] = []  # in the output
        self._ids = np.zeros(8, np.int64)
        self._changes = np.zeros((3, 8))
        for token_id, bias in penalties.bias:
            place = self._place(token_id)
            self._changes[BIAS, place] = bias

    def add_prompt(self, token_ids: Iterable[int]) -> None:
        """Note tokens of the prompt, which count for the repetition penalty alone."""
        if (repetition := self._penalties.repetition) != 1.0:
            for token_id in dict.fromkeys(token_ids):
                place = self._place(token_id)  # which may move `_changes`
                self._changes[DIVISOR, place] = repetition

    def add(self, token_ids: Iterable[int]) -> None:
        """Count tokens of the output."""
        penalties = self._penalties
        for token_id in token_ids:
            place = self._place(token_id)
            self._counts[place] += 1
            minuend = penalties.frequency * self._counts[place] + penalties.presence
            self._changes[DIVISOR, place] = penalties.repetition
            self._changes[MINUEND, place] = minuend

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._counts)]

    @property
    def changes(self) -> NDArray[np.float64]:
        """What is added, the divisor of a positive logit, and what is taken off: [3, n]."""
        return self._changes[:, : len(self._counts)]

    def _place(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._counts))
        if place == len(self._counts):
            self._counts.append(0)
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, self._ids])
                self._changes = np.concatenate([self._changes, self._changes], axis=1)
            self._ids[place] = token_id
            self._changes[:, place : place + 1] = _NO_CHANGE
        return place


def packed(
    by_sample: Mapping[int, CountedTokens],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the samples and ids [2, n] of the logits that change, and their changes [3, n]."""
    samples = [np.full(len(one.ids), sample) for sample, one in by_sample.items()]
    ids = [one.ids for one in by_sample.values()]
    changes = [one.changes for one in by_sample.values()]
    return np.stack([np.concatenate(samples), np.concatenate(ids)]), np.concatenate(
        changes, axis=1
    )


def penalize(logits: Tensor, places: Tensor, changes: Tensor) -> None:
    """Change the logits [num_samples, vocab] as `packed` says; each pair of places comes once."""
    samples, ids = places
    values = logits[samples, ids].to(torch.float64) + changes[BIAS]
    divisors = changes[DIVISOR]
    values = (
        torch.where(values > 0, values / divisors, values * divisors) - changes[MINUEND]
    )
    logits[samples, ids] = values.to(logits.dtype)
