"""The facts about one machine and the demands on it. Probers fill them in, and rules read them.

They are sent as JSON between the hosts of a cluster's check, so every field has a default, and a
report of another release can still be read. A default means "unknown" or "absent".
"""

from typing import Literal

import msgspec

from baton.engine.compute_facts import ComputeFacts

UNLIMITED = -1


class Wants(msgspec.Struct, frozen=True):
    """What processes need from their machine."""

    gpus: int = 0
    pool_mib: int = 0  # 0: the share of free memory that a node would take
    needs_nixl: bool = False  # blocks travel between hosts, or between GPUs
    ports: tuple[str, ...] = ()  # host:port on which processes will listen
    reach: tuple[str, ...] = ()  # host:port that processes will dial


class GpuUser(msgspec.Struct, frozen=True):
    pid: int
    name: str
    used_mib: int


class GpuFacts(msgspec.Struct, frozen=True):
    index: int
    name: str
    total_mib: int
    used_mib: int
    users: tuple[GpuUser, ...] = ()


class NixlFacts(msgspec.Struct, frozen=True):
    is_installed: bool = False
    failure: str = ""  # why no agent could be made
    lanes: tuple[str, ...] = ()  # transport/device that UCX can use, such as tcp/eth0


class PortFacts(msgspec.Struct, frozen=True):
    """A port on which a process wants to listen."""

    address: str
    problem: str = ""  # why it cannot be listened on
    holder: str = ""  # the program that has it


class ReachFacts(msgspec.Struct, frozen=True):
    """Another host's port, as seen from here."""

    address: str
    state: Literal["open", "refused", "silent"]
    reason: str = ""


class MemoryFacts(msgspec.Struct, frozen=True):
    total_mib: int = 0
    available_mib: int = 0  # what the limits of cgroups leave, too
    huge_mib: int = 0  # reserved as huge pages
    huge_shared: str = ""  # when the kernel uses huge pages for shared memory
    shm_mib: int = 0  # free in /dev/shm


class LimitFacts(msgspec.Struct, frozen=True):
    """Limits of this user's processes; `UNLIMITED` without a limit, 0 if it is unknown."""

    memlock_kib: int = 0
    open_files: int = 0
    tasks: int = 0  # processes and threads, by the cgroup


class CpuFacts(msgspec.Struct, frozen=True):
    num_cpus: int = 0
    num_usable: int = 0  # by affinity and the quota of the cgroup
    features: tuple[str, ...] = ()


class ClockFacts(msgspec.Struct, frozen=True):
    now_s: float = 0.0  # since 1970
    installed_s: float = 0.0  # when baton's newest file was written
    is_synchronised: bool | None = None


class FileFacts(msgspec.Struct, frozen=True):
    """A model or a key. Equal digests mean equal contents."""

    path: str = ""
    digest: str = ""
    failure: str = ""


class MachineFacts(msgspec.Struct, frozen=True):
    """Everything that was found on one machine."""

    wants: Wants = Wants()
    host: str = ""
    version: str = ""
    protocol: int = 0
    python: tuple[int, int, int] = (0, 0, 0)
    compute: ComputeFacts = ComputeFacts()
    gpus: tuple[GpuFacts, ...] = ()
    nixl: NixlFacts = NixlFacts()
    rdma_ports: tuple[str, ...] = ()  # that are active
    memory: MemoryFacts = MemoryFacts()
    limits: LimitFacts = LimitFacts()
    cpu: CpuFacts = CpuFacts()
    clock: ClockFacts = ClockFacts()
    ports: tuple[PortFacts, ...] = ()
    reach: tuple[ReachFacts, ...] = ()
    model: FileFacts = FileFacts()
    key: FileFacts = FileFacts()
