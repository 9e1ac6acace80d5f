"""The ring of sampled tokens on a device, and the places of the last steps' tokens in it."""

from collections import deque
from collections.abc import Sequence

from baton.engine.scheduling.plan import Slice
from baton.protocol.errors import InvariantBroken
from baton.protocol.ids import Key

# The number of steps whose sampled tokens are kept. A plan may leave out a token only while its
# step is unsettled (two steps at most), so no plan needs older ones.
REMEMBERED_STEPS = 4
RING_TOKENS = 1 << 17
IDLE_PLACE = RING_TOKENS - 1  # takes the tokens that padding samples


class TokenRing:
    def __init__(self) -> None:
        self._steps: deque[dict[Key, int]] = deque(maxlen=REMEMBERED_STEPS)
        self._next = 0

    def stand_in(self, part: Slice) -> int:
        """Return the negative number that stands for the token that was sampled last for a key."""
        for step in reversed(self._steps):
            place = step.get(part.key)
            if place is not None:
                return place - RING_TOKENS
        raise InvariantBroken(f"{part.key}: no token was sampled in the last steps")

    def add(self, slices: Sequence[Slice]) -> list[int]:
        """Assign a place to each sample of a step, and return the places in order."""
        num_samples = sum(part.num_sampled for part in slices)
        if num_samples > IDLE_PLACE // REMEMBERED_STEPS:
            raise InvariantBroken(f"a step samples {num_samples} tokens")
        if self._next + num_samples > IDLE_PLACE:
            self._next = 0
        places = list(range(self._next, self._next + num_samples))
        self._next += num_samples
        left = iter(places)
        self._steps.append(
            {
                part.key.of_choice(choice): next(left)
                for part in slices
                for choice in part.samples * (1 + part.num_guesses)
            }
        )
        return places
