"""`baton render --on slurm`: batch scripts that run a cluster as several jobs.

One job holds the routers, and an array each pool: a task of an array is a host with its share of
the nodes. So Slurm requeues the nodes of a host that fails, and nothing else. The routers' job
writes its address into the folder, which all hosts must share; if it comes to another host, the
nodes begin anew. The scripts hold no setting and no secret of baton: tasks read those there.
"""

import math
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from baton.deploy.cluster import supervision
from baton.deploy.cluster.description import Description
from baton.deploy.cluster.processes import (
    ROUTERS,
    ClusterAddresses,
    ClusterPlan,
    ProcessSpec,
    filled,
)
from baton.deploy.cluster.state import write_private
from baton.deploy.templates import filled_in
from baton.protocol.errors import BatonError, ConfigError
from baton.runtime.clock import monotonic
from baton.runtime.host import VISIBLE_GPUS

SUBMIT = "submit.sh"
PLAN = "plan.json"
KEY = "key"
ROUTERS_FILE = "routers"  # with the address of the routers
# Variables of the plan. All routers of a job are on one host.
FOLDER = "$(FOLDER)"
OWN_ADDRESS = "$(OWN_ADDRESS)"
ROUTERS_ADDRESS = "$(ROUTERS_ADDRESS)"
WAIT_S = 1.0  # between two looks for routers whose job has not begun
LOOK_S = 5.0  # between two looks whether they have moved


class SlurmPlan(msgspec.Struct, frozen=True):
    """The processes of a job. They hold secrets, so only the user may read their file."""

    processes: tuple[ProcessSpec, ...]
    logs: str  # folder


def addresses_of(description: Description) -> ClusterAddresses:
    """Return the places of processes. Raises `ConfigError` for what Slurm cannot grant."""
    description.check_no_hosts(
        "Slurm chooses the hosts; take the line out, and write `slurm: {arguments: "
        "[--nodelist=...]}` to restrict its choice"
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
    routers = (ROUTERS_ADDRESS,) * len(description.routers)
    key = f"{FOLDER}/{KEY}" if description.key else ""
    return ClusterAddresses(routers, OWN_ADDRESS, listen=OWN_ADDRESS, key=key)


def render(plan: ClusterPlan, folder: Path) -> list[Path]:
    """Write the script, and the plan and a copy of the key as files that only this user reads."""
    folder = folder.absolute()
    logs = plan.description.logs or str(folder / "logs")
    for path in (str(folder), logs):
        if not re.fullmatch(r"[\w@+=:,./ %-]+", path):
            raise ConfigError(
                f"sbatch cannot write to {path}: use a folder with plain characters in its name"
            )
    # Slurm makes no folder for the output of a job.
    Path(logs).mkdir(parents=True, exist_ok=True)
    pools = list(dict.fromkeys(spec.pool for spec in plan.processes))
    files = {
        f"{pool}.sh": _script_of(plan, pool, str(folder), logs).encode()
        for pool in pools
    }
    submission = filled_in(
        "slurm-submit.sh", folder=str(folder), pools=pools, routers_file=ROUTERS_FILE
    )
    files |= {
        SUBMIT: submission.encode(),
        PLAN: msgspec.json.encode(SlurmPlan(plan.processes, logs)),
    }
    if plan.description.key:
        files[KEY] = Path(plan.description.key).read_bytes()
    for name, content in files.items():
        write_private(folder / name, content)
    return [folder / name for name in files]


def _script_of(plan: ClusterPlan, pool: str, folder: str, logs: str) -> str:
    """Return the script of a pool's job, in whose array each task is a host.

    The nodes are spread evenly; memory and resources are per host.
    """
    description = plan.description
    specs = plan.pool(pool)
    first = specs[0]
    is_router = pool == ROUTERS
    per_host = 1
    if is_router:
        per_host = len(specs)
    elif first.gpus and description.gpus_per_host:
        per_host = min(len(specs), max(1, description.gpus_per_host // first.gpus))
    counts = {"gpu": first.gpus} if first.gpus else {}
    counts |= {name: int(count) for name, count in first.resources.items()}
    return filled_in(
        "slurm-pool.sh",
        name=description.name,
        pool=pool,
        slurm=description.slurm,
        folder=folder,
        logs=logs,
        is_router=is_router,
        routers_file=ROUTERS_FILE,
        grace_s=math.ceil(first.grace_s),
        per_host=per_host,
        num_hosts=math.ceil(len(specs) / per_host),
        cpus=first.cpus,
        memory_mib=first.memory_mib,
        resources=",".join(
            f"{name}:{count * per_host}" for name, count in counts.items()
        ),
        features=list(first.node_selector),
        python=sys.executable,
        module=__name__,
    )


def placed(
    spec: ProcessSpec, folder: Path, routers: str, environment: Mapping[str, str]
) -> ProcessSpec:
    """Return `spec` with its task's addresses and GPUs. Raises `ConfigError` without GPUs."""
    host = environment["SLURMD_NODENAME"]
    values = {
        ROUTERS_ADDRESS: routers,
        OWN_ADDRESS: environment["OWN_ADDRESS"],
        FOLDER: str(folder),
    }
    nth = int(environment["SLURM_LOCALID"])
    # Two tasks of an array may get one host, so each node of a pool has fixed ports of its own.
    spec = filled(spec, host, spec.index, values)
    if not spec.gpus:
        return spec
    gpus = [one for one in environment.get(VISIBLE_GPUS, "").split(",") if one]
    if len(gpus) > spec.gpus:  # Slurm has not bound the tasks to their own
        gpus = gpus[nth * spec.gpus : (nth + 1) * spec.gpus]
    if len(gpus) < spec.gpus:
        raise ConfigError(
            f"{spec.name} on {host}: it needs {spec.gpus} GPUs and Slurm gave it {len(gpus)}; see "
            "gres.conf, gpus and gpus_per_host"
        )
    return msgspec.structs.replace(spec, env={**spec.env, VISIBLE_GPUS: ",".join(gpus)})


def main(folder: Path, pool: str, environment: Mapping[str, str]) -> int:
    """Run one process until its step is told to end, and return the exit code.

    The last host of an array may have more places than there are processes left.
    """
    plan = msgspec.json.decode((folder / PLAN).read_bytes(), type=SlurmPlan)
    first = int(environment.get("SLURM_ARRAY_TASK_ID", "0")) * int(
        environment["SLURM_NTASKS"]
    )
    index = first + int(environment["SLURM_PROCID"])
    own = [one for one in plan.processes if (one.pool, one.index) == (pool, index)]
    if not own:
        return 0
    (spec,) = own
    try:
        is_moved = True
        while is_moved:
            routers = _routers_of(folder)
            job = supervision.HostJob(
                (placed(spec, folder, routers, environment),), plan.logs
            )
            watch = RoutersWatch(folder, routers)
            is_moved = supervision.supervise(job, is_over=watch.are_elsewhere)
    except BatonError as error:
        print(f"baton: {error.message}", file=sys.stderr)
        return 1
    return 0


class RoutersWatch:
    """Tells when the routers have come to another address. It never waits for their file."""

    def __init__(self, folder: Path, routers: str) -> None:
        self._folder = folder
        self._routers = routers
        self._look_at_s = monotonic() + LOOK_S

    def are_elsewhere(self) -> bool:
        if monotonic() < self._look_at_s:  # the folder is that of all hosts
            return False
        self._look_at_s = monotonic() + LOOK_S
        return _announced(self._folder) not in ("", self._routers)


def _routers_of(folder: Path) -> str:
    """Return the address of the routers, once their job has begun. SIGTERM ends the wait."""
    while not (routers := _announced(folder)):
        time.sleep(WAIT_S)
    return routers


def _announced(folder: Path) -> str:
    """Return the address in the routers' file; empty while it cannot be read."""
    try:
        return (folder / ROUTERS_FILE).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], os.environ))
