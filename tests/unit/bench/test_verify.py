"""Outputs under load against those of the request alone: each kind of difference is told apart."""

import pytest

from baton.bench.client.target import Target
from baton.bench.records import Outcome, Planned, Record
from baton.bench.verify import (
    Mismatch,
    MismatchKind,
    alone,
    check_greedy,
    compare_outputs,
    whole,
)
from baton.protocol.errors import BatonError, ConfigError
from tests.support.bench_records import request

E = tuple(range(100, 120))  # the expected output


def record_of(
    index: int,
    token_ids: tuple[int, ...] | None = None,
    text: str | None = None,
    outcome: Outcome = Outcome.ANSWERED,
) -> Record:
    record = request(index=index, outcome=outcome)
    record.token_ids = None if token_ids is None else list(token_ids)
    record.text = text
    return record


def cut(index: int, token_ids: tuple[int, ...]) -> Record:
    return record_of(index, token_ids, outcome=Outcome.TRUNCATED)


def mismatch(got: tuple[int, ...], expected: tuple[int, ...] = E) -> Mismatch:
    (found,) = compare_outputs({3: record_of(3, expected)}, [record_of(3, got)])
    assert found.index == 3
    assert found.unit == "token"
    return found


def test_equal_outputs_are_no_mismatch() -> None:
    references = {0: record_of(0, E, "abc"), 1: record_of(1, (7,))}
    records = [record_of(1, (7,), "x"), record_of(0, E, "abc")]
    warm = record_of(5, (1,))
    warm.warm_up = True
    assert compare_outputs(references, [*records, warm]) == []


@pytest.mark.parametrize(
    ("got", "kind", "at"),
    [
        (E[:7] + E[8:], MismatchKind.LOST, 7),
        (E[:7] + E[12:], MismatchKind.LOST, 7),  # a chunk
        (E[1:], MismatchKind.LOST, 0),
        (E[:-1], MismatchKind.LOST, 19),
        ((), MismatchKind.LOST, 0),
        (E[:7] + E[8:] + (999,), MismatchKind.LOST, 7),  # with the length kept
        (E[:4] + E[6:12] + E[13:], MismatchKind.LOST, 4),  # twice
        (E[:8] + E[7:], MismatchKind.DOUBLED, 8),
        (E[:8] + E[3:], MismatchKind.DOUBLED, 8),  # a chunk
        (E[:8] + E[3:15], MismatchKind.DOUBLED, 8),  # with the length kept
        (E + E[-1:], MismatchKind.DOUBLED, 20),
        ((*E[:5], E[6], E[5], *E[7:]), MismatchKind.REORDERED, 5),
        (E[:4] + E[8:12] + E[4:8] + E[12:], MismatchKind.REORDERED, 4),  # chunks
        ((*E[:9], 1, *E[10:]), MismatchKind.WRONG, 9),
        (E[:9] + tuple(range(11)), MismatchKind.WRONG, 9),  # parted for good
        ((*E, 1), MismatchKind.WRONG, 20),
    ],
)
def test_each_kind_of_difference_is_named(
    got: tuple[int, ...], kind: MismatchKind, at: int
) -> None:
    found = mismatch(got)
    assert (found.kind, found.at) == (kind, at)


def test_a_mismatch_says_what_was_expected_and_what_came() -> None:
    found = mismatch((*E[:18], 1, 2))
    assert str(found) == "wrong at token 18: expected 118 119, got 1 2"
    assert str(mismatch(E[:-1])) == "lost at token 19: expected 119, got the end"


@pytest.mark.parametrize(
    ("ids", "expected", "got", "kind", "at"),
    [
        (None, "the quick brown fox", "the quick fox", MismatchKind.LOST, 10),
        # Text that was detokenized wrongly, although the ids are right.
        ((1, 2), "ab", "a?", MismatchKind.WRONG, 1),
    ],
)
def test_text_is_compared_too(
    ids: tuple[int, ...] | None, expected: str, got: str, kind: MismatchKind, at: int
) -> None:
    (found,) = compare_outputs({0: record_of(0, ids, expected)}, [record_of(0, ids, got)])
    assert (found.kind, found.at, found.unit) == (kind, at, "letter")
    assert str(found).endswith(f"expected {expected[at : at + 6]!r}, got {got[at : at + 6]!r}")


def test_what_a_failed_request_brought_must_be_right_as_far_as_it_goes() -> None:
    references = {0: record_of(0, E), 1: record_of(1, E)}
    wrong = (*E[:3], 1)
    (found,) = compare_outputs(references, [cut(0, E[:5]), cut(1, wrong)])
    assert (found.index, found.at) == (1, 3)


def test_an_answer_that_cannot_be_compared_is_never_taken_as_right() -> None:
    with pytest.raises(BatonError, match="request 5 was not asked alone"):
        compare_outputs({}, [record_of(5, E)])
    with pytest.raises(BatonError, match="request 5 cannot be verified"):
        compare_outputs({5: record_of(5, E)}, [record_of(5, None, "text")])
    assert compare_outputs({}, [cut(5, E)]) == []


def test_a_reference_that_was_not_answered_is_a_failure() -> None:
    record = cut(4, E)
    record.detail = "no [DONE]"
    with pytest.raises(BatonError, match=r"request 4 was not .* asked alone: truncated no \[DONE"):
        whole(record)
    with pytest.raises(BatonError, match="request 4 has neither token ids nor text"):
        whole(record_of(4))


def test_alone_means_without_schedule_and_without_warm_up() -> None:
    requests = [
        Planned(0, -1.0, 8, (1, 2), warm_up=True),
        Planned(1, 0.5, 8, (3, 4)),
        Planned(2, None, 8, (5, 6)),
    ]
    assert alone(requests) == [
        Planned(1, None, 8, (3, 4)),
        Planned(2, None, 8, (5, 6)),
    ]


@pytest.mark.parametrize("field", ['{"temperature": 0.7}', '{"use_beam_search": true}'])
def test_sampled_outputs_are_refused(field: str) -> None:
    target = Target(url="http://127.0.0.1:1", model="m", extra_body=field)
    with pytest.raises(ConfigError, match="only greedy outputs can be verified"):
        check_greedy(target)
