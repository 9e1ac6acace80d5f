"""Who is let into a decode node, and what its prefix cache keeps of those who leave."""

import msgspec
import pytest

from baton.decode_node.waiting_queue import MAX_PASSED_S
from baton.engine.scheduling.scheduler import NodeLimits
from baton.kv_transfer.interfaces import ReceiveEnded
from baton.protocol.blocks import block_hashes
from baton.protocol.errors import Failure
from baton.protocol.messages import Accepted, Failed
from tests.support.drive import BLOCK_SIZE, Drive, decode_drive, handed, key, local, offered
from tests.support.toy_executor import continuation

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


def test_nobody_gets_a_first_token_while_the_steps_have_no_place() -> None:
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
def test_many_choices_take_the_places_that_are_left_and_keep_nobody_out(depth: int) -> None:
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
            assert drive.output(name, prompt, choice) == continuation(prompt, num_tokens, choice)
    # The long stream never lost its place, and choices that had begun went on before others began.
    names = [[part.key.request_id for part in plan.slices] for plan in drive.plans]
    assert all("long" in step for step in names[:38])
    assert sum("late" in step for step in names[before : before + 4 + depth]) == 5
    ends = [entry.key.choice for entry in drive.entries() if entry.finish_reason is not None]
    assert [choice for choice in ends if choice] == [1, 2, 3, 4, 5]
    assert drive.pool.num_owned == 0


def test_a_head_that_waited_long_is_passed_no_more() -> None:
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
def test_what_quarantined_blocks_leave_no_room_for_goes_elsewhere(is_early: bool) -> None:
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
    assert [(f.failure.retryable, f.failure.code) for f in failed] == [(True, "overloaded")]
    drive.scheduler.add(0.0, 0, local("small", [1, 2, 3]))
    drive.run()
    assert drive.output("small", [1, 2, 3]) == continuation([1, 2, 3], 8)


@pytest.mark.parametrize("length", range(3, 9))
def test_a_block_whose_last_token_nobody_knows_is_not_kept(length: int) -> None:
    """Two steps run when the sequence is cancelled: what the first one drew is thrown away."""
    drive = decode_drive(limits=LIMITS)
    prompt = list(range(length))
    drive.scheduler.add(0.0, 0, local("a", prompt, max_tokens=20))
    drive.run(steps=1)
    first, second = drive.launch(), drive.launch()
    assert first is not None
    assert second is not None
    drive.scheduler.cancel(0, (key("a"),))
    drive.settle(first)
    drive.settle(second)
    known = [*prompt, *continuation(prompt, 1)]
    hashes = block_hashes(known, BLOCK_SIZE)
    assert len(drive.pool.cache) == len(drive.pool.cache.lookup(hashes)) == len(known) // BLOCK_SIZE
