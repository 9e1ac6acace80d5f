"""What a confused or hostile router or peer says ends one request at most, never the process."""

import msgspec
import pytest

from baton.engine.scheduling.scheduler import NodeLimits
from baton.kv_transfer.interfaces import Abandon, KVReceived, Offer, ReceiveEnded, Released
from baton.protocol.errors import Failure
from baton.protocol.messages import CancelDone, Decode, Failed, FirstToken, FirstTokens, Prefill
from baton.protocol.sampling import MAX_CHOICES
from tests.support.drive import (
    Drive,
    decode_drive,
    handed,
    key,
    local,
    offered,
    prefill,
    prefill_drive,
    sampling,
)
from tests.support.toy_executor import continuation

NUM_BLOCKS = 16
LIMITS = NodeLimits(max_num_batched_tokens=16, max_num_seqs=8, max_model_len=32, vocab_size=1000)
PROMPT = [1, 2, 3, 4, 5]


def make(role: str) -> Drive:
    return (prefill_drive if role == "prefill" else decode_drive)(NUM_BLOCKS, LIMITS)


def request(role: str, name: str = "a", **changes: object) -> Prefill | Decode:
    message = prefill(name, PROMPT) if role == "prefill" else local(name, PROMPT)
    return msgspec.structs.replace(message, **changes)


def failures(drive: Drive) -> list[Failed]:
    list(drive.entries())  # collects what was said
    return [message for message in drive.said if isinstance(message, Failed)]


WRONG: dict[str, dict[str, object]] = {
    "no choices": {"num_choices": 0},
    "negative choices": {"num_choices": -1},
    "a million choices": {"num_choices": 10**6},
    "a choice below zero": {"key": key("a", choice=-1)},
    "a choice beyond the most": {"key": key("a", choice=MAX_CHOICES)},
    "no tokens": {"token_ids": [], "num_prompt_tokens": 0},
    "more prompt than tokens": {"num_prompt_tokens": 6},
    "no prompt": {"num_prompt_tokens": 0},
    "a negative prompt": {"num_prompt_tokens": -3},
    "a token beyond the vocabulary": {"token_ids": [1, 2, 3, 4, 1000]},
    "a token beyond 64 bits": {"token_ids": [1, 2, 3, 4, (1 << 64) - 1]},
    "a negative token": {"token_ids": [1, 2, 3, 4, -1]},
    "nothing to generate": {"sampling": sampling(0)},
    "a resume with nothing left to generate": {"num_prompt_tokens": 2, "sampling": sampling(3)},
    "no room for a token": {"token_ids": [7] * 32, "num_prompt_tokens": 32},
    "more than the model takes": {"token_ids": [7] * 40, "num_prompt_tokens": 40},
}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_request_is_refused_and_the_next_one_served(
    role: str, changes: dict[str, object]
) -> None:
    drive = make(role)
    wrong = request(role, **changes)
    drive.scheduler.add(0.0, 0, wrong)
    (failed,) = failures(drive)
    assert failed.key == wrong.key
    assert not failed.failure.retryable
    assert drive.launch() is None
    assert (drive.asked, drive.pool.num_free) == ([], NUM_BLOCKS)
    drive.scheduler.cancel(0, (wrong.key,))
    drive.scheduler.add(0.0, 0, request(role, "b"))
    drive.run()
    if role == "decode":
        assert drive.output("b", PROMPT) == continuation(PROMPT, 8)
    else:
        assert [m.key for m in drive.said if isinstance(m, FirstTokens)] == [key("b")]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_for_the_other_role_is_refused(role: str) -> None:
    drive = make(role)
    drive.scheduler.add(0.0, 0, request("decode" if role == "prefill" else "prefill"))
    assert [failed.key for failed in failures(drive)] == [key("a")]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_prompt_that_leaves_room_for_one_token_gets_it(role: str) -> None:
    drive, prompt = make(role), [7] * 31
    drive.scheduler.add(0.0, 0, request(role, token_ids=list(prompt), num_prompt_tokens=31))
    drive.run()
    if role == "decode":
        assert drive.output("a", prompt) == continuation(prompt, 1)
        assert [entry.finish_reason for entry in drive.entries()] == ["length"]
        assert drive.pool.num_free == NUM_BLOCKS
    else:
        (first,) = [m for m in drive.said if isinstance(m, FirstTokens)]
        assert first.tokens[0].finish_reason == "length"


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("choice", [0, 1])
def test_a_key_that_is_in_use_is_refused_and_its_owner_goes_on(
    role: str, steps: int, choice: int
) -> None:
    """The same key twice, or a key of one of its choices; at every stage."""
    drive = make(role)
    drive.scheduler.add(0.0, 0, request(role, num_choices=2))
    drive.run(steps=steps)
    drive.scheduler.add(0.0, 1, request(role, key=key("a", choice)))
    assert [failed.key for failed in failures(drive)] == [key("a", choice)]
    drive.run()
    if role == "decode":
        for index in range(2):
            assert drive.output("a", PROMPT, index) == continuation(PROMPT, 8, index)
    else:
        assert [len(m.tokens) for m in drive.said if isinstance(m, FirstTokens)] == [2]
        assert len([e for e in drive.asked if isinstance(e, Offer)]) == 1
        drive.scheduler.on_report(0.0, Released(key("a")))
    assert drive.pool.num_free == NUM_BLOCKS


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_key_whose_blocks_are_still_in_a_step_is_refused(role: str) -> None:
    drive = make(role)
    drive.scheduler.add(0.0, 0, request(role))
    plan = drive.launch()
    assert plan is not None
    drive.scheduler.cancel(0, (key("a"),))
    drive.scheduler.add(0.0, 0, request(role))
    assert [failed.key for failed in failures(drive)] == [key("a")]
    drive.settle(plan)
    drive.run()
    drive.asked.clear()
    if role == "prefill":
        drive.scheduler.on_report(0.0, Released(key("a")))
    assert drive.pool.num_free == NUM_BLOCKS


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_cancels_of_unknown_keys_are_answered(role: str) -> None:
    drive = make(role)
    drive.scheduler.cancel(0, (key("a"), key("a"), key("b", 500)))
    drive.launch()
    assert drive.said == [CancelDone((key("a"), key("a"), key("b", 500)))]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_newer_attempt_of_one_choice_ends_the_older_ones_of_that_choice(role: str) -> None:
    """Also when the older attempt names its choices by the key of another."""
    drive = make(role)
    drive.scheduler.add(0.0, 0, request(role, num_choices=2))
    drive.run(steps=1)
    drive.scheduler.add(0.0, 0, request(role, key=key("a", 0, 1), num_choices=2))
    drive.run()
    if role == "decode":
        tokens = {0: 0, 1: 0}
        for entry in drive.entries():
            if entry.key.attempt == 0:
                tokens[entry.key.choice] += len(entry.token_ids)
        assert tokens == {0: 1, 1: 1}
    else:
        drive.scheduler.on_report(0.0, Released(key("a", 0, 1)))
        drive.scheduler.on_report(0.0, Released(key("a")))
    assert drive.pool.num_free == NUM_BLOCKS


def test_a_newer_attempt_ends_a_prompt_once_it_has_taken_all_of_its_choices() -> None:
    drive = make("decode")
    drive.scheduler.add(0.0, 0, handed("a", PROMPT, num_choices=2))
    for choice, is_over in ((1, False), (0, True)):
        drive.scheduler.add(0.0, 0, request("decode", key=key("a", choice, 1)))
        drive.run()
        assert any(isinstance(event, Abandon) for event in drive.asked) == is_over
    drive.scheduler.on_report(0.0, ReceiveEnded(key("a"), Failure("x", "gone")))
    assert drive.pool.num_free == NUM_BLOCKS


@pytest.mark.parametrize(
    "tokens",
    [(), (FirstToken(5),), (FirstToken(5),) * 3, (FirstToken(5), FirstToken(1000)),
     (FirstToken(-1), FirstToken(5))],
    ids=["none", "too few", "too many", "not a token", "a negative one"],
)  # fmt: skip
def test_first_tokens_that_do_not_fit_end_the_request(tokens: tuple[FirstToken, ...]) -> None:
    drive = make("decode")
    drive.scheduler.add(0.0, 0, handed("a", PROMPT, num_choices=2))
    drive.scheduler.on_report(0.0, offered("a", 5, 2))
    drive.launch()
    drive.scheduler.on_report(0.0, KVReceived(key("a"), tokens, 0, 0.0, 0.0))
    (failed,) = failures(drive)
    assert failed.failure.retryable
    assert drive.launch() is None
    assert drive.pool.num_free == NUM_BLOCKS


def test_an_offer_of_another_prompt_is_declined() -> None:
    drive = make("decode")
    drive.scheduler.add(0.0, 0, handed("a", PROMPT))
    drive.scheduler.on_report(0.0, offered("a", 6, 2))
    (failed,) = failures(drive)
    assert [e.failure for e in drive.asked if isinstance(e, Abandon)] == [failed.failure]
    drive.scheduler.on_report(0.0, ReceiveEnded(key("a"), failed.failure))
    assert len(failures(drive)) == 1
    assert drive.pool.num_free == NUM_BLOCKS


def test_a_first_token_that_fills_decodes_own_length_ends_the_sequence() -> None:
    """Prefill's nodes may take longer sequences than decode's."""
    drive, prompt = make("decode"), [7] * 31
    drive.scheduler.add(0.0, 0, handed("a", prompt))
    drive.scheduler.on_report(0.0, offered("a", 31, 8))
    drive.launch()
    drive.scheduler.on_report(0.0, KVReceived(key("a"), (FirstToken(5),), 0, 0.0, 0.0))
    drive.run()
    assert [(e.token_ids, e.finish_reason) for e in drive.entries()] == [([5], "length")]
    assert drive.pool.num_free == NUM_BLOCKS
