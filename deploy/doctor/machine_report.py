"""What `baton doctor --json` prints of one machine, and `cluster_check` reads of each host."""

import msgspec

from baton.deploy.doctor.facts import MachineFacts
from baton.deploy.doctor.findings import Finding


class MachineReport(msgspec.Struct, frozen=True):
    facts: MachineFacts
    findings: tuple[Finding, ...]
