"""The origin of a figure: commit, settings, machine, its load, and the versions in use.

It names the class of the machine and never the machine: no host or user name, no address. A fact
that cannot be found is reported as unknown, and never stops a run.
"""

import datetime
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec
import psutil

import baton

COMMAND_TIMEOUT_S = 5.0
PACKAGES = ("aiohttp", "msgspec", "numpy")
Load = tuple[float, float, float]


class Machine(msgspec.Struct, frozen=True):
    """The kind of machine that ran the client (and, on one host, the server)."""

    cpu_model: str
    num_cpus: int  # that this process may use
    num_cpus_total: int
    memory_bytes: int  # 0 if unknown
    gpus: list[str]  # name, memory and driver of each
    system: str  # kernel and architecture


class Provenance(msgspec.Struct, frozen=True):
    """The origin of a report. Load averages are over 1, 5 and 15 minutes."""

    created_at: str  # UTC, ISO 8601
    command_line: list[str]
    baton_version: str
    commit: str  # empty outside a checkout
    dirty: bool  # files of the checkout differed from the commit
    machine: Machine
    versions: dict[str, str]
    load_before: Load | None
    load_after: Load | None = None
    gpus_after: list[str] = []  # clocks, power, throttling

    @property
    def revision(self) -> str:
        """Return the commit or the version, for a heading."""
        if not self.commit:
            return f"version {self.baton_version}"
        return self.commit[:12] + (" with local changes" if self.dirty else "")


def collect(
    command_line: Sequence[str], packages: Sequence[str] = PACKAGES
) -> Provenance:
    """Return the facts about this checkout, this machine, and those packages that it has."""
    commit, dirty = _checkout(Path(__file__).resolve())
    return Provenance(
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command_line=list(command_line),
        baton_version=baton.__version__,
        commit=commit,
        dirty=dirty,
        machine=_machine(),
        versions={"python": platform.python_version()}
        | {
            name: one.version
            for name in packages
            for one in metadata.distributions(name=name)
        },
        load_before=os.getloadavg(),
    )


def complete(before: Provenance) -> Provenance:
    """Return `before` with the facts that are known only after the run."""
    return msgspec.structs.replace(
        before, load_after=os.getloadavg(), gpus_after=gpu_states()
    )


def gpu_states() -> list[str]:
    """Return clocks, power and temperature of each GPU at this moment."""
    return _gpus(
        "name,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"
    )


def cpu_model_of(cpuinfo: str) -> str:
    """Return the processor's name in the text of /proc/cpuinfo, or "" if it has none."""
    found = re.search(r"(?im)^(?:model name|cpu model|hardware)\s*:(.*)$", cpuinfo)
    return " ".join(found[1].split()) if found else ""


def _machine() -> Machine:
    cpuinfo = Path("/proc/cpuinfo")
    num_cpus = os.cpu_count() or 1
    model = cpu_model_of(cpuinfo.read_text("utf-8") if cpuinfo.exists() else "")
    return Machine(
        cpu_model=model or f"unknown {platform.machine()} processor",
        num_cpus=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else num_cpus,
        num_cpus_total=num_cpus,
        memory_bytes=psutil.virtual_memory().total,
        gpus=_gpus("name,memory.total,driver_version"),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
    )


def _checkout(file: Path) -> tuple[str, bool]:
    """Return the commit, and whether files differ from it; "" outside a checkout of baton.

    An installed baton may be in an environment inside another repository, whose commit would be
    wrong, so `file` itself has to be under version control.
    """
    git = ["git", "-C", str(file.parent)]
    if not _lines([*git, "ls-files", file.name]):
        return "", False
    changes = _lines([*git, "status", "--porcelain", "--untracked-files=no"])
    return "".join(_lines([*git, "rev-parse", "HEAD"])), bool(changes)


def _gpus(fields: str) -> list[str]:
    return _lines(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"])


def _lines(command: list[str]) -> list[str]:
    """Return the output of a small command; nothing if it is missing, fails or hangs."""
    try:
        output = subprocess.check_output(
            command, stderr=subprocess.DEVNULL, timeout=COMMAND_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return output.decode(errors="replace").splitlines()
