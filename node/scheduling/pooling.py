"""Pool the rows of a prompt over its chunks, to the same bits however the prompt is cut.

A mean is made of sums of integers, because these are the same in every order of addition.
"""

from array import array

from baton.protocol.pooling import Pooling

# The unit of the sums. Numbers up to 2 ** 31 / the tokens of a step fit; normed ones are smaller.
SUM_SCALE = 1 << 32


class PooledPrompt:
    def __init__(self) -> None:
        self._sums: list[int] = []
        self._row = b""

    def add(self, pooling: Pooling | None, data: bytes) -> None:
        """Add what a step returns of a slice.

        That is a row of fp32 numbers, or for `mean` the int64 sums of the slice's rows in units of
        1 / `SUM_SCALE`.
        """
        if pooling != "mean":
            self._row = data
            return
        more = array("q", data)
        sums = self._sums or [0] * len(more)
        self._sums = [one + other for one, other in zip(sums, more, strict=True)]

    def numbers(self, num_tokens: int) -> bytes:
        """Return the pooled row of a prompt of so many tokens, as fp32 numbers."""
        if not self._sums:
            return self._row
        divisor = SUM_SCALE * num_tokens
        return array("f", [one / divisor for one in self._sums]).tobytes()
