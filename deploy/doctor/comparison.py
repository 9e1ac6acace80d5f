"""Compare the facts that must be equal on all hosts of a cluster.

This file is pure.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from baton.deploy.doctor.facts import MachineFacts
from baton.deploy.doctor.findings import Finding, fault, ok, warning

ALL = "all hosts"
FAR_CLOCK_S = 1.0


class LookedAt(msgspec.Struct, frozen=True):
    """The facts of one host, with the times of the request and the answer on the asker's clock."""

    host: str
    facts: MachineFacts
    asked_s: float
    answered_s: float


def compared(hosts: Sequence[LookedAt]) -> list[Finding]:
    """Return a finding for each comparison; none for a single host."""
    if len(hosts) < 2:
        return []
    findings = [
        _equal(
            hosts, "versions", lambda facts: f"baton {facts.version}, protocol {facts.protocol}",
            "install one release on all hosts",
        ),
        _equal(
            hosts, "keys", lambda facts: facts.key.digest,
            "copy one key file to all hosts",
        ),
        _equal(
            hosts, "models", lambda facts: facts.model.digest,
            "copy one model to all hosts: the folders differ",
        ),
        _clocks(hosts),
    ]  # fmt: skip
    return [
        msgspec.structs.replace(finding, host=ALL) for finding in findings if finding is not None
    ]


def _equal(
    hosts: Sequence[LookedAt], check: str, value_of: Callable[[MachineFacts], str], advice: str
) -> Finding | None:
    """Name the hosts whose value differs from that of most; a host without one is left out."""
    values = {one.host: value_of(one.facts) for one in hosts if value_of(one.facts)}
    if len(values) < 2:
        return None
    usual, count = Counter(values.values()).most_common(1)[0]
    odd = [f"{host} has {value}" for host, value in values.items() if value != usual]
    if odd:
        return fault(check, f"{'; '.join(odd)}; {count} hosts have {usual}: {advice}")
    return ok(check, f"{usual} on {count} hosts")


def _clocks(hosts: Sequence[LookedAt]) -> Finding:
    far = [
        f"{one.host} by {ahead:+.1f} s"
        for one in hosts
        if abs(ahead := _ahead_s(one)) > FAR_CLOCK_S
    ]
    if far:
        return warning(
            "clocks",
            f"they differ from this one: {', '.join(far)}, so times in logs and traces do not "
            "agree: run an NTP client on all hosts",
        )
    return ok("clocks", "they agree")


def _ahead_s(one: LookedAt) -> float:
    """Return how far a clock, read between question and answer, is ahead at least."""
    now_s = one.facts.clock.now_s
    return max(0.0, now_s - one.answered_s) + min(0.0, now_s - one.asked_s)
