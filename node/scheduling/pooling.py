"""Pool the rows of a prompt over its chunks, to the same bits however the prompt is cut.

A mean is made of sums of integers, because these are the same in every order of addition.
"""

from array import array

from baton.protocol.pooling import Pooling

# The unit of the sums. Numbers up to 2 ** 31 / the tokens of a step fit; normed ones are smaller.
SUM_SCALE = 1 << 32


def pooled_with(before: bytes, pooling: Pooling | None, data: bytes) -> bytes:
    """Return what is pooled of a prompt, from that of its chunks `before` and a step's `data`.

    A step returns a row of fp32 numbers for a slice, or for `mean` the int64 sums of its rows in
    units of 1 / `SUM_SCALE`.
    """
    if pooling != "mean" or not before:
        return data
    sums = zip(array("q", before), array("q", data), strict=True)
    return array("q", [earlier + later for earlier, later in sums]).tobytes()


def pooled_numbers(pooled: bytes, pooling: Pooling | None, num_tokens: int) -> bytes:
    """Return the pooled row of a prompt of so many tokens, as fp32 numbers."""
    if pooling != "mean":
        return pooled
    divisor = SUM_SCALE * num_tokens
    return array("f", [total / divisor for total in array("q", pooled)]).tobytes()
