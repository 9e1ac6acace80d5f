"""Collect the facts of this machine: from the kernel, from limits, and from a few programs.

`commands` calls it. torch and NIXL, which may crash or take long, are tried in separate processes.
It changes nothing on the machine, and keeps nothing open.
"""

import contextlib
import csv
import ctypes
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from baton.deploy.doctor.facts import (
    UNLIMITED,
    ClockFacts,
    CpuFacts,
    GpuFacts,
    GpuUser,
    LimitFacts,
    MachineFacts,
    MemoryFacts,
    NixlFacts,
    PortFacts,
    ReachFacts,
    Wants,
)
from baton.deploy.doctor.files import key_facts, model_facts
from baton.deploy.ports import check_port
from baton.engine.compute_facts import ComputeFacts
from baton.kv_transfer.pools import available_bytes
from baton.protocol import VERSION
from baton.protocol.config import ClusterConfig, EngineConfig
from baton.protocol.errors import ConfigError
from baton.protocol.messages import PROTOCOL_VERSION
from baton.runtime.host import active_ports, threads_per_rank

CHILD_TIMEOUT_S = 60.0
REACH_TIMEOUT_S = 3.0
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
SHARED_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
MAX_TASKS = Path("/sys/fs/cgroup/pids.max")
NVIDIA_SMI = ("nvidia-smi", "--format=csv,noheader,nounits")
# From sys/timex.h: the kernel's answer when the clock is not synchronised.
TIME_ERROR = 5
MIB = 1 << 20

S = TypeVar("S", bound=msgspec.Struct)


def machine_facts(config: ClusterConfig, wants: Wants) -> MachineFacts:
    """Return all facts; `config` names the model, the key and the network device."""
    return MachineFacts(
        wants=wants,
        host=socket.gethostname(),
        version=VERSION,
        protocol=PROTOCOL_VERSION,
        python=sys.version_info[:3],
        compute=_compute(),
        gpus=_gpus(),
        nixl=_nixl(config.transfer.device),
        rdma_ports=tuple(active_ports()),
        memory=_memory(),
        limits=_limits(),
        cpu=_cpu(),
        clock=_clock(),
        ports=tuple(_port(address) for address in wants.ports),
        reach=tuple(_reach(address) for address in wants.reach),
        model=model_facts(config.model),
        key=key_facts(config.keys),
    )


def _compute() -> ComputeFacts:
    facts, failure = _said_by("baton.engine.check_compute", (), ComputeFacts)
    return facts or ComputeFacts(failure=failure)


def _nixl(device: str) -> NixlFacts:
    facts, failure = _said_by("baton.deploy.doctor.check_nixl", (device,), NixlFacts)
    return facts or NixlFacts(is_installed=True, failure=failure)


def _said_by(module: str, words: Sequence[str], kind: type[S]) -> tuple[S | None, str]:
    """Run a module whose last line is a struct. Return the struct, or why there is none."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            capture_output=True, text=True, check=False, timeout=CHILD_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, f"no answer within {CHILD_TIMEOUT_S:g} s"
    try:
        return msgspec.json.decode((done.stdout.strip().splitlines() or [""])[-1], type=kind), ""
    except msgspec.MsgspecError:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return None, last


def _gpus() -> tuple[GpuFacts, ...]:
    """Return the GPUs that nvidia-smi lists; none if it is missing or does not work."""
    gpus = _nvidia_smi("gpu", "index", "uuid", "name", "memory.total", "memory.used")
    users = _nvidia_smi("compute-apps", "gpu_uuid", "pid", "process_name", "used_memory")
    return tuple(
        GpuFacts(
            _number(index), name, _number(total), _number(used),
            tuple(
                GpuUser(_number(pid), _program(program), _number(taken))
                for owner, pid, program, taken in users
                if owner == uuid
            ),
        )
        for index, uuid, name, total, used in gpus
    )  # fmt: skip


def _nvidia_smi(what: str, *columns: str) -> list[list[str]]:
    """Return a row of text for each object of the query."""
    try:
        done = subprocess.run(
            [*NVIDIA_SMI, f"--query-{what}={','.join(columns)}"],
            capture_output=True, text=True, check=True, timeout=CHILD_TIMEOUT_S,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return [row for row in rows if len(row) == len(columns)]  # it may say that there are none


def _program(text: str) -> str:
    return "unknown" if text.startswith("[") else Path(text).name


def _number(text: str) -> int:
    """Return a number of nvidia-smi, which writes [N/A] for unknown values."""
    return int(text) if text.strip().isdecimal() else 0


def _memory() -> MemoryFacts:
    info = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    shared = ""
    with contextlib.suppress(OSError):
        shared = SHARED_PAGES.read_text().partition("[")[2].partition("]")[0]
    return MemoryFacts(
        total_mib=int(info["MemTotal"].split()[0]) // 1024,
        available_mib=available_bytes() // MIB,
        huge_mib=int(info.get("Hugetlb", "0").split()[0]) // 1024,
        huge_shared=shared,
        shm_mib=shm.f_bavail * shm.f_frsize // MIB if shm else 0,
    )


def _limits() -> LimitFacts:
    tasks = UNLIMITED
    with contextlib.suppress(OSError, ValueError):  # without a limit the file says "max"
        tasks = int(MAX_TASKS.read_text())
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return LimitFacts(
        memlock_kib=UNLIMITED if memlock == resource.RLIM_INFINITY else memlock // 1024,
        open_files=UNLIMITED if files == resource.RLIM_INFINITY else files,
        tasks=tasks,
    )


def _cpu() -> CpuFacts:
    flags: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            flags = set(line.partition(":")[2].split())
            break
    found = tuple(name for name in CPU_FEATURES if name in flags)
    return CpuFacts(os.cpu_count() or 1, threads_per_rank(EngineConfig()), found)


def _clock() -> ClockFacts:
    installed_s = max(path.stat().st_mtime for path in Path(__file__).parent.glob("*.py"))
    return ClockFacts(time.time(), installed_s, _is_synchronised())


def _is_synchronised() -> bool | None:
    """Return whether the clock is synchronised; None if the kernel does not know."""
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)
    if adjtimex is None:
        return None
    state: int = adjtimex(ctypes.create_string_buffer(512))  # zeroed struct timex: only ask
    return None if state < 0 else state != TIME_ERROR


def _port(address: str) -> PortFacts:
    host, _, port = address.rpartition(":")
    try:
        check_port(host.strip("[]"), int(port), "")
    except ConfigError as error:
        return PortFacts(address, error.message.removesuffix(": "), _holder(int(port)))
    return PortFacts(address)


def _holder(port: int) -> str:
    """Return the program that listens on a port of this machine; empty if it cannot be seen."""
    with contextlib.suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            is_it = one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port
            if is_it and one.pid:
                process = psutil.Process(one.pid)
                # It runs as `baton serve` or `python -m baton serve`.
                is_ours = "baton" in (Path(word).name for word in process.cmdline()[:3])
                return f"{'baton' if is_ours else process.name()}, pid {one.pid}"
    return ""


def _reach(address: str) -> ReachFacts:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return ReachFacts(address, "refused")
    except OSError as error:
        reason = "timed out" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return ReachFacts(address, "silent", reason)
    return ReachFacts(address, "open")
