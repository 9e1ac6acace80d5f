"""Whether two servers were started alike: their flags and their own words, brought to one form.

`compare.py` collects both for every arm. Pure. Names differ between servers, so the few settings
that decide a comparison have one name here; all others are compared under the name they came with.
Nothing is assumed of what nobody said: it is shown as unknown.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from baton.bench.report.document import Parity
from baton.bench.report.redaction import is_secret_name
from baton.protocol.errors import ConfigError

UNKNOWN = "not said"
ON = "true"
# What a comparison depends on, and the names that servers have for it.
DECISIVE: Mapping[str, tuple[str, ...]] = {
    "dtype": ("dtype", "torch-dtype", "model-dtype"),
    "KV dtype": ("kv-cache-dtype", "cache-dtype", "kv-dtype"),
    "quantization": ("quantization", "quantize"),
    "block size": ("block-size", "page-size", "kv-block-size", "tokens-per-block"),
    "threads": ("threads", "num-threads", "omp-num-threads", "cpu-threads"),
    "CUDA graphs": (
        "cuda-graphs", "cuda-graph", "enforce-eager", "disable-cuda-graph", "cudagraph-mode",
        "cuda-graph-sizes", "cudagraph-capture-sizes", "cuda-graph-max-bs",
    ),
    "tensor parallel": ("tensor-parallel", "tensor-parallel-size", "tp-size", "tp"),
    "prefix cache": (
        "prefix-cache", "enable-prefix-caching", "disable-radix-cache", "cache-prefix",
    ),
}  # fmt: skip
# Of these names "true" means that the setting is off.
OPPOSITES = {"enforce-eager", "disable-cuda-graph", "disable-radix-cache"}
WARNED = ("dtype", "KV dtype", "quantization", "block size", "threads", "CUDA graphs")
_VALUES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32",
           "float": "float32", "yes": ON, "on": ON, "no": "false", "off": "false"}  # fmt: skip
_SETTING = re.compile(r"\s*([A-Za-z][\w.-]*)\s*:\s+(\S.*?)\s*(?:#.*)?")
_VARIABLE = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)")
_LABELS = re.compile(r"^(\w+)_info\{(.*)\} ", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Facts = dict[str, str]


def facts_of_flags(text: str) -> Facts:
    """The settings in a command line, or in `name: value` lines; raises `ConfigError`."""
    lines = [
        line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    found = [_SETTING.fullmatch(line) for line in lines]
    if lines and "--" not in text and any(found):
        return _merged((match[1], match[2].strip("\"'")) for match in found if match)
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(f"cannot read these flags: {error}") from error
    return _merged(_flags(words))


def facts_of_metrics(text: str) -> Facts:
    """The labels of info metrics (Prometheus), such as `vllm:cache_config_info`."""
    plain = text.replace(":", "_")
    pairs = [pair for match in _LABELS.finditer(plain) for pair in _LABEL.findall(match[2])]
    return _merged(pairs)


def facts_of_json(answer: object) -> Facts:
    """The plain values of a server's description of itself, wherever they stand in it."""
    return _merged(_leaves(answer))


def parity(flags: Mapping[str, Facts], said: Mapping[str, Facts]) -> list[Parity]:
    """A row per setting: what the arms were started with, and what their servers say.

    A server's own word counts, and a flag where the server is silent. Decisive settings come first,
    then those in which arms differ. Keys are no settings: some servers tell them to who has one.
    """
    arms = list(flags)
    seen = {arm: flags[arm] | said.get(arm, {}) for arm in arms}
    names = [
        name
        for name in dict.fromkeys(name for arm in arms for name in seen[arm])
        if not is_secret_name(name)
    ]
    rows = [
        Parity(name, {arm: seen[arm].get(name, UNKNOWN) for arm in arms})
        for name in [*DECISIVE, *(name for name in names if name not in DECISIVE)]
    ]
    decisive = [row for row in rows if row.name in DECISIVE]
    others = [row for row in rows if row.name not in DECISIVE and not row.same]
    return decisive + others


def warnings(rows: Sequence[Parity]) -> list[str]:
    """A line for each decisive setting that is not known to be the same."""
    lines = []
    for row in rows:
        if row.name not in WARNED:
            continue
        shown = ", ".join(f"{arm}: {value}" for arm, value in row.values.items())
        if not row.same:
            lines.append(f"WARNING: the arms differ in {row.name} ({shown})")
    silent = [
        row.name for row in rows if row.name in WARNED and set(row.values.values()) == {UNKNOWN}
    ]
    if silent:
        lines.append(
            f"Neither flags nor servers say: {', '.join(silent)}. Give them with --flags NAME=..."
        )
    return lines


def _flags(words: Sequence[str]) -> list[tuple[str, str]]:
    found = []
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if variable := _VARIABLE.fullmatch(word):
            found.append((variable[1], variable[2]))
        elif word == "serve" and place < len(words) and not words[place].startswith("-"):
            found.append(("model", words[place]))
            place += 1
        elif word.startswith("-") and not _is_number(word):
            name, equals, value = word.partition("=")
            if not equals:
                follows = words[place] if place < len(words) else "-"
                value = ON
                if not follows.startswith("-") or _is_number(follows):
                    value = follows
                    place += 1
            if name == "--set":
                name, _, value = value.partition("=")
            found.append((name, value))
    return found


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?", word) is not None


def _leaves(value: object, name: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, str(key))]
    if isinstance(value, bool):
        return [(name, str(value).lower())] if name else []
    return [(name, str(value))] if name and isinstance(value, str | int | float) else []


def _merged(pairs: Iterable[tuple[str, str]]) -> Facts:
    """The last word on each setting."""
    return dict(_normal(name, value) for name, value in pairs)


def _normal(name: str, value: str) -> tuple[str, str]:
    """A setting under its one name, its value in its one form."""
    whole = name.lstrip("-").lower().replace("_", "-").replace(".", "-")
    last = name.lstrip("-").lower().replace("_", "-").rpartition(".")[2]
    plain = value.strip().lower().removeprefix("torch.")
    plain = _VALUES.get(plain, plain)
    for key, names in DECISIVE.items():
        for known in (whole, last, last.removeprefix("no-")):
            if known in names:
                turned = (known in OPPOSITES) != (known != whole and last.startswith("no-"))
                if turned and plain in (ON, "false"):
                    plain = "false" if plain == ON else ON
                return key, plain
    return whole, value.strip()
