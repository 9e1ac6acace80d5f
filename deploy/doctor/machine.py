"""The checks of one machine: whether nodes can start here, and reach each other.

torch and NIXL, which may crash or take long, are tried in separate processes. Nothing is changed on
the machine. Facts that other tools show, such as CPU features and clocks, are left to them.
"""

import hashlib
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from baton.deploy.model_folder import with_model
from baton.deploy.startup import check_port
from baton.kv_transfer.pools import available_bytes
from baton.kv_transfer.transports.nixl_binding import is_installed
from baton.model.runner.compute_facts import ComputeFacts
from baton.protocol import VERSION
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError
from baton.protocol.messages import PROTOCOL_VERSION
from baton.runtime.channels.keys import load_keys
from baton.runtime.host import active_ports, gpus_of

CHILD_TIMEOUT_S = 60.0
REACH_TIMEOUT_S = 3.0
DIGEST_BYTES = 6
SAMPLE_BYTES = 1 << 16
NIXL_HINT = "run `pip install -e '.[nixl]'` in baton's folder"
MIB = 1 << 20
CHECK_WIDTH = 10

Level = Literal["ok", "warning", "fault"]


class Finding(msgspec.Struct, frozen=True):
    """`text` says what was found and, if that is a problem, what to do.

    With a fault, nodes would not start or not reach each other; a warning costs speed, or may be
    unintended.
    """

    check: str
    level: Level
    text: str
    host: str = ""  # empty for the host that was asked


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def warning(check: str, text: str) -> Finding:
    return Finding(check, "warning", text)


def fault(check: str, text: str) -> Finding:
    return Finding(check, "fault", text)


def is_healthy(findings: Sequence[Finding]) -> bool:
    return all(one.level != "fault" for one in findings)


def line_of(finding: Finding) -> str:
    return f"  {finding.level.ljust(7)}  {finding.check.ljust(CHECK_WIDTH)}  {finding.text}"


def summary_of(findings: Sequence[Finding]) -> str:
    faults = sum(one.level == "fault" for one in findings)
    warnings = sum(one.level == "warning" for one in findings)
    return f"{faults} faults, {warnings} warnings, {len(findings) - faults - warnings} checks ok"


class Wants(msgspec.Struct, frozen=True):
    """What processes need from their machine."""

    gpus: int = 0
    pool_mib: int = 0
    needs_nixl: bool = False  # blocks travel between hosts, or between GPUs
    ports: tuple[str, ...] = ()  # host:port on which processes will listen
    reach: tuple[str, ...] = ()  # host:port that processes will dial


class MachineReport(msgspec.Struct, frozen=True):
    """The report on one machine. Equal digests mean equal contents; an empty one is unknown."""

    version: str
    key: str  # digest; it reveals nothing of the key
    model: str  # digest
    findings: tuple[Finding, ...]


def check_machine(config: ClusterConfig, wants: Wants) -> MachineReport:
    """Return the report; `config` names the model, the key and the network device."""
    compute = _compute()
    rdma_ports = active_ports()
    num_gpus = len(gpus_of(0))
    has_gpus = bool(num_gpus) and config.engine.device != "cpu"
    model, model_digest = _model(config)
    key, key_digest = _key(config)
    findings = [
        ok("python", f"{sys.version.partition(' ')[0]}, baton {VERSION}"),
        torch_finding(compute),
        cuda_finding(compute, wants.gpus, has_gpus=has_gpus),
        gpus_finding(num_gpus, wants.gpus),
        *(start_findings(compute) if has_gpus and not compute.no_gpu else ()),
        nixl_finding(_nixl(config.transfer.device), needs_nixl=wants.needs_nixl),
        memory_finding(wants.pool_mib, available_bytes() // MIB),
        memlock_finding(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], rdma_ports),
        network_finding(rdma_ports),
        model,
        key,
        _ports(wants.ports),
        _reach(wants.reach),
    ]
    version = f"baton {VERSION}, protocol {PROTOCOL_VERSION}"
    return MachineReport(
        version, key_digest, model_digest, tuple(filter(None, findings))
    )


def torch_finding(found: ComputeFacts) -> Finding:
    if found.failure:
        return fault(
            "torch",
            f"torch does not load ({found.failure}): install baton again in a new folder",
        )
    build = f"for CUDA {found.cuda}" if found.cuda else "without CUDA"
    return ok("torch", f"{found.torch}, built {build}")


def cuda_finding(
    found: ComputeFacts, num_wanted: int, *, has_gpus: bool
) -> Finding | None:
    """A torch for CUDA on a host whose GPU does not work ends every start."""
    if found.failure or not (num_wanted or has_gpus):
        return None
    if not found.cuda:
        bad = fault if num_wanted else warning
        return bad(
            "cuda",
            "there is a GPU, but this torch is built without CUDA: install torch with it (`make "
            "serve` without TORCH_INDEX, in a new environment)",
        )
    if found.driver_cuda and _major(found.driver_cuda) < _major(found.cuda):
        return fault(
            "cuda",
            f"the driver supports CUDA up to {found.driver_cuda}, and torch is built for "
            f"{found.cuda}: install a newer NVIDIA driver, or a torch built for CUDA "
            f"{_major(found.driver_cuda)}",
        )
    if found.no_gpu:
        return fault(
            "cuda", f"torch can use no GPU: {found.no_gpu}; or set engine.device=cpu"
        )
    return ok(
        "cuda",
        f"torch uses {found.num_gpus} GPUs; the driver supports {found.driver_cuda}",
    )


def start_findings(found: ComputeFacts) -> list[Finding]:
    """Judge what a rank needs of a host whose GPUs work, and what reads between them need."""
    if found.no_launcher:
        compiler = fault("compiler", found.no_launcher)
    else:
        compiler = ok("compiler", "Triton can compile its launcher")
    if not found.peerless:
        return [compiler, ok("peers", "every GPU can read every other one")]
    peers = warning(
        "peers",
        f"GPUs cannot read each other ({', '.join(found.peerless)}), so blocks take the way over "
        f"NIXL and the host: {NIXL_HINT}, or place prefill and decode on GPUs that can",
    )
    return [compiler, peers]


def gpus_finding(num_gpus: int, num_wanted: int) -> Finding:
    if num_gpus < num_wanted:
        return fault(
            "gpus",
            f"{num_wanted} GPUs are needed and there are {num_gpus}: install the NVIDIA driver, "
            "lower gpus or replicas, or name more hosts",
        )
    return ok("gpus", str(num_gpus or "none"))


def nixl_finding(failure: str | None, *, needs_nixl: bool) -> Finding:
    """Judge why NIXL makes no agent: None if it is not installed, empty if it makes one."""
    bad = fault if needs_nixl else warning
    if failure is None:
        return bad(
            "nixl",
            f"not installed, so blocks travel within this host's CPUs alone: {NIXL_HINT}",
        )
    return (
        bad("nixl", f"it does not work: {failure}")
        if failure
        else ok("nixl", "an agent starts")
    )


def memory_finding(pool_mib: int, available_mib: int) -> Finding:
    if pool_mib > available_mib:
        return fault(
            "memory",
            f"the pools need {pool_mib} MiB and {available_mib} MiB are free: lower "
            "cache.memory_mib, or end other programs",
        )
    return ok("memory", f"{available_mib} MiB are free for pools")


def memlock_finding(limit_bytes: int, rdma_ports: Sequence[str]) -> Finding:
    is_unlimited = limit_bytes == resource.RLIM_INFINITY
    shown = "unlimited" if is_unlimited else f"{limit_bytes // 1024} KiB"
    if rdma_ports and not is_unlimited:
        return fault(
            "memlock",
            f"the limit is {shown}, and RDMA locks the whole pool: set `ulimit -l unlimited` "
            "(LimitMEMLOCK=infinity in a unit, --ulimit memlock=-1 for a container)",
        )
    return ok("memlock", shown)


def network_finding(rdma_ports: Sequence[str]) -> Finding | None:
    """Say how the network is measured without baton, with the programs that are installed."""
    commands = {
        "ib_write_bw": "`ib_write_bw -d {device} -i {port}`, then on another host the same with "
        "the address of this one",
        "nixlbench": "`nixlbench --etcd-endpoints URL --backend UCX` on two hosts",
    }
    installed = [text for name, text in commands.items() if shutil.which(name)]
    if not rdma_ports or not installed:
        return None
    device, _, port = rdma_ports[0].partition(":")
    how = "; or ".join(installed).format(device=device, port=port)
    return ok("network", f"to compare paths with its own rate, run {how}")


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _compute() -> ComputeFacts:
    line, complaint = _last_line_of("baton.model.runner.compute_facts")
    try:
        return msgspec.json.decode(line, type=ComputeFacts)
    except msgspec.MsgspecError:
        return ComputeFacts(failure=complaint)


def _nixl(device: str) -> str | None:
    """Return why NIXL makes no agent; None if it is not installed."""
    if not is_installed():
        return None
    line, complaint = _last_line_of("baton.deploy.doctor.nixl_check", device)
    return line or complaint


def _last_line_of(module: str, *words: str) -> tuple[str, str]:
    """Run a module; return its last line, and why it has failed or an empty text."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=CHILD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {CHILD_TIMEOUT_S:g} s"
    lines = done.stdout.rstrip("\n").splitlines() or [""]
    complaints = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1], complaints[-1] if done.returncode else ""


def _model(config: ClusterConfig) -> tuple[Finding | None, str]:
    """Check the model. The digest covers names, sizes and first bytes, which takes milliseconds."""
    if not config.model.path:
        return None, ""
    try:
        folder = Path(with_model(config).model.path)
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for path in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
            digest.update(f"\0{path.name} {path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                digest.update(file.read(SAMPLE_BYTES))
    except ConfigError as error:
        return fault("model", error.message), ""
    except OSError as error:
        return fault("model", f"cannot read the model: {error}"), ""
    return ok("model", str(folder)), digest.hexdigest()


def _key(config: ClusterConfig) -> tuple[Finding | None, str]:
    path = config.keys.file
    if not path:
        return None, ""
    try:
        first = load_keys(config.keys).first
    except ConfigError as error:
        return fault("key", error.message), ""
    assert first is not None, "a file without a key is refused"
    digest = hashlib.blake2b(first.public, digest_size=DIGEST_BYTES).hexdigest()
    return ok("key", f"{path}, digest {digest}"), digest


def _ports(addresses: Sequence[str]) -> Finding | None:
    """Check that processes can listen here."""
    problems = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            check_port(host.strip("[]"), int(port), "")
        except ConfigError as error:
            problems.append(f"{address}: {error.message.removesuffix(': ')}")
    if problems:
        return fault(
            "ports", f"{'; '.join(problems)}: end what holds it, or choose another port"
        )
    return ok("ports", f"{', '.join(addresses)} free") if addresses else None


def _reach(addresses: Sequence[str]) -> Finding | None:
    """Check that other hosts answer, even if nothing listens there yet."""
    shown = []
    silent = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection(
                (host.strip("[]"), int(port)), REACH_TIMEOUT_S
            ).close()
            shown.append(f"{address} answers")
        except ConnectionRefusedError:
            shown.append(f"{address} is reached, nothing listens")
        except OSError as error:
            silent.append(f"{address} ({error.strerror or error})")
    if silent:
        return fault(
            "reach",
            f"no answer from {'; '.join(silent)}: check that the host is up, and open the port in "
            f"every firewall between it and {socket.gethostname()}",
        )
    return ok("reach", ", ".join(shown)) if shown else None
