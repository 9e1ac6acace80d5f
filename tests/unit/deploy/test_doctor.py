"""The findings of `baton doctor`: of one machine, of several hosts, and of a path."""

import msgspec
import pytest

from baton.deploy.doctor.cluster_check import compared
from baton.deploy.doctor.machine import (
    MachineReport,
    cuda_finding,
    gpus_finding,
    memlock_finding,
    memory_finding,
    network_finding,
    nixl_finding,
    start_findings,
    torch_finding,
)
from baton.deploy.doctor.nixl_check import complaint_in, lane_in
from baton.deploy.doctor.path import PathMeasured, path_finding
from baton.model.runner.compute_facts import ComputeFacts
from baton.protocol.errors import Failure

TORCH = ComputeFacts(torch="2.9", cuda="13.0", driver_cuda="13.0", num_gpus=1)
NEW = msgspec.structs.replace(TORCH, driver_cuda="12.4", no_gpu="too old")
APART = msgspec.structs.replace(TORCH, peerless=("0-1",))
BARE = msgspec.structs.replace(TORCH, no_launcher="install a C compiler")
RDMA = ["mlx5_0:1"]
BY_RDMA = PathMeasured("nixl", "rc_mlx5/mlx5_0:1", 1 << 30, 0.1, 1e-4)
BY_TCP = msgspec.structs.replace(BY_RDMA, lane="tcp/eth0")
LATE = PathMeasured(failure=Failure("path_timed_out", "no answer"))
SPLIT = PathMeasured(failure=Failure("no_transport", "nothing serves both"))


@pytest.mark.parametrize(
    ("found", "level", "text"),
    [
        (torch_finding(ComputeFacts(failure="no libc10")), "fault", "no libc10"),
        (cuda_finding(TORCH, 0, has_gpus=True), "ok", "torch uses 1 GPUs"),
        (
            cuda_finding(ComputeFacts(torch="2.9"), 0, has_gpus=True),
            "warning",
            "built without CUDA",
        ),
        (
            cuda_finding(NEW, 1, has_gpus=True),
            "fault",
            "the driver supports CUDA up to 12.4, and torch is built for 13.0",
        ),
        (
            cuda_finding(
                msgspec.structs.replace(TORCH, no_gpu="none is left"), 0, has_gpus=True
            ),
            "fault",
            "torch can use no GPU: none is left",
        ),
        (start_findings(TORCH)[0], "ok", "can compile"),
        (start_findings(BARE)[0], "fault", "install a C compiler"),
        (start_findings(TORCH)[-1], "ok", "every GPU can read"),
        (start_findings(APART)[-1], "warning", "cannot read each other (0-1)"),
        (gpus_finding(1, 2), "fault", "2 GPUs are needed and there are 1"),
        (nixl_finding(None, needs_nixl=False), "warning", "pip install -e '.[nixl]'"),
        (nixl_finding("no plugin", needs_nixl=False), "warning", "no plugin"),
        (nixl_finding("", needs_nixl=True), "ok", "an agent starts"),
        (
            memory_finding(50_000, 40_000),
            "fault",
            "need 50000 MiB and 40000 MiB are free",
        ),
        (
            memlock_finding(64 << 10, RDMA),
            "fault",
            "the limit is 64 KiB, and RDMA locks",
        ),
        (
            path_finding("b reads a", BY_RDMA, RDMA),
            "ok",
            "10.74 GB/s, 0.10 ms for a block of 64",
        ),
        (
            path_finding("b reads a", BY_TCP, RDMA),
            "warning",
            "although there are RDMA ports",
        ),
        (
            path_finding("b reads a", LATE, RDMA),
            "fault",
            "no answer: open all TCP ports",
        ),
        (
            path_finding("b reads a", SPLIT, RDMA),
            "fault",
            "install the extra nixl on both hosts",
        ),
    ],
)
def test_each_finding_is_one_line_that_says_what_to_do(found, level, text):
    assert (found.level, text in found.text) == (level, True), found
    assert "\n" not in found.text


def test_the_networks_own_programs_are_named_where_they_are_installed(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert network_finding(RDMA) is None
    program = tmp_path / "ib_write_bw"
    program.touch(mode=0o755)
    assert network_finding([]) is None
    found = network_finding(RDMA)
    assert found is not None
    assert "`ib_write_bw -d mlx5_0 -i 1`" in found.text
    assert "nixlbench" not in found.text


WELL = MachineReport("baton 1, protocol 1", "d1", "d2", ())


@pytest.mark.parametrize(
    ("changes", "check", "text"),
    [
        (
            {"version": "baton 9"},
            "versions",
            "c has baton 9; 2 hosts have baton 1, protocol 1",
        ),
        ({"key": "d9"}, "keys", "c has d9; 2 hosts have d1"),
        ({"model": "d9"}, "models", "copy one model to all hosts"),
    ],
)
def test_the_host_that_differs_is_named(changes, check, text):
    assert {finding.level for finding in compared({"a": WELL, "b": WELL})} == {"ok"}
    odd = msgspec.structs.replace(WELL, **changes)
    found = [
        one for one in compared({"a": WELL, "b": WELL, "c": odd}) if one.level != "ok"
    ]
    assert [one.check for one in found] == [check]
    assert text in found[0].text


# As UCX 1.23 prints them.
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


def test_the_log_of_ucx_is_understood():
    lines = "".join(f"{STAMP}{line}\n" for line in TABLES.splitlines())
    assert lane_in(lines) == "tcp/lo"
    assert lane_in(lines + lines.replace("tcp/lo", "tcp/eth0")) == "tcp/eth0"
    assert lane_in("") == ""
    said = "[1.0] [vm:1:0]  ucp_context.c:1770 UCX  ERROR no usable transports (asked nothing)\n"
    assert complaint_in(lines + said) == "no usable transports (asked nothing)"
