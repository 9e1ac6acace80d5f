"""How reports write numbers: a few digits, the unit beside them, and a dash for none."""

import math

NONE = "–"  # noqa: RUF001 - the dash that a table shows


def number(value: float | None) -> str:
    """Return three significant digits, or all digits before the point, and a count as it is."""
    if value is None or not math.isfinite(value):
        return NONE
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if size >= 100 or value == 0:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.1 else f"{value:.3g}"


def share(value: float | None) -> str:
    """Return a percentage that says 100 % (or 0 %) only where it is all (or none)."""
    if value is None or not math.isfinite(value):
        return NONE
    percent = 100 * value
    for decimals in (1, 2, 3):
        text = f"{percent:.{decimals}f}"
        if float(text) not in (0.0, 100.0) or percent in (0.0, 100.0):
            return f"{text.removesuffix('.0')} %"
    return "< 100 %" if percent > 50 else "> 0 %"


def quantity(value: float | None, unit: str) -> str:
    """Return a number and its unit, and a share as a percentage."""
    if unit == "share":
        return share(value)
    written = number(value)
    return written if written == NONE else f"{written} {unit}".strip()


def several(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def utc(stamp: str) -> str:
    """Return an ISO 8601 time of UTC in a form for reading."""
    return stamp.replace("T", " ").replace("+00:00", " UTC")
