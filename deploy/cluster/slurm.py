"""`baton render --on slurm`: a batch script that runs a cluster as one heterogeneous job.

The first component holds the routers and each further one a pool. Every component has one step,
each of whose tasks runs this module, which runs one process. The script holds no setting and no
secret of baton: tasks read those from the private folder of the job, which all hosts must share.
"""

import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from baton.deploy.cluster import supervision
from baton.deploy.cluster.description import Description
from baton.deploy.cluster.processes import (
    ROUTERS,
    ClusterPlan,
    ProcessPlaces,
    ProcessSpec,
    filled,
)
from baton.deploy.cluster.state import make_private, write_private
from baton.protocol.errors import BatonError, ConfigError

SCRIPT, PLAN, KEY = "job.sh", "plan.json", "key"
PROCESSES = "processes"  # the subfolder with a folder per process
GPUS = "CUDA_VISIBLE_DEVICES"
# Variables of the plan. All routers of a job are on one host.
FOLDER, OWN_ADDRESS, ROUTERS_ADDRESS = "$(FOLDER)", "$(OWN_ADDRESS)", "$(ROUTERS_ADDRESS)"
ADDRESSES = r"""
# Print host=address of each host of a node list.
addresses() {
  local host
  for host in $(scontrol show hostnames "$1"); do
    scontrol show node --oneliner "$host" | sed -n "s/.* NodeAddr=\([^ ]*\).*/$host=\1/p"
  done
}
"""


class SlurmPlan(msgspec.Struct, frozen=True):
    """The processes of a job. They hold secrets, so only the user may read their file."""

    processes: tuple[ProcessSpec, ...]
    logs: str  # folder


def places_of(description: Description) -> ProcessPlaces:
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
    return ProcessPlaces(routers, OWN_ADDRESS, listen=OWN_ADDRESS, key=key)


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
    files = {
        SCRIPT: _script_of(plan, str(folder), logs).encode(),
        PLAN: msgspec.json.encode(SlurmPlan(plan.processes, logs)),
    }
    if plan.description.key:
        files[KEY] = Path(plan.description.key).read_bytes()
    for name, content in files.items():
        write_private(folder / name, content)
    return [folder / name for name in files]


def _script_of(plan: ClusterPlan, folder: str, logs: str) -> str:
    description = plan.description
    pools = list(dict.fromkeys(spec.pool for spec in plan.processes))
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name=baton-{description.name}",
        f'#SBATCH --output="{logs.replace("%", "%%")}/job.log"',
        "#SBATCH --open-mode=append",
    ]
    if description.slurm.time:
        longest_s = max(spec.grace_s for spec in plan.processes)
        lines.append(f"#SBATCH --signal=TERM@{math.ceil(longest_s)}")
    for pool in pools:
        lines += ["#SBATCH hetjob"] if pool != ROUTERS else []
        lines += [f"#SBATCH {option}" for option in _options(description, plan.pool(pool))]
    lines += [
        "set -u",
        "umask 077",
        f"folder={shlex.quote(folder)}",
        ADDRESSES,
        "# A job that was requeued finds what its last run has left.",
        f'rm -rf "$folder/{PROCESSES}"',
        'routers=$(addresses "$SLURM_JOB_NODELIST_HET_GROUP_0")',
        "export PYTHONUNBUFFERED=1 HOST_ADDRESSES ROUTERS_ADDRESS=${routers#*=}",
    ]
    for i, pool in enumerate(pools):
        cpus = f" --cpus-per-task={plan.pool(pool)[0].cpus}" if plan.pool(pool)[0].cpus else ""
        lines += [
            "",
            f'HOST_ADDRESSES=$(addresses "$SLURM_JOB_NODELIST_HET_GROUP_{i}")',
            # A step that was told to end exits with 0.
            f"{{ srun --het-group={i} --job-name={pool} --kill-on-bad-exit=1{cpus} \\",
            f'  {shlex.quote(sys.executable)} -m {__name__} "$folder" {pool} ||',
            '  scancel "$SLURM_JOB_ID"; } &',
        ]
    return "\n".join([*lines, "", "wait", ""])


def _options(description: Description, specs: Sequence[ProcessSpec]) -> list[str]:
    """Return the options of sbatch for a pool, spread evenly; memory and resources are per host."""
    first, options = specs[0], description.slurm
    per_host = 1
    if first.role == "router":
        per_host = len(specs)
    elif first.gpus and description.gpus_per_host:
        per_host = min(len(specs), max(1, description.gpus_per_host // first.gpus))
    counts = {"gpu": first.gpus} if first.gpus else {}
    counts |= {name: int(count) for name, count in first.resources.items()}
    resources = ",".join(f"{name}:{count * per_host}" for name, count in counts.items())
    lines = [
        f"--nodes={math.ceil(len(specs) / per_host)}",
        f"--ntasks={len(specs)}",
        f"--ntasks-per-node={per_host}",
        f"--cpus-per-task={first.cpus}" if first.cpus else "",
        f"--mem={first.memory_mib * per_host}M" if first.memory_mib else "",
        f"--gres={resources}" if resources else "",
        f'--constraint="{"&".join(first.node_selector)}"' if first.node_selector else "",
        "--requeue",
        f"--partition={options.partition}" if options.partition else "",
        f"--account={options.account}" if options.account else "",
        f"--time={options.time}" if options.time else "",
        *options.arguments,
    ]
    return [line for line in lines if line]


def placed(spec: ProcessSpec, folder: Path, environment: Mapping[str, str]) -> ProcessSpec:
    """Return `spec` with its task's addresses and GPUs. Raises `ConfigError` without GPUs."""
    host = environment["SLURMD_NODENAME"]
    addresses = dict(
        line.partition("=")[::2] for line in environment["HOST_ADDRESSES"].splitlines()
    )
    values = {
        ROUTERS_ADDRESS: environment["ROUTERS_ADDRESS"],
        OWN_ADDRESS: addresses[host],
        FOLDER: str(folder),
    }
    nth = int(environment["SLURM_LOCALID"])
    spec = filled(spec, host, nth, values)
    if not spec.gpus:
        return spec
    gpus = [one for one in environment.get(GPUS, "").split(",") if one]
    if len(gpus) > spec.gpus:  # Slurm has not bound the tasks to their own
        gpus = gpus[nth * spec.gpus : (nth + 1) * spec.gpus]
    if len(gpus) < spec.gpus:
        raise ConfigError(
            f"{spec.name} on {host}: it needs {spec.gpus} GPUs and Slurm gave it {len(gpus)}; see "
            "gres.conf, gpus and gpus_per_host"
        )
    return msgspec.structs.replace(spec, env={**spec.env, GPUS: ",".join(gpus)})


def main(folder: Path, pool: str, environment: Mapping[str, str]) -> int:
    """Run one task's process until its step is told to end, and return the exit code."""
    plan = msgspec.json.decode((folder / PLAN).read_bytes(), type=SlurmPlan)
    index = int(environment["SLURM_PROCID"])
    try:
        spec = next(one for one in plan.processes if (one.pool, one.index) == (pool, index))
        own = folder / PROCESSES / spec.name
        make_private(own)
        job = supervision.HostJob((placed(spec, folder, environment),), plan.logs)
        write_private(own / supervision.JOB, msgspec.json.encode(job))
        return supervision.main(own)
    except BatonError as error:
        print(f"baton: {error.message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], os.environ))
