"""The stages of a request follow one another and always add up to the whole."""

import pytest

from baton.protocol.ids import NodeId
from baton.router.outputs import AttemptRecord, RequestMetrics, waterfall

P0, D0, D1 = NodeId("p0"), NodeId("d0"), NodeId("d1")
WHOLE = AttemptRecord(
    0, 1, 0, 0.0, placed_at_s=0.5, prefill_node=P0, decode_node=D0, prefilled_at_s=2.0,
    decoding_at_s=3.0, queue_s=0.25, prefill_s=1.0, transfer_s=0.75, exposed_s=0.25,
    decode_queue_s=0.125, first_step_s=0.25,
)  # fmt: skip
LOCAL = AttemptRecord(
    0, 1, 0, 0.0, placed_at_s=0.5, decode_node=D0, decoding_at_s=2.0, queue_s=0.5, prefill_s=0.75
)
LOST = AttemptRecord(
    0, 2, 0, 0.0, placed_at_s=0.5, prefill_node=P0, decode_node=D0, prefilled_at_s=1.0,
    prefill_s=0.5, decoding_at_s=1.5, first_step_s=0.25, lost_at_s=2.0, failure="node_lost",
)  # fmt: skip
RESUMED = AttemptRecord(
    1, 1, 1, 2.5, placed_at_s=2.75, decode_node=D1, decoding_at_s=3.5, prefill_s=0.5
)
OTHER = AttemptRecord(0, 1, 1, 2.25, placed_at_s=2.25, decode_node=D1, decoding_at_s=3.0)
# The router read the message of the decode node before that of the prefill node.
SWAPPED = AttemptRecord(
    0, 1, 0, 0.0, placed_at_s=0.5, prefill_node=P0, decode_node=D0, prefilled_at_s=2.0,
    decoding_at_s=2.0, prefill_s=1.0, first_step_s=0.25,
)  # fmt: skip
NEVER_PLACED = AttemptRecord(0, 1, 0, 0.0)
# A clock of a node that runs fast: its stages do not fit between the router's times.
TOO_LONG = AttemptRecord(
    0, 1, 0, 0.0, placed_at_s=0.5, prefill_node=P0, decode_node=D0, prefilled_at_s=1.0,
    decoding_at_s=1.25, queue_s=9.0, prefill_s=9.0, exposed_s=9.0, first_step_s=9.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        (
            [WHOLE],
            "router_queue 0.5 dispatch 0.25 queue 0.25 prefill 1.0 handoff 0.375 transfer 0.25 "
            "decode_queue 0.125 first_step 0.25 decode 1.0",
        ),
        ([LOCAL], "router_queue 0.5 dispatch 0.25 queue 0.5 prefill 0.75 decode 2.0"),
        (
            [LOST, OTHER, RESUMED],
            "router_queue 0.5 prefill 0.5 handoff 0.25 first_step 0.25 decode 0.5 lost 0.5 "
            "router_queue 0.25 dispatch 0.25 prefill 0.5 decode 0.5",
        ),
        (
            [SWAPPED],
            "router_queue 0.5 dispatch 0.25 prefill 1.0 first_step 0.25 decode 2.0",
        ),
        ([NEVER_PLACED], "router_queue 4.0"),
        ([TOO_LONG], "router_queue 0.5 queue 0.0 prefill 0.5 first_step 0.25 decode 2.75"),
        ([], "finish 4.0"),
    ],
    ids=["pair", "local", "resumed", "swapped", "never placed", "clocks", "none"],
)
def test_the_stages_add_up(attempts: list[AttemptRecord], expected: str) -> None:
    stages = waterfall(RequestMetrics(e2e_s=4.0, attempts=attempts))
    words = expected.split()
    wanted = [(n, float(s)) for n, s in zip(words[::2], words[1::2], strict=True) if float(s)]
    assert [(one.stage, one.duration_s) for one in stages] == wanted
    assert sum(one.duration_s for one in stages) == 4.0
    ends = [one.start_s + one.duration_s for one in stages]
    assert [one.start_s for one in stages] == [0.0, *ends[:-1]]


def test_a_stage_names_its_node_and_a_lost_attempt_its_failure() -> None:
    stages = waterfall(RequestMetrics(e2e_s=4.0, attempts=[LOST, OTHER, RESUMED]))
    assert [one.node for one in stages if one.stage == "prefill"] == ["p0", "d1"]
    assert [one.failure for one in stages if one.stage == "lost"] == ["node_lost"]
