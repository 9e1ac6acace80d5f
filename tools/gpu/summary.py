"""The last lines of the GPU benchmark, which give PASS, FAIL or values for each claim.

The command prints them when all sections have ended, and writes them to the report. A claim selects
its checks and rows by the beginnings of their keys, or by a part of them. This file is pure.
"""

import re
from collections.abc import Sequence

import msgspec

from tools.gpu.rows import Check, GpuReport, Row

NOT_TRIED = "not tried"


class Claim(msgspec.Struct, frozen=True):
    """One line. `checks` and `rows` are patterns of keys; rows show values, checks a verdict."""

    title: str
    checks: str = ""
    rows: str = ""


CLAIMS = (
    Claim("kernels = twins",
          r"(decode attention|prefill attention|QK norm|add \+ norm|SiLU|gather and scatter"
          r"|sampling: device = CPU|a decoder on the kernels).*"),
    Claim("bits in any batch and chunking",
          r"(ordered|prefill attention: bits|sampling: tokens in any batch).*"),
    Claim("graph = eager", r"a replayed step has the bits.*"),
    Claim("capture", r"capture of .*", r"capture of .*"),
    Claim("waits per step", r"waits in a replayed step.*"),
    Claim("copies per step", r"copies to the device.*"),
    Claim("invariance per weight shape", r"rows keep their bits.*"),
    Claim("decode ms, eager", rows=r".* decode b\d+ ctx .*, eager"),
    Claim("decode ms, graph", rows=r".* decode b\d+ ctx .*, graph"),
    Claim("decode ms, served by the loop", rows=r"(?!idle share).* decode b\d+ ctx \w+"),
    Claim("prefill ms", rows=r".* prefill \w+( in chunks of \d+)?"),
    Claim("prefill attention and SDPA", rows=r"(prefill attention|torch SDPA) .*"),
    Claim("sampler", rows=r"sampling .*"),
    Claim("idle share", rows=r"idle share.*"),
    Claim("lane", r"lane .*"),
    Claim("KV reads", rows=r"KV reads .*"),
    Claim("hand-over p50 / p99", rows=r"hand-over .*"),
    Claim("split tokens = colocated", r"greedy tokens, split against colocated"),
)  # fmt: skip


def last_lines(report: GpuReport) -> list[str]:
    """Return one line for each claim."""
    checks = [check for section in report.sections for check in section.checks]
    rows = [row for section in report.sections for row in section.rows]
    return [_line(claim, checks, rows) for claim in CLAIMS]


def _line(claim: Claim, checks: Sequence[Check], rows: Sequence[Row]) -> str:
    own = [check for check in checks if claim.checks and re.fullmatch(claim.checks, check.key)]
    shown = [row for row in rows if claim.rows and re.fullmatch(claim.rows, row.key)]
    failed = [check.key for check in own if check.has_failed]
    failed += [row.key for row in shown if row.error]
    said = [*_verdict(own), *(_value(row) for row in shown if not row.error)]
    if failed:
        said.insert(0, f"FAIL ({failed[0]}, of {len(failed)})")
    return f"{claim.title}: {'; '.join(said) or NOT_TRIED}"


def _verdict(checks: Sequence[Check]) -> list[str]:
    tried = [check for check in checks if check.passed is not None]
    if not tried:
        return [f"{NOT_TRIED} ({checks[0].detail})"] if checks else []
    if any(check.has_failed for check in tried):
        return []
    missed = [check.key for check in tried if check.passed is False]
    if missed:
        return [f"{len(tried) - len(missed)} of {len(tried)} hold, not {missed[0]}"]
    detail = f" {tried[0].detail}" if len(tried) == 1 else f" ({len(tried)})"
    return ["PASS" + detail]


def _value(row: Row) -> str:
    if row.value is None:
        return f"{row.key} {row.note or NOT_TRIED}"
    high = f" / {row.high:.3g}" if row.key.startswith("hand-over") and row.high else ""
    share = f", {100 * row.floor_share:.0f} % of floor" if row.floor_share else ""
    verdict = f", {row.verdict}" if row.verdict else ""
    return f"{row.key} {row.value:.3g}{high} {row.unit}{share}{verdict}"
