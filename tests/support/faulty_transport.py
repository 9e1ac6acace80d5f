"""A transport that misbehaves on purpose, by a seed, and shows each block that it has brought.

It wraps any other and keeps the contract of `Transport` while it delays, repeats and stalls reads.
The same seed and the same calls give the same faults.
"""

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from baton.kv_transfer.interfaces import BlockPiece, PeerRank, Transport
from baton.protocol.errors import TransferError


class Faults(msgspec.Struct, frozen=True):
    """Chances per read, 0 to 1, and for how many calls of `test` delays and stalls last."""

    delay: float = 0.0  # its end is seen late
    duplicate: float = 0.0  # it is copied twice
    stall: float = 0.0  # from now on no read ends for a while, and no cancel is sure
    delay_tests: int = 20
    stall_tests: int = 200


NO_FAULTS = Faults()
Landed = Callable[[tuple[int, ...], BlockPiece], None]


@dataclass(slots=True)
class _Read:
    inner: set[int]  # handles of the wrapped transport that have not ended
    local: tuple[int, ...]
    piece: BlockPiece
    tests_left: int = 0
    failure: TransferError | None = None


class FaultyTransport:
    """`inner` with `faults`. `landed` gets the local blocks of a read, and which piece of them it
    brought, before its end is told."""

    def __init__(
        self,
        inner: Transport,
        faults: Faults = NO_FAULTS,
        seed: int = 0,
        landed: Landed | None = None,
    ) -> None:
        self.name, self.connect_s = inner.name, inner.connect_s
        self.least_slice_bytes, self.progress_s = inner.least_slice_bytes, inner.progress_s
        self._inner = inner
        self._faults = faults
        self._random = random.Random(seed)
        self._landed = landed
        self._pieces: dict[PeerRank, BlockPiece] = {}
        self._reads: dict[int, _Read] = {}
        self._next_handle = 0
        self._stalled_tests = 0

    def address(self) -> bytes:
        return self._inner.address()

    def add_peer(
        self, peer: PeerRank, address: bytes, num_blocks: int, block_bytes: int, piece: BlockPiece
    ) -> None:
        self._inner.add_peer(peer, address, num_blocks, block_bytes, piece)
        self._pieces[peer] = piece

    def connected(self, peer: PeerRank) -> bool:
        return self._inner.connected(peer)

    def remove_peer(self, peer: PeerRank) -> None:
        self._inner.remove_peer(peer)

    def read(
        self,
        peer: PeerRank,
        remote: Sequence[int],
        local: Sequence[int],
        generations: Sequence[int],
    ) -> int:
        # Every chance is drawn for every read, so that one fault does not shift the others.
        faults = self._faults
        names = ("delay", "duplicate", "stall")
        drawn = {name for name in names if self._random.random() < getattr(faults, name)}
        handle = self._inner.read(peer, remote, local, generations)
        read = _Read({handle}, tuple(local), self._pieces[peer])
        if "duplicate" in drawn:
            with contextlib.suppress(TransferError):
                read.inner.add(self._inner.read(peer, remote, local, generations))
        read.tests_left = faults.delay_tests if "delay" in drawn else 0
        if "stall" in drawn:
            self._stalled_tests = faults.stall_tests
        self._next_handle += 1
        self._reads[self._next_handle] = read
        return self._next_handle

    def test(self, handle: int) -> bool:
        read = self._reads[handle]
        if self._stalled_tests:
            self._stalled_tests -= 1
            return False
        read.tests_left -= 1
        if read.tests_left >= 0 or not self._inner_has_ended(read):
            return False
        del self._reads[handle]
        if read.failure is not None:
            raise read.failure
        if self._landed is not None:
            self._landed(read.local, read.piece)
        return True

    def _inner_has_ended(self, read: _Read) -> bool:
        for handle in sorted(read.inner):
            try:
                ended = self._inner.test(handle)
            except TransferError as error:
                read.failure = error
                ended = True
            if ended:
                read.inner.remove(handle)
        return not read.inner

    def cancel(self, handle: int) -> bool:
        read = self._reads.get(handle)
        if read is None:
            return True
        if self._stalled_tests:
            return False
        read.inner = {inner for inner in read.inner if not self._inner.cancel(inner)}
        if read.inner:
            return False
        del self._reads[handle]
        return True

    def fileno(self) -> int:
        return self._inner.fileno()

    def service(self) -> list[PeerRank]:
        return self._inner.service()

    def close(self) -> None:
        self._landed = None  # it may hold a view of the pool
        self._inner.close()
