"""Which nodes hold a request that another router began, and when that is decided."""

import msgspec
import pytest

from baton.protocol.errors import Failure
from baton.protocol.ids import Key, NodeId, RequestId
from baton.protocol.messages import Attached, FinishReason, HeldChoice, NotAttached, TokenEntry
from baton.protocol.sampling import Sampling
from baton.router.core.reattach import ANSWER_S, REJOIN_S, FoundRequest, ReceivedPart, Search
from baton.router.core.request import RETRY_S
from baton.router.core.stream import digest_of

ID = RequestId("r")
A = NodeId("a")
B = NodeId("b")
NOTHING = NotAttached(ID)


def search(
    *received: ReceivedPart, nodes: tuple[NodeId, ...] = (A, B), is_old: bool = True
) -> Search:
    """A search among these nodes, by a router that was started long or just now."""
    one = Search(ID, received or None, 0.0, 0.0 if is_old else REJOIN_S)
    assert all(one.asks(node) for node in nodes)
    return one


def part(num_tokens: int, *, has_ended: bool = False) -> ReceivedPart:
    return ReceivedPart(num_tokens, True, has_ended, digest_of(range(num_tokens)))


def held(
    choice: int = 0,
    num_tokens: int = 5,
    *,
    attempt: int = 0,
    end: FinishReason | None = None,
    is_running: bool = False,
    start: int = 0,
) -> HeldChoice:
    token_ids = list(range(start, start + num_tokens))
    return HeldChoice(Key(ID, choice, attempt), token_ids, end, is_running)


def attached(*choices: HeldChoice, num_choices: int = 1) -> Attached:
    return Attached(ID, b"", num_choices, [1], Sampling(seed=0, max_tokens=9), choices)


def code(verdict: object) -> str:
    return verdict.code


def test_a_stream_that_runs_is_found_when_all_have_answered():
    """A node that is silent may have a later attempt."""
    one = search(part(3))
    assert one.verdict(0.0) is None
    one.heard(B, attached(held(is_running=True)))
    assert one.verdict(0.0) is None
    one.heard(A, NOTHING)
    verdict = one.verdict(0.0)
    assert verdict.choices[0].node == B
    assert one.running_keys == {B: [Key(ID)]}


def test_old_answers_are_asked_for_again_before_a_stream_counts_as_gone():
    """Another router may have gone on with it at one of these nodes."""
    one = search(part(3))
    one.heard(A, NOTHING)
    one.heard(B, NOTHING)
    assert code(one.verdict(0.0)) == "stream_gone"
    assert one.asks_again(RETRY_S / 2) == [], "the answers are new"
    assert one.asks_again(RETRY_S) == [A, B]
    assert one.verdict(RETRY_S) is None
    one.heard(A, attached(held(is_running=True)))
    one.heard(B, NOTHING)
    assert isinstance(one.verdict(RETRY_S), FoundRequest)
    assert one.asks_again(9.0) == []


def test_a_router_that_just_started_waits_for_its_nodes():
    one = search(is_old=False, nodes=(A,))
    one.heard(A, NOTHING)
    assert one.verdict(REJOIN_S - 0.1) is None
    assert one.asks(B)
    assert not one.asks(B)
    one.heard(B, attached(held(end="stop")))
    assert isinstance(one.verdict(REJOIN_S - 0.1), FoundRequest)


def test_a_node_that_never_answers_is_not_waited_for_for_ever():
    one = search()
    one.heard(A, NOTHING)
    assert one.verdict(ANSWER_S - 0.1) is None
    assert code(one.verdict(ANSWER_S)) == "stream_unknown", "it may have the stream"


@pytest.mark.parametrize("attempt", [0, 2])
def test_an_attempt_with_other_tokens_is_never_adopted(attempt):
    """Another router may have made it, so that its number says nothing."""
    one = search(part(3), is_old=False)
    one.heard(A, attached(held(num_tokens=9, attempt=attempt, is_running=True, start=1)))
    one.heard(B, NOTHING)
    assert one.verdict(REJOIN_S - 0.1) is None, "a node with the client's may yet dial in"
    assert code(one.verdict(REJOIN_S)) == "stream_gone"
    one.heard(B, attached(held(num_tokens=4, attempt=1, is_running=True)))
    verdict = one.verdict(0.0)
    assert verdict.choices[0].node == B
    assert one.running_keys == {A: [Key(ID, 0, attempt)], B: [Key(ID, 0, 1)]}, "A ends its own"


def test_the_highest_attempt_counts_and_what_stopped_is_not_final():
    one = search(part(5))
    one.heard(A, attached(held(num_tokens=5)))
    assert one.verdict(0.0) is None, "another node may have gone on with it"
    one.heard(B, attached(held(num_tokens=8, attempt=1, end="length")))
    verdict = one.verdict(0.0)
    assert (verdict.choices[0].node, verdict.choices[0].held.key.attempt) == (B, 1)


def test_an_attempt_whose_first_token_is_unknown_gives_way_to_one_that_has_the_clients():
    one = search(part(3))
    landing = attached(held(num_tokens=2, attempt=1, is_running=True))
    one.heard(A, msgspec.structs.replace(landing, landing=(0,)))
    one.heard(B, NOTHING)
    verdict = one.verdict(0.0)
    assert verdict.choices[0].node == A
    one.heard(B, attached(held(num_tokens=3, is_running=True)))
    verdict = one.verdict(0.0)
    assert verdict.choices[0].node == B


def test_a_node_that_answers_twice_gives_one_sequence():
    """It was asked again when its channel came back, before its first answer was read."""
    one = search()
    for num_tokens in (3, 5):
        one.heard(A, attached(held(num_tokens=num_tokens, is_running=True)))
    one.heard(B, NOTHING)
    verdict = one.verdict(0.0)
    assert len(verdict.choices[0].held.token_ids) == 5
    assert one.running_keys == {A: [Key(ID)]}


def test_choices_may_lie_on_several_nodes_and_be_missing_if_the_client_has_them():
    received = (part(2), part(4, has_ended=True), ReceivedPart())
    one = search(*received)
    one.heard(A, attached(held(0, is_running=True), num_choices=3))
    assert one.verdict(0.0) is None
    one.heard(B, attached(held(2, 0, is_running=True), num_choices=3))
    verdict = one.verdict(0.0)
    assert sorted(verdict.choices) == [0, 2]


def test_a_node_that_knows_less_than_the_client_does_not_help():
    one = search(part(9), nodes=(A,))
    one.heard(A, attached(held(num_tokens=5, is_running=True)))
    assert code(one.verdict(0.0)) == "stream_gone"


def entry(position: int, *token_ids: int, end: FinishReason | None = None) -> TokenEntry:
    return TokenEntry(Key(ID), 1 + position, list(token_ids), end)


@pytest.mark.parametrize("token", [5, 6])
def test_an_attempt_that_catches_up_counts_if_it_has_the_clients_tokens(token):
    one = search(part(6))
    one.heard(A, attached(held(num_tokens=5, is_running=True)))
    one.goes_on(A, entry(5, token))
    one.heard(B, NOTHING)
    assert isinstance(one.verdict(0.0), FoundRequest if token == 5 else Failure)


def test_a_router_without_a_decode_node_does_not_know_that_a_stream_is_gone():
    one = search(part(3), nodes=())
    assert code(one.verdict(0.0)) == "stream_unknown"
    assert one.asks(A)
    one.heard(A, NOTHING)
    assert code(one.verdict(0.0)) == "stream_gone"


def test_a_node_that_a_new_router_has_never_met_may_hold_the_stream():
    one = Search(ID, None, 0.0, REJOIN_S, (), unmet_s=30.0)
    assert one.asks(A)
    one.heard(A, NOTHING)
    assert one.verdict(REJOIN_S - 0.1) is None
    assert code(one.verdict(REJOIN_S)) == "stream_unknown"
    assert code(one.verdict(30.0)) == "stream_gone"


@pytest.mark.parametrize("is_lost_before", [True, False])
def test_as_long_as_a_node_may_come_back_with_a_stream_it_is_not_called_gone(is_lost_before):
    missing = (B,) if is_lost_before else ()
    one = Search(ID, None, 0.0, 0.0, missing)
    assert one.asks(A)
    one.heard(A, NOTHING)
    if not is_lost_before:
        assert one.asks(B)
        one.lost(B)
    assert one.verdict(ANSWER_S - 0.1) is None
    verdict = one.verdict(ANSWER_S)
    assert code(verdict) == "stream_unknown"
    assert (verdict.http_status, verdict.retry_after_s) == (503, RETRY_S)
    assert one.asks(B)
    one.heard(B, attached(held(is_running=True)))
    assert isinstance(one.verdict(ANSWER_S), FoundRequest)


def test_a_stream_that_was_found_may_be_elsewhere_until_all_nodes_have_answered():
    one = Search(ID, None, 0.0, 0.0, (B,))
    assert one.asks(A)
    one.heard(A, attached(held(is_running=True)))
    verdict = one.verdict(0.0)
    assert verdict.may_be_elsewhere
    assert one.asks(B)
    one.heard(B, NOTHING)
    verdict = one.verdict(0.0)
    assert not verdict.may_be_elsewhere
