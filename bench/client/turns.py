"""Requests that belong together: how a conversation goes on after an answer, or after a failure.

`load.py` deals units out to client processes, `worker.py` follows each from turn to turn. Pure. A
turn that the failure of an earlier one took away is never dropped: it was to arrive, so it counts
as failed.
"""

from collections.abc import Sequence

import msgspec

from baton.bench.records import Message, Outcome, Planned, Record

NOT_SENT = "not sent: "

# A request alone, or the turns of a conversation in order.
Unit = list[Planned]


def units_of(requests: Sequence[Planned]) -> list[Unit]:
    """In the order of their first requests."""
    units: list[Unit] = []
    conversations: dict[tuple[bool, int], Unit] = {}
    for planned in requests:
        if planned.conversation is None:
            units.append([planned])
            continue
        key = (planned.warm_up, planned.conversation)
        if key not in conversations:
            units.append(conversations.setdefault(key, []))
        conversations[key].append(planned)
    for unit in conversations.values():
        unit.sort(key=lambda planned: planned.turn)
    return units


def next_turn(planned: Planned, before: Planned, answer: Record) -> Planned:
    """With everything that was said before it, and due `think_s` after the answer."""
    due_s, said = answer.end_s + planned.think_s, answer.text or ""
    if planned.messages:
        told = (*before.messages, Message("assistant", said), *planned.messages)
        return msgspec.structs.replace(planned, at_s=due_s, messages=told)
    if planned.prompt_ids:
        ids = (*before.prompt_ids, *(answer.token_ids or ()), *planned.prompt_ids)
        return msgspec.structs.replace(planned, at_s=due_s, prompt_ids=ids)
    prompt = before.prompt + said + planned.prompt
    return msgspec.structs.replace(planned, at_s=due_s, prompt=prompt)


def lost_turn(planned: Planned, answer: Record) -> Record | None:
    """The record of a turn that cannot be sent; None if it can. `planned` knows when it is due."""
    if answer.outcome is not Outcome.ANSWERED:
        outcome, why = answer.outcome, answer.detail
        if not why.startswith(NOT_SENT):
            why = f"{NOT_SENT}turn {answer.turn} of the conversation failed"
    elif planned.prompt_ids and not answer.token_ids:
        outcome, why = Outcome.MALFORMED, f"{NOT_SENT}turn {answer.turn} returned no token ids"
    else:
        return None
    due_s = planned.at_s or 0.0
    return Record(
        index=planned.index,
        intended_s=due_s,
        sent_s=due_s,
        end_s=due_s,
        outcome=outcome,
        detail=why,
        conversation=planned.conversation,
        turn=planned.turn,
        warm_up=planned.warm_up,
    )
