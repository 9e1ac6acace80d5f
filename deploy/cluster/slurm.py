"""`--on slurm`: one heterogeneous job, submitted with sbatch.

`render` writes the batch script, the plan and a copy of the key into a folder that only the user
can enter, and that all hosts of the job must share. Every task of the job runs one process and
writes its state there, which `status` reads. `stop` lets the job drain before it cancels it.
"""

import re
import shutil
import sys
from pathlib import Path

import msgspec

from baton.deploy.cluster.description import Description
from baton.deploy.cluster.host_seat import HostSeat
from baton.deploy.cluster.job_script import ADDRESS, PROCESSES, drain_s, script_of
from baton.deploy.cluster.keeper import ORDERS, STATUS, Orders
from baton.deploy.cluster.placeholders import FOLDER, OWN_ADDRESS
from baton.deploy.cluster.platform import PlatformOptions, ProcessState, ProcessStatus
from baton.deploy.cluster.processes import ROUTERS, ClusterPlan, ProcessPlaces, ProcessSpec
from baton.deploy.cluster.programs import order, question
from baton.deploy.cluster.running import write_private
from baton.deploy.cluster.slurm_task import PLAN, ROUTERS_ADDRESS, SlurmPlan, read_plan
from baton.deploy.health import url_of
from baton.protocol.errors import ConfigError, NodeError
from baton.runtime.clock import monotonic
from baton.runtime.process import Interrupts

SCRIPT, KEY, JOB = "job.sh", "key", "job"
WATCH_S = 0.5
HURRIED_S = 20.0
# The time that Slurm itself takes, beyond that of the processes.
EXTRA_STOP_S = 30.0
MISSING = "run this command on a host of the Slurm cluster, or use another platform with --on"
GONE = ("Invalid job id", "already completing or completed")
ACTIVE = {
    "COMPLETING", "CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "RUNNING",
    "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED",
}  # fmt: skip


class SlurmPlatform:
    """Implements `Platform` and `Reaching`."""

    def __init__(self, options: PlatformOptions) -> None:
        self._options = options

    def own(self, plan: ClusterPlan) -> tuple[ProcessSpec, ...]:
        return plan.processes

    def places(self, description: Description) -> ProcessPlaces:
        if self._options.hosts:
            raise ConfigError("--host: Slurm chooses the hosts of all processes; leave this out")
        _check(description)
        routers = (ROUTERS_ADDRESS,) * len(description.routers)
        key = f"{FOLDER}/{KEY}" if description.key else ""
        return ProcessPlaces(routers, OWN_ADDRESS, listen=OWN_ADDRESS, key=key)

    def render(self, plan: ClusterPlan, folder: Path) -> list[Path]:
        folder = folder.absolute()
        logs = plan.description.logs or str(folder / "logs")
        for path in (str(folder), logs):
            if not re.fullmatch(r"[\w@+=:,./ %-]+", path):
                raise ConfigError(
                    f"sbatch cannot write to {path}: use a folder with plain characters in its name"
                )
        # Slurm makes no folder for the output of a job.
        Path(logs).mkdir(parents=True, exist_ok=True)
        files = {
            SCRIPT: script_of(plan, str(folder), logs, sys.executable).encode(),
            PLAN: msgspec.json.encode(SlurmPlan(plan.processes, logs, drain_s(plan))),
        }
        if plan.description.key:
            files[KEY] = Path(plan.description.key).read_bytes()
        for name, content in files.items():
            write_private(folder / name, content)
        return [folder / name for name in files]

    def start(self, plan: ClusterPlan, folder: Path) -> None:
        self.render(plan, folder)
        said = _run("sbatch", "--parsable", str(folder.absolute() / SCRIPT))
        write_private(folder / JOB, said.strip().partition(";")[0].encode())

    def stop(self, folder: Path, *, is_hurried: bool = False) -> None:
        job = _job(folder)
        if not job or not _are_active(job):
            _tidy(folder)
            return
        limit_s = HURRIED_S if is_hurried else read_plan(folder).drain_s + EXTRA_STOP_S
        with Interrupts() as interrupts:
            is_draining = "RUNNING" in _states(job).values()
            if is_draining:
                # The batch script passes it on to its steps.
                number = "INT" if is_hurried else "TERM"
                _run("scancel", "--batch", f"--signal={number}", job, may_fail=True)
            if not is_draining or not _gone(job, limit_s, interrupts):
                _run("scancel", job, may_fail=True)
                if not _gone(job, EXTRA_STOP_S + limit_s, Interrupts()):
                    raise NodeError(f"job {job} does not end: see `squeue --jobs={job}`")
        _tidy(folder)

    def status(self, folder: Path) -> list[ProcessStatus]:
        job = _job(folder)
        if not job:
            return []
        plan = read_plan(folder)
        states = _states(job)
        pools = list(dict.fromkeys(spec.pool for spec in plan.processes))
        return [
            _status(spec, folder, job, states.get(pools.index(spec.pool), ""), plan.logs)
            for spec in plan.processes
        ]

    def urls(self, plan: ClusterPlan, folder: Path) -> tuple[str, ...]:
        """Return the URLs once the job runs: Slurm chooses the host of the routers."""
        try:
            address = (folder / ADDRESS).read_text().strip()
        except FileNotFoundError:
            return ()
        return tuple(
            url_of(address, spec.ports[0].port, is_tls=spec.is_tls) for spec in plan.pool(ROUTERS)
        )

    def seats(self, plan: ClusterPlan, folder: Path) -> list[HostSeat]:
        """Run further steps of the job, beside those that run its processes."""
        job = _job(folder)
        pools = list(dict.fromkeys(spec.pool for spec in plan.processes))
        placed: dict[str, list[ProcessSpec]] = {}
        for spec in plan.processes:
            path = folder / PROCESSES / spec.name / ORDERS
            if path.exists():
                orders = msgspec.json.decode(path.read_bytes(), type=Orders)
                placed.setdefault(orders.processes[0].host, []).append(orders.processes[0])
        seats = []
        for host, specs in placed.items():
            component = pools.index(specs[0].pool)
            launcher = (
                "srun", f"--jobid={job}", f"--het-group={component}", "--overlap", "--nodes=1",
                "--ntasks=1", f"--nodelist={host}",
            )  # fmt: skip
            program = (sys.executable, "-m", "baton")
            seats.append(HostSeat(host, tuple(specs), program, launcher))
        return seats


def _check(description: Description) -> None:
    """Raise `ConfigError` if the description asks for something that Slurm cannot do."""
    named = [f"routers[{i}].host" for i, one in enumerate(description.routers) if one.host]
    named += [f"pools.{name}.hosts" for name, pool in description.pools.items() if pool.hosts]
    if named:
        raise ConfigError(
            f"{named[0]}: Slurm chooses the hosts; take the line out, and write `slurm: "
            "{arguments: [--nodelist=...]}` to restrict its choice"
        )
    for name, pool in description.pools.items():
        for feature, value in pool.node_selector.items():
            if value not in ("", "true"):
                raise ConfigError(
                    f"pools.{name}.node_selector.{feature}: features of Slurm have no value; write "
                    f'`{feature}: "true"`'
                )
        for resource, count in pool.resources.items():
            if not count.isdecimal():
                raise ConfigError(
                    f"pools.{name}.resources.{resource}: give the number that each node needs"
                )


def _status(spec: ProcessSpec, folder: Path, job: str, state: str, logs: str) -> ProcessStatus:
    """Return a task's record of its process, or the state of its part of the job."""
    note = f"job {job} is {state or 'gone'}"
    if state not in ACTIVE:
        last_end = f"{note}; see {logs}/job.log"
        return ProcessStatus(spec.name, spec.role, "", "ended", "", last_end)
    path = folder / PROCESSES / spec.name / STATUS
    # The routers' address is written before any process starts.
    if state == "RUNNING" and (folder / ADDRESS).exists() and path.exists():
        return msgspec.json.decode(path.read_bytes(), type=list[ProcessStatus])[0]
    waiting: ProcessState = "waiting"
    return ProcessStatus(spec.name, spec.role, "", waiting, note)


def _states(job: str) -> dict[int, str]:
    """Return the state of each component; empty if Slurm has forgotten the job."""
    words = ("--noheader", "--states=all", f"--jobs={job}", "--format=%i %T")
    said = _run("squeue", *words, may_fail=True)
    states = {}
    for line in said.splitlines():
        number, _, state = line.partition(" ")
        states[int(number.partition("+")[2] or 0)] = state.strip()
    return states


def _are_active(job: str) -> bool:
    return not ACTIVE.isdisjoint(_states(job).values())


def _gone(job: str, timeout_s: float, interrupts: Interrupts) -> bool:
    """Return whether the job ends in time. A second Ctrl-C ends the waiting."""
    deadline_s = monotonic() + timeout_s
    while _are_active(job):
        if monotonic() > deadline_s or interrupts.requested:
            return False
        interrupts.wait(WATCH_S)
    return True


def _tidy(folder: Path) -> None:
    """Remove everything that `start` and the job have written, except logs."""
    shutil.rmtree(folder / PROCESSES, ignore_errors=True)
    for name in (SCRIPT, PLAN, KEY, ADDRESS, JOB):
        (folder / name).unlink(missing_ok=True)


def _job(folder: Path) -> str:
    try:
        return (folder / JOB).read_text()
    except FileNotFoundError:
        return ""


def _run(*words: str, may_fail: bool = False) -> str:
    """Run a command of Slurm and return what it prints. Raises `NodeError` if it fails.

    With `may_fail`, an ended job is not a failure.
    """
    run = question if words[0] == "squeue" else order
    try:
        return run(words, MISSING, GONE if may_fail else ())
    except NodeError as error:
        raise NodeError(f"{words[0]}: {error.message}") from error
