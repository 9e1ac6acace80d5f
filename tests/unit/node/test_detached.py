"""Streams whose router is gone: they run on, and are given to the router that asks for them."""

import msgspec
import pytest

from baton.decode_node import detached as keeping
from baton.kv_transfer.interfaces import BeginReceive, KVReceived
from baton.node.scheduling.scheduler import NodeLimits
from baton.protocol.errors import taken_over
from baton.protocol.ids import Key, RequestId
from baton.protocol.messages import (
    Attach,
    Attached,
    Decode,
    Failed,
    FirstToken,
    HeldChoice,
    Keep,
    NotAttached,
    ResumeState,
    TokenEntry,
    Tokens,
)
from baton.protocol.sampling import Sampling
from tests.support.drive import (
    BLOCK_SIZE,
    ROOT,
    Drive,
    continuation,
    decode_drive,
    handed,
    key,
    local,
    offered,
)

PROMPT = [1, 2, 3, 4, 5]
OWNER = b"owner"
OTHER = b"another"
OLD = 0
NEW = 1
KEEP_S = 30.0
LIMITS = NodeLimits(
    max_num_batched_tokens=16, max_num_seqs=8, max_model_len=256, vocab_size=1000, detached_s=KEEP_S
)


def stream(message: Decode, num_choices: int = 1) -> Decode:
    return msgspec.structs.replace(message, kept=ResumeState(b"form", OWNER, num_choices))


def detached(steps: int, message: Decode) -> Drive:
    """A node on which a request has taken so many steps when its router is lost."""
    drive = decode_drive(limits=LIMITS)
    drive.scheduler.add(0.0, OLD, message)
    drive.run(steps)
    drive.scheduler.forget(OLD)
    return drive


def attach(drive: Drive, owner: bytes = OWNER) -> list[object]:
    """What the new router is told first."""
    drive.entries()
    del drive.said[:]
    drive.scheduler.attach(drive.now_s, NEW, Attach(RequestId("r"), owner))
    drive._collect()
    said = list(drive.said)
    drive.said = []
    return said


def choices_of(answer: list[object]) -> dict[int, HeldChoice]:
    (attached,) = answer
    assert isinstance(attached, Attached)
    assert (attached.form, attached.prompt_token_ids) == (b"form", PROMPT)
    return {held.key.choice: held for held in attached.choices}


def tokens_after(drive: Drive, choice: int) -> tuple[int, list[int]]:
    """Where the tokens begin that the new router gets, and what they are."""
    entries = [
        entry
        for message in drive.said
        if isinstance(message, Tokens)
        for entry in message.entries
        if isinstance(entry, TokenEntry) and entry.key.choice == choice
    ]
    return entries[0].position, [token for entry in entries for token in entry.token_ids]


def test_what_waited_in_a_router_that_ended_is_kept_for_its_client():
    drive = decode_drive(limits=LIMITS)
    held = HeldChoice(Key(RequestId("r"), 0, 2), [7, 8])
    sampling = Sampling(seed=0, max_tokens=9)
    drive.scheduler.keep(
        drive.now_s, Keep(ResumeState(b"form", OWNER, 1), PROMPT, sampling, (held,))
    )
    assert isinstance(attach(drive, b"stranger")[0], NotAttached)
    assert choices_of(attach(drive)) == {0: held}


@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_stream_runs_on_and_goes_to_the_router_that_attaches(num_choices):
    drive = detached(3, stream(local("r", PROMPT, 20, num_choices), num_choices))
    num_said = len(drive.said)
    drive.run(4)
    assert len(drive.said) == num_said, "nobody is told"
    held = choices_of(attach(drive))
    drive.run()
    for choice in range(num_choices):
        assert held[choice].is_running
        position, rest = tokens_after(drive, choice)
        assert position == len(PROMPT) + len(held[choice].token_ids)
        assert held[choice].token_ids + rest == continuation(PROMPT, 20, choice)
    assert len(held[0].token_ids) > 4, "it went on without a router"
    assert drive.pool.num_free == 64


def test_a_prompt_whose_blocks_are_on_their_way_goes_to_the_router_that_attaches():
    """Its client may have the first tokens, of which this node does not know yet."""
    drive = decode_drive(limits=LIMITS)
    drive.scheduler.add(0.0, OLD, stream(handed("r", PROMPT, 20, 2), 2))
    drive.scheduler.on_report(0.0, offered("r", len(PROMPT), 2))
    drive.launch()
    drive.scheduler.forget(OLD)
    said = attach(drive)
    assert choices_of(said) == {n: HeldChoice(key("r", n), [], is_running=True) for n in range(2)}
    assert isinstance(said[0], Attached)
    assert said[0].landing == (0, 1)
    (land,) = [event for event in drive.asked if isinstance(event, BeginReceive)]
    for position in range(len(PROMPT)):
        block = land.block_ids[position // BLOCK_SIZE]
        drive.model.write(block, position % BLOCK_SIZE, ROOT.extended(PROMPT[: position + 1]))
    firsts = [continuation(PROMPT, 20, choice)[0] for choice in range(2)]
    tokens = FirstToken(firsts[0]), FirstToken(firsts[1], "stop")
    drive.scheduler.on_report(0.0, KVReceived(key("r"), tokens, 0, 0.0, 0.0))
    drive.run(1)
    assert tokens_after(drive, 1) == (len(PROMPT), firsts[1:]), "prefill told the dead router"
    position, rest = tokens_after(drive, 0)
    assert (position, rest[0]) == (len(PROMPT), firsts[0])


def test_what_ends_while_detached_is_kept_without_its_blocks():
    drive = detached(3, stream(local("r", PROMPT, 20)))
    drive.run()
    assert drive.pool.num_free == 64
    held = choices_of(attach(drive))[0]
    assert (held.token_ids, held.finish_reason) == (continuation(PROMPT, 20), "length")
    assert choices_of(attach(drive))[0] == held, "the tokens are there for the next one, too"
    drive.now_s += KEEP_S
    drive.run()
    assert attach(drive) == [NotAttached(RequestId("r"))]


def test_only_its_owner_gets_a_stream():
    drive = detached(3, stream(local("r", PROMPT, 200)))
    assert attach(drive, OTHER) == [NotAttached(RequestId("r"))]
    assert choices_of(attach(drive))[0].is_running


def test_the_owner_takes_a_stream_from_a_router_that_still_has_it():
    drive = decode_drive(limits=LIMITS)
    drive.scheduler.add(0.0, OLD, stream(local("r", PROMPT, 200)))
    drive.run(3)
    drive.scheduler.attach(0.0, NEW, Attach(RequestId("r"), OWNER))
    told = [m for m in drive.scheduler.outputs.take_router_messages() if type(m[1]) is not Tokens]
    assert told[0] == (OLD, Failed(key("r"), taken_over()))
    assert told[1][0] == NEW
    assert isinstance(told[1][1], Attached)
    drive.scheduler.cancel(OLD, (key("r"),))
    assert drive.scheduler.load().num_running == 1, "it is no longer the old router's"


def test_what_a_cancel_ends_can_be_continued_from_its_tokens():
    """The client may have lost its connection and not its interest."""
    drive = decode_drive(limits=LIMITS)
    drive.scheduler.add(0.0, OLD, stream(local("r", PROMPT, 200)))
    drive.run(5)
    drive.scheduler.cancel(OLD, (key("r"),))
    drive.run()
    held = choices_of(attach(drive))[0]
    assert (held.is_running, held.finish_reason) == (False, None)
    assert held.token_ids == continuation(PROMPT, 200)[: len(held.token_ids)]
    assert drive.pool.num_free == 64


def test_a_router_that_was_away_ends_what_landed_meanwhile():
    """It moved the request on, and its cancel comes when it meets the node again."""
    drive = decode_drive(limits=LIMITS)
    drive.scheduler.add(0.0, OLD, stream(handed("r", PROMPT, 200)))
    drive.scheduler.on_report(0.0, offered("r", len(PROMPT), 2))
    drive.launch()
    drive.scheduler.forget(OLD)
    first = FirstToken(continuation(PROMPT, 200)[0])
    drive.scheduler.on_report(0.0, KVReceived(key("r"), (first,), 0, 0.0, 0.0))
    assert drive.scheduler.load().num_running == 1
    drive.scheduler.cancel(NEW, (key("r"),))
    assert drive.scheduler.load().num_running == 1
    drive.scheduler.cancel(OLD, (key("r"),))
    assert drive.scheduler.load().num_running == 0
    assert drive.pool.num_free == 64


def test_a_prompt_that_a_cancel_ends_can_be_begun_again():
    drive = decode_drive(limits=LIMITS)
    drive.scheduler.add(0.0, OLD, stream(handed("r", PROMPT, 20)))
    drive.scheduler.cancel(OLD, (key("r"),))
    assert choices_of(attach(drive)[1:])[0] == HeldChoice(key("r"), [])


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(keeping, "MAX_ENDED", 3)
    drive = decode_drive(limits=LIMITS)
    for number in range(5):
        drive.scheduler.add(0.0, OLD, stream(local(f"r{number}", PROMPT, 3)))
        drive.run()
    found = []
    for number in range(5):
        drive.scheduler.attach(0.0, NEW, Attach(RequestId(f"r{number}"), OWNER))
        drive._collect()
        found.append(isinstance(drive.said[-1], Attached))
    assert found == [False, False, True, True, True]
