"""Recorded traffic: the rows of Azure's and Mooncake's traces, and where those that ship lie.

`workloads.py` reads a trace, `replay.py` cuts and scales its rows; sources and licences are in
`traces/README.md`. A row that cannot be read is an error with its line, never a row less. A trace
holds lengths and times, no text.
"""

import gzip
import lzma
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO

import msgspec

from baton.bench.plan.lengths import MAX_LENGTH
from baton.protocol.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "traces"
SHIPPED = {
    "azure-conv": "azure_2023_conv.csv.xz",
    "azure-code": "azure_2023_code.csv.xz",
    "mooncake-conversation": "mooncake_fast25_conversation.jsonl.xz",
    "mooncake-synthetic": "mooncake_fast25_synthetic.jsonl.xz",
}
BLOCK_TOKENS = 512  # of Mooncake's hash ids
MAX_DIGITS = 20  # of a length: enough to see that it is too long
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceRow(msgspec.Struct, frozen=True):
    """One recorded request. `at_s` counts from the first row of the file.

    Equal `hash_ids` at the front of two rows mean equal tokens there, a block for each id; the last
    block is cut to `input_tokens`. No ids: the prompt is like no other.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def trace_path(name: str) -> Path:
    """The file of a shipped trace's short name; any other name is a path."""
    return FOLDER / SHIPPED[name] if name in SHIPPED else Path(name)


def open_text(path: Path) -> IO[str]:
    """Reads text, gzip and xz alike. Raises `ConfigError` when there is no such file."""
    try:
        if path.suffix == ".gz":
            return gzip.open(path, "rt", encoding="utf-8", newline="")
        if path.suffix == ".xz":
            return lzma.open(path, "rt", encoding="utf-8", newline="")
        return path.open(encoding="utf-8", newline="")
    except OSError as error:
        shipped = ", ".join(SHIPPED)
        why = f"{path} cannot be read: {error.strerror} (traces that ship: {shipped})"
        raise ConfigError(why) from None


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers. Raises `ConfigError` for a damaged file."""
    with open_text(path) as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
        except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is damaged or no text: {error}") from None


def read_trace(path: Path) -> list[TraceRow]:
    """The rows of an Azure CSV or a Mooncake JSONL, told apart by the first line."""
    _, first = next(numbered_lines(path), (0, ""))
    if not first:
        raise ConfigError(f"{path} is empty")
    if first.lstrip().startswith("{"):
        return read_mooncake(path)
    if _AZURE_COLUMNS[0] in first:
        return read_azure(path)
    wanted = f"a header with {', '.join(_AZURE_COLUMNS)}, or JSON objects"
    raise ConfigError(f"{path}:1: neither of the known traces; the first line must be {wanted}")


def read_azure(path: Path) -> list[TraceRow]:
    """Rows of the Azure LLM inference traces: a stamp and two numbers of tokens."""
    lines = numbered_lines(path)
    number, header = next(lines, (1, ""))
    columns = [name.strip() for name in header.strip().split(",")]
    if missing := [name for name in _AZURE_COLUMNS if name not in columns]:
        raise ConfigError(f"{path}:{number}: the header has no {', '.join(missing)}")
    places = [columns.index(name) for name in _AZURE_COLUMNS]
    rows: list[TraceRow] = []
    begin: datetime | None = None
    for number, line in lines:
        where = f"{path}:{number}"
        cells = line.strip().split(",")
        if len(cells) != len(columns):
            raise ConfigError(f"{where}: {len(cells)} cells, {len(columns)} columns")
        stamp, *lengths = (cells[place].strip() for place in places)
        if not all(length.isascii() and length.isdecimal() for length in lengths):
            raise ConfigError(f"{where}: lengths {', '.join(lengths)} are not whole numbers")
        try:
            at = datetime.fromisoformat(stamp)
            begin = begin or at
            at_s = (at - begin).total_seconds()
        except (ValueError, TypeError):
            # The latter: some stamps name a time zone and others do not.
            raise ConfigError(f"{where}: {stamp!r} is no stamp like that of row 1") from None
        inputs, outputs = (int(length[:MAX_DIGITS]) for length in lengths)
        _append(rows, TraceRow(at_s, inputs, outputs), where)
    return _not_empty(rows, path)


class _MooncakeRow(msgspec.Struct):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_mooncake(path: Path) -> list[TraceRow]:
    """Rows of the Mooncake traces: milliseconds, lengths, and an id per 512-token prefix block."""
    decoder = msgspec.json.Decoder(_MooncakeRow)
    rows: list[TraceRow] = []
    begin_ms: float | None = None
    for number, line in numbered_lines(path):
        where = f"{path}:{number}"
        try:
            read = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise ConfigError(f"{where}: {error}") from None
        begin_ms = read.timestamp if begin_ms is None else begin_ms
        blocks = math.ceil(read.input_length / BLOCK_TOKENS)
        if read.hash_ids and len(read.hash_ids) != blocks:
            what = f"{len(read.hash_ids)} hash_ids for {read.input_length} tokens"
            raise ConfigError(f"{where}: {what}; blocks of {BLOCK_TOKENS} make it {blocks}")
        if min(read.hash_ids, default=0) < 0:
            raise ConfigError(f"{where}: a hash id is below 0")
        at_s = (read.timestamp - begin_ms) / 1000
        _append(rows, TraceRow(at_s, read.input_length, read.output_length, read.hash_ids), where)
    return _not_empty(rows, path)


def _append(rows: list[TraceRow], row: TraceRow, where: str) -> None:
    if not 1 <= row.input_tokens <= MAX_LENGTH:
        raise ConfigError(f"{where}: {row.input_tokens} input tokens")
    if not 0 <= row.output_tokens <= MAX_LENGTH:
        raise ConfigError(f"{where}: {row.output_tokens} output tokens")
    if not math.isfinite(row.at_s):
        raise ConfigError(f"{where}: {row.at_s} is no time")
    if row.at_s < (rows[-1].at_s if rows else 0.0):
        raise ConfigError(f"{where}: the stamp lies before that of the row above")
    rows.append(row)


def _not_empty(rows: list[TraceRow], path: Path) -> list[TraceRow]:
    if not rows:
        raise ConfigError(f"{path} has no rows")
    return rows
