"""A finding, which is one line of `baton doctor`."""

from collections.abc import Sequence
from typing import Literal

import msgspec

Level = Literal["ok", "warning", "fault"]
CHECK_WIDTH = 10


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
