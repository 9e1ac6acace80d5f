"""What of a trace is played, how it is scaled, and the prompts that keep its shared prefixes.

`workloads.py` calls it with the rows that `trace_files.py` read. What spreading, scaling and
clamping change is counted and said in notes; nothing is dropped but what the cut leaves out.
"""

import collections
import itertools
import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from baton.bench.plan.trace_files import BLOCK_TOKENS, TraceRow
from baton.protocol.errors import ConfigError

# Blocks of fewer random bits than this would be equal by chance in a trace of 100,000 blocks.
MIN_BLOCK_BITS = 40
# Keeps the draws of a seed apart from those of arrivals and lengths.
_STREAM = 2

Vocabulary = tuple[int, int]  # lowest and highest token id to draw, both included


class TraceOptions(msgspec.Struct, frozen=True):
    """What part of a trace is played, and how. Lengths are clamped after they were scaled."""

    start_s: Annotated[
        float, Meta(ge=0, description="skip the trace up to here", extra={"unit": "s"})
    ] = 0.0
    time_scale: Annotated[float, Meta(gt=0, description="stretches times: 2 halves the rate")] = 1.0
    spread_s: Annotated[
        float,
        Meta(
            ge=0,
            description="rows of one stamp are spread evenly up to the next stamp, at most so far "
            "(Mooncake's conversation: 3); 0 leaves them",
            extra={"unit": "s"},
        ),
    ] = 0.0
    length_scale: Annotated[
        float, Meta(gt=0, description="scales inputs, outputs and prefix blocks")
    ] = 1.0
    max_input: Annotated[
        int, Meta(ge=0, description="clamps inputs; 0 clamps none", extra={"unit": "tokens"})
    ] = 0
    max_output: Annotated[
        int, Meta(ge=0, description="clamps outputs; 0 clamps none", extra={"unit": "tokens"})
    ] = 0


class Replay(msgspec.Struct, frozen=True):
    """Rows to play, from `at_s` 0; `notes` say what was done to them."""

    rows: list[TraceRow]
    block_tokens: int
    notes: list[str]


def replay(rows: Sequence[TraceRow], options: TraceOptions, *, limit: int | None = None) -> Replay:
    """The rows to play: those from `start_s` on, at most `limit`.

    Cutting comes last, so a longer replay begins with exactly the rows of a shorter one.
    """
    spread = _spread(rows, options.spread_s) if options.spread_s else rows
    chosen = [row for row in spread if row.at_s >= options.start_s][:limit]
    if not chosen:
        raise ConfigError(f"the trace has no rows from {options.start_s:g} s on")
    block_tokens = max(1, round(BLOCK_TOKENS * options.length_scale))
    begin_s = chosen[0].at_s
    played: list[TraceRow] = []
    clamps: list[tuple[bool, bool]] = []
    for row in chosen:
        fitted, clamped = _fitted(row, options, block_tokens)
        at_s = (row.at_s - begin_s) * options.time_scale
        played.append(msgspec.structs.replace(fitted, at_s=at_s))
        clamps.append(clamped)
    return Replay(played, block_tokens, _notes(played, options, block_tokens, clamps))


def _spread(rows: Sequence[TraceRow], spread_s: float) -> list[TraceRow]:
    """Rows of one stamp, evenly spread up to the next stamp or over `spread_s`, if that is less."""
    spread: list[TraceRow] = []
    first = 0
    while first < len(rows):
        at_s = rows[first].at_s
        after = first
        while after < len(rows) and rows[after].at_s == at_s:
            after += 1
        width_s = min(spread_s, rows[after].at_s - at_s) if after < len(rows) else spread_s
        for place, row in enumerate(rows[first:after]):
            moved_s = at_s + width_s * place / (after - first)
            spread.append(msgspec.structs.replace(row, at_s=moved_s))
        first = after
    return spread


def _fitted(
    row: TraceRow, options: TraceOptions, block_tokens: int
) -> tuple[TraceRow, tuple[bool, bool]]:
    """The row with scaled and clamped lengths, and whether input and output were clamped."""
    scale = options.length_scale
    inputs = max(1, round(row.input_tokens * scale))
    if row.hash_ids:
        # By blocks, so that rows which share an id in full share a whole block of the new size.
        full = len(row.hash_ids) - 1
        rest = row.input_tokens - full * BLOCK_TOKENS
        inputs = full * block_tokens + math.ceil(rest * block_tokens / BLOCK_TOKENS)
    outputs = max(1, round(row.output_tokens * scale))
    clamps = (
        0 < options.max_input < inputs,
        0 < options.max_output < outputs or row.output_tokens == 0,
    )
    inputs = options.max_input if clamps[0] else inputs
    outputs = min(outputs, options.max_output or outputs)
    hash_ids = row.hash_ids[: math.ceil(inputs / block_tokens)]
    return TraceRow(row.at_s, inputs, outputs, hash_ids), clamps


def _notes(
    rows: list[TraceRow],
    options: TraceOptions,
    block_tokens: int,
    clamps: list[tuple[bool, bool]],
) -> list[str]:
    notes = []
    if options.start_s:
        notes.append(f"the trace's first {options.start_s:g} s are left out")
    if options.spread_s:
        how = f"evenly up to the next stamp, over {options.spread_s:g} s at most"
        notes.append(f"rows of one stamp are spread {how}")
    if options.time_scale != 1:
        notes.append(f"the trace's times are stretched by {options.time_scale:g}")
    if options.length_scale != 1:
        notes.append(f"the trace's lengths are scaled by {options.length_scale:g}, to 1 at least")
    if any(row.hash_ids for row in rows):
        scale = block_tokens / BLOCK_TOKENS
        scaled = "" if scale == 1 else f", which scales inputs by {scale:g}"
        notes.append(f"equal hash ids are equal blocks of {block_tokens} tokens{scaled}")
        share = repeated_share(rows, block_tokens)
        notes.append(f"{share:.1%} of input tokens repeat the start of an earlier prompt")
    if not options.spread_s and (shared := _sharing_a_stamp(rows)) > len(rows) / 2:
        notes.append(f"{shared} of {len(rows)} rows share a stamp: as recorded they are bursts")
    limits = {"inputs": options.max_input, "outputs": options.max_output}
    for (side, limit), marks in zip(limits.items(), zip(*clamps, strict=True), strict=True):
        if any(marks):
            bound = f"1 to {limit}" if limit else "1 or more"
            notes.append(f"{sum(marks)} of {len(rows)} {side} were clamped to {bound} tokens")
    return notes


def _sharing_a_stamp(rows: list[TraceRow]) -> int:
    counts = collections.Counter(row.at_s for row in rows)
    return sum(count for count in counts.values() if count > 1)


def repeated_share(rows: Sequence[TraceRow], block_tokens: int) -> float:
    """The share of input tokens that a prefix cache without end would hold: whole blocks alone."""
    seen: set[int] = set()
    repeated = 0
    for row in rows:
        known = list(itertools.takewhile(seen.__contains__, row.hash_ids))
        repeated += min(len(known) * block_tokens, row.input_tokens)
        seen.update(row.hash_ids)
    return repeated / sum(row.input_tokens for row in rows)


def prefix_tokens(
    hash_ids: Sequence[int],
    input_tokens: int,
    vocabulary: Vocabulary,
    *,
    block_tokens: int = BLOCK_TOKENS,
    seed: int,
) -> tuple[int, ...]:
    """A prompt of `input_tokens`: a block for each id, drawn from it alone, the last one cut.

    Prompts that begin with the same ids begin with the same tokens, in every run of the seed.
    Raises `ConfigError` when blocks are too small to tell ids apart.
    """
    low, high = vocabulary
    if block_tokens * math.log2(high - low + 1) < MIN_BLOCK_BITS:
        raise ConfigError(
            f"prefix blocks of {block_tokens} tokens from {high - low + 1} ids would be equal by "
            "chance: raise the length scale or widen the vocabulary"
        )
    tokens: list[int] = []
    for hash_id in hash_ids:
        rng = np.random.default_rng([seed, _STREAM, hash_id])
        tokens += rng.integers(low, high, block_tokens, endpoint=True).tolist()
    assert len(tokens) - block_tokens < input_tokens <= len(tokens)
    return tuple(tokens[:input_tokens])
