"""Find out whether the servers of a comparison were started alike, by flags and their own words.

Settings are compared under the names and with the values that they were written with; only case,
leading dashes and sections are left out of a name. Pure.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence

import yaml

from baton.bench.report.document import Parity
from baton.bench.report.redaction import is_secret_name
from baton.protocol.errors import ConfigError

UNKNOWN = "not said"
ON = "true"
# What a comparison depends on, and the words by which the names of its settings are known.
DECISIVE: Mapping[str, tuple[str, ...]] = {
    "dtype": ("dtype",),
    "quantization": ("quantiz",),
    "block size": ("block-size", "page-size"),
    "threads": ("threads",),
    "CUDA graphs": ("cuda-graph", "cudagraph", "eager"),
}
_INFO = re.compile(r"^[\w:]+_info\{(.*)\} ", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Facts = dict[str, str]


def facts_of_flags(text: str) -> Facts:
    """Return the settings in a command line, or in YAML. Raises `ConfigError`."""
    try:
        content: object = None if "--" in text else yaml.safe_load(text)
        words = [] if isinstance(content, dict) else shlex.split(text.replace("\\\n", " "), True)
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"cannot read these flags: {reason}") from error
    return facts_of_json(content) if isinstance(content, dict) else _facts_of_words(words)


def _facts_of_words(words: Sequence[str]) -> Facts:
    """Return the settings of `--name value`, `--name=value`, `--name` and `NAME=value`."""
    facts: Facts = {}
    flag = before = ""
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("-") and not word[1:2].isdigit():
            flag = "" if equals or name == "--set" else _name(name)
            if name != "--set":
                facts[_name(name)] = value if equals else ON
        elif flag:
            facts[flag], flag = word, ""
        elif equals:
            facts[_name(name)] = value
        elif before == "serve":
            facts["model"] = word
        before = word
    return facts


def facts_of_json(answer: object, name: str = "") -> Facts:
    """Return the plain values in a description, at any depth."""
    if isinstance(answer, dict):
        facts: Facts = {}
        for key, inner in answer.items():
            facts |= facts_of_json(inner, str(key))
        return facts
    if not name or not isinstance(answer, str | int | float):
        return {}
    return {_name(name): str(answer).lower() if isinstance(answer, bool) else str(answer)}


def _name(written: str) -> str:
    return written.lstrip("-").lower().replace("_", "-").rpartition(".")[2]


def facts_said(pages: Mapping[str, str]) -> Facts:
    """Return what a server says of itself on these pages: JSON, or the labels of info metrics."""
    facts: Facts = {}
    for text in pages.values():
        try:
            facts |= facts_of_json(json.loads(text))
        except ValueError:  # metrics (Prometheus), such as `vllm:cache_config_info`
            pairs = (pair for match in _INFO.finditer(text) for pair in _LABEL.findall(match[1]))
            facts |= {_name(name): value for name, value in pairs}
    return facts


def parity(flags: Mapping[str, Facts], said: Mapping[str, Facts]) -> list[Parity]:
    """Return a row per setting of each arm: what its server says, or else what its flags say.

    Decisive settings come first, then the others in which arms differ. Keys are left out.
    """
    seen = {arm: facts | said.get(arm, {}) for arm, facts in flags.items()}
    names = dict.fromkeys(name for facts in seen.values() for name in facts)
    rows = [
        Parity(name, {arm: facts.get(name, UNKNOWN) for arm, facts in seen.items()})
        for name in names
        if not is_secret_name(name)
    ]
    others = [row for row in rows if not _decides(row.name) and not row.same]
    return [row for row in rows if _decides(row.name)] + others


def warnings(rows: Sequence[Parity]) -> list[str]:
    """Return a line for each decisive setting that is not known to be the same."""
    lines = []
    for row in rows:
        if _decides(row.name) and not row.same:
            shown = ", ".join(f"{arm}: {value}" for arm, value in row.values.items())
            lines.append(f"WARNING: the arms differ in {row.name} ({shown})")
    known = {_decides(row.name) for row in rows}
    if silent := [subject for subject in DECISIVE if subject not in known]:
        lines.append(
            f"Neither flags nor servers say: {', '.join(silent)}. Give them with --flags NAME=..."
        )
    return lines


def _decides(name: str) -> str:
    """Return the subject of a setting that a comparison depends on; empty for others."""
    found = (subject for subject, words in DECISIVE.items() if any(map(name.__contains__, words)))
    return next(found, "")
