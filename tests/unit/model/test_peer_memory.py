"""A peer's memory, with a driver of the test's own: its copies move this process's bytes."""

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from baton.model.runner import peer_memory
from baton.model.runner.peer_memory import (
    BlockIds,
    CudaDriver,
    OpenedPool,
    runs_of,
    shareable_memory,
)
from baton.protocol.errors import ConfigError, TransferError

SLICE_BYTES = 32


class Library:
    """The calls of libcuda that `CudaDriver` makes. `fails` has the errors of some of them."""

    def __init__(self, *, native_atomics: int = 0, **fails: str) -> None:
        self._native_atomics = native_atomics
        self._fails = fails
        self.asked: list[tuple[int, int, int]] = []
        self.copies: list[int] = []
        self._error = b""

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*_: object) -> int:
            self._error = self._fails.get(name, "").encode()
            return int(bool(self._error))

        return call

    def cuGetErrorName(self, status: int, text: object) -> int:  # noqa: N802
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = self._error
        return 0

    def cuDeviceGetP2PAttribute(  # noqa: N802
        self,
        found: object,
        kind: ctypes.c_int,
        source: ctypes.c_int,
        target: ctypes.c_int,
    ) -> int:
        self.asked.append((kind.value, source.value, target.value))
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = self._native_atomics
        return 0

    def cuMemcpyDtoDAsync_v2(  # noqa: N802
        self,
        target: ctypes.c_uint64,
        source: ctypes.c_uint64,
        num_bytes: ctypes.c_size_t,
        stream: ctypes.c_void_p,
    ) -> int:
        assert stream.value == 77
        if self._fails.get("copy"):
            self._error = self._fails["copy"].encode()
            return 1
        self.copies.append(num_bytes.value)
        ctypes.memmove(target.value, source.value, num_bytes.value)
        return 0


def driver(monkeypatch: pytest.MonkeyPatch, library: Library) -> CudaDriver:
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: library)
    return CudaDriver()


@pytest.fixture
def events(monkeypatch):
    event = SimpleNamespace(record=lambda _: None, query=lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())


@pytest.mark.usefixtures("events")
def test_over_pcie_the_copy_engine_moves_neighbours_at_once(monkeypatch):
    library = Library()
    theirs = torch.randint(-9, 9, (6, 16), dtype=torch.int32)
    ours = torch.zeros(9, 16, dtype=torch.int32)
    stream = SimpleNamespace(cuda_stream=77)
    memory = SimpleNamespace(
        blocks=ours, stream=stream, driver=driver(monkeypatch, library)
    )
    pool = OpenedPool(memory, theirs, 0, has_engine=True)
    # Halves of blocks.
    remote, local = np.array([4, 5, 6, 1, 9]), np.array([7, 8, 9, 10, 3])
    assert pool.copy(remote, local, SLICE_BYTES).has_ended()
    expected = torch.zeros(18, 8, dtype=torch.int32)
    expected[local] = theirs.view(-1, 8)[remote]
    assert torch.equal(ours.view(-1, 8), expected)
    assert library.copies == [3 * SLICE_BYTES, SLICE_BYTES, SLICE_BYTES]
    assert list(runs_of(local[:0], remote[:0])) == []
    library._fails["copy"] = "CUDA_ERROR_LAUNCH_FAILED"
    with pytest.raises(
        TransferError, match="cuMemcpyDtoDAsync_v2 reported CUDA_ERROR_LAUNCH_FAIL"
    ):
        pool.copy(remote, local, SLICE_BYTES)


def test_copies_that_run_at_once_have_numbers_of_their_own(monkeypatch):
    """A buffer is taken again once its copy has ended, and a larger one replaces those."""
    events: list[SimpleNamespace] = []

    def event(**_: object) -> SimpleNamespace:
        made = SimpleNamespace(has_happened=False)
        made.query = lambda: made.has_happened
        events.append(made)
        return made

    monkeypatch.setattr(torch.cuda, "Event", event)
    ids = BlockIds(torch.device("cpu"))
    first, _ = ids.sent(np.array([1, 2, 3]), np.array([4, 5, 6]))
    second, _ = ids.sent(np.array([7]), np.array([8]))
    assert first.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert second.tolist() == [[7], [8]]
    assert len(ids._buffers) == 2
    events[0].has_happened = True
    third, _ = ids.sent(np.array([9, 10]), np.array([11, 12]))
    assert third.tolist() == [[9, 10], [11, 12]]
    assert third.data_ptr() == first.data_ptr()
    assert second.tolist() == [[7], [8]]
    events[2].has_happened = True
    many, _ = ids.sent(np.arange(40), np.arange(40, 80))
    assert many.tolist() == [[*range(40)], [*range(40, 80)]]
    assert len(ids._buffers) == 2, "the one that was too small is gone"


def test_a_link_with_atomics_is_nvlink_and_a_gpu_reaches_itself(monkeypatch):
    library = Library(native_atomics=1)
    assert driver(monkeypatch, library).has_nvlink(1, 0)
    assert library.asked == [(3, 0, 1)]
    apart = driver(monkeypatch, Library())
    assert apart.has_nvlink(0, 0)
    assert not apart.has_nvlink(1, 0)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
            "the GPUs cannot read each other (cuIpcOpen",
        ),
        ("CUDA_ERROR_MAP_FAILED", "switch resizable BAR"),
        (
            "CUDA_ERROR_INVALID_VALUE",
            "cuIpcOpenMemHandle_v2 reported CUDA_ERROR_INVALID_VALUE",
        ),
    ],
)
def test_memory_that_cannot_be_mapped_says_what_to_do(error, line, monkeypatch):
    found = driver(monkeypatch, Library(cuIpcOpenMemHandle_v2=error))
    with pytest.raises(TransferError) as raised:
        found.open(bytes(64))
    assert line in raised.value.message


def test_memory_without_a_handle_names_expandable_segments(monkeypatch):
    found = driver(monkeypatch, Library(cuIpcGetMemHandle="CUDA_ERROR_INVALID_VALUE"))
    with pytest.raises(
        ConfigError, match="remove expandable_segments from PYTORCH_ALLOC_CONF"
    ):
        found.export(1 << 40)


@pytest.mark.parametrize("variable", peer_memory.SETTINGS)
def test_a_pool_is_allocated_outside_expandable_segments(variable, monkeypatch):
    applied: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", applied.append)
    with shareable_memory():
        assert applied == []
    monkeypatch.setenv(variable, "max_split_size_mb:64,expandable_segments:True")
    with shareable_memory():
        assert applied == ["max_split_size_mb:64,expandable_segments:False"]
    assert applied[1:] == ["max_split_size_mb:64,expandable_segments:True"]
