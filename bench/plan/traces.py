"""Files of requests: recorded traces of lengths and times, and prompts that a user wrote.

A trace is Azure's CSV or Mooncake's JSONL (sources and licences: `traces/README.md`) and holds no
text. A row that cannot be read is an error with its line, never a row less.
"""

import gzip
import itertools
import lzma
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, TypeVar

import msgspec
from msgspec import Meta

from baton.bench.plan.prompts import MAX_LENGTH
from baton.bench.records import Message
from baton.protocol.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "traces"
SHIPPED = {
    "azure-conv": "azure_2023_conv.csv.xz",
    "azure-code": "azure_2023_code.csv.xz",
    "mooncake-conversation": "mooncake_fast25_conversation.jsonl.xz",
    "mooncake-synthetic": "mooncake_fast25_synthetic.jsonl.xz",
}
OPENERS: Mapping[str, Callable[..., IO[str]]] = {".gz": gzip.open, ".xz": lzma.open}
BLOCK_TOKENS = 512  # of Mooncake's hash ids

InputTokens = Annotated[int, Meta(ge=1, le=MAX_LENGTH)]
OutputTokens = Annotated[int, Meta(ge=0, le=MAX_LENGTH)]
TokenId = Annotated[int, Meta(ge=0)]


class TraceRow(msgspec.Struct, frozen=True):
    """One recorded request. `at_s` counts from the first row of the file.

    Equal `hash_ids` at the front of two rows mean equal tokens there, a block for each id; the last
    block is cut to `input_tokens`. A row without ids has a prompt like no other.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


class PromptRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a user's file. `at_s` counts from the start of the schedule."""

    prompt: str | tuple[TokenId, ...] = ""
    messages: tuple[Message, ...] = ()
    output_tokens: InputTokens | None = None
    at_s: Annotated[float, Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        if bool(self.prompt) == bool(self.messages):
            raise ValueError("a row has either a prompt or messages, and neither is empty")


class _AzureRow(msgspec.Struct):
    stamp: str = msgspec.field(name="TIMESTAMP")
    input_tokens: InputTokens = msgspec.field(name="ContextTokens")
    output_tokens: OutputTokens = msgspec.field(name="GeneratedTokens")


class _MooncakeRow(msgspec.Struct):
    timestamp: float  # ms
    input_length: InputTokens
    output_length: OutputTokens
    hash_ids: tuple[TokenId, ...] = ()


Row = TypeVar("Row", TraceRow, PromptRow)
_decode_mooncake = msgspec.json.Decoder(_MooncakeRow).decode


def read_prompts(path: Path) -> list[PromptRow]:
    """Return the rows of a user's file in their order; all or none of them say when they arrive."""
    return _rows(path, numbered_lines(path), msgspec.json.Decoder(PromptRow).decode)


def read_trace(name: str) -> list[TraceRow]:
    """Return the rows of a shipped trace by its short name, or of the trace at a path."""
    path = FOLDER / SHIPPED[name] if name in SHIPPED else Path(name)
    lines = numbered_lines(path)
    _, first = head = next(lines, (0, ""))
    if first.lstrip().startswith("{"):
        rows = _rows(path, itertools.chain([head], lines), _mooncake)
    elif "TIMESTAMP" in first:
        rows = _rows(path, lines, _azure([name.strip() for name in first.split(",")]))
    else:
        wanted = "a header with TIMESTAMP,ContextTokens,GeneratedTokens, or JSON objects"
        raise ConfigError(f"{path}:1: neither of the known traces, which begin with {wanted}")
    begin_s = rows[0].at_s
    return [msgspec.structs.replace(row, at_s=row.at_s - begin_s) for row in rows]


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of text, gzip or xz that are not blank, with their numbers."""
    try:
        with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8", newline="") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is damaged or no text: {error}") from None
    except OSError as error:
        shipped = ", ".join(SHIPPED)
        why = f"{path} cannot be read: {error.strerror} (traces that ship: {shipped})"
        raise ConfigError(why) from None


def _rows(path: Path, lines: Iterable[tuple[int, str]], decode: Callable[[str], Row]) -> list[Row]:
    rows: list[Row] = []
    for number, line in lines:
        try:
            row = decode(line)
            if rows:
                before_s, at_s = rows[-1].at_s, row.at_s
                if (before_s is None) != (at_s is None):
                    raise ValueError("some rows say at_s and others do not")
                if before_s is not None and at_s is not None and at_s < before_s:
                    raise ValueError("the row arrives before the row above it")
        except (ValueError, msgspec.DecodeError) as error:
            raise ConfigError(f"{path}:{number}: {error}") from None
        rows.append(row)
    if not rows:
        raise ConfigError(f"{path} has no rows")
    return rows


def _azure(columns: list[str]) -> Callable[[str], TraceRow]:
    """Read rows of the Azure LLM inference traces: a stamp and two numbers of tokens."""

    def decode(line: str) -> TraceRow:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(columns):
            raise ValueError(f"{len(cells)} cells, {len(columns)} columns")
        row = msgspec.convert(dict(zip(columns, cells, strict=True)), _AzureRow, strict=False)
        at = datetime.fromisoformat(row.stamp)
        at_s = at.replace(tzinfo=at.tzinfo or UTC).timestamp()
        return TraceRow(at_s, row.input_tokens, row.output_tokens)

    return decode


def _mooncake(line: str) -> TraceRow:
    """Read a row of the Mooncake traces: milliseconds, lengths, and an id per prefix block."""
    row = _decode_mooncake(line)
    blocks = math.ceil(row.input_length / BLOCK_TOKENS)
    if row.hash_ids and len(row.hash_ids) != blocks:
        what = f"{len(row.hash_ids)} hash_ids for {row.input_length} tokens"
        raise ValueError(f"{what}; blocks of {BLOCK_TOKENS} make it {blocks}")
    return TraceRow(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids)
