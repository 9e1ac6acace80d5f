"""Find out whether the servers of a comparison were started alike, by flags and their own words.

Only settings that a comparison depends on are read, wherever they stand: in a command line, YAML,
JSON or the labels of a metric. They are compared under the names and with the values that they were
written with; only case, leading dashes and sections are left out of a name. Pure.
"""

import re
from collections.abc import Mapping, Sequence

from baton.bench.report.document import UNKNOWN, Parity

ON = "true"  # the value of a flag that has none
# What a comparison depends on, and the words by which the names of its settings are known.
DECISIVE: Mapping[str, str] = {
    "dtype": "dtype",
    "quantization": "quantiz",
    "block size": "(?:block|page)[-_]size",
    "threads": "threads",
    "CUDA graphs": "cuda[-_]?graph|eager",
}
_SETTING = re.compile(
    rf"""([\w.-]*(?:{"|".join(DECISIVE.values())})[\w-]*)["']?"""
    r"""(?:(?:[ \t]*[=:][ \t]*|[ \t]+)"""
    r"""(?:"([^"]*)"|'([^']*)'|([^\s"',;{}\[\]\\-][^\s"',;{}\[\]]*)))?""",
    re.IGNORECASE,
)

Facts = dict[str, str]


def facts_of(text: str) -> Facts:
    """Return the decisive settings in a text of any form; the last of a name counts."""
    return {
        name.lstrip("-").lower().replace("_", "-").rpartition(".")[2]: "".join(values) or ON
        for name, *values in _SETTING.findall(text)
    }


def facts_said(pages: Mapping[str, str]) -> Facts:
    """Return what a server says of itself on these pages: in JSON, or as labels of info metrics."""
    facts: Facts = {}
    for text in pages.values():
        is_json = text.lstrip().startswith(("{", "["))
        lines = [line for line in text.splitlines() if is_json or "_info{" in line]
        facts |= facts_of("\n".join(lines))
    return facts


def parity(flags: Mapping[str, Facts], said: Mapping[str, Facts]) -> list[Parity]:
    """Return a row per setting of each arm: what its server says, or else what its flags say."""
    seen = {arm: facts | said.get(arm, {}) for arm, facts in flags.items()}
    names = dict.fromkeys(name for facts in seen.values() for name in facts)
    return [
        Parity(name, {arm: facts.get(name, UNKNOWN) for arm, facts in seen.items()})
        for name in names
    ]


def warnings(rows: Sequence[Parity], arms: Sequence[str]) -> list[str]:
    """Return a line for each setting that differs, and one for all that are not known."""
    lines = []
    for row in rows:
        if row.same == "NO":
            shown = ", ".join(f"{arm}: {value}" for arm, value in row.values.items())
            lines.append(f"WARNING: the arms differ in {row.name} ({shown})")
    silent = []
    for subject, words in DECISIVE.items():
        own = [row for row in rows if re.search(words, row.name)]
        lacking = [arm for arm in arms if all(row.values[arm] == UNKNOWN for row in own)]
        silent += [f"{subject} ({', '.join(lacking)})"] if lacking else []
    if silent:
        lines.append(f"Not said by flags or servers: {', '.join(silent)}; see --flags")
    return lines
