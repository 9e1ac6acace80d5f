"""A request's lifecycle under every schedule of messages, failures and second thoughts."""

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.request_world import World, expected_answer

EXAMPLES = int(os.environ.get("BATON_EXAMPLES", "100"))
# (what happens, as a number among what can; whether it is something bad)
STEPS = st.lists(
    st.tuples(st.integers(0, 999), st.sampled_from([False] * 9 + [True])), max_size=160
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    steps=STEPS,
    num_choices=st.integers(1, 3),
    max_tokens=st.sampled_from([1, 2, 3, 6]),
    num_nodes=st.integers(1, 2),
    max_attempts=st.integers(1, 4),
)
def test_every_request_ends_once_in_order_and_leaves_nothing_behind(
    steps: list[tuple[int, bool]],
    num_choices: int,
    max_tokens: int,
    num_nodes: int,
    max_attempts: int,
) -> None:
    world = World(num_choices, max_tokens, num_nodes, max_attempts)
    for number, is_bad in steps:
        actions = world.bad_actions() if is_bad else world.good_actions()
        if actions:
            actions[number % len(actions)]()
    world.finish()
    # Exactly one outcome, then the end of everything.
    assert len(world.outcomes) == 1
    assert world.is_closed
    if world.outcomes[0] is None:
        for choice in range(num_choices):
            if choice not in world.stopped:
                assert world.output[choice] == expected_answer(world.request, choice)
                assert world.finished[choice] is not None
    # Charges return to zero, no request waits for nodes, and no node works without a request.
    assert not any(world.charges.values())
    assert not world.places
    assert [node.node_id for node in world.nodes if node.works] == []
