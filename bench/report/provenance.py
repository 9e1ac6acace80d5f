"""Where a figure comes from: commit, settings, machine, its load, and the versions in use.

Every report carries one `Provenance`: `collect` it before the first request, `complete` it after
the last. It names the class of the machine and never the machine: no host or user name, no
address, no secret. What cannot be found out is said to be unknown, it never stops a run.
"""

import datetime
import hashlib
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec

import baton
from baton.bench.report.redaction import clean_words, without_secrets

COMMAND_TIMEOUT_S = 5.0
PACKAGES = ("aiohttp", "msgspec", "numpy")
Load = tuple[float, float, float]


class Machine(msgspec.Struct, frozen=True):
    """What kind of machine ran the client (and, on one host, the server)."""

    cpu_model: str
    num_cpus: int  # that this process may use
    num_cpus_total: int
    memory_bytes: int  # 0 if unknown
    gpus: list[str]  # name, memory and driver of each
    system: str  # kernel and architecture


class Provenance(msgspec.Struct, frozen=True):
    """Load averages are over 1, 5 and 15 minutes; None where the system has none."""

    created_at: str  # UTC, ISO 8601
    command_line: list[str]
    baton_version: str
    commit: str  # empty outside of a checkout
    dirty: bool  # files of the checkout differed from the commit
    config_hash: str  # sha256 of the canonical settings without secrets
    machine: Machine
    versions: dict[str, str]
    load_before: Load | None
    load_after: Load | None = None
    gpus_after: list[str] = msgspec.field(default_factory=list)  # clocks, power, throttling

    @property
    def revision(self) -> str:
        """Commit or version, for a heading."""
        if not self.commit:
            return f"version {self.baton_version}"
        return self.commit[:12] + (" with local changes" if self.dirty else "")


def collect(
    settings: object, command_line: Sequence[str], secrets: Sequence[str] = ()
) -> Provenance:
    """Looks at this checkout and this machine, now. `settings` is a Struct or plain data."""
    commit, dirty = _checkout(Path(__file__).resolve().parent)
    return Provenance(
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command_line=clean_words(command_line, secrets),
        baton_version=baton.__version__,
        commit=commit,
        dirty=dirty,
        config_hash=config_hash(settings),
        machine=machine(),
        versions=_versions(),
        load_before=_load(),
    )


def complete(before: Provenance) -> Provenance:
    """`before` with what can only be known after the run."""
    return msgspec.structs.replace(before, load_after=_load(), gpus_after=_gpu_states())


def config_hash(settings: object) -> str:
    """Equal for equal settings on any machine; a key of access is none of the settings."""
    plain = without_secrets(msgspec.to_builtins(settings))
    return hashlib.sha256(msgspec.json.encode(plain, order="deterministic")).hexdigest()


def machine() -> Machine:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    total = os.cpu_count() or 0
    query = "--query-gpu=name,memory.total,driver_version"
    return Machine(
        cpu_model=_cpu_model(),
        num_cpus=usable or total,
        num_cpus_total=total,
        memory_bytes=_memory_bytes(),
        gpus=_lines(["nvidia-smi", query, "--format=csv,noheader"]),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
    )


def cpu_model_of(cpuinfo: str) -> str:
    """The processor's name in the text of /proc/cpuinfo; empty if it has none."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() in ("model name", "cpu model", "hardware"):
            return " ".join(value.split())
    return ""


def _cpu_model() -> str:
    try:
        found = cpu_model_of(Path("/proc/cpuinfo").read_text(errors="replace"))
    except OSError:
        found = ""
    return found or platform.processor() or f"unknown {platform.machine()} processor"


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


def _load() -> Load | None:
    try:
        return os.getloadavg()
    except OSError:
        return None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


def _checkout(folder: Path) -> tuple[str, bool]:
    """Commit and whether files differ from it; empty where `folder` is in no checkout of baton.

    An installed baton may lie in an environment inside of somebody's own repository: that
    repository's commit says nothing about it, so the file itself has to be under version control.
    """
    git = ["git", "-C", str(folder)]
    if not _lines([*git, "ls-files", "provenance.py"]):
        return "", False
    commit = _lines([*git, "rev-parse", "HEAD"])
    changes = _lines([*git, "status", "--porcelain", "--untracked-files=no"])
    return (commit[0] if commit else ""), bool(changes)


def _gpu_states() -> list[str]:
    # The last field was renamed; each driver knows one of the two names.
    for reasons in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):
        fields = f"name,clocks.sm,clocks.mem,power.draw,temperature.gpu,{reasons}"
        if found := _lines(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]):
            return found
    return []


def _lines(command: list[str]) -> list[str]:
    """What a small command prints; nothing if it is not there, fails or hangs."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
