"""Which model a router serves when it has just begun, and who must wait."""

import msgspec
import pytest

from baton.protocol.errors import Failure
from baton.protocol.messages import NodeFacts, NodeInfo, Ready
from baton.router.registry import (
    SETTLED_S,
    Change,
    Entered,
    Left,
    Membership,
    Refuse,
    Registry,
    Replaced,
)
from tests.support.scripted_nodes import hello_of, node_info, toy_layout

P0, P1 = node_info("p0", "prefill"), node_info("p1", "prefill")
D0, D1 = node_info("d0", "decode"), node_info("d1", "decode")
STRAY = node_info("stray", "decode", model="another")
OTHER_P = node_info("x-p", "prefill", model="another")


def codes(verdict: Failure | tuple[str, ...]) -> str | tuple[str, ...]:
    return verdict.code if isinstance(verdict, Failure) else verdict


def joined(*infos: NodeInfo, now_s: float = 0.0) -> Membership:
    membership = Membership()
    for info in infos:
        membership.join(now_s, info)
    return membership


def test_a_stray_node_that_comes_first_gives_way_to_a_whole_cluster() -> None:
    membership = joined(STRAY)
    assert codes(membership.join(0.5, P0)) == "model_mismatch"
    assert membership.join(1.0, D0) == ("stray",)
    assert membership.model == D0
    assert membership.join(1.5, P0) == ()
    assert codes(membership.join(2.0, STRAY)) == "model_mismatch"


def test_among_decode_nodes_alone_the_most_decide() -> None:
    membership = joined(STRAY)
    assert codes(membership.join(0.5, D0)) == "model_mismatch"
    assert membership.join(1.0, D1) == ("stray",)


@pytest.mark.parametrize("now_s", [1.0, SETTLED_S])
def test_a_model_that_has_served_keeps_its_place(now_s: float) -> None:
    """With nodes of both roles at once, or alone after a while; however many come later."""
    membership = joined(*([D0, P0] if now_s < SETTLED_S else [D0]))
    for other in (STRAY, OTHER_P, msgspec.structs.replace(STRAY, node_id="stray-2")):
        assert codes(membership.join(now_s, other)) == "model_mismatch"
    for member in (D0, P0):
        membership.leave(member.node_id)
    assert codes(membership.join(now_s, STRAY)) == "model_mismatch"
    assert membership.join(now_s, D1) == ()


def test_nodes_that_left_count_for_nothing() -> None:
    membership = joined(STRAY)
    membership.join(0.5, P0)
    membership.leave(P0.node_id)
    assert codes(membership.join(1.0, D0)) == "model_mismatch"


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"model": "x" * 32}, "model_mismatch", "serves another model"),
        (
            {"model": "x" * 32, "facts": NodeFacts("float32", model_name="qwen")},
            "model_mismatch",
            "it serves qwen in float32, and they serve tiny in bfloat16",
        ),
        ({"layout": toy_layout("another")}, "layout_mismatch", "have another layout"),
        ({"max_model_len": 100}, "limits_mismatch", "its max_model_len is 100, theirs 200"),
        ({"vocab_size": 7}, "limits_mismatch", "its vocab_size is 7, theirs 250"),
        ({"eos_token_ids": (3,)}, "limits_mismatch", r"its eos_token_ids is (3,), theirs ()"),
    ],
)
def test_a_refusal_names_the_fields_that_differ(
    changes: dict[str, object], code: str, text: str
) -> None:
    named = NodeFacts("bfloat16", model_name="tiny")
    infos = [msgspec.structs.replace(info, facts=named) for info in (P0, D0, D1)]
    failure = joined(*infos[:2]).join(1.0, msgspec.structs.replace(infos[2], **changes))
    assert isinstance(failure, Failure)
    assert failure.code == code
    assert text in failure.message
    assert "x" * 32 not in failure.message


def ready(registry: Registry, info: NodeInfo) -> list[Change]:
    registry.hello(0.0, info.node_id, hello_of(info))
    return registry.ready(0.0, info.node_id, Ready(info))


def test_what_the_stray_node_began_ends_before_its_nodes_leave() -> None:
    """Its streams must not go on with tokens of another model."""
    registry = Registry()
    ready(registry, STRAY)
    ready(registry, P0)
    changes = ready(registry, D0)
    assert [type(change) for change in changes] == [Replaced, Left, Refuse, Entered]
    assert [node.node_id for node in registry.in_service("decode")] == ["d0"]
    assert [type(change) for change in ready(registry, P0)] == [Entered]
    # It asks again and is told the same, which is not worth a line in the log.
    told = [change for change in ready(registry, STRAY) if isinstance(change, Refuse)]
    assert [change.is_new for change in told] == [False]
