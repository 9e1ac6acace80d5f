"""The stages of a request's time: the server's own timeline joined to the client's stamps.

The server's durations come from several clocks and the client's from another, so only durations are
compared, never stamps. Time that no stage explains is a stage of its own; stages that explain more
time than there was are an error that the report counts, never scaled away.
"""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from baton.bench.records import Record, Stage

UNATTRIBUTED = "unattributed"

# The stages are in order; the last one has no place of its own.
STAGES: Mapping[str, str] = {
    "client_lag": "intended arrival to sending",
    "before_server": "sending until the server's clock starts: connecting, HTTP, chat template, "
    "tokenizing; with the way back of the first token, which cannot be told apart",
    "router_queue": "until the router had chosen where it runs",
    "queue": "waiting for the step that starts the prompt",
    "prefill": "computing the prompt",
    "exposed_transfer": "moving KV blocks after the last part of the prompt was computed",
    "decode_queue": "from joining the decode batch to the step that makes its first token there",
    "first_step": "that step",
    "decoding": "from the second token to the last",
    "after_server": "from the server's last token to the last byte, beyond the first token's way",
    UNATTRIBUTED: "time that no stage explains: messages between nodes, waits for a node's consent",
}

# The stages that the server reports, and their fields.
TOLD = {name: f"{name}_s" for name in ("router_queue", "queue", "prefill", "decode_queue")}
TOLD |= {"exposed_transfer": "exposed_s", "first_step": "first_step_s"}
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Timeline(msgspec.Struct, frozen=True):
    """A server's report about one request; None where it reports nothing.

    `time_to_first_token_s` and `e2e_s` are measured by one clock, from the arrival at the server.
    """

    router_queue_s: Seconds | None = None
    queue_s: Seconds | None = None
    prefill_s: Seconds | None = None
    exposed_s: Seconds | None = None
    decode_queue_s: Seconds | None = None
    first_step_s: Seconds | None = None
    time_to_first_token_s: Seconds | None = None
    e2e_s: Seconds | None = None


def read_timeline(data: bytes | msgspec.Raw) -> Timeline | None:
    """Read the `timeline` of an answer: JSON of an entry, or of a list of one."""
    try:
        found = msgspec.json.decode(data, type=Timeline | list[Timeline] | None)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if isinstance(found, list):
        return found[0] if len(found) == 1 else None
    return found


def stages_of(timeline: Timeline, record: Record) -> list[Stage]:
    """Split the time of `record` from its intended arrival to its last byte into stages.

    No stage is below zero, and they add up to that time unless the server claims more than there
    was. A record without a token has no stages.
    """
    stamps = [arrival.at_s for arrival in record.arrivals]
    if not stamps:
        return []
    seen_s = record.end_s - record.sent_s
    parts = {name: getattr(timeline, field) or 0.0 for name, field in TOLD.items()}
    named_s = sum(parts.values())
    parts["client_lag"] = max(0.0, record.sent_s - record.intended_s)
    inside_s = seen_s
    if timeline.e2e_s is not None:
        # The server's time lies within the client's, so both of these are at least zero.
        inside_s, outside_s = timeline.e2e_s, max(0.0, seen_s - timeline.e2e_s)
        first_s = timeline.time_to_first_token_s
        way_s = stamps[0] - record.sent_s - first_s if first_s is not None else outside_s
        parts["before_server"] = min(max(0.0, way_s), outside_s)
        parts["after_server"] = outside_s - parts["before_server"]
    # From the second token to the last, within what the other stages leave: the client sees the
    # stamps with the jitter of the network, and no start if the second token came with the first.
    later_s = stamps[-1] - stamps[1] if len(stamps) > 1 else 0.0
    parts["decoding"] = min(later_s, max(0.0, inside_s - named_s))
    left_s = record.end_s - record.intended_s - sum(parts.values())
    parts[UNATTRIBUTED] = max(0.0, left_s)
    return [Stage(name, parts.get(name, 0.0)) for name in STAGES]


def sum_error_s(record: Record) -> float:
    """Return how much more time the stages of a record claim than it took; below 0 if less."""
    total_s = sum(stage.duration_s for stage in record.stages)
    return total_s - (record.end_s - record.intended_s)
