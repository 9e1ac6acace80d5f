"""The ranges of the numbers that travel. Decoding refuses a message with a number outside of them.

Every struct that another process can send takes its integers from here, so that none of them can
overflow an array, a clock or an allocation further in.
"""

from typing import Annotated

from msgspec import Meta

MAX_COUNT = (1 << 31) - 1
MAX_GENERATION = (1 << 32) - 1
MAX_BLOCKS = 1 << 24  # of one pool: a reader lists all blocks of a peer's pool
MAX_BYTES = 1 << 62
MAX_FORM_BYTES = 32 * 1024  # of what a node keeps of an answer beside its tokens
MAX_KEYS = 4096  # of blocks that one message says were cached, or were given up

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]  # tokens, positions, token ids, sequences
Generation = Annotated[int, Meta(ge=0, le=MAX_GENERATION)]
BlockCount = Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
BlockId = Annotated[int, Meta(ge=0, lt=MAX_BLOCKS)]
Checksum = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Total = Annotated[int, Meta(ge=0, le=MAX_BYTES)]  # of what a process counts in all its life
NumBytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
HttpStatus = Annotated[int, Meta(ge=100, le=599)]
