"""A conversation goes on with what was really said, and no turn is lost."""

import msgspec

from baton.bench.client.turns import lost_turn, next_turn, units_of
from baton.bench.records import Message, Outcome, Planned, Record


def planned(index: int, **more: object) -> Planned:
    return msgspec.convert({"index": index, "at_s": None, "output_tokens": 2, **more}, Planned)


def answer(**more: object) -> Record:
    fields = {"index": 0, "intended_s": 0.0, "sent_s": 0.0, "end_s": 3.0, "outcome": "answered"}
    return msgspec.convert({**fields, **more}, Record)


def test_turns_of_a_conversation_stay_together_in_order() -> None:
    requests = [
        planned(0, conversation=5),
        planned(1),
        planned(2, conversation=5, turn=2),
        planned(3, conversation=5, turn=1),
        planned(4, conversation=5, warm_up=True),
    ]
    found = [[one.index for one in unit] for unit in units_of(requests)]
    assert found == [[0, 3, 2], [1], [4]]


def test_a_chat_goes_on_after_what_the_server_said() -> None:
    before = planned(0, messages=[Message("user", "hi")])
    turn = planned(1, turn=1, think_s=0.5, messages=[Message("user", "go on")])
    found = next_turn(turn, before, answer(text="hello"))
    said = [(message.role, message.content) for message in found.messages]
    assert said == [("user", "hi"), ("assistant", "hello"), ("user", "go on")]
    assert found.at_s == 3.5


def test_token_ids_are_appended_exactly() -> None:
    before = planned(0, prompt_ids=[1, 2])
    turn = planned(1, turn=1, prompt_ids=[5])
    assert next_turn(turn, before, answer(token_ids=[3, 4])).prompt_ids == (1, 2, 3, 4, 5)


def test_text_is_appended() -> None:
    turn = planned(1, turn=1, prompt=" c")
    assert next_turn(turn, planned(0, prompt="a"), answer(text=" b")).prompt == "a b c"


def test_a_turn_after_a_failed_one_counts_as_failed() -> None:
    turn = planned(1, conversation=2, turn=1, at_s=4.0)
    lost = lost_turn(turn, answer(outcome="refused", detail="full"))
    assert lost is not None
    assert (lost.outcome, lost.intended_s, lost.end_s) == (Outcome.REFUSED, 4.0, 4.0)
    assert lost.detail == "not sent: turn 0 of the conversation failed"
    later = lost_turn(planned(2, conversation=2, turn=2, at_s=4.0), lost)
    assert later is not None
    assert later.detail == lost.detail


def test_ids_that_were_not_returned_cannot_be_continued() -> None:
    turn = planned(1, turn=1, at_s=4.0, prompt_ids=[5])
    lost = lost_turn(turn, answer())
    assert lost is not None
    assert lost.outcome is Outcome.MALFORMED
    assert lost_turn(turn, answer(token_ids=[1])) is None
