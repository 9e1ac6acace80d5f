"""The text of the batch script that runs a cluster as one heterogeneous Slurm job.

`slurm` writes and submits it. The first component holds the routers and each further one a pool.
Every component has one step, whose tasks run `slurm_task`. The script holds no setting and no
secret of baton: the tasks read those from the private folder of the job. This file is pure.
"""

import math
import shlex
from collections.abc import Sequence

import msgspec

from baton.deploy.cluster.description import Description
from baton.deploy.cluster.processes import ROUTERS, ClusterPlan, ProcessSpec

ADDRESS = "address"  # the file that holds the routers' address once the job runs
PROCESSES = "processes"  # its subfolder with a folder per process
FUNCTIONS = r"""
# Print host=address of each host of a node list.
addresses() {
  local host
  for host in $(scontrol show hostnames "$1"); do
    scontrol show node --oneliner "$host" | sed -n "s/.* NodeAddr=\([^ ]*\).*/$host=\1/p"
  done
}

# Send a signal to the step of a component, as soon as the step is there.
tell() {
  local job=SLURM_JOB_ID_HET_GROUP_$2 step
  while kill -0 "${steps[$2]}" 2>/dev/null; do
    step=$(squeue --noheader --steps --jobs="${!job}" --format="%i %j" |
      sed -n "s/ ${pools[$2]}\$//p")
    if [ -n "$step" ]; then
      scancel --signal="$1" "$step"
      return
    fi
    sleep 1
  done
}

# Routers finish their requests before the nodes that serve them are told to end.
drain() {
  trap '' TERM INT
  local i
  tell TERM 0
  wait "${steps[0]}"
  for i in "${!steps[@]}"; do tell TERM "$i"; done
  wait
}

hurry() {
  trap '' TERM INT
  local i
  for i in "${!steps[@]}"; do tell INT "$i"; done
  wait
}
"""
LAST = """
trap 'drain; exit 0' TERM
trap 'hurry; exit 0' INT
wait -n
echo "a step has ended, so all others end too" >&2
drain
exit 1
"""


class Component(msgspec.Struct, frozen=True):
    """A component of the job: equal processes, evenly spread over its hosts."""

    pool: str
    num_tasks: int
    tasks_per_host: int
    cpus: int
    memory_mib: int
    generic_resources: tuple[tuple[str, int], ...]  # name and count of each task
    features: tuple[str, ...]

    @property
    def num_hosts(self) -> int:
        return math.ceil(self.num_tasks / self.tasks_per_host)


def components_of(plan: ClusterPlan) -> list[Component]:
    """Return the components: all routers on one host, then every pool."""
    names = dict.fromkeys(spec.pool for spec in plan.processes)
    return [_component(plan.description, name, plan.pool(name)) for name in names]


def script_of(plan: ClusterPlan, folder: str, logs: str, python: str) -> str:
    """Return the batch script of `plan`, whose files are in `folder` on every host."""
    description = plan.description
    components = components_of(plan)
    head = [
        f"--job-name=baton-{description.name}",
        f'--output="{logs.replace("%", "%%")}/job.log"',
        "--open-mode=append",
    ]
    if description.slurm.time:
        head.append(f"--signal=B:TERM@{math.ceil(drain_s(plan))}")
    blocks = [
        [*(head if component.pool == ROUTERS else []), *_requested(description, component)]
        for component in components
    ]
    lines = ["#!/bin/bash"]
    for i, block in enumerate(blocks):
        lines += ["#SBATCH hetjob"] if i else []
        lines += [f"#SBATCH {option}" for option in block]
    lines += [
        "set -u",
        "umask 077",
        f"folder={shlex.quote(folder)}",
        f"pools=({' '.join(component.pool for component in components)})",
        "steps=()",
        FUNCTIONS,
        "# A job that was requeued finds what its last run has left.",
        f'rm -rf "$folder/{PROCESSES}" "$folder/{ADDRESS}"',
        'routers=$(addresses "$SLURM_JOB_NODELIST_HET_GROUP_0")',
        "export PYTHONUNBUFFERED=1 HOST_ADDRESSES ROUTERS_ADDRESS=${routers#*=}",
        f'echo "$ROUTERS_ADDRESS" >"$folder/.{ADDRESS}"',
        f'mv "$folder/.{ADDRESS}" "$folder/{ADDRESS}"',
    ]
    for i, component in enumerate(components):
        lines += ["", *_step(i, component, python)]
    return "\n".join(lines) + "\n" + LAST


def drain_s(plan: ClusterPlan) -> float:
    """Return the longest time in which the routers and then the nodes end."""
    routers = [spec.grace_s for spec in plan.processes if spec.role == "router"]
    nodes = [spec.grace_s for spec in plan.processes if spec.role != "router"]
    return max(routers) + max(nodes)


def _component(description: Description, name: str, specs: Sequence[ProcessSpec]) -> Component:
    first = specs[0]
    per_host = 1
    if name == ROUTERS:
        per_host = len(specs)
    elif first.gpus and description.gpus_per_host:
        per_host = min(len(specs), max(1, description.gpus_per_host // first.gpus))
    gpus = [("gpu", first.gpus)] if first.gpus else []
    return Component(
        pool=name,
        num_tasks=len(specs),
        tasks_per_host=per_host,
        cpus=first.cpus,
        memory_mib=first.memory_mib,
        generic_resources=(*gpus, *((k, int(v)) for k, v in first.resources.items())),
        features=tuple(first.node_selector),
    )


def _requested(description: Description, component: Component) -> list[str]:
    """Return the options of sbatch for a component. Memory and resources are those of a host."""
    per_host = component.tasks_per_host
    resources = ",".join(f"{n}:{count * per_host}" for n, count in component.generic_resources)
    options = description.slurm
    lines = [
        f"--nodes={component.num_hosts}",
        f"--ntasks={component.num_tasks}",
        f"--ntasks-per-node={per_host}",
        f"--cpus-per-task={component.cpus}" if component.cpus else "",
        f"--mem={component.memory_mib * per_host}M" if component.memory_mib else "",
        f"--gres={resources}" if resources else "",
        f'--constraint="{"&".join(component.features)}"' if component.features else "",
        "--requeue",
        f"--partition={options.partition}" if options.partition else "",
        f"--account={options.account}" if options.account else "",
        f"--time={options.time}" if options.time else "",
        *options.arguments,
    ]
    return [line for line in lines if line]


def _step(i: int, component: Component, python: str) -> list[str]:
    cpus = f" --cpus-per-task={component.cpus}" if component.cpus else ""
    module = "baton.deploy.cluster.slurm_task"
    return [
        f'HOST_ADDRESSES=$(addresses "$SLURM_JOB_NODELIST_HET_GROUP_{i}")',
        f"srun --het-group={i} --job-name={component.pool} --kill-on-bad-exit=1{cpus} \\",
        f'  {shlex.quote(python)} -m {module} "$folder" {component.pool} &',
        "steps+=($!)",
    ]
