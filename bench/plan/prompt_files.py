"""Prompts that a user wrote: a JSONL file, one request a line, gzip and xz accepted.

A row is `{"prompt": "text"}`, `{"prompt": [ids]}` or `{"messages": [{"role", "content"}]}`, and may
say `output_tokens` and `at_s`. `workloads.py` reads it. A row that cannot be read, a field that is
unknown included, is an error with its line.
"""

import math
from pathlib import Path

import msgspec

from baton.bench.plan.trace_files import numbered_lines
from baton.bench.records import Message
from baton.protocol.errors import ConfigError


class PromptRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row: `prompt` or `messages`. `at_s` counts from the start of the schedule."""

    prompt: str | tuple[int, ...] = ""
    messages: tuple[Message, ...] = ()
    output_tokens: int | None = None
    at_s: float | None = None


def read_prompts(path: Path) -> list[PromptRow]:
    """The rows in their order; all or none of them say when they arrive."""
    decoder = msgspec.json.Decoder(PromptRow)
    rows: list[PromptRow] = []
    for number, line in numbered_lines(path):
        where = f"{path}:{number}"
        try:
            row = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise ConfigError(f"{where}: {error}") from None
        if why := _fault(row, rows[-1] if rows else None):
            raise ConfigError(f"{where}: {why}")
        rows.append(row)
    if not rows:
        raise ConfigError(f"{path} has no prompts")
    return rows


def _fault(row: PromptRow, before: PromptRow | None) -> str:
    """What is wrong with a row that could be decoded; empty if nothing is."""
    if bool(row.prompt) == bool(row.messages):
        return "a row has either a prompt or messages, and neither is empty"
    if isinstance(row.prompt, tuple) and min(row.prompt, default=0) < 0:
        return "a token id is below 0"
    if row.output_tokens is not None and row.output_tokens < 1:
        return f"{row.output_tokens} output tokens"
    if row.at_s is not None and not 0 <= row.at_s < math.inf:
        return f"at_s {row.at_s} is below 0"
    if before is None:
        return ""
    if (row.at_s is None) != (before.at_s is None):
        return "some rows say at_s and others do not"
    if row.at_s is not None and before.at_s is not None and row.at_s < before.at_s:
        return "at_s lies before that of the row above"
    return ""
