"""Errors by what programs read of them, which stays when a message is written anew."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from baton.protocol.errors import BatonError


@contextmanager
def raises(
    kind: type[BatonError], code: str, param: str | None = None
) -> Iterator[pytest.ExceptionInfo[BatonError]]:
    """As `pytest.raises`; the error must have this code, and blame this field or none."""
    with pytest.raises(kind) as caught:
        yield caught
    assert (caught.value.code, caught.value.param) == (code, param)
