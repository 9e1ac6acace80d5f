"""Compare the outputs under load with those of each request alone: greedy, token by token.

Asking warms the server's prefix cache with the same prompts, so it comes *after* the measured load.
The outputs of a server that is not batch-invariant may differ without a loss: they part once and
for good (`wrong`), while `lost`, `doubled` and `reordered` are faults of delivery on any server.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Literal

import msgspec

from baton.bench.client.load import Load, Progress, run_load
from baton.bench.client.target import Target
from baton.bench.records import Outcome, Planned, Record
from baton.protocol.errors import BatonError, ConfigError

SHOWN = 6  # tokens or letters shown on either side in a line about a mismatch
# After a gap or a repetition this many tokens must match where no other sign tells it from chance.
MIN_OVERLAP = 4
# With other values, an output is not a function of its prompt.
GREEDY = {"temperature": 0, "best_of": 1, "use_beam_search": False}

Unit = Literal["token", "letter"]


class MismatchKind(StrEnum):
    LOST = "lost"  # some tokens are missing, the others are right
    DOUBLED = "doubled"  # some tokens came twice, the others are right
    REORDERED = "reordered"  # the tokens are right, their order is not
    WRONG = "wrong"  # the tokens are others


class Mismatch(msgspec.Struct, frozen=True):
    """An output under load that differs from that of the request alone."""

    index: int  # the request's
    kind: MismatchKind
    at: int  # the first token (or letter) that differs
    unit: Unit
    expected: str  # the output from there on
    got: str

    def __str__(self) -> str:
        return (
            f"{self.kind} at {self.unit} {self.at}: expected {self.expected or 'the end'}, "
            f"got {self.got or 'the end'}"
        )


def check_greedy(target: Target) -> None:
    """Raise `ConfigError` if the requests ask for outputs that cannot be compared."""
    extra = target.extra
    for name, greedy in GREEDY.items():
        if extra.get(name, greedy) != greedy:
            raise ConfigError(f"only greedy outputs can be verified: leave out {name}")


def reference(
    target: Target,
    requests: Sequence[Planned],
    stop: threading.Event | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> dict[int, Record]:
    """Return the record of each request alone on the server, by its index, until `stop` is set.

    Raises `BatonError` if the server does not answer one.
    """
    load = Load(target, alone(requests), concurrency=1, keep_text=True)
    records = run_load(load, on_progress=on_progress, stop=stop).records
    if stop is not None and stop.is_set():
        records = [record for record in records if record.outcome is Outcome.ANSWERED]
    return {record.index: whole(record) for record in records}


def alone(requests: Sequence[Planned]) -> list[Planned]:
    """Return the requests for a closed loop: without their times, and without the warm-up."""
    return [
        msgspec.structs.replace(planned, at_s=None) for planned in requests if not planned.warm_up
    ]


def whole(record: Record) -> Record:
    """Return the record if others can be compared with it, else raise `BatonError`."""
    if record.outcome is not Outcome.ANSWERED:
        why = f"{record.outcome} {record.detail}".strip()
        raise BatonError(f"request {record.index} was not answered when asked alone: {why}")
    if record.token_ids is None and record.text is None:
        raise BatonError(f"request {record.index} has neither token ids nor text to compare")
    return record


def compare_outputs(references: Mapping[int, Record], records: Sequence[Record]) -> list[Mismatch]:
    """Return every output that differs, in the order of `records`.

    The tokens that a failed request got must be right. Raises `BatonError` for an answered request
    that cannot be compared, because it must not count as right.
    """
    found = []
    for record in records:
        if record.warm_up:
            continue
        is_whole = record.outcome is Outcome.ANSWERED
        if record.index in references:
            mismatch = _mismatch(references[record.index], record, is_whole)
            found += [mismatch] if mismatch else []
        elif is_whole:
            raise BatonError(f"request {record.index} was not asked alone: no output to compare")
    return found


def _mismatch(expected: Record, record: Record, is_whole: bool) -> Mismatch | None:
    """Compare token ids, and text where both sides have it, which the load detokenized."""
    pairs: tuple[tuple[Unit, Sequence[object] | None, Sequence[object] | None], ...] = (
        ("token", expected.token_ids, record.token_ids),
        ("letter", expected.text, record.text),
    )
    comparable = [
        (unit, one, got) for unit, one, got in pairs if one is not None and got is not None
    ]
    if is_whole and not comparable:
        raise BatonError(
            f"request {record.index} cannot be verified: the load kept neither its token ids nor "
            "its text"
        )
    for unit, one, got in comparable:
        if got != (one if is_whole else one[: len(got)]):
            at = _first_difference(one, got)
            shown = [_shown(part[at : at + SHOWN]) for part in (one, got)]
            return Mismatch(record.index, classify(one, got), at, unit, *shown)
    return None


def _shown(part: Sequence[object]) -> str:
    """Return some tokens or letters in readable form; an empty text for none."""
    if isinstance(part, str):
        return repr(part) if part else ""
    return " ".join(map(str, part))


def classify(expected: Sequence[object], got: Sequence[object]) -> MismatchKind:
    """Name the way in which `got` differs from `expected`.

    The tokens that follow tell missing or doubled tokens from wrong ones: they must be the expected
    tokens, only shifted. So a gap is found although the forced length was kept.
    """
    at = _first_difference(expected, got)
    if _is_within(got, expected):
        return MismatchKind.LOST
    if _is_within(expected, got) and not Counter(got).keys() - Counter(expected).keys():
        return MismatchKind.DOUBLED
    if Counter(expected) == Counter(got):
        return MismatchKind.REORDERED
    for length in range(1, len(expected) - at - MIN_OVERLAP + 1):
        if _goes_on(expected[at + length :], got[at:]):
            return MismatchKind.LOST
    for length in range(1, min(at, len(got) - at - MIN_OVERLAP) + 1):
        is_repeated = got[at : at + length] == expected[at - length : at]
        if is_repeated and _goes_on(expected[at:], got[at + length :]):
            return MismatchKind.DOUBLED
    return MismatchKind.WRONG


def _goes_on(expected: Sequence[object], got: Sequence[object]) -> bool:
    """Return whether both agree up to the shorter end, for too long to be chance."""
    length = min(len(expected), len(got))
    return length >= MIN_OVERLAP and expected[:length] == got[:length]


def _is_within(part: Sequence[object], whole: Sequence[object]) -> bool:
    """Return whether `part` is `whole` with some entries left out."""
    rest = iter(whole)
    return len(part) < len(whole) and all(any(entry == one for one in rest) for entry in part)


def _first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    shorter = min(len(one), len(other))
    return next((at for at in range(shorter) if one[at] != other[at]), shorter)
