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
    """What the client has of one choice, and how much of that has been computed again."""

    num_tokens: int = 0
    has_begun: bool = False  # it has the event that opens the choice
    has_ended: bool = False  # it has the event with the finish reason
    digest: int = 0  # of its tokens, by `digest_of`
    num_again: int = 0
    digest_again: int = 0

    @property
    def is_passed(self) -> bool:
        """Return whether the client has none of the tokens that follow."""
        return self.num_again == self.num_tokens

    def passing(self, token_ids: list[int], *, is_end: bool) -> "ReceivedPart":
        """Return the part once these tokens, too, have been computed again.

        Those behind its own are not counted. `is_end` says that no token follows. Raises
        `RequestError` if the client has other tokens.
        """
        again = token_ids[: self.num_tokens - self.num_again]
        num_again = self.num_again + len(again)
        digest = digest_of(again, self.digest_again)
        is_passed = num_again == self.num_tokens
        if (is_passed and digest != self.digest) or (is_end and not is_passed):
            raise changed()
        return msgspec.structs.replace(self, num_again=num_again, digest_again=digest)


def changed() -> RequestError:
    """Return the error of a client whose tokens were not computed again."""
    text = (
        "the response has other tokens now than its client has, as the request, the model or the "
        "kind of node has changed: send the request without Last-Event-ID"
    )
    return RequestError(text, code="stream_changed", http_status=409)
