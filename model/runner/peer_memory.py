"""Share a GPU's pool with other processes of this host, and map their pools.

The thread of the `cuda_ipc` transport calls it. Memory is shared by the driver's IPC handles, plain
bytes: nothing that a peer sends is unpickled. Copies run on a stream of their own beside the steps,
and an event says when one has ended. The driver is called through ctypes because torch offers
handles only as pickles.
"""

import ctypes
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kv_transfer.pools import PoolShape
from baton.model.runner.device_state import DeviceArray
from baton.protocol.errors import ConfigError, TransferError

DRIVER = "libcuda.so.1"
HANDLE_BYTES = 64
PROOF_BYTES = 16
# From cuda.h.
LAZY_ENABLE_PEER_ACCESS = 1
POINTER_DEVICE_ORDINAL = 9
NATIVE_ATOMICS = 3  # of a link between two GPUs: NVLink has them, PCIe has none
SUCCESS = 0
# An error of mapping a peer's memory, and what to do about it.
NOT_MAPPED = {
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": "the GPUs cannot read each other",
    "CUDA_ERROR_OUT_OF_MEMORY": "the peer's pool is larger than what its GPU shows on PCIe (BAR1): "
    "switch resizable BAR and Above 4G Decoding on in the BIOS, or lower cache.memory_mib",
}
NOT_MAPPED["CUDA_ERROR_MAP_FAILED"] = NOT_MAPPED["CUDA_ERROR_OUT_OF_MEMORY"]
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"


class PoolHandle(msgspec.Struct, frozen=True, array_like=True):
    """An allocation's handle, and the pool's offset in it. Peers of one version exchange it."""

    handle: bytes
    offset: int
    num_words: int  # of one block, 4 bytes each
    proof: bytes  # the last bytes of the spare block, which follows the pool's blocks

    @classmethod
    def decode(cls, data: bytes) -> "PoolHandle":
        """Return the decoded handle. Raises `TransferError` if `data` is not one."""
        try:
            found = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TransferError(f"not a handle of GPU memory: {error}") from error
        sizes = len(found.handle), len(found.proof)
        if (
            sizes != (HANDLE_BYTES, PROOF_BYTES)
            or found.offset < 0
            or found.num_words <= 0
        ):
            raise TransferError("not a handle of GPU memory")
        return found


@contextmanager
def shareable_memory() -> Iterator[None]:
    """Let torch allocate by cudaMalloc inside, whatever its settings: only that can be shared.

    Memory in expandable segments has no IPC handles. torch then skips free blocks of theirs, too.
    """
    settings = next((text for name in SETTINGS if (text := os.environ.get(name))), "")
    if EXPANDABLE not in settings:
        yield
        return
    apply = torch._C._accelerator_setAllocatorSettings  # it has no public name
    apply(settings.replace(EXPANDABLE, "expandable_segments:False"))
    try:
        yield
    finally:
        apply(settings)


class CudaPeerMemory:
    """The `PeerMemory` of a pool, in whose memory `SPARE_BLOCKS` follow `num_blocks`."""

    def __init__(self, pool: Tensor, num_blocks: int) -> None:
        self.device = pool.device
        words = pool.storage_offset() // (4 // pool.itemsize)
        block_words = pool[0].numel() * pool.itemsize // 4
        whole = torch.empty(0, dtype=torch.int32, device=pool.device).set_(
            pool.untyped_storage(), words, (num_blocks + 1, block_words)
        )  # type: ignore[call-overload]
        self.blocks: Tensor = whole  # [num_blocks + 1, words of a block] int32
        self.stream: torch.cuda.Stream | None = None
        self.ids = BlockIds(self.device)
        self.scratch: Tensor | None = None  # [1, words of a block], where trials land
        # What the thread that reads tiers has of its own: pinned memory of a block, and a stream.
        self._filling: tuple[Tensor, torch.cuda.Stream] | None = None
        self.driver = CudaDriver()
        self._proof = secrets.token_bytes(PROOF_BYTES)

    @property
    def gpu(self) -> str:
        return _gpu_id(self.device.index)

    @property
    def visible(self) -> tuple[str, ...]:
        own = self.device.index
        return tuple(
            _gpu_id(index)
            for index in range(torch.cuda.device_count())
            if index == own or torch.cuda.can_device_access_peer(own, index)
        )

    def handle(self) -> bytes:
        address = self.blocks.data_ptr()
        handle, base = self.driver.export(address)
        write_proof(self.blocks, self._proof)
        torch.cuda.synchronize(self.device)
        return msgspec.msgpack.encode(
            PoolHandle(handle, address - base, self.blocks.shape[1], self._proof)
        )

    def enter(self) -> None:
        torch.cuda.set_device(self.device)
        # A thread has no CUDA context before its first call that needs one, but UCX requires it.
        torch.cuda.synchronize(self.device)
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.scratch = torch.empty_like(self.blocks[:1])
        spare = np.array([len(self.blocks) - 1])
        # Compile both kernels.
        OpenedPool(self, self.blocks, 0).copy(spare, spare, 4 * self.blocks.shape[1])
        self.checksums(spare, 4 * self.blocks.shape[1])

    def open(self, handle: bytes, shape: PoolShape) -> "OpenedPool":
        found = PoolHandle.decode(handle)
        if 4 * found.num_words != shape.block_bytes:
            raise TransferError("the handle is of another pool")
        base = self.driver.open(found.handle)
        owner = self.driver.device_of(base)
        view = DeviceArray(base + found.offset, (shape.num_blocks + 1, found.num_words))
        # Some versions of torch copy the memory if the device is not named or is another one.
        blocks = torch.as_tensor(view, device=torch.device("cuda", owner))
        assert self.stream is not None, "the agent's thread entered"
        with torch.cuda.stream(self.stream):
            is_proven = reads_proof(blocks, found.proof, self.device)
        if not is_proven:
            self.driver.close(base)
            raise TransferError(
                "a GPU reads other bytes from a peer than were written there: switch ACS and the "
                "IOMMU off for the GPUs, or set transfer.transport=nixl"
            )
        has_engine = not self.driver.has_nvlink(owner, self.device.index)
        return OpenedPool(self, blocks[: shape.num_blocks], base, has_engine=has_engine)

    def checksums(self, slices: NDArray[np.int64], num_bytes: int) -> tuple[int, ...]:
        assert self.stream is not None, "the agent's thread entered"
        try:
            with torch.cuda.stream(self.stream):
                return checksums_of(self.blocks.view(-1, num_bytes // 4), slices)
        except (RuntimeError, torch.AcceleratorError) as error:
            raise TransferError(
                f"the GPU cannot sum blocks: {_first_line(error)}"
            ) from error

    def copies(self, block_ids: Sequence[int]) -> list[memoryview]:
        assert self.stream is not None, "the agent's thread entered"
        try:
            with torch.cuda.stream(self.stream):
                rows = self.blocks[torch.tensor(block_ids, device=self.device)]
                copied = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
                copied.copy_(rows, non_blocking=True)
            # The caller gives the blocks back as soon as it has the copies.
            self.stream.synchronize()
        except (RuntimeError, torch.AcceleratorError) as error:
            raise TransferError(
                f"the GPU cannot copy blocks: {_first_line(error)}"
            ) from error
        return [row.numpy().data.cast("B") for row in copied]

    def fill(self, block: int, read: Callable[[memoryview], None]) -> None:
        try:
            torch.cuda.set_device(self.device)
            if self._filling is None:
                staging = torch.empty_like(
                    self.blocks[0], device="cpu", pin_memory=True
                )
                stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
                self._filling = staging, stream
            staging, stream = self._filling
            read(staging.numpy().data.cast("B"))
            with torch.cuda.stream(stream):
                self.blocks[block].copy_(staging, non_blocking=True)
            # The next block takes the same host memory, and the caller says that this one is there.
            stream.synchronize()
        except (RuntimeError, torch.AcceleratorError) as error:
            raise TransferError(
                f"the GPU cannot take blocks: {_first_line(error)}"
            ) from error


def checksums_of(blocks: Tensor, ids: NDArray[np.int64]) -> tuple[int, ...]:
    """Return the checksums of `blocks`, `[num_blocks, words]` int32, as numbers without a sign."""
    # Triton exists on Linux only and is slow to import; see `rank`.
    from baton.kernels.cuda.pool_writes import sum_blocks

    sums = sum_blocks(blocks, torch.from_numpy(ids.astype(np.int32)).to(blocks.device))
    return tuple(number & 0xFFFFFFFF for number in sums.tolist())


def write_proof(blocks: Tensor, proof: bytes) -> None:
    """Write the proof to the end of the last block, `[num_blocks, words]` int32."""
    words = torch.frombuffer(bytearray(proof), dtype=torch.int32)
    blocks[-1, -len(words) :] = words.to(blocks.device)


def reads_proof(blocks: Tensor, proof: bytes, device: torch.device) -> bool:
    """Return whether a copy to `device` finds the proof at the end of the last block.

    Behind some IOMMUs, reads of another GPU's memory succeed and bring other bytes.
    """
    # Triton exists on Linux only and is slow to import; see `rank`.
    from baton.kernels.cuda.pool_writes import move_blocks

    seen = torch.zeros(1, blocks.shape[1], dtype=torch.int32, device=device)
    last = torch.tensor([len(blocks) - 1], dtype=torch.int32, device=device)
    move_blocks(blocks, last, seen, torch.zeros_like(last))
    found = seen[0, -(PROOF_BYTES // 4) :].cpu().numpy().tobytes()
    return found == proof


class OpenedPool:
    """The `PeerPool` whose `blocks` are mapped at `base`.

    With `has_engine`, the GPU's copy engine moves them: over PCIe a kernel would hold its
    multiprocessors for as long as the link is busy, and a few programs do not fill the link.
    """

    def __init__(
        self,
        memory: CudaPeerMemory,
        blocks: Tensor,
        base: int,
        *,
        has_engine: bool = False,
    ) -> None:
        self._memory = memory
        self._blocks = blocks
        self._base = base
        self._has_engine = has_engine

    def copy(
        self, remote: NDArray[np.int64], local: NDArray[np.int64], num_bytes: int
    ) -> "LaunchedCopy":
        return self._launched(self._memory.blocks, remote, local, num_bytes)

    def trial(self, num_blocks: int) -> "LaunchedCopy":
        scratch = self._memory.scratch
        assert scratch is not None, "the agent's thread entered"
        blocks = np.arange(num_blocks)
        return self._launched(scratch, blocks, 0 * blocks, 4 * scratch.shape[1])

    def _launched(
        self,
        target: Tensor,
        remote: NDArray[np.int64],
        local: NDArray[np.int64],
        num_bytes: int,
    ) -> "LaunchedCopy":
        # Triton exists on Linux only and is slow to import; see `rank`.
        from baton.kernels.cuda.pool_writes import move_blocks

        memory = self._memory
        assert memory.stream is not None, "the agent's thread entered"
        try:
            with torch.cuda.stream(memory.stream):
                if self._has_engine:
                    done = event()
                    into, out_of = target.data_ptr(), self._blocks.data_ptr()
                    stream = memory.stream.cuda_stream
                    for first, other, count in runs_of(local, remote):
                        memory.driver.copy(
                            into + first * num_bytes,
                            out_of + other * num_bytes,
                            count * num_bytes,
                            stream,
                        )
                else:
                    ids, done = memory.ids.sent(remote, local)
                    theirs, ours = (
                        pool.view(-1, num_bytes // 4) for pool in (self._blocks, target)
                    )
                    move_blocks(theirs, ids[0], ours, ids[1])
                done.record(memory.stream)
        except (RuntimeError, torch.AcceleratorError) as error:
            raise TransferError(f"the GPU cannot copy: {_first_line(error)}") from error
        return LaunchedCopy(done, memory.blocks.device)

    def close(self) -> None:
        self._memory.driver.close(self._base)


class LaunchedCopy:
    """The `PeerCopy` behind which the event `done` was recorded."""

    def __init__(self, done: torch.cuda.Event, device: torch.device) -> None:
        self._done = done
        self._device = device

    def has_ended(self) -> bool:
        try:
            return bool(self._done.query())  # type: ignore[no-untyped-call]
        except (RuntimeError, torch.AcceleratorError) as error:
            raise TransferError(
                f"the GPU could not copy: {_first_line(error)}"
            ) from error

    def wait(self) -> None:
        # `has_ended` raises the error.
        with suppress(RuntimeError, torch.AcceleratorError):
            # Another thread would begin to use the first GPU otherwise.
            torch.cuda.set_device(self._device)
            self._done.synchronize()


def event() -> torch.cuda.Event:
    """Return an event for which a thread can wait without taking a CPU."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


class BlockIds:
    """Where a GPU finds the numbers of the blocks that it copies, for all copies that run at once.

    Pinning memory for each copy would take longer than a small copy itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[_IdBuffer] = []

    def sent(
        self, remote: NDArray[np.int64], local: NDArray[np.int64]
    ) -> tuple[Tensor, torch.cuda.Event]:
        """Return both on the device, `[2, count]` int32, and the event to record behind the copy.

        Until that event has happened, nothing else takes their place.
        """
        count = len(remote)
        buffer = next((one for one in self._buffers if one.has_room(count)), None)
        if buffer is None:
            self._buffers = [one for one in self._buffers if not one.has_room(0)]
            buffer = _IdBuffer(1 << (2 * count).bit_length(), self._device)
            self._buffers.append(buffer)
        numbers = buffer.host.numpy()
        numbers[:count] = remote
        numbers[count : 2 * count] = local
        whole = buffer.on_device[: 2 * count]
        whole.copy_(buffer.host[: 2 * count], non_blocking=True)
        buffer.done = event()
        return whole.view(2, count), buffer.done


class _IdBuffer:
    def __init__(self, size: int, device: torch.device) -> None:
        is_pinned = device.type == "cuda"
        self.host = torch.empty(size, dtype=torch.int32, pin_memory=is_pinned)
        self.on_device = torch.empty(size, dtype=torch.int32, device=device)
        self.done: torch.cuda.Event | None = None  # of the copy that takes it

    def has_room(self, count: int) -> bool:
        """Return whether no copy takes it, and it has room for so many pairs."""
        is_free = self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]
        return is_free and 2 * count <= len(self.host)


def runs_of(
    local: NDArray[np.int64], remote: NDArray[np.int64]
) -> Iterator[tuple[int, int, int]]:
    """Yield the first number of each run of neighbours in both, and how many the run has."""
    is_break = (np.diff(local) != 1) | (np.diff(remote) != 1)
    for start, end in pairwise(
        [0, *(np.flatnonzero(is_break) + 1).tolist(), len(local)]
    ):
        if end > start:
            yield int(local[start]), int(remote[start]), end - start


class CudaDriver:
    """The calls of the CUDA driver that share and copy memory. They need a current context."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(DRIVER)
        except OSError as error:
            raise ConfigError(f"the CUDA driver cannot be loaded: {error}") from error

    def export(self, address: int) -> tuple[bytes, int]:
        """Return the handle of the allocation around `address`, and the allocation's start."""
        base = ctypes.c_uint64()
        size = ctypes.c_size_t()
        handle = _Handle()
        try:
            self._call(
                "cuMemGetAddressRange_v2",
                ctypes.byref(base),
                ctypes.byref(size),
                ctypes.c_uint64(address),
            )
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        except TransferError as error:
            raise ConfigError(
                f"this GPU's memory cannot be shared ({error.message}); remove "
                "expandable_segments from PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF, or use "
                "NIXL: `pip install -e '.[nixl]'`"
            ) from error
        return bytes(handle), base.value

    def open(self, handle: bytes) -> int:
        """Map an allocation of another process and return its address. Raises `TransferError`."""
        address = ctypes.c_uint64()
        try:
            self._call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                _Handle.from_buffer_copy(handle),
                ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS),
            )
        except TransferError as error:
            reason = NOT_MAPPED.get(error.message.rpartition(" ")[2], "")
            raise TransferError(
                f"{reason} ({error.message})" if reason else error.message
            ) from error
        return address.value

    def has_nvlink(self, owner: int, reader: int) -> bool:
        """Return whether one GPU reaches the other by NVLink, or is the same."""
        if owner == reader:
            return True
        found = ctypes.c_int()
        self._call(
            "cuDeviceGetP2PAttribute",
            ctypes.byref(found),
            ctypes.c_int(NATIVE_ATOMICS),
            ctypes.c_int(reader),
            ctypes.c_int(owner),
        )
        return bool(found.value)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Queue a copy on a stream, which a copy engine makes. Raises `TransferError`."""
        self._call(
            "cuMemcpyDtoDAsync_v2",
            ctypes.c_uint64(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(num_bytes),
            ctypes.c_void_p(stream),
        )

    def device_of(self, address: int) -> int:
        """Return the number, in this process, of the GPU that has the memory."""
        number = ctypes.c_int()
        self._call(
            "cuPointerGetAttribute",
            ctypes.byref(number),
            ctypes.c_int(POINTER_DEVICE_ORDINAL),
            ctypes.c_uint64(address),
        )
        return number.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != SUCCESS:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            said = (text.value or b"an unknown error").decode()
            raise TransferError(f"{name} reported {said}")


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


def _gpu_id(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
