"""The flags of `--workload`, in one Struct that the whole plan reads.

`cli.py` makes flags of its annotations, so nothing heavy may be imported here.
"""

from typing import Annotated, Literal

import msgspec

from baton.protocol.config import about
from baton.protocol.errors import ConfigError

Kind = Literal["tokens", "text", "chat", "trace", "file"]
Vocabulary = tuple[int, int]  # lowest and highest token id to draw, both included

AUTO = "auto"
AUTO_VOCABULARY: Vocabulary = (300, 8000)  # below 300 lie the bytes and special tokens of most


class Workload(msgspec.Struct, frozen=True):
    """A number of 0 and an empty text mean "not given" where the description says so."""

    workload: Annotated[Kind, about("source of the requests")] = "tokens"
    prompt: Annotated[
        str,
        about(
            "lengths of prompts: 512, uniform:100-900, normal:512,sd=100, "
            "lognormal:mean=1155,sd=1100 or choice:100,200",
            "tokens",
        ),
    ] = "512"
    output: Annotated[
        str, about("lengths of outputs in the same forms, forced on the server", "tokens")
    ] = "64"
    vocabulary: Annotated[
        str,
        about(
            "token ids to draw prompts from, LOW-HIGH; auto takes 300-8000, or as many of these as "
            "the server accepts"
        ),
    ] = AUTO
    shared_prefix: Annotated[
        int,
        about("common start of all prompts, in front of the tokens of --prompt", "tokens", ge=0),
    ] = 0
    path: Annotated[
        str, about("a JSONL file of prompts, a trace file, or a shipped trace", kind="path")
    ] = ""
    trace_start_s: Annotated[float, about("skip the trace up to this time", "s", ge=0)] = 0.0
    time_scale: Annotated[float, about("stretch the trace's times: 2 halves its rate", gt=0)] = 1.0
    spread_s: Annotated[
        float,
        about(
            "spread rows that share a stamp evenly up to the next stamp, over at most this time "
            "(Mooncake's conversation: 3)", "s", ge=0,
        ),
    ] = 0.0  # fmt: skip
    length_scale: Annotated[float, about("scale the trace's lengths and prefix blocks", gt=0)] = 1.0
    max_input: Annotated[
        int, about("cut longer prompts of a trace; 0 cuts none", "tokens", ge=0)
    ] = 0
    max_output: Annotated[
        int, about("cut longer outputs of a trace; 0 cuts none", "tokens", ge=0)
    ] = 0
    seed: Annotated[
        int, about("seed from which all prompts, lengths and arrivals are drawn", ge=0)
    ] = 0


def range_of(text: str) -> Vocabulary:
    """Read `--vocabulary`. Raises `ConfigError`."""
    if text == AUTO:
        return AUTO_VOCABULARY
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and int(low) < int(high)):
        raise ConfigError(f"--vocabulary {text!r}: write it as LOW-HIGH, such as 300-8000")
    return int(low), int(high)
