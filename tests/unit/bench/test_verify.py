"""Outputs under load against those of the request alone: each kind of difference is told apart."""

import pytest

from baton.bench.client.target import Target
from baton.bench.records import Outcome, Planned, Record
from baton.bench.verify import (
    Mismatch,
    MismatchKind,
    Output,
    alone,
    check_greedy,
    compare_outputs,
    outputs,
)
from baton.protocol.errors import BatonError, ConfigError

EXPECTED = tuple(range(100, 120))


def answered(
    index: int, token_ids: tuple[int, ...] | None = None, text: str | None = None
) -> Record:
    return Record(
        index=index,
        intended_s=0.0,
        sent_s=0.0,
        end_s=1.0,
        outcome=Outcome.ANSWERED,
        token_ids=None if token_ids is None else list(token_ids),
        text=text,
    )


def cut(index: int, token_ids: tuple[int, ...]) -> Record:
    record = answered(index, token_ids)
    record.outcome = Outcome.TRUNCATED
    return record


def mismatch(got: tuple[int, ...], expected: tuple[int, ...] = EXPECTED) -> Mismatch:
    (found,) = compare_outputs({3: Output(expected, None)}, [answered(3, got)])
    assert found.index == 3
    assert found.unit == "token"
    return found


def test_equal_outputs_are_no_mismatch() -> None:
    references = {0: Output(EXPECTED, "abc"), 1: Output((7,), None)}
    records = [answered(1, (7,), "x"), answered(0, EXPECTED, "abc")]
    assert compare_outputs(references, records) == []


@pytest.mark.parametrize(
    ("got", "kind", "at"),
    [
        pytest.param(EXPECTED[:7] + EXPECTED[8:], MismatchKind.LOST, 7, id="one lost"),
        pytest.param(EXPECTED[:7] + EXPECTED[12:], MismatchKind.LOST, 7, id="a chunk lost"),
        pytest.param(EXPECTED[1:], MismatchKind.LOST, 0, id="the first lost"),
        pytest.param(EXPECTED[:-1], MismatchKind.LOST, 19, id="the last lost"),
        pytest.param((), MismatchKind.LOST, 0, id="all lost"),
        pytest.param(
            EXPECTED[:7] + EXPECTED[8:] + (999,), MismatchKind.LOST, 7, id="lost, length kept"
        ),
        pytest.param(
            EXPECTED[:4] + EXPECTED[6:12] + EXPECTED[13:], MismatchKind.LOST, 4, id="lost twice"
        ),
        pytest.param(EXPECTED[:8] + EXPECTED[7:], MismatchKind.DOUBLED, 8, id="one doubled"),
        pytest.param(EXPECTED[:8] + EXPECTED[3:], MismatchKind.DOUBLED, 8, id="a chunk doubled"),
        pytest.param(
            EXPECTED[:8] + EXPECTED[3:15], MismatchKind.DOUBLED, 8, id="doubled, length kept"
        ),
        pytest.param(EXPECTED + EXPECTED[-1:], MismatchKind.DOUBLED, 20, id="the last doubled"),
        pytest.param(
            (*EXPECTED[:5], EXPECTED[6], EXPECTED[5], *EXPECTED[7:]),
            MismatchKind.REORDERED,
            5,
            id="two swapped",
        ),
        pytest.param(
            EXPECTED[:4] + EXPECTED[8:12] + EXPECTED[4:8] + EXPECTED[12:],
            MismatchKind.REORDERED,
            4,
            id="chunks swapped",
        ),
        pytest.param((*EXPECTED[:9], 1, *EXPECTED[10:]), MismatchKind.WRONG, 9, id="one wrong"),
        pytest.param(EXPECTED[:9] + tuple(range(11)), MismatchKind.WRONG, 9, id="parted for good"),
        pytest.param((*EXPECTED, 1), MismatchKind.WRONG, 20, id="one too many"),
    ],
)
def test_each_kind_of_difference_is_named(
    got: tuple[int, ...], kind: MismatchKind, at: int
) -> None:
    found = mismatch(got)
    assert (found.kind, found.at) == (kind, at)


def test_a_mismatch_says_what_was_expected_and_what_came() -> None:
    found = mismatch((*EXPECTED[:18], 1, 2))
    assert str(found) == "wrong at token 18: expected 118 119, got 1 2"
    assert str(mismatch(EXPECTED[:-1])) == "lost at token 19: expected 119, got the end"


def test_text_is_compared_where_there_are_no_ids() -> None:
    references = {0: Output(None, "the quick brown fox")}
    (found,) = compare_outputs(references, [answered(0, text="the quick fox")])
    assert (found.kind, found.at, found.unit) == (MismatchKind.LOST, 10, "letter")


def test_text_that_was_detokenized_wrongly_is_found_although_the_ids_are_right() -> None:
    references = {0: Output((1, 2), "ab")}
    (found,) = compare_outputs(references, [answered(0, (1, 2), "a?")])
    assert (found.kind, found.unit) == (MismatchKind.WRONG, "letter")


def test_what_a_failed_request_brought_must_be_right_as_far_as_it_goes() -> None:
    references = {0: Output(EXPECTED, None), 1: Output(EXPECTED, None)}
    wrong = (*EXPECTED[:3], 1)
    (found,) = compare_outputs(references, [cut(0, EXPECTED[:5]), cut(1, wrong)])
    assert (found.index, found.at) == (1, 3)


def test_an_answer_that_cannot_be_compared_is_never_taken_as_right() -> None:
    with pytest.raises(BatonError, match="request 5 was not asked alone"):
        compare_outputs({}, [answered(5, EXPECTED)])
    with pytest.raises(BatonError, match="request 5 cannot be verified"):
        compare_outputs({5: Output(EXPECTED, None)}, [answered(5, None, "text")])
    assert compare_outputs({}, [cut(5, EXPECTED)]) == []


def test_warm_up_is_not_compared() -> None:
    record = answered(0, (1,))
    record.warm_up = True
    assert compare_outputs({}, [record]) == []


def test_a_reference_that_was_not_answered_is_a_failure() -> None:
    record = cut(4, EXPECTED)
    record.detail = "no [DONE]"
    with pytest.raises(BatonError, match=r"alone, request 4 was not answered: truncated no \[DONE"):
        outputs([record])
    with pytest.raises(BatonError, match="neither token ids nor text of request 4"):
        outputs([answered(4)])


def test_alone_means_without_schedule_and_without_warm_up() -> None:
    requests = [
        Planned(0, -1.0, 8, (1, 2), warm_up=True),
        Planned(1, 0.5, 8, (3, 4)),
        Planned(2, None, 8, (5, 6), conversation=1, turn=1, think_s=2.0),
    ]
    assert alone(requests) == [
        Planned(1, None, 8, (3, 4)),
        Planned(2, None, 8, (5, 6), conversation=1, turn=1),
    ]


@pytest.mark.parametrize("field", ['{"temperature": 0.7}', '{"use_beam_search": true}'])
def test_sampled_outputs_are_refused(field: str) -> None:
    target = Target(url="http://127.0.0.1:1", model="m", extra_body=field)
    with pytest.raises(ConfigError, match="only be verified when greedy"):
        check_greedy(target)
