"""Files of requests: recorded traces of lengths and times, and prompts that a user wrote.

A trace is Azure's CSV or Mooncake's JSONL (sources and licences: `traces/README.md`) and holds no
text. A row that cannot be read is an error with its line number, and never skipped. `replay` scales
a trace as the settings say.
"""

import gzip
import itertools
import lzma
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, TypeVar

import msgspec
from msgspec import Meta

from baton.bench.plan.prompts import (
    MAX_LENGTH,
    MEASURED,
    WARM_UP,
    WORD_PLACES,
    Draws,
    written,
)
from baton.bench.records import Message, Planned
from baton.bench.settings import Workload
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
# Blocks of fewer random bits than this would be equal by chance in a trace of 100,000 blocks.
MIN_BLOCK_BITS = 40

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
            raise ValueError(
                "a row has either a prompt or messages, and neither is empty"
            )


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
        wanted = (
            "a header with TIMESTAMP,ContextTokens,GeneratedTokens, or JSON objects"
        )
        raise ConfigError(
            f"{path}:1: neither of the known traces, which begin with {wanted}"
        )
    begin_s = rows[0].at_s
    return [msgspec.structs.replace(row, at_s=row.at_s - begin_s) for row in rows]


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of text, gzip or xz that are not blank, with their numbers."""
    try:
        with OPENERS.get(path.suffix, open)(
            path, "rt", encoding="utf-8", newline=""
        ) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is damaged or no text: {error}") from None
    except OSError as error:
        shipped = ", ".join(SHIPPED)
        why = f"{path} cannot be read: {error.strerror} (traces that ship: {shipped})"
        raise ConfigError(why) from None


def _rows(
    path: Path, lines: Iterable[tuple[int, str]], decode: Callable[[str], Row]
) -> list[Row]:
    rows: list[Row] = []
    for number, line in lines:
        try:
            row = decode(line)
            if rows:
                before_s = rows[-1].at_s
                at_s = row.at_s
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
        row = msgspec.convert(
            dict(zip(columns, cells, strict=True)), _AzureRow, strict=False
        )
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
    return TraceRow(
        row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids
    )


def replay(rows: Sequence[TraceRow], options: Workload) -> tuple[list[TraceRow], int]:
    """Return the rows as they are played, and the tokens of their blocks."""
    block_tokens = max(1, round(BLOCK_TOKENS * options.length_scale))
    played = [
        TraceRow(
            row.at_s * options.time_scale,
            *_scaled(row, options.length_scale, block_tokens),
            row.hash_ids,
        )
        for row in rows
    ]
    return played, block_tokens


def _scaled(row: TraceRow, scale: float, block_tokens: int) -> tuple[int, int]:
    """Return the scaled lengths of a row, at least 1 each."""
    inputs = max(1, round(row.input_tokens * scale))
    if row.hash_ids:
        # By blocks, so that rows which share an id in full share a whole block of the new size.
        full = len(row.hash_ids) - 1
        rest = row.input_tokens - full * BLOCK_TOKENS
        inputs = full * block_tokens + math.ceil(rest * block_tokens / BLOCK_TOKENS)
    return inputs, max(1, round(row.output_tokens * scale))


class TraceSource:
    """Requests of recorded lengths, whose prompts share the prefixes that the hash ids say."""

    def __init__(self, workload: Workload, draws: Draws) -> None:
        self._draws, self._recorded = draws, read_trace(workload.path)
        self._rows, self._block_tokens = replay(self._recorded, workload)
        self.num_rows: int | None = len(self._rows)
        self.times: Sequence[float] | None = [row.at_s for row in self._rows]
        # Blocks that are too small to tell their ids apart would be equal by chance.
        size, (low, high) = self._block_tokens, draws.vocabulary
        has_blocks = any(row.hash_ids for row in self._rows)
        if has_blocks and size * math.log2(high - low + 1) < MIN_BLOCK_BITS:
            raise ConfigError(
                f"prefix blocks of {size} tokens from {high - low + 1} ids would be equal by "
                "chance: raise --length-scale or widen --vocabulary"
            )

    def draw(self, place: int) -> Planned:
        row = self._rows[place]
        if not row.hash_ids:
            return self._unlike_others(row, (MEASURED, place, 0))
        self._draws.spend(row.input_tokens)
        blocks = (self._draws.block(one, self._block_tokens) for one in row.hash_ids)
        ids = tuple(itertools.chain.from_iterable(blocks))[: row.input_tokens]
        assert len(ids) == row.input_tokens
        return Planned(0, None, row.output_tokens, prompt_ids=ids)

    def warm_up(self, place: int) -> Planned:
        return self._unlike_others(
            self._rows[place % len(self._rows)], (WARM_UP, place, 0)
        )

    def _unlike_others(self, row: TraceRow, key: tuple[int, ...]) -> Planned:
        self._draws.spend(row.input_tokens)
        ids = self._draws.prompt(key, row.input_tokens, self._draws.vocabulary)
        return Planned(0, None, row.output_tokens, prompt_ids=ids)

    def notes(self, num_arrivals: int) -> list[str]:
        rows = self._recorded[:num_arrivals]
        size = self._block_tokens
        notes = []
        if any(row.hash_ids for row in rows):
            scale = size / BLOCK_TOKENS
            scaled = "" if scale == 1 else f", which scales inputs by {scale:g}"
            notes.append(f"equal hash ids are equal blocks of {size} tokens{scaled}")
        if empty := sum(row.output_tokens == 0 for row in rows):
            notes.append(
                f"{empty} of {len(rows)} rows have no output and ask for one token"
            )
        return notes


class FileSource:
    """Requests as a file has them; an output length that a row does not say is drawn."""

    def __init__(self, workload: Workload, draws: Draws) -> None:
        self._rows = read_prompts(Path(workload.path))
        self._draws = draws
        self.num_rows: int | None = len(self._rows)
        at = [row.at_s for row in self._rows if row.at_s is not None]
        self.times: Sequence[float] | None = at or None

    def draw(self, place: int) -> Planned:
        row, outputs = self._row(place, MEASURED)
        if isinstance(row.prompt, tuple):
            return Planned(0, None, outputs, prompt_ids=row.prompt)
        return Planned(0, None, outputs, prompt=row.prompt, messages=row.messages)

    def warm_up(self, place: int) -> Planned:
        """Draw a request of the row's form and length, which is counted in words if it is text."""
        (row, outputs), key = self._row(place, WARM_UP), (WARM_UP, place, 0)
        if isinstance(row.prompt, tuple):
            ids = self._draws.prompt(key, len(row.prompt), self._draws.vocabulary)
            return Planned(0, None, outputs, prompt_ids=ids)
        text = row.prompt or " ".join(message.content for message in row.messages)
        words = written(self._draws.prompt(key, max(1, len(text.split())), WORD_PLACES))
        messages = (Message("user", words),) if row.messages else ()
        return Planned(
            0, None, outputs, prompt="" if messages else words, messages=messages
        )

    def _row(self, place: int, kind: int) -> tuple[PromptRow, int]:
        row = self._rows[place % len(self._rows)]
        return row, row.output_tokens or self._draws.output_tokens((kind, place, 0))

    def notes(self, num_arrivals: int) -> list[str]:
        different = {(row.prompt, row.messages) for row in self._rows[:num_arrivals]}
        repeated = num_arrivals - len(different)
        notes = [
            "a file has the same prompts in every load: a prefix cache may know them"
        ]
        if repeated:
            notes.append(f"{repeated} of {num_arrivals} prompts repeat an earlier one")
        return notes
