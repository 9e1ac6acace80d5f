"""A transport that shows each block that it has brought, before the end of its read is reported."""

from collections.abc import Callable

from baton.kv_transfer.interfaces import (
    AddPeer,
    BlockSlice,
    PeerRank,
    PeerTransport,
    Read,
)

KVReceived = Callable[[tuple[int, ...], BlockSlice], None]


class WatchedTransport:
    """`inner`; `landed` gets the local blocks of a read and the slice of them that it brought."""

    def __init__(self, inner: PeerTransport, landed: KVReceived | None = None) -> None:
        self.name = inner.name
        self.connect_s = inner.connect_s
        self.min_chunk_bytes = inner.min_chunk_bytes
        self.progress_s = inner.progress_s
        self.tells_ends = inner.tells_ends
        self._inner = inner
        self._landed = landed
        self._slices: dict[PeerRank, BlockSlice] = {}
        self._reads: dict[int, tuple[tuple[int, ...], BlockSlice]] = {}
        self.address = inner.address
        self.connected = inner.connected
        self.remove_peer = inner.remove_peer
        self.cancel = inner.cancel
        self.fileno = inner.fileno
        self.service = inner.service
        self.trial = inner.trial

    def add_peer(self, command: AddPeer) -> None:
        self._inner.add_peer(command)
        self._slices[command.peer] = command.part

    def read(self, command: Read) -> int:
        handle = self._inner.read(command)
        self._reads[handle] = (command.local, self._slices[command.peer])
        return handle

    def test(self, handle: int) -> bool:
        if not self._inner.test(handle):
            return False
        if self._landed is not None:
            self._landed(*self._reads.pop(handle))
        return True

    def close(self) -> None:
        self._landed = None  # it may hold a view of the pool
        self._inner.close()
