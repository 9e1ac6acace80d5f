"""What the lifecycle commands at the turns that random schedules seldom take."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import pytest

from baton.protocol.errors import Cancelled, Failure, NodeError, TransferError
from baton.protocol.ids import Epoch, Key, NodeId, RequestId
from baton.protocol.messages import (
    NOT_CACHED,
    Accepted,
    Cancel,
    CancelDone,
    Crashed,
    Failed,
    FirstToken,
    FirstTokens,
    InProgress,
    Pooled,
    PromptLogprobs,
    StageTimes,
    TokenEntry,
    TokenLogprobs,
)
from baton.protocol.sampling import Sampling
from baton.router.core.lifecycle import SILENCE_DEADLINE_S, Request
from baton.router.core.request import (
    AVOID_S,
    DRAINING,
    PAUSE_S,
    Attempt,
    Begun,
    CallerGone,
    ChoiceStopped,
    Closed,
    Deliver,
    DeliverPooled,
    DeliverPrompt,
    HandoffEnded,
    NodeLost,
    NodeMessage,
    NodesSelected,
    Outcome,
    Release,
    RequestCommand,
    RequestEvent,
    SelectNodes,
    Send,
    Tick,
)

C = TypeVar("C", bound=RequestCommand)
R = RequestId("r")
KEY = Key(R)
P = NodeId("p")
D = NodeId("d")
EPOCHS = {P: Epoch("p-1"), D: Epoch("d-1")}
PROMPT = [1, 2, 3]
LOST = NodeError("gone").to_failure()
REFUSED = TransferError("no").to_failure()
TIMES = StageTimes(prefill_s=1.0)


def selected(
    attempt: Attempt,
    prefill: NodeId | None,
    decode: NodeId | None,
    epochs: Mapping[NodeId, Epoch] | None = None,
    max_uncached_tokens: int | None = None,
) -> NodesSelected:
    """The event of an attempt that has got its nodes."""
    known = epochs or {}
    attempt.prefill_node = prefill
    attempt.decode_node = decode
    attempt.epochs = {
        node: known.get(node, Epoch("")) for node in (prefill, decode) if node
    }
    attempt.max_uncached_tokens = max_uncached_tokens
    return NodesSelected(attempt)


def asked(commands: list[RequestCommand]) -> list[Attempt]:
    """The attempts for which these commands ask for nodes."""
    return [command.attempt for command in of_type(commands, SelectNodes)]


class Driver:
    def __init__(
        self,
        num_choices: int = 1,
        max_tokens: int = 5,
        max_attempts: int = 3,
        **fields: Any,
    ) -> None:
        sampling = Sampling(seed=1, max_tokens=max_tokens, **fields)
        self.request = Request(R, PROMPT, sampling, num_choices, max_attempts)
        self.metrics = self.request.metrics
        self.now_s = 0.0

    def step(self, event: RequestEvent) -> list[RequestCommand]:
        return self.request.step(self.now_s, event)

    def place(
        self, prefill: NodeId | None = P, decode: NodeId | None = D
    ) -> list[RequestCommand]:
        (place,) = asked(self.step(Begun()))
        return self.step(selected(place, prefill, decode, EPOCHS))

    def place_again(self, commands: list[RequestCommand]) -> Key:
        """Give the one attempt that these commands ask for the same nodes again."""
        (place,) = asked(commands)
        self.step(selected(place, P, D, EPOCHS))
        return place.key

    def says(self, node: NodeId, message: NodeMessage) -> list[RequestCommand]:
        return self.request.step(self.now_s, message, node)


def of_type(commands: list[RequestCommand], kind: type[C]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]


def test_an_entry_that_only_continues_a_choice_needs_no_command():
    drive = Driver()
    drive.place(prefill=None)
    first = TokenEntry(KEY, 3, [9])
    assert not drive.request.continues(1.0, D, first)  # nothing streams yet
    assert drive.says(D, first) == [Deliver(0, [9])]
    guessed = TokenEntry(KEY, 4, [8, 7], num_draft_tokens=3, num_accepted_tokens=1)
    assert drive.request.continues(7.0, D, guessed)
    assert drive.metrics.num_draft_tokens == 3
    assert drive.metrics.num_accepted_tokens == 1
    assert drive.request.choices[0].output == [9, 8, 7]
    assert drive.request.heard_s == 7.0
    logprobs = (TokenLogprobs(-1.0, 1, ()),)
    other = msgspec.structs.replace(KEY, attempt=1)
    for node, entry in (
        (P, TokenEntry(KEY, 6, [6])),
        (D, TokenEntry(other, 6, [6])),
        (D, TokenEntry(msgspec.structs.replace(KEY, choice=1), 6, [6])),
        (D, TokenEntry(KEY, 5, [7, 6])),  # the first of them is known
        (D, TokenEntry(KEY, 7, [5])),  # one before it is missing
        (D, TokenEntry(KEY, 6, [6], "stop")),
        (D, TokenEntry(KEY, 6, [6], None, None, logprobs)),
        (D, TokenEntry(KEY, 6, [])),
    ):
        assert not drive.request.continues(8.0, node, entry)
    assert drive.request.choices[0].output == [9, 8, 7]
    assert drive.request.heard_s == 7.0
    assert drive.says(D, TokenEntry(KEY, 5, [7, 6])) == [Deliver(0, [6])]


def test_a_request_goes_from_one_place_to_closed():
    drive = Driver()
    sent = of_type(drive.place(), Send)
    assert [send.node for send in sent] == [D, P]
    assert drive.says(P, FirstTokens(KEY, 3, (FirstToken(9),), TIMES)) == [
        Release(P, KEY)
    ]
    assert (
        drive.metrics.prefill_s
        == drive.metrics.attempts[0].prefill_s
        == TIMES.prefill_s
    )
    assert drive.says(D, Accepted(KEY)) == [Deliver(0, [9])]
    assert drive.says(D, TokenEntry(KEY, 3, [9, 8])) == [
        HandoffEnded((P, EPOCHS[P]), (D, EPOCHS[D])),
        Deliver(0, [8]),
    ]
    assert drive.says(D, TokenEntry(KEY, 5, [7], "stop")) == [
        Deliver(0, [7], "stop"),
        Release(D, KEY),
        Outcome(),
        Closed(),
    ]
    assert drive.says(D, TokenEntry(KEY, 6, [7])) == []


def test_decode_hears_of_an_end_with_the_first_token_also_when_prefill_cannot_tell_it():
    drive = Driver()
    drive.place()
    commands = drive.says(P, FirstTokens(KEY, 3, (FirstToken(9, "stop"),), TIMES))
    assert of_type(commands, Send) == [Send(D, Cancel((KEY,)))]
    assert of_type(commands, Outcome) == [Outcome()]
    assert not of_type(commands, HandoffEnded)  # so the pair is not blamed
    assert drive.says(D, CancelDone((KEY,))) == [Release(D, KEY), Closed()]


def test_a_prompt_that_was_not_cached_goes_elsewhere_and_nobody_is_blamed():
    drive = Driver(max_attempts=1)
    (place,) = asked(drive.step(Begun()))
    sent = of_type(drive.step(selected(place, None, D, EPOCHS, 64)), Send)
    assert [send.message.max_uncached_tokens for send in sent] == [64]
    refusal = Failure(NOT_CACHED, "no", retryable=True, http_status=503)
    (again,) = asked(drive.says(D, Failed(KEY, refusal)))
    assert (again.is_remote_only, again.avoid) == (True, frozenset())
    # A node that says so of a prompt without a bound is at fault.
    drive.step(selected(again, None, D, EPOCHS))
    assert of_type(drive.says(D, Failed(again.key, refusal)), Outcome) == [
        Outcome(refusal)
    ]


def test_a_gap_loses_the_attempt_and_the_choice_resumes_from_what_was_received():
    drive = Driver()
    drive.place()
    drive.says(D, TokenEntry(KEY, 3, [9]))
    commands = drive.says(D, TokenEntry(KEY, 5, [7]))
    (place,) = asked(commands)
    assert (place.key, place.num_tokens, place.is_resume) == (Key(R, 0, 1), 4, True)
    assert place.avoid == {(D, EPOCHS[D])}
    assert of_type(commands, Deliver) == []
    assert Send(D, Cancel((KEY,))) in commands, "the node does not know of the gap"


def test_guesses_are_counted_with_the_tokens_that_are_passed_on():
    drive = Driver(max_tokens=50)
    drive.place()
    drive.says(P, FirstTokens(KEY, 3, (FirstToken(9),), TIMES))
    drive.says(D, TokenEntry(KEY, 3, [9, 8, 7], None, None, (), 3, 1))
    key = drive.place_again(drive.step(NodeLost(D, LOST)))
    drive.says(D, TokenEntry(KEY, 6, [6], num_draft_tokens=2))  # it is lost
    drive.says(D, TokenEntry(key, 6, [6, 5, 4], "stop", None, (), 2, 2))
    assert drive.metrics.num_draft_tokens == 5
    assert drive.metrics.num_accepted_tokens == 3


def test_only_losses_without_progress_use_up_attempts():
    drive = Driver(max_tokens=50, max_attempts=2)
    drive.place()
    key = KEY
    position = 3
    for _ in range(6):  # one loss with progress, then one without: never two in a row
        drive.says(D, TokenEntry(key, position, [9, 9]))
        position += 2
        key = drive.place_again(drive.step(NodeLost(D, LOST)))
        key = drive.place_again(drive.step(NodeLost(D, LOST)))
    drive.says(D, TokenEntry(key, position, [9, 9]))
    key = drive.place_again(drive.step(NodeLost(D, LOST)))
    key = drive.place_again(drive.step(NodeLost(D, LOST)))
    assert of_type(drive.step(NodeLost(D, LOST)), Outcome) == [Outcome(LOST)]


def test_after_two_losses_in_a_row_nodes_that_failed_get_time_to_come_back():
    drive = Driver(max_tokens=50, max_attempts=9)
    drive.place()
    drive.now_s = 10.0
    waits = []
    for _ in range(3):
        (again,) = asked(commands := drive.step(NodeLost(D, LOST)))
        waits.append(again.avoid_until_s)
        key = drive.place_again(commands)
    assert waits == [0.0, 10.0 + PAUSE_S, 10.0 + PAUSE_S]
    drive.says(D, TokenEntry(key, 3, [9, 9]))
    (again,) = asked(drive.step(NodeLost(D, LOST)))
    assert again.avoid_until_s == 0.0, "it had made progress"


def test_a_node_that_may_only_have_paused_is_told_to_give_up_what_it_had():
    drive = Driver()
    drive.place()
    assert Send(D, Cancel((KEY,), "node lost")) in drive.step(NodeLost(D, LOST))


def test_a_request_that_kills_two_nodes_is_refused_whatever_progress_it_made():
    drive = Driver(max_tokens=50, max_attempts=9)
    drive.place()
    drive.says(D, TokenEntry(KEY, 3, [9, 9]))
    assert drive.says(D, Crashed((Key(RequestId("other")),), LOST)) == []
    assert drive.says(D, Crashed((KEY,), LOST)) == []
    (place,) = asked(drive.step(NodeLost(D, LOST)))
    assert place.is_suspect
    drive.step(selected(place, P, D, EPOCHS))
    assert drive.says(D, Crashed((KEY,), LOST)) == [], "that attempt is over"
    drive.says(D, TokenEntry(place.key, 5, [9, 9]))
    commands = drive.says(D, Crashed((place.key,), LOST))
    (outcome,) = of_type(commands, Outcome)
    assert (outcome.failure.code, outcome.failure.http_status) == (
        "request_kills_nodes",
        422,
    )
    assert asked(drive.step(NodeLost(D, LOST))) == []


def test_a_node_that_drains_sends_an_attempt_elsewhere_at_no_cost():
    drive = Driver(max_attempts=1)
    drive.place()
    draining = Failure(DRAINING, "it is to end", retryable=True, http_status=503)
    (place,) = asked(drive.says(D, Failed(KEY, draining)))
    assert place.avoid == {(D, EPOCHS[D])}


@pytest.mark.parametrize("node", [P, D])
def test_a_cancel_that_nobody_asked_for_is_a_lost_node(node):
    """A node that lost its channel to this router first gives up what it was asked for."""
    drive = Driver()
    drive.place()
    failure = Cancelled("the request was cancelled").to_failure()
    commands = drive.says(node, Failed(KEY, failure))
    assert of_type(commands, Outcome) == []
    (place,) = asked(commands)
    assert place.avoid == {(node, EPOCHS[node])}


def test_a_failed_handoff_is_recorded_for_the_pair_and_both_are_avoided_for_a_while():
    drive = Driver()
    drive.place()
    commands = drive.says(D, Failed(KEY, REFUSED))
    pair = (P, EPOCHS[P]), (D, EPOCHS[D])
    assert of_type(commands, HandoffEnded) == [HandoffEnded(*pair, REFUSED)]
    assert (drive.metrics.retry_codes, drive.metrics.num_resumes) == (
        {REFUSED.code: 1},
        0,
    )
    (place,) = asked(commands)
    assert place.avoid == set(pair)
    drive.step(selected(place, NodeId("p2"), NodeId("d2")))
    drive.now_s = AVOID_S
    (place,) = asked(drive.step(NodeLost(NodeId("d2"), LOST)))
    assert place.avoid == {(NodeId("d2"), Epoch(""))}


@pytest.mark.parametrize("is_accepted", [False, True])
def test_a_handoff_that_fails_after_the_first_token_is_tried_again(is_accepted):
    drive = Driver()
    drive.place()
    drive.says(P, FirstTokens(KEY, 3, (FirstToken(9),), TIMES))
    if is_accepted:
        assert of_type(drive.says(D, Accepted(KEY)), Deliver) == [Deliver(0, [9])]
    out = drive.says(P, Failed(KEY, REFUSED))
    codes = drive.metrics.resume_codes if is_accepted else drive.metrics.retry_codes
    assert codes == {REFUSED.code: 1}
    assert drive.metrics.attempts[0].failure == REFUSED.code
    assert of_type(out, Send) == [Send(D, Cancel((KEY,)))]
    (place,) = asked(out)
    assert (place.num_tokens, {node for node, _ in place.avoid}) == (
        3 + is_accepted,
        {P, D},
    )


def test_a_request_that_no_node_has_in_progress_is_tried_again_with_other_nodes():
    """Its handoff was lost between the nodes, of which each waits for the other."""
    drive = Driver()
    drive.place()
    for _ in range(30):  # a long line at prefill is no loss
        drive.now_s += SILENCE_DEADLINE_S / 2
        drive.says(P, InProgress((KEY,)))
        assert drive.step(Tick()) == []
    drive.now_s += SILENCE_DEADLINE_S
    commands = drive.step(Tick())
    (place,) = asked(commands)
    assert place.avoid == {(P, EPOCHS[P]), (D, EPOCHS[D])}
    assert len(of_type(commands, HandoffEnded)) == 1
    drive.step(selected(place, P, D, EPOCHS))
    drive.says(D, TokenEntry(place.key, 3, [9]))
    drive.now_s += SILENCE_DEADLINE_S
    (place,) = asked(drive.step(Tick()))
    assert place.is_resume


def test_a_stream_that_its_node_ended_unasked_moves_on():
    """For example by a cancel of a session that is gone."""
    drive = Driver(num_choices=2)
    drive.place()
    drive.says(D, TokenEntry(KEY, 3, [9]))
    drive.says(D, TokenEntry(Key(R, 1), 3, [8]))
    drive.step(ChoiceStopped(1))
    assert asked(drive.says(D, CancelDone((Key(R, 1),)))) == [], "it was asked for"
    assert asked(drive.says(P, CancelDone((KEY,)))) == [], "prefill is no longer needed"
    (place,) = asked(drive.says(D, CancelDone((KEY,))))
    assert (place.key, place.num_tokens) == (Key(R, 0, 1), 4)


ROWS = b"12345678abcdefgh"  # of the second token and the third


def delivered(commands: list[RequestCommand]) -> list[RequestCommand]:
    return [one for one in commands if isinstance(one, Deliver | DeliverPrompt)]


def test_the_prompts_log_probabilities_come_once_and_before_any_token():
    drive = Driver(prompt_logprobs=0)
    drive.place()
    drive.says(P, PromptLogprobs(KEY, ROWS[:8]))
    drive.says(D, Accepted(KEY))
    # Prefill's messages may be slower than those of decode, which gets the first token from it.
    assert drive.says(D, TokenEntry(KEY, 3, [9, 8])) == []
    assert drive.says(D, TokenEntry(KEY, 5, [7])) == []
    drive.says(P, PromptLogprobs(KEY, ROWS[8:]))
    out = drive.says(P, FirstTokens(KEY, 3, (FirstToken(9),), TIMES))
    assert delivered(out) == [
        DeliverPrompt(ROWS),
        Deliver(0, [9]),
        Deliver(0, [8]),
        Deliver(0, [7]),
    ]
    # A resume asks for no more of them.
    (place,) = asked(drive.step(NodeLost(D, LOST)))
    sent = of_type(drive.step(selected(place, P, D, EPOCHS)), Send)
    assert [send.message.sampling.prompt_logprobs for send in sent] == [None, None]
    out = drive.says(D, TokenEntry(place.key, 6, [6]))
    assert delivered(out) == [Deliver(0, [6])]


def test_a_prefill_node_that_dies_with_them_is_replaced_whatever_decode_has_sent():
    drive = Driver(prompt_logprobs=0)
    drive.place()
    drive.says(P, PromptLogprobs(KEY, ROWS[:8]))
    drive.says(D, TokenEntry(KEY, 3, [9, 8]))
    out = drive.step(NodeLost(P, LOST))
    assert (drive.metrics.retry_codes, drive.metrics.num_resumes) == ({LOST.code: 1}, 0)
    assert Send(D, Cancel((KEY,))) in out
    (place,) = asked(out)
    sent = of_type(drive.step(selected(place, None, D, EPOCHS)), Send)
    assert [send.message.sampling.prompt_logprobs for send in sent] == [0]
    drive.says(D, PromptLogprobs(place.key, ROWS))
    assert delivered(drive.says(D, TokenEntry(place.key, 3, [5]))) == [
        DeliverPrompt(ROWS),
        Deliver(0, [5]),
    ]


@pytest.mark.parametrize("node", [P, D])
def test_a_node_that_sends_too_few_of_them_loses_the_attempt(node):
    drive = Driver(prompt_logprobs=0)
    drive.place(P if node == P else None)
    drive.says(node, PromptLogprobs(KEY, ROWS[:8]))
    drive.says(D, Accepted(KEY))
    first = FirstTokens(KEY, 3, (FirstToken(9),), TIMES)
    out = drive.says(node, first if node == P else TokenEntry(KEY, 3, [9]))
    assert delivered(out) == []
    (place,) = asked(out)
    assert {name for name, _ in place.avoid} == {node}


def pooling_drive() -> Driver:
    """A request of which a prefill node alone has the prompt."""
    drive = Driver(max_tokens=1, pooling="last")
    (place,) = asked(drive.step(Begun()))
    assert place.is_pooled
    assert not place.wants_decode
    (sent,) = of_type(drive.step(selected(place, P, None, EPOCHS)), Send)
    assert sent.node == P
    return drive


def test_a_prompt_to_pool_ends_with_its_numbers():
    drive = pooling_drive()
    assert drive.says(D, Pooled(KEY, b"0000")) == []  # of a node that was not asked
    assert drive.says(P, Pooled(KEY, b"1234", TIMES)) == [
        Release(P, KEY),
        DeliverPooled(b"1234"),
        Outcome(),
        Closed(),
    ]
    assert drive.says(P, Pooled(KEY, b"1234", TIMES)) == []


@pytest.mark.parametrize(
    "event",
    [NodeLost(P, LOST), Failed(KEY, LOST), Pooled(KEY, b"")],
    ids=["lost", "failed", "empty"],
)
def test_a_prompt_to_pool_is_computed_again_if_its_node_brings_nothing(event):
    drive = pooling_drive()
    commands = drive.request.step(0.0, event, P)
    (place,) = asked(commands)
    assert (place.is_pooled, place.avoid) == (True, frozenset({(P, EPOCHS[P])}))
    assert not of_type(commands, Outcome)
    drive.step(selected(place, P, None, EPOCHS))
    assert of_type(drive.says(P, Pooled(place.key, b"1234")), DeliverPooled)


def test_a_caller_who_leaves_ends_a_prompt_to_pool():
    drive = pooling_drive()
    commands = drive.step(CallerGone())
    assert of_type(commands, Send) == [Send(P, Cancel((KEY,)))]
    assert drive.says(P, Pooled(KEY, b"1234")) == []
    assert of_type(drive.says(P, CancelDone((KEY,))), Closed)
