"""Which nodes a leg goes to, and who is let in."""

import pytest

from baton.protocol.blocks import blocks_needed
from baton.protocol.config import LocalPrefill
from baton.protocol.errors import Overloaded, RequestError
from baton.protocol.ids import Key, NodeId, RequestId
from baton.protocol.messages import NodeInfo, Ready
from baton.protocol.sampling import SamplingParams
from baton.router.admission import Admission, Limits, check_prompt, fit, sampling_of
from baton.router.policy import Decision, LeastLoaded
from baton.router.registry import Registry
from baton.router.request.events import Place
from tests.support.scripted_nodes import hello_of, node_info

PAIRS = [
    node_info(name, "prefill" if name.startswith("p") else "decode")
    for name in ("p1", "p0", "d1", "d0")
]
LIMITS = Limits(100, 50, 4, prefill_blocks=20, decode_blocks=20)


def cluster(*infos: NodeInfo) -> Registry:
    registry = Registry()
    for info in infos:
        registry.hello(0.0, info.node_id, hello_of(info))
        registry.ready(0.0, info.node_id, Ready(info))
    return registry


def place(
    name: str = "r",
    num_tokens: int = 40,
    *,
    wants_decode: bool = True,
    avoid: frozenset[NodeId] = frozenset(),
) -> Place:
    key = Key(RequestId(name))
    return Place(key, num_tokens, 1, wants_decode, num_tokens + 10, avoid)


def choose(
    registry: Registry, leg: Place, mode: LocalPrefill = "auto"
) -> tuple[str | None, str | None] | None:
    decision = LeastLoaded(mode, 32).choose(registry, leg)
    if decision is None:
        return None
    charge(registry, decision)
    return decision.placed.prefill_node, decision.placed.decode_node


def charge(registry: Registry, decision: Decision) -> None:
    for node, amount in decision.charges:
        registry.charge(node, decision.placed.key, amount)


def test_the_least_loaded_pair_is_taken_and_ties_go_by_name() -> None:
    registry = cluster(*PAIRS)
    assert choose(registry, place("a", 60)) == ("p0", "d0")
    assert choose(registry, place("b", 40)) == ("p1", "d1")
    assert choose(registry, place("c", 40)) == ("p1", "d1")
    registry.forget(RequestId("a"))
    assert choose(registry, place("d", 40)) == ("p0", "d0")


def test_a_node_that_failed_the_request_is_the_last_resort() -> None:
    registry = cluster(*PAIRS)
    failed = frozenset({NodeId("p0"), NodeId("d0"), NodeId("d1")})
    assert choose(registry, place(avoid=failed)) == ("p1", "d0")


def test_short_prompts_stay_local_unless_the_setting_forbids() -> None:
    registry = cluster(*PAIRS)
    assert choose(registry, place("a", 32)) == (None, "d0")
    assert choose(registry, place("b", 33)) == ("p0", "d1")
    assert choose(registry, place("c", 32), "never") == ("p1", "d0")
    assert choose(registry, place("d", 90), "always") == (None, "d1")


def test_without_prefill_nodes_decode_computes_only_where_the_setting_lets_it() -> None:
    registry = cluster(node_info("d0", "decode"))
    decision = LeastLoaded("auto", 32).choose(registry, place())
    assert decision is not None
    assert decision.is_fallback
    assert decision.path == "local_prefill"
    assert choose(registry, place(), "never") is None
    assert choose(registry, place("one", wants_decode=False)) == (None, "d0")


def test_nodes_whose_pool_is_too_small_are_passed_over() -> None:
    small = [node_info("p0", "prefill", num_blocks=9), node_info("d0", "decode", num_blocks=12)]
    large = [node_info("p1", "prefill"), node_info("d1", "decode")]
    assert choose(cluster(*small, *large), place(num_tokens=40)) == ("p1", "d1")
    assert choose(cluster(*small, *large), place(num_tokens=36)) == ("p0", "d0")
    assert choose(cluster(*small), place(num_tokens=40), "never") is None


def test_choices_share_the_whole_blocks_of_the_prompt() -> None:
    assert blocks_needed(4, 8, 10, 1) == 3
    assert blocks_needed(4, 8, 10, 3) == 5
    assert blocks_needed(4, 9, 10, 3) == 5


@pytest.mark.parametrize(
    ("params", "num_prompt", "expected"),
    [
        (SamplingParams(max_tokens=10), 10, (10, None)),
        (SamplingParams(max_tokens=95), 25, (55, 55)),
        (SamplingParams(max_tokens=None), 25, (55, None)),
        (SamplingParams(max_tokens=None, n=2), 40, (20, None)),
    ],
)
def test_output_is_cut_to_the_room_there_is(
    params: SamplingParams, num_prompt: int, expected: tuple[int, int | None]
) -> None:
    limits = Limits(80, 50, 4, prefill_blocks=20, decode_blocks=20)
    assert fit(num_prompt, params, limits) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1.0),
        ("n", True),
        ("max_tokens", 2.5),
        ("min_tokens", "1"),
        ("min_tokens", 1 << 31),
        ("seed", 0.5),
        ("top_k", 1 << 40),
        ("temperature", "hot"),
        ("top_p", None),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.5]),
    ],
)
def test_what_no_node_could_read_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name) as error:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert error.value.param == name


def test_what_no_pool_can_hold_is_refused_with_the_most_that_it_can() -> None:
    with pytest.raises(RequestError, match="at most 40 tokens") as error:
        fit(40, SamplingParams(max_tokens=41), LIMITS)
    assert error.value.param == "max_tokens"
    assert fit(40, SamplingParams(max_tokens=40), LIMITS) == (40, None)
    with pytest.raises(RequestError, match="min_tokens"):
        fit(98, SamplingParams(max_tokens=5, min_tokens=3), LIMITS)
    with pytest.raises(RequestError, match="KV pool"):
        fit(90, SamplingParams(max_tokens=None), LIMITS)


@pytest.mark.parametrize(
    ("token_ids", "code"),
    [
        ([], "invalid_request"),
        ([50], "invalid_request"),
        ([-1], "invalid_request"),
        ([1] * 100, "context_length_exceeded"),
        ([1] * 81, "invalid_request"),
    ],
)
def test_prompts_that_no_node_could_compute_are_refused(token_ids: list[int], code: str) -> None:
    with pytest.raises(RequestError) as error:
        check_prompt(token_ids, LIMITS)
    assert error.value.code == code
    assert error.value.param == "prompt"


def test_what_travels_keeps_every_token_when_all_are_asked_for() -> None:
    sampling = sampling_of(SamplingParams(top_k=-1, stop_token_ids=[7]), 5, 9)
    assert (sampling.top_k, sampling.seed, sampling.max_tokens) == (0, 5, 9)
    assert sampling.stop_token_ids == (7,)


def test_retries_go_before_what_is_new_and_need_no_room() -> None:
    line = Admission(max_queued=5, max_inflight=1)
    line.wait(place("a"))
    line.placed(Key(RequestId("a")))
    line.wait(place("b"))
    assert line.head() is None
    again = Place(Key(RequestId("a"), 0, 1), 40, 1, True, 50)
    line.wait(again)
    assert line.head() == again
    line.placed(again.key)
    line.ended(1.0, RequestId("a"))
    assert line.head() == place("b")


def test_the_line_is_bounded_and_empty_lines_admit_even_with_no_bound_left() -> None:
    line = Admission(max_queued=0, max_inflight=1)
    line.check_room(could_place=True)
    with pytest.raises(Overloaded):
        line.check_room(could_place=False)
    line.wait(place("a"))
    line.placed(Key(RequestId("a")))
    with pytest.raises(Overloaded) as error:
        line.check_room(could_place=True)
    assert error.value.http_status == 429
    assert error.value.retry_after_s is not None


def test_retry_after_follows_the_pace_of_late() -> None:
    line = Admission(max_queued=9, max_inflight=9)
    for number in range(100):
        name = str(number)
        line.wait(place(name))
        line.placed(Key(RequestId(name)))
        line.ended(float(10 * number), RequestId(name))
    line.wait(place("a"))
    assert 15.0 < line.retry_after_s() <= 20.0


def test_everyone_is_overdue_once_nobody_could_be_placed_for_long() -> None:
    line = Admission(max_queued=9, max_inflight=9)
    line.wait(place("a"))
    line.stalled(1.0)
    line.wait(place("b"))
    line.stalled(5.0)
    assert line.overdue(30.9, 30.0) == []
    assert line.overdue(31.0, 30.0) == [place("a").key, place("b").key]
    line.placed(place("a").key)
    assert line.overdue(99.0, 30.0) == []
    line.forget(RequestId("b"))
    assert line.num_queued == 0
