"""`baton doctor` checks this machine, a cluster's hosts, one path, or the transfers of a router.

The command line calls `main`. The exit code is 1 if there is a fault, else 0.
"""

import socket
import sys
from collections.abc import Iterable, Sequence

import msgspec

from baton.deploy.doctor.arguments import DoctorWords, words_of
from baton.deploy.doctor.cluster_check import check_cluster
from baton.deploy.doctor.findings import Finding, Lines, fault, is_healthy, summary_of
from baton.deploy.doctor.machine_report import MachineReport
from baton.deploy.doctor.path_ends import PathReader, offer_pool
from baton.deploy.doctor.path_messages import PathMeasured, PoolOffered
from baton.deploy.doctor.path_rules import path_findings
from baton.deploy.doctor.prober import machine_facts
from baton.deploy.doctor.rules import findings_of
from baton.deploy.doctor.serving import check_router
from baton.protocol.errors import NodeError
from baton.runtime.host import active_ports
from baton.runtime.process import Interrupts


def main(name: str, summary: str, arguments: Sequence[str]) -> int:
    """Run `baton doctor` and return the exit code. Raises `ConfigError`."""
    words = words_of(name, summary, arguments)
    if words.listen:
        return _listen(words)
    if words.connect:
        return _report(_connect(words), words)
    if words.url:
        return _report(check_router(words.url), words)
    if words.file:
        return _report(check_cluster(words), words)
    facts = machine_facts(words.config, words.wants)
    findings = findings_of(facts)
    if words.json:
        print(msgspec.json.encode(MachineReport(facts, tuple(findings))).decode())
        return 0 if is_healthy(findings) else 1
    return _report(findings, words)


def _report(found: Iterable[Finding], words: DoctorWords) -> int:
    """Print each finding when it is made, or all of them as JSON. Return the exit code."""
    findings = []
    lines = Lines(is_coloured=sys.stdout.isatty())
    for finding in found:
        findings.append(finding)
        if not words.json:
            print("\n".join(lines.of(finding)), flush=True)
    print(msgspec.json.encode(findings).decode() if words.json else summary_of(findings))
    return 0 if is_healthy(findings) else 1


def _listen(words: DoctorWords) -> int:
    failures = 0

    def tell(offer: PoolOffered, measured: PathMeasured) -> None:
        nonlocal failures
        failures += measured.failure is not None
        print(f"this host reads {offer.host}: {measured}", file=sys.stderr, flush=True)

    reader = PathReader(words.config, _endpoint(words.listen))
    try:
        address = reader.endpoint.removeprefix("tcp://")
        if words.json:
            print(msgspec.json.encode({"address": address}).decode(), flush=True)
        else:
            print(f"on the prefill node's host, run: baton doctor --connect {address}", flush=True)
        with Interrupts() as interrupts:
            is_done = reader.serve(interrupts, words.timeout_s, tell, is_once=words.once)
    finally:
        reader.close()
    return 0 if is_done and not failures else 1


def _connect(words: DoctorWords) -> list[Finding]:
    try:
        row = offer_pool(words.config, _endpoint(words.connect), words.timeout_s)
    except NodeError as error:
        return [fault(f"{words.connect} reads {socket.gethostname()}", error.message)]
    return path_findings(row, active_ports())


def _endpoint(text: str) -> str:
    return text if "://" in text else f"tcp://{text}"
