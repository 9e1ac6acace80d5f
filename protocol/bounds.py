"""The ranges of the numbers in messages. Decoding refuses a message with a number out of range.

Every struct that another process can send takes its integer types from here, so that no number from
outside can overflow an array, a clock or an allocation.
"""

from typing import Annotated

from msgspec import Meta

MAX_COUNT = (1 << 31) - 1
MAX_GENERATION = (1 << 32) - 1
MAX_BLOCKS = 1 << 24  # in one pool: a reader lists all blocks of a peer's pool
MAX_BYTES = 1 << 62
MAX_FORM_BYTES = 32 * 1024  # in the form of an answer, which a node keeps beside its tokens
MAX_KEYS = 4096  # in one message about blocks that were cached or given up

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]  # tokens, positions, token ids, sequences
Generation = Annotated[int, Meta(ge=0, le=MAX_GENERATION)]
BlockCount = Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
BlockId = Annotated[int, Meta(ge=0, lt=MAX_BLOCKS)]
Checksum = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Total = Annotated[int, Meta(ge=0, le=MAX_BYTES)]  # a count over the whole life of a process
NumBytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
HttpStatus = Annotated[int, Meta(ge=100, le=599)]
