"""Decode scheduling on an executor that checks every slot it reads."""

import msgspec
import pytest

from baton.kv_transfer.interfaces import Abandon, BeginReceive, KVReceived
from baton.protocol.messages import NOT_CACHED, Accepted, Failed, FirstToken
from tests.support.drive import BLOCK_SIZE, Drive, decode_drive, handed, key, local, offered
from tests.support.toy_executor import continuation, next_token


def land(drive: Drive, name: str, prompt: list[int], num_choices: int = 1) -> None:
    """What connector and prefill do for a handed-over request: offer, fill the blocks, report."""
    num_blocks = drive.pool.blocks_for(len(prompt))
    drive.scheduler.on_report(0.0, offered(name, len(prompt), num_blocks))
    assert drive.launch() is None, "nothing else may be running"
    (order,) = [e for e in drive.asked if isinstance(e, BeginReceive) and e.key == key(name)]
    for position in range(order.first_block * BLOCK_SIZE, len(prompt)):
        block = order.block_ids[position // BLOCK_SIZE - order.first_block]
        drive.executor.slots[block][position % BLOCK_SIZE] = tuple(prompt[: position + 1])
    firsts = tuple(FirstToken(next_token(prompt, choice)) for choice in range(num_choices))
    drive.scheduler.on_report(0.0, KVReceived(key(name), firsts, 0, 0.0, 0.0))


def test_only_blocks_that_are_not_cached_are_landed() -> None:
    drive, prompt = decode_drive(), list(range(10))
    drive.scheduler.add(0.0, 0, local("warm", prompt, max_tokens=2))
    drive.run()
    drive.scheduler.add(0.0, 0, handed("a", prompt))
    land(drive, "a", prompt)
    (order,) = [e for e in drive.asked if isinstance(e, BeginReceive)]
    assert (order.first_block, len(order.block_ids)) == (2, 1)
    assert Accepted(key("a"), 8) in drive.said
    drive.run()
    assert drive.output("a", prompt) == continuation(prompt, 8)


@pytest.mark.parametrize(("bound", "num_cached"), [(1, None), (2, 8), (10, 8)])
def test_a_local_prompt_that_is_not_cached_enough_is_refused_before_any_token(
    bound: int, num_cached: int | None
) -> None:
    drive, prompt = decode_drive(), list(range(10))
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


def test_when_no_block_is_left_the_youngest_goes_back_to_its_router() -> None:
    drive = decode_drive(num_blocks=8)
    drive.scheduler.add(0.0, 0, local("old", [1, 2, 3], max_tokens=21))
    drive.scheduler.add(0.0, 0, local("young", [4, 5, 6], max_tokens=21))
    drive.run(depth=2)
    failed = [message for message in drive.said if isinstance(message, Failed)]
    assert [(f.key.request_id, f.failure.code) for f in failed] == [("young", "preempted")]
    assert failed[0].failure.retryable
    assert drive.output("old", [1, 2, 3]) == continuation([1, 2, 3], 21)
    got = drive.output("young", [4, 5, 6])
    assert got == continuation([4, 5, 6], 21)[: len(got)]
    assert drive.pool.num_free == 8


def test_a_landing_whose_router_is_gone_is_given_up_as_lost_and_not_as_cancelled() -> None:
    """Prefill passes the reason on, perhaps to a router that only this node has lost."""
    drive = decode_drive()
    drive.scheduler.add(0.0, 7, handed("a", [1, 2, 3]))
    drive.launch()
    drive.scheduler.forget(7)
    drive.launch()
    (abandon,) = [event for event in drive.asked if isinstance(event, Abandon)]
    assert (abandon.failure.code, abandon.failure.retryable) == ("node_lost", True)
