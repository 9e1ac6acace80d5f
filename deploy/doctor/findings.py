"""A finding, which is one line of `baton doctor`, and the printing of findings."""

from collections.abc import Sequence
from typing import Literal

import msgspec

Level = Literal["ok", "warning", "fault"]
CHECK_WIDTH = 10
COLOURS = {"ok": "32", "warning": "33", "fault": "31"}


class Finding(msgspec.Struct, frozen=True):
    """`text` says what was found and, if that is a problem, what to do."""

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


class Lines:
    """Prints findings as lines, those of a host below a line with its name."""

    def __init__(self, *, is_coloured: bool) -> None:
        self._is_coloured = is_coloured
        self._host = ""

    def of(self, finding: Finding) -> list[str]:
        lines = []
        if finding.host != self._host:
            self._host = finding.host
            lines.append(f"{finding.host}:")
        level = finding.level.ljust(7)
        if self._is_coloured:
            level = f"\x1b[{COLOURS[finding.level]}m{level}\x1b[0m"
        return [*lines, f"  {level}  {finding.check.ljust(CHECK_WIDTH)}  {finding.text}"]


def summary_of(findings: Sequence[Finding]) -> str:
    faults = sum(one.level == "fault" for one in findings)
    warnings = sum(one.level == "warning" for one in findings)
    return f"{faults} faults, {warnings} warnings, {len(findings) - faults - warnings} checks ok"
