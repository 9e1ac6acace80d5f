"""What `baton doctor` makes of facts: of one machine, of several hosts, of a path, of a router."""

import msgspec
import pytest

from baton.deploy.doctor.check_nixl import lanes_in
from baton.deploy.doctor.comparison import LookedAt, compared
from baton.deploy.doctor.facts import (
    UNLIMITED,
    ClockFacts,
    CpuFacts,
    FileFacts,
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
from baton.deploy.doctor.findings import Finding, Lines, is_healthy
from baton.deploy.doctor.path_ends import PathRow
from baton.deploy.doctor.path_messages import PathMeasured
from baton.deploy.doctor.path_rules import path_findings
from baton.deploy.doctor.rules import findings_of
from baton.deploy.doctor.serving import serving_findings
from baton.deploy.doctor.ucx_log import complaint_in, lane_in
from baton.deploy.health import HealthReply, LostReply, NodeReply, PairReply, TransferReply
from baton.engine.compute_facts import ComputeFacts
from baton.protocol import VERSION
from baton.protocol.errors import Failure
from baton.protocol.messages import PROTOCOL_VERSION

TORCH = ComputeFacts(torch="2.9", cuda="13.0", driver_cuda="13.0", num_gpus=1)
IDLE = GpuFacts(0, "H100", 80_000, 500)
BUSY = GpuFacts(0, "H100", 80_000, 60_000, (GpuUser(7, "train.py", 59_000),))
MEMORY = MemoryFacts(total_mib=64_000, available_mib=40_000, shm_mib=1000, huge_shared="never")
LIMITS = LimitFacts(memlock_kib=UNLIMITED, open_files=1 << 20, tasks=UNLIMITED)
WELL = MachineFacts(
    host="a",
    version=VERSION,
    protocol=PROTOCOL_VERSION,
    python=(3, 11, 2),
    compute=TORCH,
    gpus=(IDLE,),
    nixl=NixlFacts(is_installed=True, lanes=("tcp/eth0", "rc_mlx5/mlx5_0:1")),
    rdma_ports=("mlx5_0:1",),
    memory=MEMORY,
    limits=LIMITS,
    cpu=CpuFacts(8, 8, ("avx2",)),
    clock=ClockFacts(2e9, 1e9, is_synchronised=True),
    ports=(PortFacts("0.0.0.0:8000"),),
    reach=(ReachFacts("10.0.0.1:5570", "refused"),),
    model=FileFacts("/models/a", "d1"),
    key=FileFacts("/keys/a", "d2"),
)
ILL: list[tuple[str, str, dict[str, object], str]] = [
    ("python", "fault", {"python": (3, 9, 1)}, "install Python 3.11"),
    ("torch", "fault", {"compute": ComputeFacts(failure="no libc10")}, "no libc10"),
    ("cuda", "warning", {"compute": ComputeFacts(torch="2.9")}, "built without CUDA"),
    (
        "cuda",
        "fault",
        {
            "compute": msgspec.structs.replace(TORCH, driver_cuda="12.4", no_gpu="too old"),
            "wants": Wants(gpus=1),
        },
        "the driver supports CUDA up to 12.4, and torch is built for 13.0: install a newer",
    ),
    ("cuda", "warning", {"compute": msgspec.structs.replace(TORCH, no_gpu="none is left")},
     "torch can use no GPU: none is left"),
    ("gpus", "fault", {"wants": Wants(gpus=2)}, "2 GPUs are wanted and nvidia-smi shows 1"),
    (
        "gpu memory",
        "warning",
        {"gpus": (BUSY,)},
        "GPU 0 60000 of 80000 MiB: train.py (pid 7, 59000 MiB)",
    ),
    ("nixl", "warning", {"nixl": NixlFacts()}, "pip install -e '.[nixl]'"),
    ("nixl", "fault", {"nixl": NixlFacts(), "wants": Wants(needs_nixl=True)}, "not installed"),
    ("nixl", "warning", {"nixl": NixlFacts(is_installed=True, failure="no plugin")}, "no plugin"),
    (
        "ucx lanes",
        "warning",
        {"nixl": NixlFacts(is_installed=True, lanes=("tcp/eth0",))},
        "none of the RDMA ports mlx5_0:1 (tcp/eth0): install rdma-core",
    ),
    (
        "ucx lanes",
        "warning",
        {"nixl": NixlFacts(is_installed=True, lanes=("posix/memory",)), "rdma_ports": ()},
        "no network device (posix/memory)",
    ),
    ("memory", "fault", {"wants": Wants(pool_mib=50_000)}, "need 50000 MiB and 40000 MiB are free"),
    ("huge pages", "warning", {"memory": msgspec.structs.replace(MEMORY, huge_mib=32_000)},
     "vm.nr_hugepages"),
    ("/dev/shm", "warning", {"memory": msgspec.structs.replace(MEMORY, shm_mib=1)}, "--shm-size"),
    ("memlock", "fault", {"limits": msgspec.structs.replace(LIMITS, memlock_kib=64)},
     "the limit is 64 KiB, and RDMA locks the whole pool: set `ulimit -l unlimited`"),
    ("open files", "fault", {"limits": msgspec.structs.replace(LIMITS, open_files=256)},
     "ulimit -n"),
    ("open files", "warning", {"limits": msgspec.structs.replace(LIMITS, open_files=4096)},
     "fewer clients than its max_connections"),
    ("tasks", "warning", {"limits": msgspec.structs.replace(LIMITS, tasks=100)}, "--pids-limit"),
    ("cpu", "warning", {"cpu": CpuFacts(8, 2, ("sse4",))}, "2 of 8 CPUs may be used, without AVX2"),
    ("kernels", "warning",
     {"compute": msgspec.structs.replace(TORCH, kernels_failure="read-only")},
     "(read-only): each start compiles them again"),
    ("clock", "fault", {"clock": ClockFacts(1e9, 2e9)}, "before the day on which baton was"),
    ("clock", "warning", {"clock": ClockFacts(2e9, 1e9, is_synchronised=False)}, "chrony"),
    ("model", "fault", {"model": FileFacts("/m", failure="/m does not exist")}, "/m does not"),
    ("key", "fault", {"key": FileFacts("/k", failure=
        "/k can be read by other users")}, "can be read"),
    ("ports", "fault",
     {"ports": (PortFacts("0.0.0.0:8000", "port 8000 is in use", "nginx, pid 3"),)},
     "0.0.0.0:8000: port 8000 is in use, by nginx, pid 3: end it, or choose another port"),
    ("reach", "fault", {"reach": (ReachFacts("10.0.0.1:5570", "silent", "timed out"),)},
     "no answer from 10.0.0.1:5570 (timed out): see that the host is up, and open the port"),
]  # fmt: skip


def test_a_machine_that_is_well_has_no_warning() -> None:
    findings = findings_of(WELL)
    assert len(findings) >= 19
    assert {finding.level for finding in findings} == {"ok"}


@pytest.mark.parametrize(("check", "level", "changed", "said"), ILL)
def test_each_illness_is_one_line_that_says_what_to_do(
    check: str, level: str, changed: dict[str, object], said: str
) -> None:
    findings = findings_of(msgspec.structs.replace(WELL, **changed))  # type: ignore[arg-type]
    (found,) = [finding for finding in findings if finding.check == check]
    assert found.level == level
    assert said in found.text
    assert "\n" not in found.text


def test_a_port_that_baton_has_is_no_fault() -> None:
    ours = PortFacts("0.0.0.0:8000", "port 8000 is in use", "baton, pid 3")
    findings = findings_of(msgspec.structs.replace(WELL, ports=(ours,)))
    assert "0.0.0.0:8000 (baton, pid 3)" in {one.text for one in findings if one.level == "ok"}
    assert is_healthy(findings)


def looked_at(host: str, ahead_s: float = 0.0, **changed: object) -> LookedAt:
    """A host that was asked at 2e9 s and answered 3 s later."""
    clock = ClockFacts(2e9 + 1 + ahead_s, 1e9)
    facts = msgspec.structs.replace(WELL, clock=clock, **changed)  # type: ignore[arg-type]
    return LookedAt(host, facts, 2e9, 2e9 + 3)


@pytest.mark.parametrize(
    ("odd", "check", "said"),
    [
        (looked_at("c", version="9.9"), "versions", "c has baton 9.9, protocol"),
        (looked_at("c", key=FileFacts("/k", "d9")), "keys", "c has d9; 2 hosts have d2"),
        (looked_at("c", model=FileFacts("/m", "d9")), "models", "copy one model to all hosts"),
        (looked_at("c", ahead_s=62.0), "clocks", "c by +60.0 s"),
        (looked_at("c", ahead_s=-61.0), "clocks", "c by -60.0 s"),
    ],
)
def test_the_host_that_differs_is_named(odd: LookedAt, check: str, said: str) -> None:
    alike = [looked_at("a"), looked_at("b")]
    assert {finding.level for finding in compared(alike)} == {"ok"}
    findings = [one for one in compared([*alike, odd]) if one.level != "ok"]
    assert [one.check for one in findings] == [check]
    assert said in findings[0].text


def row(**changed: object) -> PathRow:
    measured = PathMeasured("nixl", "rc_mlx5/mlx5_0:1", 1 << 30, 0.1, 1e-4, 1 << 16)
    whole = PathRow("10.0.0.1", "10.0.0.2", measured, VERSION, PROTOCOL_VERSION, 0.0)
    return msgspec.structs.replace(whole, **changed)  # type: ignore[arg-type]


BY_TCP = PathMeasured("nixl", "tcp/eth0", 1 << 30, 0.1, 1e-4, 1 << 16)


@pytest.mark.parametrize(
    ("path", "level", "said"),
    [
        (row(), "ok", "10.74 GB/s, 0.10 ms for a block of 64 KiB, by nixl: rc_mlx5/mlx5_0:1"),
        (row(measured=BY_TCP), "warning", "although there are RDMA ports (mlx5_0:1)"),
        (
            row(measured=PathMeasured(failure=Failure("path_timed_out", "no answer"))),
            "fault",
            "no answer: open all TCP ports of 10.0.0.1 to 10.0.0.2",
        ),
        (
            row(measured=PathMeasured(failure=Failure("no_transport", "nothing serves both"))),
            "fault",
            "nothing serves both: install the extra nixl on both hosts",
        ),
        (row(version="9.9"), "warning", "10.0.0.2 has baton 9.9"),
        (row(protocol=99), "fault", "protocol 99"),
        (row(clock_s=-90.0), "warning", "that of 10.0.0.2 is 90.0 s behind this one"),
    ],
)
def test_a_path_is_judged_by_how_it_went(path: PathRow, level: str, said: str) -> None:
    findings = path_findings(path, ["mlx5_0:1"])
    worst = [one for one in findings if one.level != "ok"] or findings
    assert (worst[0].level, said in worst[0].text) == (level, True), worst


def test_a_routers_nodes_and_pairs_are_told_without_moving_anything() -> None:
    health = HealthReply(
        nodes=(
            NodeReply("p", "prefill", "ready", device="cpu"),
            NodeReply("d", "decode", "degraded", reason="no common transport"),
            NodeReply("e", "decode", "starting", "weights", 1, 3),
        ),
        lost=(LostReply("gone", 12.0),),
        pairs=(PairReply("p", "d", "the read took too long"),),
        transfers=(TransferReply("p", "e", 5, 0, 3 << 30, 1.5), TransferReply("p", "d", 0, 2)),
    )
    told = [(one.level, one.check, one.text) for one in serving_findings(health)]
    assert told == [
        ("ok", "node p", "prefill, cpu"),
        ("fault", "node d", "degraded: no common transport"),
        ("warning", "node e", "weights 1/3"),
        ("fault", "node gone", "lost 12 s ago: read its log and start it"),
        ("ok", "e reads p", "5 handoffs, 0 failed, 2.15 GB/s when blocks move"),
        (
            "fault",
            "d reads p",
            "avoided: the read took too long; check the network between the two hosts",
        ),
    ]


def test_lines_stand_below_their_host() -> None:
    lines = Lines(is_coloured=False)
    found = [Finding("python", "ok", "3.11", "a"), Finding("keys", "fault", "differ", "b")]
    assert [line for one in found for line in lines.of(one)] == [
        "a:",
        "  ok       python      3.11",
        "b:",
        "  fault    keys        differ",
    ]


# As UCX 1.23 prints them.
CONTEXT = """\
#            md 1  :  component 1  tcp
#
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- tcp/eth0
"""
STAMP = "[1795349308.077716] [vm:21998:0]   "
TABLES = """\
| baton-1 intra-node cfg#1                                         |
| remote memory read by ucp_get*(multi) into host memory from host |
| Range    |    Description     |               Config             |
|   0..511 | short              | self/memory                      |
| 512..inf | software emulation | tcp/lo                           |
+----------+--------------------+----------------------------------+
| baton-1 intra-node cfg#1                        |
| active message by ucp_am_send* from host memory |
| 0..inf | zero-copy          | rc_mlx5/mlx5_0:1  |
"""


def test_what_ucx_prints_is_understood() -> None:
    assert lanes_in(CONTEXT) == ["self/memory", "tcp/eth0"]
    lines = "".join(f"{STAMP}{line}\n" for line in TABLES.splitlines())
    assert lane_in(lines) == "tcp/lo"
    assert lane_in(lines + lines.replace("tcp/lo", "tcp/eth0")) == "tcp/eth0"
    assert lane_in("") == ""
    said = "[1.0] [vm:1:0]  ucp_context.c:1770 UCX  ERROR no usable transports (asked nothing)\n"
    assert complaint_in(lines + said) == "no usable transports (asked nothing)"
