"""What a confused or hostile router or peer says ends one request at most, never the process."""

import msgspec
import pytest

from baton.engine.scheduling.scheduler import NodeLimits
from baton.kv_transfer.interfaces import Abandon, KVReceived, Offer, ReceiveEnded, Released
from baton.protocol.errors import Failure
from baton.protocol.messages import Decode, Failed, FirstToken, FirstTokens, Prefill
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
    "a million choices": {"num_choices": 10**6},
    "a choice beyond the most": {"key": key("a", choice=MAX_CHOICES)},
    "no tokens": {"token_ids": [], "num_prompt_tokens": 0},
    "more prompt than tokens": {"num_prompt_tokens": 6},
    "a token beyond the vocabulary": {"token_ids": [1, 2, 3, 4, 1000]},
    "nothing to generate": {"sampling": sampling(0)},
    "a resume with nothing left to generate": {"num_prompt_tokens": 2, "sampling": sampling(3)},
    "no room for a token": {"token_ids": [7] * 32, "num_prompt_tokens": 32},
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
@pytest.mark.parametrize("steps", [0, 2])
def test_a_key_that_is_in_use_is_refused_and_its_owner_goes_on(role: str, steps: int) -> None:
    """The same key twice, or a key of one of its choices; at every stage."""
    drive = make(role)
    drive.scheduler.add(0.0, 0, request(role, num_choices=2))
    drive.run(steps=steps)
    drive.scheduler.add(0.0, 1, request(role, key=key("a", 1)))
    assert [failed.key for failed in failures(drive)] == [key("a", 1)]
    drive.run()
    if role == "decode":
        for index in range(2):
            assert drive.output("a", PROMPT, index) == continuation(PROMPT, 8, index)
    else:
        assert [len(m.tokens) for m in drive.said if isinstance(m, FirstTokens)] == [2]
        assert len([e for e in drive.asked if isinstance(e, Offer)]) == 1
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
