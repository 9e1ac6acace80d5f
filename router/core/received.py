"""What a client already has of a response, when it sends its request again to go on with it.

The tokens of a request follow from its prompt, its parameters and its seed. So a router that has
never seen the response computes it again, passes over what the client has, and compares a digest.
"""

import zlib
from array import array
from collections.abc import Sequence

import msgspec

from baton.protocol.errors import RequestError


def digest_of(token_ids: Sequence[int], digest: int = 0) -> int:
    """Return the digest, of 32 bits, of the tokens that have `digest` and of these after them."""
    return zlib.crc32(array("I", token_ids), digest)


class ReceivedPart(msgspec.Struct, frozen=True):
    """What the client has of one choice."""

    num_tokens: int = 0
    has_begun: bool = False  # it has the event that opens the choice
    has_ended: bool = False  # it has the event with the finish reason
    digest: int = 0  # of its tokens, by `digest_of`


class PassingOver:
    """Takes the tokens of one choice that the client has out of those that are computed again."""

    __slots__ = ("_digest", "_num_left", "part")

    def __init__(self, part: ReceivedPart) -> None:
        self.part = part
        self._num_left = part.num_tokens
        self._digest = 0

    @property
    def is_over(self) -> bool:
        """Return whether the client has none of the tokens that follow."""
        return self._num_left == 0

    def take(self, token_ids: list[int], *, is_end: bool) -> list[int]:
        """Return those of the next tokens that the client has.

        `is_end` says that no token follows. Raises `RequestError` if the client has other tokens.
        """
        again = token_ids[: self._num_left]
        self._num_left -= len(again)
        self._digest = digest_of(again, self._digest)
        has_other = self._num_left == 0 and self._digest != self.part.digest
        if has_other or (is_end and self._num_left):
            raise changed()
        return again


def changed() -> RequestError:
    """Return the error of a client whose tokens were not computed again."""
    text = (
        "the response has other tokens now than its client has, as the request, the model or the "
        "kind of node has changed: send the request without Last-Event-ID"
    )
    return RequestError(text, code="stream_changed", http_status=409)
