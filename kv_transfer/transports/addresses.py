"""Decode the addresses that ranks publish, for all transports.

An address comes from another process, so a damaged one is refused.
"""

from typing import TypeVar

import msgspec

from baton.protocol.errors import TransferError

T = TypeVar("T", bound=msgspec.Struct)


def decode_address(data: bytes, kind: type[T], transport: str) -> T:
    """Return the address of this `kind`. Raises a `TransferError` that names the `transport`."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TransferError(f"not an address of {transport}: {error}") from error
