"""Blocks of equal tokens that different makers computed: they are never taken for one another."""

import random

import msgspec
import pytest

from baton.decode_node.scheduler import DecodeScheduler
from baton.kv_transfer.interfaces import BeginReceive, KVReceived
from baton.node.scheduling.plan import StepPlan
from baton.prefill_node.scheduler import PrefillScheduler
from baton.protocol.blocks import (
    KEY_BYTES,
    THIS_NODE,
    Makers,
    block_hashes,
)
from baton.protocol.messages import Decode, FirstToken
from tests.sim.executor import BLOCK_SIZE, VOCAB, Context
from tests.support.depth import nightly
from tests.support.drive import (
    LIMITS,
    ROOT,
    TOY,
    Drive,
    continuation,
    decode_drive,
    handed,
    key,
    local,
    offered,
    prefill,
)

PROMPT = [7 * n % 50 for n in range(1, 23)]
STATE = 3


def two_orders(num_blocks: int = 256, state_blocks: int = 0) -> Drive:
    limits = msgspec.structs.replace(
        LIMITS, max_num_batched_tokens=80, max_model_len=1024
    )
    return Drive(DecodeScheduler, num_blocks, limits, state_blocks, has_two_orders=True)


def response(prompt: list[int], count: int, choice: int = 0) -> list[int]:
    """What a model of two orders says after a prompt whose every token it computes anew."""

    def row(context: Context, token: int) -> Context:
        is_output = context.length >= len(prompt) - 1
        return context.then(token + VOCAB * is_output)

    context = ROOT
    for token in prompt:
        context = row(context, token)
    said = []
    for _ in range(count):
        said.append(TOY(context, 0, choice))
        context = row(context, said[-1])
    return said


def ask(drive: Drive, name: str, message: Decode) -> tuple[list[int], int]:
    """Return what is said, and how many tokens of the prompt were not cached."""
    first = len(drive.plans)
    drive.scheduler.add(drive.now_s, 0, message)
    drive.run()
    starts = [
        part.start
        for plan in drive.plans[first:]
        for part in plan.slices
        if part.key == message.key
    ]
    num_new = len(message.token_ids) - starts[0]
    return drive.output(name, message.token_ids), num_new


def test_this_node_alone_leaves_hashes_as_they_are():
    chain = block_hashes(PROMPT, BLOCK_SIZE)
    assert THIS_NODE.hashes(chain, 0, BLOCK_SIZE) == chain


@pytest.mark.parametrize("border", range(len(PROMPT)))
def test_blocks_with_tokens_behind_a_border_have_hashes_of_their_own(border):
    chain = block_hashes(PROMPT, BLOCK_SIZE)
    hashes = Makers(borders=(border,)).hashes(chain, 0, BLOCK_SIZE)
    num_alike = border // BLOCK_SIZE
    assert hashes[:num_alike] == chain[:num_alike]
    assert {*hashes[num_alike:]}.isdisjoint(chain)
    keys = {one[:KEY_BYTES] for one in chain}
    assert keys.isdisjoint(one[:KEY_BYTES] for one in hashes[num_alike:])


def test_each_border_and_node_gives_other_hashes_in_any_number_of_pieces():
    chain = block_hashes(PROMPT, BLOCK_SIZE)
    makers = [
        THIS_NODE,
        *(Makers(borders=(border,)) for border in range(1, BLOCK_SIZE)),
        *(Makers(name, (9, end)) for name in ("a", "b") for end in (9, 13)),
    ]
    last = [one.hashes(chain, 0, BLOCK_SIZE)[-1] for one in makers]
    assert len({*last}) == len(last)
    for one in makers:
        pieces = [
            *one.hashes(chain[:2], 0, BLOCK_SIZE),
            *one.hashes(chain[2:], 2, BLOCK_SIZE),
        ]
        assert pieces == one.hashes(chain, 0, BLOCK_SIZE)


def test_routers_know_the_prompts_of_other_nodes_by_the_same_keys():
    chain = block_hashes(PROMPT, BLOCK_SIZE)
    hashes = Makers("other", (len(PROMPT) - 1, len(PROMPT))).hashes(
        chain, 0, BLOCK_SIZE
    )
    assert [one[:KEY_BYTES] for one in hashes] == [one[:KEY_BYTES] for one in chain]
    assert {*hashes}.isdisjoint(chain)


def test_a_later_prompt_computes_what_a_response_has_computed_in_another_order():
    drive = two_orders()
    said, _ = ask(drive, "a", local("a", PROMPT, 20))
    assert said == response(PROMPT, 20)
    longer = [*PROMPT, *said, *PROMPT]
    again, num_new = ask(drive, "b", local("b", longer, 20))
    assert again == response(longer, 20)
    # The last token of the first prompt was one of the response, too.
    assert num_new == len(longer) - (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_a_resumed_sequence_computes_each_token_as_before():
    drive = two_orders()
    said, _ = ask(drive, "a", local("a", PROMPT, 40))
    resumed = msgspec.structs.replace(
        local("b", [*PROMPT, *said[:15]], 40), num_prompt_tokens=len(PROMPT)
    )
    rest, num_new = ask(drive, "b", resumed)
    assert rest == said[15:]
    assert num_new < BLOCK_SIZE + 1  # what the first one left is as good
    drive.pool.reset_prefix_cache()
    alone = msgspec.structs.replace(resumed, key=key("c"))
    assert ask(drive, "c", alone) == (rest, len(resumed.token_ids))


@pytest.mark.parametrize("state_blocks", [0, STATE])
@pytest.mark.parametrize("seed", [*range(6), *map(nightly, range(6, 40))])
def test_random_chats_say_what_they_say_without_a_cache(seed, state_blocks):
    luck = random.Random(seed)
    drive = two_orders(luck.choice((160, 400)), state_blocks)
    text = [luck.randint(0, 49) for _ in range(200)]
    chats: list[list[int]] = [[] for _ in range(3)]
    for turn in range(30):
        chat = luck.choice(chats)
        if len(chat) > 300:
            chat.clear()
        begin = luck.choice((0, 0, 64))
        chat += text[begin : begin + luck.randint(1, 90)]
        name = f"r{turn}"
        said, _ = ask(drive, name, local(name, chat, luck.randint(1, 30)))
        assert said == response(chat, len(said)), turn
        chat += said
    assert drive.pool.num_owned == 0


def test_a_state_is_never_cut_between_its_units():
    """Whatever is left of a step's budget: a chunk that would end inside one waits."""
    limits = msgspec.structs.replace(
        LIMITS, max_num_batched_tokens=100, max_model_len=1024
    )
    drive = Drive(PrefillScheduler, 256, limits, STATE, has_two_orders=True)
    prompts = {f"r{n}": [n] * (30 + 70 * n) for n in range(4)}
    for name, prompt in prompts.items():
        drive.scheduler.add(0.0, 0, prefill(name, prompt))
    ends: dict[str, list[int]] = {}
    launched: list[StepPlan] = []
    while (plan := drive.launch()) is not None:
        launched.append(plan)
        for part in plan.slices:
            ends.setdefault(part.key.request_id, []).append(part.start + part.length)
        drive.settle(plan)
    for name, prompt in prompts.items():
        *inner, last = ends[name]
        assert last == len(prompt)
        assert all(end % 64 == 0 for end in inner)
    assert all(sum(part.length for part in plan.slices) <= 100 for plan in launched)


def received(drive: Drive, message: Decode, mark: int) -> int:
    """Run a request whose prompt comes from a node that computes contexts with this mark.

    Return how many of its tokens were cached; fail if what follows is not what those contexts say.
    """
    prompt = message.token_ids
    num_blocks = -(-len(prompt) // BLOCK_SIZE)
    drive.scheduler.add(0.0, 0, message)
    drive.scheduler.on_report(
        0.0, offered(message.key.request_id, len(prompt), num_blocks)
    )
    drive.launch()
    (begin,) = (one for one in drive.asked if isinstance(one, BeginReceive))
    drive.asked.clear()
    context = ROOT
    num_cached = begin.first_block * BLOCK_SIZE
    for position, token in enumerate(prompt):
        context = context.then(token + mark * VOCAB)
        if position >= num_cached:
            block = begin.block_ids[position // BLOCK_SIZE - begin.first_block]
            drive.model.write(block, position % BLOCK_SIZE, context)
    first = FirstToken(TOY(context, 0, 0))
    drive.scheduler.on_report(0.0, KVReceived(message.key, (first,), 1, 0.1, 0.0))
    drive.run()
    said = [first.token_id]
    while len(said) < message.sampling.max_tokens:
        context = context.then(said[-1])
        said.append(TOY(context, 0, 0))
    assert drive.output(message.key.request_id, prompt) == said
    return num_cached


def of(name: str, prompt: list[int], compute: str) -> Decode:
    return msgspec.structs.replace(handed(name, prompt, 30), prompt_compute=compute)


def test_blocks_of_a_node_with_other_bits_serve_its_prompts_alone():
    drive = decode_drive(256)
    whole = len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE
    assert received(drive, of("a", PROMPT, "other"), mark=1) == 0
    assert received(drive, of("b", PROMPT, "other"), mark=1) == whole
    assert received(drive, of("c", PROMPT, ""), mark=0) == 0
    assert received(drive, of("d", PROMPT, "third"), mark=2) == 0
    assert received(drive, of("e", PROMPT, ""), mark=0) == whole
    assert ask(drive, "f", local("f", PROMPT, 8)) == (continuation(PROMPT, 8), 2)
    assert received(drive, of("g", PROMPT, "other"), mark=1) == whole
    assert drive.pool.num_owned == 0


def test_a_response_to_a_prompt_of_other_bits_is_part_of_no_later_prompt():
    """The other node would have computed its tokens as those of a prompt."""
    drive = decode_drive(256)
    received(drive, of("a", PROMPT, "other"), mark=1)
    said = drive.output("a", PROMPT)
    longer = [*PROMPT, *said]
    border = (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert received(drive, of("b", longer, "other"), mark=1) == border
    assert received(drive, of("c", longer, ""), mark=0) == 0


def test_what_a_resumed_sequence_receives_is_told_from_what_was_decoded_here():
    drive = decode_drive(256)
    received(drive, of("a", PROMPT, "other"), mark=1)
    said = drive.output("a", PROMPT)
    resumed = of("b", [*PROMPT, *said[:20]], "other")
    resumed = msgspec.structs.replace(resumed, num_prompt_tokens=len(PROMPT))
    border = (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE
    drive.scheduler.add(0.0, 0, resumed)
    num_tokens = len(resumed.token_ids)
    report = offered("b", num_tokens, -(-num_tokens // BLOCK_SIZE))
    drive.scheduler.on_report(0.0, report)
    drive.launch()
    (begin,) = (one for one in drive.asked if isinstance(one, BeginReceive))
    assert begin.first_block * BLOCK_SIZE == border
