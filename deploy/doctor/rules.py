"""Judge the facts about one machine: each rule checks one thing and returns at most one finding.

This file is pure. With a fault, nodes would not start or not reach each other. A warning is
something that costs speed, or that may be unintended. Both say what to do.
"""

from collections.abc import Callable

from baton.deploy.doctor.facts import UNLIMITED, MachineFacts
from baton.deploy.doctor.findings import Finding, fault, ok, warning

Rule = Callable[[MachineFacts], Finding | None]

OLDEST_PYTHON = (3, 11)
# A router takes a descriptor per client, and a node some for each of its peers.
FEW_FILES, MANY_FILES = 1024, 16384 + 1024
FEW_TASKS = 512
SMALL_SHM_MIB = 64
NIXL_HINT = "run `pip install -e '.[nixl]'` in baton's folder"


def python(facts: MachineFacts) -> Finding | None:
    version = ".".join(map(str, facts.python))
    if facts.python[:2] < OLDEST_PYTHON:
        return fault("python", f"{version} is too old: install Python 3.11 or newer")
    return ok("python", f"{version}, baton {facts.version}")


def torch(facts: MachineFacts) -> Finding | None:
    found = facts.compute
    if found.failure:
        return fault(
            "torch", f"torch does not load ({found.failure}): install baton again in a new folder"
        )
    build = f"for CUDA {found.cuda}" if found.cuda else "without CUDA"
    return ok("torch", f"{found.torch}, built {build}")


def cuda(facts: MachineFacts) -> Finding | None:
    found = facts.compute
    is_wanted = bool(facts.wants.gpus or facts.gpus)
    if found.failure or not is_wanted:
        return None
    bad = fault if facts.wants.gpus else warning
    if not found.cuda:
        return bad(
            "cuda",
            "there is a GPU, but this torch is built without CUDA: install torch with it (`make "
            "serve` without TORCH_INDEX, in a new environment)",
        )
    if found.driver_cuda and _numbers(found.driver_cuda)[0] < _numbers(found.cuda)[0]:
        return bad(
            "cuda",
            f"the driver supports CUDA up to {found.driver_cuda}, and torch is built for "
            f"{found.cuda}: install a newer NVIDIA driver, or a torch built for CUDA "
            f"{_numbers(found.driver_cuda)[0]}",
        )
    if found.no_gpu:
        return bad("cuda", f"torch can use no GPU: {found.no_gpu}")
    return ok("cuda", f"torch uses {found.num_gpus} GPUs; the driver supports {found.driver_cuda}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def gpus(facts: MachineFacts) -> Finding | None:
    if len(facts.gpus) < facts.wants.gpus:
        return fault(
            "gpus",
            f"{facts.wants.gpus} GPUs are wanted and nvidia-smi shows {len(facts.gpus)}: install "
            "the NVIDIA driver, lower gpus or replicas, or name more hosts",
        )
    if not facts.gpus:
        return ok("gpus", "none")
    return ok("gpus", ", ".join(f"{one.index}: {one.name}" for one in facts.gpus))


def gpu_memory(facts: MachineFacts) -> Finding | None:
    if not facts.gpus:
        return None
    # Some MiB are the driver's own.
    busy = [one for one in facts.gpus if one.used_mib > one.total_mib // 20]
    if not busy:
        return ok("gpu memory", f"free; {facts.gpus[0].total_mib} MiB each")
    said = []
    for one in busy:
        users = ", ".join(f"{who.name} (pid {who.pid}, {who.used_mib} MiB)" for who in one.users)
        said.append(f"GPU {one.index} {one.used_mib} of {one.total_mib} MiB: {users or 'unknown'}")
    return warning(
        "gpu memory",
        f"{'; '.join(said)}; pools take what is left: end these programs if they are not baton's",
    )


def nixl(facts: MachineFacts) -> Finding | None:
    found = facts.nixl
    bad = fault if facts.wants.needs_nixl else warning
    if not found.is_installed:
        return bad(
            "nixl", f"not installed, so blocks travel within this host's CPUs alone: {NIXL_HINT}"
        )
    if found.failure:
        return bad("nixl", f"it does not work: {found.failure}")
    return ok("nixl", "an agent starts")


def lanes(facts: MachineFacts) -> Finding | None:
    found = facts.nixl
    if not found.is_installed or found.failure:
        return None
    shown = ", ".join(found.lanes)
    if facts.rdma_ports and not any(_is_rdma(lane) for lane in found.lanes):
        return warning(
            "ucx lanes",
            f"UCX uses none of the RDMA ports {', '.join(facts.rdma_ports)} ({shown}): install "
            "rdma-core, and give a container /dev/infiniband and IPC_LOCK",
        )
    if not any(_is_network(lane) for lane in found.lanes):
        bad = fault if facts.wants.needs_nixl else warning
        return bad("ucx lanes", f"UCX sees no network device ({shown}): see UCX_NET_DEVICES")
    return ok("ucx lanes", shown)


def _is_rdma(lane: str) -> bool:
    return lane.split("/", maxsplit=1)[0].startswith(("rc", "dc", "ud"))


def _is_network(lane: str) -> bool:
    return lane.startswith("tcp/") or _is_rdma(lane)


def memory(facts: MachineFacts) -> Finding | None:
    found = facts.memory
    if facts.wants.pool_mib > found.available_mib:
        return fault(
            "memory",
            f"the pools need {facts.wants.pool_mib} MiB and {found.available_mib} MiB are free: "
            "lower cache.memory_mib, or end other programs",
        )
    return ok(
        "memory",
        f"{found.available_mib} of {found.total_mib} MiB are free for "
        + (f"pools of {facts.wants.pool_mib} MiB" if facts.wants.pool_mib else "pools"),
    )


def huge_pages(facts: MachineFacts) -> Finding | None:
    found = facts.memory
    if found.huge_mib > found.total_mib // 10:
        return warning(
            "huge pages",
            f"{found.huge_mib} of {found.total_mib} MiB are reserved as huge pages, which baton "
            "does not use: set vm.nr_hugepages to 0 unless another program needs them",
        )
    shared = found.huge_shared or "unknown"
    return ok(
        "huge pages", f"{found.huge_mib} MiB reserved; transparent for shared memory: {shared}"
    )


def shared_memory(facts: MachineFacts) -> Finding | None:
    free = facts.memory.shm_mib
    if free < SMALL_SHM_MIB:
        return warning(
            "/dev/shm",
            f"{free} MiB are free, and UCX and torch put small segments there: give it "
            f"{SMALL_SHM_MIB} MiB or more (--shm-size for a container); pools do not lie in it",
        )
    return ok("/dev/shm", f"{free} MiB free; pools are memfds and do not lie in it")


def memlock(facts: MachineFacts) -> Finding | None:
    limit = facts.limits.memlock_kib
    shown = "unlimited" if limit == UNLIMITED else f"{limit} KiB"
    if facts.rdma_ports and limit != UNLIMITED:
        return fault(
            "memlock",
            f"the limit is {shown}, and RDMA locks the whole pool: set `ulimit -l unlimited` "
            "(LimitMEMLOCK=infinity in a unit, --ulimit memlock=-1 for a container)",
        )
    return ok("memlock", shown)


def open_files(facts: MachineFacts) -> Finding | None:
    limit = facts.limits.open_files
    if 0 < limit < FEW_FILES:
        return fault("open files", f"the limit is {limit}: raise it with `ulimit -n {MANY_FILES}`")
    if 0 < limit < MANY_FILES:
        return warning(
            "open files",
            f"the limit is {limit}, so a router takes fewer clients than its max_connections: "
            f"raise it with `ulimit -n {MANY_FILES}`",
        )
    return ok("open files", "unlimited" if limit == UNLIMITED else str(limit))


def tasks(facts: MachineFacts) -> Finding | None:
    limit = facts.limits.tasks
    if 0 < limit < FEW_TASKS:
        return warning(
            "tasks",
            f"the cgroup allows {limit} processes and threads: raise pids.max (TasksMax in a unit, "
            "--pids-limit for a container)",
        )
    return None


def cpu(facts: MachineFacts) -> Finding | None:
    found = facts.cpu
    shown = f"{found.num_usable} of {found.num_cpus} CPUs may be used"
    # The feature names of other machines do not show this.
    if "avx2" not in found.features:
        return warning(
            "cpu",
            f"{shown}, without AVX2: nodes on CPUs compute with plain torch, which is slower; take "
            "another machine or a GPU",
        )
    return ok("cpu", f"{shown}; {', '.join(found.features)}")


def kernels(facts: MachineFacts) -> Finding | None:
    found = facts.compute
    if found.failure:
        return None
    if found.kernels_failure:
        return warning(
            "kernels",
            f"kernels cannot be compiled or cached ({found.kernels_failure}): each start "
            "compiles them again or does without; set XDG_CACHE_HOME to a folder of this user's",
        )
    return ok("kernels", "numba works, and compiled kernels are cached")


def clock(facts: MachineFacts) -> Finding | None:
    found = facts.clock
    if found.now_s < found.installed_s:
        return fault(
            "clock", "the clock is before the day on which baton was installed: set it with NTP"
        )
    if found.is_synchronised is False:
        return warning(
            "clock",
            "the kernel's clock is not synchronised, so the times in logs and traces of several "
            "hosts may not agree: run an NTP client such as chrony",
        )
    return ok("clock", "synchronised" if found.is_synchronised else "plausible")


def ports(facts: MachineFacts) -> Finding | None:
    if not facts.ports:
        return None
    bad = [one for one in facts.ports if one.problem and not one.holder.startswith("baton,")]
    if bad:
        said = "; ".join(f"{one.address}: {one.problem}, {_held(one.holder)}" for one in bad)
        return fault("ports", f"{said}: end it, or choose another port")
    said = ", ".join(
        f"{one.address} {f'({one.holder})' if one.problem else 'free'}" for one in facts.ports
    )
    return ok("ports", said)


def _held(holder: str) -> str:
    return f"by {holder}" if holder else "by a program that this user cannot see"


def reach(facts: MachineFacts) -> Finding | None:
    if not facts.reach:
        return None
    silent = [one for one in facts.reach if one.state == "silent"]
    if silent:
        said = "; ".join(f"{one.address} ({one.reason})" for one in silent)
        return fault(
            "reach",
            f"no answer from {said}: see that the host is up, and open the port in every firewall "
            f"between it and {facts.host}",
        )
    words = {"open": "answers", "refused": "is reached, nothing listens"}
    return ok("reach", ", ".join(f"{one.address} {words[one.state]}" for one in facts.reach))


def model(facts: MachineFacts) -> Finding | None:
    if facts.model.failure:
        return fault("model", facts.model.failure)
    return ok("model", facts.model.path) if facts.model.path else None


def key(facts: MachineFacts) -> Finding | None:
    if facts.key.failure:
        return fault("key", facts.key.failure)
    return ok("key", f"{facts.key.path}, digest {facts.key.digest}") if facts.key.path else None


RULES: tuple[Rule, ...] = (
    python, torch, cuda, gpus, gpu_memory, nixl, lanes, memory, huge_pages, shared_memory, memlock,
    open_files, tasks, cpu, kernels, clock, model, key, ports, reach,
)  # fmt: skip


def findings_of(facts: MachineFacts) -> list[Finding]:
    return [found for rule in RULES if (found := rule(facts)) is not None]
