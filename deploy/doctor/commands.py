"""`baton doctor` checks this machine, a cluster's hosts, or one path.

The exit code is 1 if there is a fault, else 0. Flags that are settings of nodes have their names.
"""

import socket
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from baton.deploy.doctor.cluster_check import SETTINGS, check_cluster
from baton.deploy.doctor.machine import (
    Finding,
    Wants,
    check_machine,
    fault,
    is_healthy,
    line_of,
    summary_of,
)
from baton.deploy.doctor.path import READ_S, PathReader, offer_pool
from baton.protocol.config import ClusterConfig, about
from baton.protocol.errors import ConfigError, NodeError
from baton.runtime.fields import Field, FlagParser, fields_of, with_values
from baton.runtime.host import active_ports
from baton.runtime.process import Interrupts
from baton.runtime.settings import flags_of


class DoctorArguments(msgspec.Struct, frozen=True):
    """The flags that are no settings of nodes."""

    json: Annotated[bool, about("print JSON instead of lines", kind="switch")] = False
    timeout: Annotated[
        float,
        about(
            f"longest wait for an answer of another host; 0 takes {READ_S:g} s, and with --listen "
            "no end",
            "s",
            ge=0,
        ),
    ] = 0.0
    via: Annotated[
        str, about("how to run a command on another host of FILE, as 'ssh {host}'")
    ] = ""
    state: Annotated[
        str,
        about(
            "state folder of `baton up`, if it was started with --state", kind="path"
        ),
    ] = ""
    gpus: Annotated[
        int, about("number of GPUs that nodes need on this machine", ge=0)
    ] = 0
    listen: Annotated[
        str,
        about(
            "one path by hand, on the decode node's host: wait at an address of it, as HOST or "
            "HOST:PORT, and read the pool of the first host that connects"
        ),
    ] = ""
    connect: Annotated[
        str,
        about(
            "one path by hand, on the prefill node's host: let the host that listens at this "
            "HOST:PORT read a pool of this host"
        ),
    ] = ""
    port: Annotated[
        tuple[str, ...],
        about(
            "HOST:PORT that must be free to listen on; may be repeated", kind="repeated"
        ),
    ] = ()
    reach: Annotated[
        tuple[str, ...],
        about(
            "HOST:PORT of another host that must answer; may be repeated",
            kind="repeated",
        ),
    ] = ()
    nixl: Annotated[
        bool,
        about("report a fault if NIXL does not work on this machine", kind="switch"),
    ] = False


def main(name: str, summary: str, arguments: Sequence[str]) -> int:
    """Run `baton doctor` and return the exit code. Raises `ConfigError`."""
    parser = parser_of(name, summary)
    parsed = parser.parse_args(arguments)
    given = with_values(
        DoctorArguments(), parser.values_in(parsed, fields_of(DoctorArguments))
    )
    config = with_values(ClusterConfig(), parser.values_in(parsed, _fields()))
    if sum(map(bool, (parsed.file, given.listen, given.connect))) > 1:
        raise ConfigError(
            "give one of FILE, --listen and --connect; see baton doctor --help"
        )
    if given.listen:
        return _listen(config, given)
    if given.connect:
        return _report(_connect(config, given), is_json=given.json)
    if parsed.file:
        timeout_s = given.timeout or READ_S
        found = check_cluster(
            parsed.file, via=given.via, state=given.state, timeout_s=timeout_s
        )
        return _report(found, is_json=given.json)
    report = check_machine(config, _wants(config, given))
    if given.json:
        print(msgspec.json.encode(report).decode())
        return 0 if is_healthy(report.findings) else 1
    return _report(report.findings, is_json=False)


def _wants(config: ClusterConfig, given: DoctorArguments) -> Wants:
    for address in (*given.port, *given.reach):
        if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdecimal():
            raise ConfigError(f"{address}: write it as HOST:PORT")
    return Wants(
        gpus=given.gpus,
        pool_mib=config.cache.memory_mib,
        needs_nixl=given.nixl or config.transfer.transport == "nixl",
        ports=given.port,
        reach=given.reach,
    )


def _report(found: Iterable[Finding], *, is_json: bool) -> int:
    """Print each finding when it is made, or all of them as JSON. Return the exit code."""
    findings = []
    host = ""
    for finding in found:
        findings.append(finding)
        if not is_json and finding.host != host:
            host = finding.host
            print(f"{host}:")
        if not is_json:
            print(line_of(finding), flush=True)
    print(msgspec.json.encode(findings).decode() if is_json else summary_of(findings))
    return 0 if is_healthy(findings) else 1


def _listen(config: ClusterConfig, given: DoctorArguments) -> int:
    reader = PathReader(config, _endpoint(given.listen))
    try:
        address = reader.endpoint.removeprefix("tcp://")
        print(
            f"on the prefill node's host, run: baton doctor --connect {address}",
            flush=True,
        )
        with Interrupts() as interrupts:
            found = reader.read(interrupts, given.timeout)
    finally:
        reader.close()
    if found is None:
        return 1
    host, measured = found
    print(f"this host reads {host}: {measured}", file=sys.stderr, flush=True)
    return 0 if measured.failure is None else 1


def _connect(config: ClusterConfig, given: DoctorArguments) -> list[Finding]:
    try:
        return [
            offer_pool(
                config,
                _endpoint(given.connect),
                given.timeout or READ_S,
                active_ports(),
            )
        ]
    except NodeError as error:
        return [fault(f"{given.connect} reads {socket.gethostname()}", error.message)]


def _endpoint(text: str) -> str:
    return text if "://" in text else f"tcp://{text}"


def _fields() -> list[Field]:
    return [field for field in fields_of(ClusterConfig) if field.name in SETTINGS]


def parser_of(name: str, summary: str) -> FlagParser:
    """Return the parser of `baton doctor`."""
    parser = FlagParser(prog=f"baton {name}", description=summary)
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="a cluster.yaml: check its hosts and measure every path between them; without it, "
        "check this machine",
    )
    parser.add_settings(fields_of(DoctorArguments), group_of=lambda _: "flags")
    parser.add_settings(_fields(), flags_of)
    return parser
