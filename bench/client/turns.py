"""Requests that belong together: the next turn of a conversation after an answer or a failure.

Pure. A turn is never dropped: if an earlier turn failed, the later ones count as failed.
"""

from collections.abc import Sequence

import msgspec

from baton.bench.records import Message, Outcome, Planned, Record, begun

NOT_SENT = "not sent: "

# A request alone, or the turns of a conversation in order.
Unit = list[Planned]


def units_of(requests: Sequence[Planned]) -> list[Unit]:
    """Return the units in the order of their first requests."""
    units: dict[tuple[object, ...], Unit] = {}
    for planned in requests:
        alone = planned.conversation is None
        key = (planned.index,) if alone else (planned.warm_up, planned.conversation)
        units.setdefault(key, []).append(planned)
    return [sorted(unit, key=lambda planned: planned.turn) for unit in units.values()]


def next_turn(planned: Planned, before: Planned, answer: Record) -> Planned:
    """Return `planned` with the whole conversation before it."""
    if planned.messages:
        said = Message("assistant", answer.text or "")
        told = (*before.messages, said, *planned.messages)
        return msgspec.structs.replace(planned, messages=told)
    ids = (*before.prompt_ids, *(answer.token_ids or ()), *planned.prompt_ids)
    return msgspec.structs.replace(planned, prompt_ids=ids)


def lost_turn(planned: Planned, answer: Record, due_s: float) -> Record | None:
    """Return the record of a turn that cannot be sent, or None if it can."""
    lost = begun(planned, due_s, due_s)
    if answer.outcome is not Outcome.ANSWERED:
        lost.outcome, lost.detail = answer.outcome, answer.detail
        if not answer.detail.startswith(NOT_SENT):
            lost.detail = f"{NOT_SENT}turn {answer.turn} of the conversation failed"
    elif planned.prompt_ids and not answer.token_ids:
        lost.outcome = Outcome.MALFORMED
        lost.detail = f"{NOT_SENT}turn {answer.turn} returned no token ids"
    else:
        return None
    return lost
