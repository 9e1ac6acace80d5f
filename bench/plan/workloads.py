"""What is asked, and when: a workload and arrivals become a plan of requests.

The experiments make one plan per load and hand its requests to the client. Everything is drawn from
one seed before the load starts; request n of a seed is the same however many there are, so arms and
rounds are asked the same. Nothing repeats unless the trace, the file or `repeat` says so.

A later turn of a conversation holds only what the user adds: the client puts the turns before it
and their answers in front, messages before messages, ids before ids.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from baton.bench.plan.arrivals import (
    ArrivalProcess,
    Ramp,
    Realised,
    Recorded,
    at_rate,
    check_process,
    mean_rate,
    realised,
    text_of,
    times,
)
from baton.bench.plan.lengths import parse_lengths
from baton.bench.plan.prompt_files import read_prompts
from baton.bench.plan.replay import TraceOptions, Vocabulary
from baton.bench.plan.sources import (
    Draft,
    DrawnSource,
    Draws,
    FileSource,
    Shape,
    Source,
    TraceSource,
)
from baton.bench.plan.trace_files import read_trace, trace_path
from baton.bench.records import Planned
from baton.protocol.errors import ConfigError

Kind = Literal["tokens", "text", "chat", "conversation", "trace", "file"]
# Warm-up requests come this fast at most, and are followed by silence before the schedule starts.
WARM_UP_SPACING_S, SETTLE_S = 0.5, 2.0


class Workload(msgspec.Struct, frozen=True):
    """What requests hold. `prompt` and `output` are texts of `lengths.py`.

    A prompt has `shared_prefix` tokens that others have too, then `prompt` tokens of its own.
    """

    kind: Annotated[Kind, Meta(description="what is asked")] = "tokens"
    prompt: Annotated[str, Meta(description="prompt lengths", extra={"unit": "tokens"})] = "512"
    output: Annotated[str, Meta(description="output lengths", extra={"unit": "tokens"})] = "64"
    vocabulary: Annotated[
        Vocabulary, Meta(description="lowest and highest token id that prompts are drawn from")
    ] = (300, 8000)
    shared_prefix: Annotated[
        int, Meta(ge=0, description="common start of prompts", extra={"unit": "tokens"})
    ] = 0
    num_prefixes: Annotated[int, Meta(ge=1, description="different common starts, in turn")] = 1
    turns: Annotated[int, Meta(ge=1, description="requests of a conversation")] = 4
    think_s: Annotated[
        float,
        Meta(ge=0, description="from an answer to the next turn", extra={"unit": "s"}),
    ] = 0.0
    conversation_form: Annotated[
        Literal["chat", "tokens"],
        Meta(description="turns as chat messages, or as token ids that are appended exactly"),
    ] = "chat"
    path: Annotated[
        str, Meta(description="JSONL of prompts, or a trace: a file or a shipped trace's name")
    ] = ""
    trace: TraceOptions = TraceOptions()
    repeat: Annotated[bool, Meta(description="start over when the trace or file is used up")] = (
        False
    )
    seed: Annotated[int, Meta(ge=0, description="of everything that is drawn")] = 0


class Plan(msgspec.Struct, frozen=True):
    """Requests in the order of sending; `requests[n].index` is n, warm-up requests come first.

    `duration_s` is the schedule's: what was asked for, else up to the last arrival. `offered_rate`
    is the rate that was asked for, `realised` what was drawn or recorded. All three are None in a
    closed loop; `offered_rate` also when a trace plays as recorded.
    """

    requests: list[Planned]
    notes: list[str]
    realised: Realised | None = None
    offered_rate: float | None = None
    duration_s: float | None = None

    @property
    def planned_rate(self) -> float | None:
        """Requests/s that the arrivals come to, with the turns that each of them brings."""
        if self.realised is None or self.realised.rate is None:
            return None
        num_requests = sum(not one.warm_up for one in self.requests)
        return self.realised.rate * num_requests / self.realised.num_arrivals


@dataclass(slots=True, frozen=True)
class _Schedule:
    """When arrivals come; a time is None in a closed loop."""

    times: Sequence[float | None]
    notes: list[str]
    realised: Realised | None = None
    offered_rate: float | None = None
    duration_s: float | None = None


def make_plan(
    workload: Workload,
    arrivals: ArrivalProcess | None,
    *,
    count: int | None = None,
    duration_s: float | None = None,
    warm_up: int = 0,
) -> Plan:
    """The plan of an open loop, or of a closed one if `arrivals` is None.

    `count` and `duration_s` bound the arrivals. Counts and rates are of requests; a conversation
    begins at its arrival and is never cut, so up to `turns` - 1 more may be planned. Traces and
    files end by themselves. Warm-up requests lie before time 0. Raises `ConfigError`.
    """
    source = _source(workload)
    count = None if count is None else math.ceil(count / _num_turns(workload))
    if arrivals is None:
        schedule = _closed(source, count, duration_s)
    elif isinstance(arrivals, Recorded):
        schedule = _recorded(source, arrivals, count, duration_s)
    else:
        schedule = _drawn(source, arrivals, count, duration_s, workload)
    num = len(schedule.times)
    if source.num_rows is not None and num > source.num_rows and not workload.repeat:
        raise ConfigError(
            f"{num} requests are wanted, {workload.path} has {source.num_rows}: ask for fewer, or "
            "let it repeat"
        )
    # Drawn first, so that a warm-up prompt makes way for a measured one and never the reverse.
    measured = [source.draw(place) for place in range(num)]
    building = _Building(think_s=workload.think_s)
    for place, at_s in enumerate(_warm_up_times(warm_up, schedule)):
        building.add([source.warm_up(place)], at_s, warm_up=True)
    for drafts, at_s in zip(measured, schedule.times, strict=True):
        building.add(drafts, at_s)
    notes = [*source.notes(num), *schedule.notes, *_lengths(building.requests)]
    if warm_up:
        notes.append(f"{warm_up} warm-up requests with prompts of their own go first")
    notes.append(f"seed {workload.seed}")
    return Plan(
        building.requests, notes, schedule.realised, schedule.offered_rate, schedule.duration_s
    )


@dataclass(slots=True)
class _Building:
    """The requests of a plan as it grows."""

    think_s: float
    requests: list[Planned] = field(default_factory=list)
    num_conversations: int = 0

    def add(self, drafts: list[Draft], at_s: float | None, *, warm_up: bool = False) -> None:
        """One arrival; several drafts are the turns of a conversation."""
        conversation = self.num_conversations if len(drafts) > 1 else None
        self.num_conversations += len(drafts) > 1
        for turn, draft in enumerate(drafts):
            request = Planned(
                index=len(self.requests),
                at_s=at_s if turn == 0 else None,
                output_tokens=draft.output_tokens,
                prompt_ids=draft.prompt_ids,
                prompt=draft.prompt,
                messages=draft.messages,
                conversation=conversation,
                turn=turn,
                think_s=self.think_s if turn else 0.0,
                warm_up=warm_up,
            )
            self.requests.append(request)


def _source(workload: Workload) -> Source:
    """Checks a workload and opens what it needs. Raises `ConfigError`."""
    try:
        msgspec.convert(msgspec.to_builtins(workload), Workload)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the workload does not fit: {error}") from None
    low, high = workload.vocabulary
    if not 0 <= low <= high:
        raise ConfigError(f"the vocabulary {low}-{high} holds no token ids")
    lengths = parse_lengths(workload.prompt), parse_lengths(workload.output)
    draws = Draws(workload.seed, workload.vocabulary, *lengths)
    reads = workload.kind in ("trace", "file")
    if reads != bool(workload.path):
        verb = "needs a" if reads else "has no"
        raise ConfigError(f"a workload of kind {workload.kind} {verb} path")
    common = workload.shared_prefix, workload.num_prefixes
    match workload.kind:
        case "trace":
            return TraceSource(read_trace(trace_path(workload.path)), workload.trace, draws)
        case "file":
            return FileSource(read_prompts(Path(workload.path)), draws)
        case "conversation":
            return DrawnSource(Shape(workload.conversation_form, workload.turns, *common), draws)
        case form:
            return DrawnSource(Shape(form, 1, *common), draws)


def _num_turns(workload: Workload) -> int:
    """Requests of one arrival."""
    return workload.turns if workload.kind == "conversation" else 1


def _closed(source: Source, count: int | None, duration_s: float | None) -> _Schedule:
    num = count if count is not None else source.num_rows
    if duration_s is not None or num is None:
        raise ConfigError("a closed loop needs a number of requests, and no duration")
    if num < 1:
        raise ConfigError(f"{num} requests are none")
    return _Schedule([None] * num, ["closed loop: requests go when others were answered"])


def _drawn(
    source: Source,
    arrivals: ArrivalProcess,
    count: int | None,
    duration_s: float | None,
    workload: Workload,
) -> _Schedule:
    """A conversation is as many requests as it has turns, so they begin that much slower."""
    check_process(arrivals)
    rate, starts, what = mean_rate(arrivals), arrivals, text_of(arrivals)
    assert rate is not None, "only recorded arrivals have none of their own"
    if count is None and duration_s is None:
        count = source.num_rows
    if (turns := _num_turns(workload)) > 1:
        starts = at_rate(arrivals, rate / turns)
        what += f" of requests, {text_of(starts)} of conversations"
    at = times(starts, duration_s=duration_s, count=count, seed=workload.seed)
    if not at:
        raise ConfigError(f"no request of {what} arrives within {duration_s:g} s")
    reality = realised(at)
    notes = [f"{what}: {reality}"]
    is_cut = isinstance(arrivals, Ramp) and len(at) == count  # the mean is that of a whole one
    return _Schedule(at, notes, reality, None if is_cut else rate, duration_s or at[-1])


def _recorded(
    source: Source, arrivals: Recorded, count: int | None, duration_s: float | None
) -> _Schedule:
    """The times of the rows that are played; a rate is theirs, whatever the other rows have."""
    check_process(arrivals)
    if source.times is None:
        raise ConfigError("arrivals 'trace' need a trace, or a file whose rows say at_s")
    if count is not None and not 1 <= count <= len(source.times):
        raise ConfigError(f"{count} requests are wanted of {len(source.times)} recorded ones")
    at, notes = list(source.times[:count]), []
    end_s = math.inf if duration_s is None else duration_s
    if arrivals.rate is not None:
        at = at[: round(min(len(at), arrivals.rate * end_s))]
        at, stretch = _stretched(at, arrivals.rate)
        what = f"the times of the first {len(at)} rows are stretched by {stretch:.6g}"
        notes.append(f"{what} for {arrivals.rate:g} requests/s")
    at = [at_s for at_s in at if at_s < end_s]
    if not at:
        raise ConfigError(f"no recorded request arrives within {duration_s} s")
    if duration_s is not None and len(at) == len(source.times):
        notes.append(f"the recording ends after {at[-1]:.6g} s")
    reality = realised(at)
    notes.append(f"recorded times: {reality}")
    return _Schedule(at, notes, reality, arrivals.rate, duration_s or at[-1])


def _stretched(at: list[float], rate: float) -> tuple[list[float], float]:
    """The times from 0 on at this mean rate, which one request alone does not have."""
    native = realised(at).rate
    if native is None and len(at) > 1:
        raise ConfigError(
            f"the first {len(at)} recorded requests come at one moment, which has no rate to "
            "change: play more of them, or spread them"
        )
    stretch = (native or rate) / rate
    return [(at_s - at[0]) * stretch for at_s in at], stretch


def _warm_up_times(warm_up: int, schedule: _Schedule) -> list[float | None]:
    """At the rate of the load but not slower than one in half a second, then a silence."""
    if schedule.realised is None:
        return [None] * warm_up
    rate = schedule.realised.rate
    spacing_s = WARM_UP_SPACING_S if rate is None else min(WARM_UP_SPACING_S, 1 / rate)
    return [-SETTLE_S - spacing_s * (warm_up - 1 - place) for place in range(warm_up)]


def _lengths(requests: list[Planned]) -> list[str]:
    """What the lengths turned out to be, without the warm-up."""
    counted = [request for request in requests if not request.warm_up]
    sides = {
        "outputs": [request.output_tokens for request in counted],
        "prompts": [len(request.prompt_ids) for request in counted if request.prompt_ids],
    }
    notes = []
    for side, lengths in sides.items():
        if lengths:
            p50, p99 = np.percentile(lengths, (50, 99), method="inverted_cdf")
            mean, longest = np.mean(lengths), max(lengths)
            shown = f"mean {mean:.5g}, p50 {p50:g}, p99 {p99:g}, max {longest}"
            notes.append(f"{side}, tokens: {shown}")
    return notes
