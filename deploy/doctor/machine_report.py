"""The report on one machine, which `baton doctor --json` prints and `cluster_check` reads."""

import msgspec

from baton.deploy.doctor.facts import MachineFacts
from baton.deploy.doctor.findings import Finding


class MachineReport(msgspec.Struct, frozen=True):
    facts: MachineFacts
    findings: tuple[Finding, ...]
