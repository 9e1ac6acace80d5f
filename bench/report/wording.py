"""How numbers are written in pages and tables: few digits, the unit beside them, a dash for none.

Used by `sections.py` and `headlines.py`; `progress.py` has its own, for narrower lines. The raw
numbers are in the JSON and the CSV.
"""

import math

NONE = "–"  # noqa: RUF001 - the dash that a table shows


def number(value: float | None) -> str:
    """Three digits that say something, all of them before the point."""
    if value is None or not math.isfinite(value):
        return NONE
    size = abs(value)
    if size >= 100 or value == 0:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.1 else f"{value:.3g}"


def share(value: float | None) -> str:
    """A percentage that only says 100 % (or 0 %) where it is all (or none)."""
    if value is None or not math.isfinite(value):
        return NONE
    percent = 100 * value
    for decimals in (1, 2, 3):
        text = f"{percent:.{decimals}f}"
        if float(text) not in (0.0, 100.0) or percent in (0.0, 100.0):
            return f"{text.removesuffix('.0')} %"
    return "< 100 %" if percent > 50 else "> 0 %"


def quantity(value: float | None, unit: str) -> str:
    """A number and its unit; shares as percentages."""
    if unit == "share":
        return share(value)
    written = number(value)
    return f"{written} {unit}".strip() if written != NONE else NONE


def duration(value_s: float | None) -> tuple[str, str]:
    """A number and its unit: milliseconds below a second."""
    if value_s is not None and value_s < 1.0:
        return number(1e3 * value_s), "ms"
    return number(value_s), "s"


def limit(value_ms: float) -> str:
    """A bound as it was written."""
    return f"{value_ms:g} ms"


def gibibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.0f} GiB" if size_bytes else "unknown"


def span(low: float, high: float, unit: str = "") -> str:
    """The ends of an interval."""
    if unit == "share":
        return f"{share(low).removesuffix(' %')} to {share(high)}"
    return f"{number(low)} to {number(high)} {unit}".strip()


def several(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def utc(stamp: str) -> str:
    """An ISO 8601 time of the UTC, for reading."""
    return stamp.replace("T", " ").replace("+00:00", " UTC")
