"""Both schedulers on an executor that checks every slot it reads, and what they refuse."""

import msgspec
import pytest

from baton.decode_node.admission import MAX_PASSED_S
from baton.kv_transfer.interfaces import (
    Abandon,
    KVReceived,
    Offer,
    OfferBroken,
    ReceiveEnded,
    Released,
)
from baton.node.scheduling.scheduler import NodeLimits
from baton.protocol.blocks import block_hashes
from baton.protocol.config import EngineConfig
from baton.protocol.errors import Failure
from baton.protocol.messages import (
    NOT_CACHED,
    Accepted,
    Decode,
    End,
    Failed,
    FirstToken,
    FirstTokens,
    Prefill,
    Withdrawn,
)
from baton.protocol.sampling import MAX_CHOICES
from baton.router.outputs import RequestMetrics
from tests.support.drive import (
    BLOCK_SIZE,
    Drive,
    continuation,
    decode_drive,
    handed,
    key,
    local,
    offered,
    prefill,
    prefill_drive,
    sampling,
)

LIMITS = NodeLimits(max_num_batched_tokens=16, max_num_seqs=2, max_model_len=64)
LOST = Failure("node_lost", "gone", retryable=True)


def accepted(drive: Drive) -> list[str]:
    list(drive.entries())  # collects what was said
    return [str(m.key.request_id) for m in drive.said if isinstance(m, Accepted)]


def hand(drive: Drive, name: str, length: int, num_choices: int = 1) -> None:
    """A request whose prompt, of its own, prefill offers at once."""
    prompt = [ord(name)] * length
    drive.scheduler.add(drive.now_s, 0, handed(name, prompt, 8, num_choices))
    num_blocks = -(-length // BLOCK_SIZE)
    drive.scheduler.on_report(drive.now_s, offered(name, length, num_blocks))


def test_nobody_gets_a_first_token_while_the_steps_have_no_place():
    drive = decode_drive(limits=LIMITS)
    for name in "abc":
        drive.scheduler.add(0.0, 0, local(name, [1, 2, 3], max_tokens=10))
    drive.run(steps=5)
    assert accepted(drive) == ["a", "b"]
    assert drive.output("c", [1, 2, 3]) == []
    drive.run()
    for name in "abc":
        assert drive.output(name, [1, 2, 3]) == continuation([1, 2, 3], 10)


@pytest.mark.parametrize("depth", [1, 2])
def test_many_choices_take_the_places_that_are_left_and_keep_nobody_out(depth):
    drive = decode_drive(limits=msgspec.structs.replace(LIMITS, max_num_seqs=3))
    prompt = [1, 2, 3]
    drive.scheduler.add(0.0, 0, local("long", prompt, max_tokens=40))
    drive.run(steps=3, depth=depth)
    drive.scheduler.add(0.0, 0, local("many", prompt, max_tokens=5, num_choices=6))
    drive.now_s = MAX_PASSED_S + 1
    drive.run(steps=3, depth=depth)
    before = len(drive.plans)
    drive.scheduler.add(drive.now_s, 0, local("late", prompt, max_tokens=5))
    drive.run(steps=8, depth=depth)
    assert drive.output("late", prompt) == continuation(prompt, 5)
    drive.run(depth=depth)
    for name, num_tokens, num_choices in (("long", 40, 1), ("many", 5, 6)):
        for choice in range(num_choices):
            assert drive.output(name, prompt, choice) == continuation(
                prompt, num_tokens, choice
            )
    # The long stream never lost its place, and choices that had begun went on before others began.
    names = [[part.key.request_id for part in plan.slices] for plan in drive.plans]
    assert all("long" in step for step in names[:38])
    assert sum("late" in step for step in names[before : before + 4 + depth]) == 5
    ends = [
        entry.key.choice for entry in drive.entries() if entry.finish_reason is not None
    ]
    assert [choice for choice in ends if choice] == [1, 2, 3, 4, 5]
    assert drive.pool.num_owned == 0


@pytest.mark.parametrize("is_running", [False, True])
def test_a_later_attempt_ends_the_one_before(is_running):
    drive = decode_drive()
    drive.scheduler.add(0.0, 0, local("a", [1, 2, 3], max_tokens=40))
    if is_running:
        drive.run(steps=3)
    before = [one for one in drive.entries() if one.key == key("a")]
    later = msgspec.structs.replace(
        local("a", [1, 2, 3], max_tokens=5), key=key("a", attempt=1)
    )
    drive.scheduler.add(0.0, 0, later)
    drive.run()
    assert not [message for message in drive.said if isinstance(message, Failed)]
    assert [one for one in drive.entries() if one.key == key("a")] == before
    tokens = [
        token
        for one in drive.entries()
        if one.key == later.key
        for token in one.token_ids
    ]
    assert tokens == continuation([1, 2, 3], 5)
    assert drive.pool.num_owned == 0


def test_a_head_that_waited_long_is_passed_no_more():
    drive = decode_drive(num_blocks=8, limits=LIMITS)
    hand(drive, "a", 20)  # 5 blocks
    drive.launch()
    hand(drive, "b", 16)  # 4 blocks, of which 3 are there
    hand(drive, "c", 4)
    drive.launch()
    assert accepted(drive) == ["a", "c"]
    drive.scheduler.on_report(0.0, ReceiveEnded(key("c"), LOST))
    drive.now_s = MAX_PASSED_S + 0.1
    hand(drive, "d", 4)
    drive.launch()
    assert accepted(drive) == ["a", "c"]
    drive.scheduler.on_report(drive.now_s, ReceiveEnded(key("a"), LOST))
    drive.launch()
    assert accepted(drive) == ["a", "c", "b", "d"]


@pytest.mark.parametrize("is_early", [True, False])
def test_what_quarantined_blocks_leave_no_room_for_goes_elsewhere(is_early):
    """It would wait for ever, and everyone behind it."""
    drive = decode_drive(num_blocks=8, limits=LIMITS)
    big = handed("big", [1] * 29, max_tokens=3)
    hand(drive, "a", 4)
    drive.launch()
    if is_early:
        drive.scheduler.add(0.0, 0, big)
        drive.scheduler.on_report(0.0, offered("big", 29, 8))
    (block,) = [block for block in range(8) if drive.pool.references(block)]
    drive.scheduler.on_report(0.0, ReceiveEnded(key("a"), LOST, (block,)))
    if not is_early:
        drive.scheduler.add(0.0, 0, big)
    assert drive.launch() is None
    failed = [m for m in drive.said if isinstance(m, Failed) and m.key == key("big")]
    assert [(f.failure.retryable, f.failure.code) for f in failed] == [
        (True, "overloaded")
    ]
    drive.scheduler.add(0.0, 0, local("small", [1, 2, 3]))
    drive.run()
    assert drive.output("small", [1, 2, 3]) == continuation([1, 2, 3], 8)


@pytest.mark.parametrize("length", [3, 4])
def test_a_block_whose_last_token_nobody_knows_is_not_kept(length):
    """Two steps run when the sequence is cancelled: what the first one drew is thrown away."""
    drive = decode_drive(limits=LIMITS)
    prompt = list(range(length))
    drive.scheduler.add(0.0, 0, local("a", prompt, max_tokens=20))
    drive.run(steps=1)
    first = drive.launch()
    second = drive.launch()
    assert first is not None
    assert second is not None
    drive.scheduler.cancel(0, (key("a"),))
    drive.settle(first)
    drive.settle(second)
    known = [*prompt, *continuation(prompt, 1)]
    hashes = block_hashes(known, BLOCK_SIZE)
    assert (
        len(drive.pool.cache)
        == len(drive.pool.cache.lookup(hashes))
        == len(known) // BLOCK_SIZE
    )


@pytest.mark.parametrize(("bound", "num_cached"), [(1, None), (2, 8), (10, 8)])
def test_a_local_prompt_that_is_not_cached_enough_is_refused_before_any_token(
    bound, num_cached
):
    drive = decode_drive()
    prompt = list(range(10))
    drive.scheduler.add(0.0, 0, local("warm", prompt, max_tokens=2))
    drive.run()
    drive.said.clear()
    bounded = msgspec.structs.replace(local("a", prompt), max_uncached_tokens=bound)
    drive.scheduler.add(0.0, 0, bounded)
    drive.run()
    if num_cached is None:
        (failed,) = drive.said
        assert isinstance(failed, Failed)
        assert (failed.failure.code, failed.failure.retryable) == (NOT_CACHED, True)
    else:
        assert Accepted(key("a"), num_cached) in drive.said
        assert drive.output("a", prompt) == continuation(prompt, 8)
    assert drive.pool.num_free == 64


def test_when_no_block_is_left_the_youngest_goes_back_to_its_router():
    drive = decode_drive(num_blocks=8)
    drive.scheduler.add(0.0, 0, local("old", [1, 2, 3], max_tokens=21))
    drive.scheduler.add(0.0, 0, local("young", [4, 5, 6], max_tokens=21))
    drive.run(depth=2)
    failed = [message for message in drive.said if isinstance(message, Failed)]
    assert [(f.key.request_id, f.failure.code) for f in failed] == [
        ("young", "preempted")
    ]
    assert failed[0].failure.retryable
    assert drive.output("old", [1, 2, 3]) == continuation([1, 2, 3], 21)
    got = drive.output("young", [4, 5, 6])
    assert got == continuation([4, 5, 6], 21)[: len(got)]
    assert drive.pool.num_free == 8


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_get_blocks_in_the_order_of_the_policy(role, policy):
    """Lower priorities come first, and of equal ones the request that arrived first."""
    limits = NodeLimits(
        max_num_batched_tokens=8,
        max_num_seqs=1,
        max_model_len=64,
        engine=EngineConfig(scheduling_policy=policy),
    )
    drive = (prefill_drive if role == "prefill" else decode_drive)(limits=limits)
    plan = None
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 5), ("e", 0)):
        message = (
            prefill(name, [1] * 8) if role == "prefill" else local(name, [1] * 8, 2)
        )
        prior = msgspec.structs.replace(message.sampling, priority=priority)
        drive.scheduler.add(
            drive.now_s, 0, msgspec.structs.replace(message, sampling=prior)
        )
        drive.now_s += 0.1
        plan = plan or drive.launch()  # the first one begins before others arrive
    assert plan is not None
    drive.settle(plan)
    drive.run()
    order = dict.fromkeys(str(plan.slices[0].key.request_id) for plan in drive.plans)
    assert "".join(order) == ("abcde" if policy == "fcfs" else "acebd")


def test_the_sequence_with_the_lowest_priority_goes_back_first():
    engine = EngineConfig(scheduling_policy="priority")
    limits = NodeLimits(
        max_num_batched_tokens=16, max_num_seqs=8, max_model_len=256, engine=engine
    )
    drive = decode_drive(num_blocks=8, limits=limits)
    for name, prompt, priority in (("old", [1, 2, 3], 1), ("young", [4, 5, 6], -1)):
        message = local(name, prompt, max_tokens=21)
        prior = msgspec.structs.replace(message.sampling, priority=priority)
        drive.scheduler.add(0.0, 0, msgspec.structs.replace(message, sampling=prior))
    drive.run(depth=2)
    failed = [message for message in drive.said if isinstance(message, Failed)]
    assert [(f.key.request_id, f.failure.code) for f in failed] == [
        ("old", "preempted")
    ]
    assert drive.output("young", [4, 5, 6]) == continuation([4, 5, 6], 21)


def test_a_landing_whose_router_is_gone_is_given_up_as_lost_and_not_as_cancelled():
    """Prefill passes the reason on, perhaps to a router that only this node has lost."""
    drive = decode_drive()
    drive.scheduler.add(0.0, 7, handed("a", [1, 2, 3]))
    drive.launch()
    drive.scheduler.forget(7)
    drive.launch()
    (abandon,) = [event for event in drive.asked if isinstance(event, Abandon)]
    assert (abandon.failure.code, abandon.failure.retryable) == ("node_lost", True)


def test_a_fully_cached_prompt_still_computes_its_last_token():
    drive = prefill_drive()
    prompt = list(range(16))
    for name in "ab":
        drive.scheduler.add(0.0, 0, prefill(name, prompt))
        drive.run()
    assert (drive.plans[-1].slices[0].start, drive.plans[-1].slices[0].length) == (
        12,
        4,
    )
    firsts = [m for m in drive.said if isinstance(m, FirstTokens)]
    assert firsts[1].times.num_cached_tokens == 12
    ends = [event for event in drive.asked if isinstance(event, End)]
    assert [end.num_cached_tokens for end in ends] == [0, 12]
    assert firsts[0].tokens == firsts[1].tokens


def test_decode_repeats_what_prefill_had_cached():
    """All tokens of a short answer may reach its router before prefill's message does."""
    drive = decode_drive()
    drive.scheduler.add(0.0, 0, handed("a", SHORT, max_tokens=1))
    drive.scheduler.on_report(0.0, offered("a", len(SHORT), 2))
    drive.launch()
    drive.scheduler.on_report(
        0.0, KVReceived(key("a"), (FirstToken(5),), 0, 0.0, 0.0, 4)
    )
    (entry,) = drive.entries()
    assert entry.times is not None
    assert entry.times.num_cached_tokens == 4
    metrics = RequestMetrics()
    metrics.timed(entry.times, of_prompt=False)
    assert metrics.num_cached_tokens == 4


def test_a_prompt_that_is_computed_outlives_its_router():
    """Its own channel alone may have broken, so decode must get the blocks."""
    drive = prefill_drive()
    drive.scheduler.add(0.0, 7, prefill("a", list(range(10))))
    drive.run()
    drive.scheduler.forget(7)
    drive.run()
    assert not any(isinstance(event, Withdrawn) for event in drive.asked)
    assert drive.pool.num_owned
    drive.scheduler.on_report(0.0, Released(key("a"), None))
    assert not drive.pool.num_owned


def test_a_handoff_whose_router_is_gone_is_withdrawn_as_lost_and_not_as_cancelled():
    """Decode passes the reason on, perhaps to a router that only this node has lost."""
    drive = prefill_drive()
    drive.scheduler.add(0.0, 7, prefill("a", list(range(60))))
    drive.run(steps=1)
    drive.scheduler.forget(7)
    drive.launch()
    (withdrawn,) = [event for event in drive.asked if isinstance(event, Withdrawn)]
    assert (withdrawn.failure.code, withdrawn.failure.retryable) == ("node_lost", True)


def test_a_handoff_that_breaks_is_reported_at_once_and_its_blocks_stay_until_released():
    drive = prefill_drive()
    drive.scheduler.add(0.0, 7, prefill("a", list(range(10))))
    drive.run()
    drive.scheduler.on_report(4.0, OfferBroken(key("a"), LOST))
    assert drive.scheduler.outputs.take_router_messages() == [
        (7, Failed(key("a"), LOST))
    ]
    assert drive.pool.num_owned
    drive.scheduler.on_report(30.0, Released(key("a"), LOST))
    assert drive.scheduler.outputs.take_router_messages() == []
    assert not drive.pool.num_owned


NUM_BLOCKS = 16
WRONG_LIMITS = NodeLimits(
    max_num_batched_tokens=16, max_num_seqs=8, max_model_len=32, vocab_size=1000
)
SHORT = [1, 2, 3, 4, 5]


def make(role: str) -> Drive:
    return (prefill_drive if role == "prefill" else decode_drive)(
        NUM_BLOCKS, WRONG_LIMITS
    )


def request(role: str, name: str = "a", **changes: object) -> Prefill | Decode:
    message = prefill(name, SHORT) if role == "prefill" else local(name, SHORT)
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
    "an adapter that the node does not have": {"sampling": sampling(lora="sql")},
    "a resume with nothing left to generate": {
        "num_prompt_tokens": 2,
        "sampling": sampling(3),
    },
    "no room for a token": {"token_ids": [7] * 32, "num_prompt_tokens": 32},
}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_request_is_refused_and_the_next_one_served(role, changes):
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
        assert drive.output("b", SHORT) == continuation(SHORT, 8)
    else:
        assert [m.key for m in drive.said if isinstance(m, FirstTokens)] == [key("b")]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_key_that_is_in_use_is_refused_and_its_owner_goes_on(role, steps):
    """The same key twice, or a key of one of its choices; at every stage."""
    drive = make(role)
    drive.scheduler.add(0.0, 0, request(role, num_choices=2))
    drive.run(steps=steps)
    drive.scheduler.add(0.0, 1, request(role, key=key("a", 1)))
    assert [failed.key for failed in failures(drive)] == [key("a", 1)]
    drive.run()
    if role == "decode":
        for index in range(2):
            assert drive.output("a", SHORT, index) == continuation(SHORT, 8, index)
    else:
        assert [len(m.tokens) for m in drive.said if isinstance(m, FirstTokens)] == [2]
        assert len([e for e in drive.asked if isinstance(e, Offer)]) == 1
        drive.scheduler.on_report(0.0, Released(key("a")))
    assert drive.pool.num_free == NUM_BLOCKS


@pytest.mark.parametrize(
    "tokens",
    [(FirstToken(5),), (FirstToken(5),) * 3, (FirstToken(5), FirstToken(1000))],
    ids=["too few", "too many", "not a token"],
)
def test_first_tokens_that_do_not_fit_end_the_request(tokens):
    drive = make("decode")
    drive.scheduler.add(0.0, 0, handed("a", SHORT, num_choices=2))
    drive.scheduler.on_report(0.0, offered("a", 5, 2))
    drive.launch()
    drive.scheduler.on_report(0.0, KVReceived(key("a"), tokens, 0, 0.0, 0.0))
    (failed,) = failures(drive)
    assert failed.failure.retryable
    assert drive.launch() is None
    assert drive.pool.num_free == NUM_BLOCKS


def test_prompts_of_many_choices_take_several_steps():
    """A step has a row of logits for each token that it samples."""
    limits = NodeLimits(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=64)
    for drive, ask in (
        (
            prefill_drive(2000, limits),
            lambda name: prefill(name, [1, 2, 3], num_choices=60),
        ),
        (
            decode_drive(2000, limits),
            lambda name: local(name, [1, 2, 3], 2, num_choices=60),
        ),
    ):
        for name in "abcde":
            drive.scheduler.add(0.0, 0, ask(name))
        plan = drive.scheduler.plan(0.0)
        assert plan is not None
        assert [part.num_sampled for part in plan.slices] == [60, 60]
