"""Judge one measured path. This file is pure, like `rules` for one machine."""

from collections.abc import Sequence

from baton.deploy.doctor.findings import Finding, fault, ok, warning
from baton.deploy.doctor.path_ends import PathRow
from baton.protocol import VERSION
from baton.protocol.errors import ConfigError
from baton.protocol.messages import PROTOCOL_VERSION

FAR_CLOCK_S = 1.0


def path(row: PathRow, rdma_ports: Sequence[str]) -> Finding:
    """Return the findings of a path. `rdma_ports` are those of the end that dialled."""
    check = f"{row.decode_host} reads {row.prefill_host}"
    measured = row.measured
    if measured.failure is not None:
        return fault(check, f"{measured.failure.message}: {_advice(measured.failure.code, row)}")
    if rdma_ports and measured.lane.startswith("tcp/"):
        return warning(
            check,
            f"{measured}, although there are RDMA ports ({', '.join(rdma_ports)}): name one with "
            "transfer.device, and see that the other host has one in the same network",
        )
    return ok(check, str(measured))


def _advice(code: str, row: PathRow) -> str:
    if code == ConfigError.code:
        return f"see `baton doctor` on {row.decode_host}"
    if code == "no_transport":
        return "install the extra nixl on both hosts, and name a network device (transfer.device)"
    return (
        f"open all TCP ports of {row.prefill_host} to {row.decode_host}, because UCX picks its "
        "ports freely, and see that transfer.device names a device of one network"
    )


def versions(row: PathRow) -> Finding:
    theirs = f"{row.decode_host} has baton {row.version}, protocol {row.protocol}"
    if row.protocol != PROTOCOL_VERSION:
        return fault(
            "version",
            f"{theirs}, and this host {VERSION}, protocol {PROTOCOL_VERSION}: install one release",
        )
    if row.version != VERSION:
        return warning("version", f"{theirs}, and this host {VERSION}: install one release")
    return ok("version", f"{VERSION} on both hosts")


def clocks(row: PathRow) -> Finding:
    if abs(row.clock_s) > FAR_CLOCK_S:
        return warning(
            "clocks",
            f"that of {row.decode_host} is {abs(row.clock_s):.1f} s "
            f"{'ahead of' if row.clock_s > 0 else 'behind'} this one, so times in logs do not "
            "agree: run an NTP client on both hosts",
        )
    return ok("clocks", "they agree")


def path_findings(row: PathRow, rdma_ports: Sequence[str]) -> list[Finding]:
    return [path(row, rdma_ports), versions(row), clocks(row)]
