"""One task of a Slurm job, which runs the process of its rank in its pool.

The batch script of `job_script` starts it with the job's folder and a pool. It fills in the values
that only the process's machine knows, its addresses and GPUs, and then keeps the process running as
`keeper` does. `status` reads the folder of the process.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from baton.deploy.cluster import keeper
from baton.deploy.cluster.job_script import PROCESSES
from baton.deploy.cluster.placeholders import FOLDER, OWN_ADDRESS, filled
from baton.deploy.cluster.processes import ProcessSpec
from baton.deploy.cluster.running import make_private, write_private
from baton.protocol.errors import BatonError, ConfigError

PLAN = "plan.json"
# All routers of a job are on one host.
ROUTERS_ADDRESS = "$(ROUTERS_ADDRESS)"
GPUS = "CUDA_VISIBLE_DEVICES"


class SlurmPlan(msgspec.Struct, frozen=True):
    """The plan of a job. It holds secrets, so only the user may read its file."""

    processes: tuple[ProcessSpec, ...]
    logs: str  # folder
    drain_s: float  # the longest time in which all end


def read_plan(folder: Path) -> SlurmPlan:
    return msgspec.json.decode((folder / PLAN).read_bytes(), type=SlurmPlan)


def placed(spec: ProcessSpec, folder: Path, environment: Mapping[str, str]) -> ProcessSpec:
    """Return `spec` with its task's values. Raises `ConfigError` if GPUs are missing."""
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
    gpus = ",".join(_own_gpus(spec, host, nth, environment.get(GPUS, "")))
    return msgspec.structs.replace(spec, env={**spec.env, GPUS: gpus})


def _own_gpus(spec: ProcessSpec, host: str, nth: int, given: str) -> Sequence[str]:
    """Return the GPUs of the `nth` task of a host, among those that Slurm has given to the step."""
    gpus = [one for one in given.split(",") if one]
    if len(gpus) > spec.gpus:  # Slurm has not bound the tasks to their own
        gpus = gpus[nth * spec.gpus : (nth + 1) * spec.gpus]
    if len(gpus) < spec.gpus:
        raise ConfigError(
            f"{spec.name} on {host}: it needs {spec.gpus} GPUs and Slurm gave it {len(gpus)}; see "
            "gres.conf, gpus and gpus_per_host"
        )
    return gpus


def main(folder: Path, pool: str, environment: Mapping[str, str]) -> int:
    """Run the process until its step is told to end, and return the exit code."""
    plan = read_plan(folder)
    index = int(environment["SLURM_PROCID"])
    try:
        spec = next(one for one in plan.processes if (one.pool, one.index) == (pool, index))
        spec = placed(spec, folder, environment)
        own = folder / PROCESSES / spec.name
        make_private(own)
        orders = keeper.Orders((spec,), plan.logs)
        write_private(own / keeper.ORDERS, msgspec.json.encode(orders))
        return keeper.main(own)
    except BatonError as error:
        print(f"baton: {error.message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], os.environ))
