"""The part of NIXL's Python API that baton uses, as types; its agents, and memory as its rows.

The wheel is an optional extra, loaded when the first agent is made.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.interfaces import PoolMemory
from baton.protocol.errors import ConfigError, TransferError

WHEELS = ("nixl_cu13", "nixl_cu12")
# NIXL's wrapper sets 0, which makes the progress thread occupy a core.
PROGRESS_DELAY_US = 1000


class Releasable(Protocol):
    """A prepared descriptor list or a transfer."""

    def release(self) -> None: ...


class NixlAgent(Protocol):
    """A NIXL agent. States of a transfer are DONE, PROC and ERR; most errors are raised."""

    def create_backend(self, backend: str, params: dict[str, str]) -> None: ...
    def register_memory(
        self, regions: list[tuple[int, int, int, str]], mem_type: str
    ) -> object: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> bytes: ...
    def remove_remote_agent(self, agent: str) -> None: ...
    def prep_xfer_dlist(
        self, agent: str, rows: NDArray[np.uint64], mem_type: str
    ) -> Releasable: ...
    def make_prepped_xfer(
        self,
        operation: str,
        local: Releasable,
        local_indices: NDArray[np.int32],
        remote: Releasable,
        remote_indices: NDArray[np.int32],
    ) -> Releasable: ...
    def transfer(self, handle: Releasable) -> str: ...
    def check_xfer_state(self, handle: Releasable) -> str: ...
    def get_new_notifs(self) -> object: ...


class NixlErrors:
    """NIXL's exceptions, which have no common root."""

    def __init__(self, api: ModuleType) -> None:
        found = vars(api.nixlBind).items()
        self.all: tuple[type[Exception], ...] = tuple(
            kind
            for name, kind in found
            if name.startswith("nixl") and name.endswith("Error")
        )
        self.at_start: tuple[type[Exception], ...] = (*self.all, RuntimeError)
        self.disconnected: type[Exception] = api.nixlBind.nixlRemoteDisconnectError


def is_installed() -> bool:
    """Return whether a NIXL wheel is installed, without importing it."""
    return any(importlib.util.find_spec(wheel) is not None for wheel in WHEELS)


def make_agent(
    name: str, network_device: str, *, is_on_gpu: bool = False, has_thread: bool = True
) -> tuple[NixlAgent, NixlErrors]:
    """Return an agent with a UCX backend that notices dead peers. Raises `ConfigError`.

    `network_device` (empty means loopback) is set in the environment, where UCX reads it, so a
    process has one device. `is_on_gpu` says where the agent's pool is. Without `has_thread`, the
    agent's owner calls `get_new_notifs` regularly, which also makes the reads of peers progress.
    """
    os.environ["UCX_NET_DEVICES"] = network_device or "lo"
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    if is_on_gpu:
        # If UCX sees no active NVLink, reads between processes of one GPU would go through TCP
        # without this variable. On a host without a GPU, UCX would warn that the variable is
        # unused.
        os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
    api = _load()
    errors = NixlErrors(api)
    try:
        with _unspun(api):
            config = api.nixl_agent_config(enable_prog_thread=has_thread, backends=[])
            agent: NixlAgent = api.nixl_agent(name, config)
        # Without this mode, a transfer whose peer dies never ends.
        agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
    except errors.at_start as error:
        raise ConfigError(f"nixl cannot start: {error}") from error
    return agent, errors


def _load() -> ModuleType:
    reasons = []
    for wheel in WHEELS:
        try:
            return importlib.import_module(f"{wheel}._api")
        except ImportError as error:
            reasons.append(str(error))
    raise ConfigError(
        "the nixl transport needs the NIXL wheel: run `pip install -e '.[nixl]'` in baton's "
        f"folder, or start with `make serve EXTRAS=nixl` ({'; '.join(reasons)})"
    )


@contextmanager
def _unspun(api: ModuleType) -> Iterator[None]:
    """Return a class of agents whose progress thread sleeps; the wrapper has no option for it."""
    original = api.nixlBind.nixlAgentConfig

    class Config(original):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(
                name, PROGRESS_DELAY_US if name == "pthrDelay" else value
            )

    api.nixlBind.nixlAgentConfig = Config
    try:
        yield
    finally:
        api.nixlBind.nixlAgentConfig = original


WARM_UP_BYTES = 64
MAX_DEVICE_DIGITS = 3


def segment(device: str) -> tuple[str, int]:
    """Return NIXL's memory type and device number of "cpu" or "cuda:1"."""
    kind, _, index = device.partition(":")
    if (
        kind not in ("cpu", "cuda")
        or not (index or "0").isdecimal()
        or (len(index) > MAX_DEVICE_DIGITS)
    ):
        raise TransferError(f"nixl knows no device {device!r}")
    return ("VRAM" if kind == "cuda" else "DRAM"), int(index or 0)


def warm_up_bytes(block_bytes: int) -> int:
    return min(WARM_UP_BYTES, block_bytes)


def block_rows(memory: PoolMemory, offset: int, num_bytes: int) -> NDArray[np.uint64]:
    """Return a descriptor (address, length, device) for a range of each block: [num_blocks, 3]."""
    rows = np.empty((memory.num_blocks, 3), np.uint64)
    offsets = np.arange(memory.num_blocks, dtype=np.uint64) * np.uint64(
        memory.block_bytes
    )
    rows[:, 0] = offsets + np.uint64(memory.address + offset)
    rows[:, 1] = num_bytes
    rows[:, 2] = segment(memory.device)[1]
    return rows


def one_row(address: int, num_bytes: int, device: int) -> NDArray[np.uint64]:
    return np.array([[address, num_bytes, device]], np.uint64)
