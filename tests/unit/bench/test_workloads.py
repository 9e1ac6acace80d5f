"""Plans: the same for a seed, no prompt twice, warm-up apart, everything that was done is said."""

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.bench.plan.arrivals import Constant, Gamma, Poisson, Ramp, Recorded
from baton.bench.plan.replay import TraceOptions
from baton.bench.plan.sources import MAX_PLAN_TOKENS
from baton.bench.plan.workloads import Plan, Workload, make_plan
from baton.bench.records import Message, Planned
from baton.protocol.errors import ConfigError

SMALL = Workload(prompt="uniform:4-40", output="uniform:1-9", shared_prefix=3)
WORKLOADS = st.builds(
    Workload,
    kind=st.sampled_from(("tokens", "text", "chat", "conversation")),
    prompt=st.sampled_from(("4", "uniform:4-40")),
    output=st.just("uniform:1-9"),
    shared_prefix=st.sampled_from((0, 3)),
    num_prefixes=st.sampled_from((1, 2)),
    turns=st.sampled_from((1, 3)),
    think_s=st.just(0.5),
    conversation_form=st.sampled_from(("chat", "tokens")),
    seed=st.integers(0, 2**40),
)
ARRIVALS = st.sampled_from((None, Constant(5), Poisson(5), Gamma(5, 2)))
TRACE = "\n".join(
    json.dumps({"timestamp": at, "input_length": 600, "output_length": 9, "hash_ids": ids})
    for at, ids in ((0, [1, 2]), (1000, [1, 3]), (4000, [4, 5]))
)


def said(plan: Plan) -> str:
    return "\n".join(plan.notes)


def written(folder: Path, text: str) -> str:
    path = folder / "rows.jsonl"
    path.write_text(text)
    return str(path)


def prompts(requests: list[Planned]) -> list[object]:
    return [(one.prompt_ids, one.prompt, one.messages) for one in requests]


@given(WORKLOADS, ARRIVALS, st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_a_plan_is_the_same_each_time_and_a_shorter_one_begins_it(
    workload: Workload, arrivals: Poisson | None, warm_up: int
) -> None:
    longer = make_plan(workload, arrivals, count=24, warm_up=warm_up)
    assert make_plan(workload, arrivals, count=24, warm_up=warm_up) == longer
    shorter = make_plan(workload, arrivals, count=5, warm_up=warm_up)
    if arrivals is not None and warm_up:
        # Warm-up requests go at the rate that came out, which depends on how many there are.
        shorter, longer = (
            msgspec.structs.replace(plan, requests=plan.requests[warm_up:])
            for plan in (shorter, longer)
        )
    assert shorter.requests == longer.requests[: len(shorter.requests)]


@given(WORKLOADS, ARRIVALS, st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_a_plan_is_numbered_and_ordered_and_repeats_nothing(
    workload: Workload, arrivals: Poisson | None, warm_up: int
) -> None:
    requests = make_plan(workload, arrivals, count=20, warm_up=warm_up).requests
    assert [one.index for one in requests] == list(range(len(requests)))
    assert [one.warm_up for one in requests] == sorted(one.warm_up for one in requests)[::-1]
    assert sum(one.warm_up for one in requests) == warm_up
    assert len(set(prompts(requests))) == len(requests)
    at = [one.at_s for one in requests if one.at_s is not None]
    assert at == sorted(at)
    for one in requests:
        assert (one.at_s is None) == (arrivals is None or one.turn > 0)
        assert one.at_s is None or (one.at_s < 0) == one.warm_up
        assert sum(bool(part) for part in (one.prompt_ids, one.prompt, one.messages)) == 1
        assert 1 <= one.output_tokens <= 9


def test_another_seed_asks_otherwise() -> None:
    first, second = (
        make_plan(msgspec.structs.replace(SMALL, seed=seed), Poisson(5), count=20)
        for seed in (1, 2)
    )
    assert not set(prompts(first.requests)) & set(prompts(second.requests))
    assert first.requests[0].at_s != second.requests[0].at_s


def test_warm_up_changes_nothing_of_what_is_measured() -> None:
    cold = make_plan(SMALL, Poisson(5), count=20).requests
    warm = make_plan(SMALL, Poisson(5), count=20, warm_up=4).requests
    assert prompts(warm[4:]) == prompts(cold)
    assert [one.at_s for one in warm[4:]] == [one.at_s for one in cold]
    tiny = Workload(prompt="1", vocabulary=(0, 9))
    cold_ids, warm_ids = (
        [one.prompt_ids for one in make_plan(tiny, None, count=6, warm_up=num).requests]
        for num in (0, 4)
    )
    assert warm_ids[4:] == cold_ids
    assert not {one.prompt_ids[:3] for one in warm[:4]} & {one.prompt_ids[:3] for one in cold}


def test_the_rate_changes_when_requests_come_and_not_what_they_ask() -> None:
    slow, fast = (make_plan(SMALL, Poisson(rate), count=20) for rate in (1, 10))
    assert prompts(slow.requests) == prompts(fast.requests)


def test_prompts_share_what_was_asked_for_and_no_more() -> None:
    workload = Workload(prompt="8", shared_prefix=5, num_prefixes=2)
    requests = make_plan(workload, None, count=6).requests
    starts = [one.prompt_ids[:5] for one in requests]
    assert starts == starts[:2] * 3
    assert starts[0] != starts[1]
    assert all(len(one.prompt_ids) == 13 for one in requests)


def test_ids_stay_within_the_vocabulary_and_reach_both_ends() -> None:
    requests = make_plan(Workload(prompt="100", vocabulary=(7, 9)), None, count=5).requests
    assert {token for one in requests for token in one.prompt_ids} == {7, 8, 9}


def test_prompts_that_cannot_all_differ_are_refused() -> None:
    tiny = Workload(prompt="1", vocabulary=(0, 9))
    assert len(make_plan(tiny, None, count=5).requests) == 5
    with pytest.raises(ConfigError, match="not enough prompts of 1 tokens that differ"):
        make_plan(tiny, None, count=11)


def test_a_later_turn_holds_only_what_the_user_adds() -> None:
    workload = Workload(kind="conversation", prompt="4", shared_prefix=2, turns=2, think_s=1.5)
    first, second, other, _ = make_plan(workload, Constant(4), count=4).requests
    assert [message.role for message in first.messages] == ["system", "user"]
    assert [message.role for message in second.messages] == ["user"]
    assert (first.conversation, second.conversation, other.conversation) == (0, 0, 1)
    assert (first.turn, second.turn) == (0, 1)
    assert (first.at_s, second.at_s, other.at_s) == (0.0, None, 0.5)
    assert (first.think_s, second.think_s) == (0.0, 1.5)
    assert first.messages[0] == other.messages[0]


@pytest.mark.parametrize("arrivals", [Constant(8), Poisson(8), Gamma(8, 2), Ramp(4, 12)])
def test_rates_and_counts_of_conversations_are_those_of_their_requests(
    arrivals: Poisson | Ramp,
) -> None:
    workload = Workload(kind="conversation", prompt="4", turns=4)
    plan = make_plan(workload, arrivals, duration_s=400.0)
    assert len(plan.requests) == pytest.approx(8 * 400, rel=0.15)
    assert plan.planned_rate == pytest.approx(len(plan.requests) / 400, rel=0.03)
    assert plan.offered_rate == 8
    counted = make_plan(workload, arrivals, count=10, duration_s=400.0)
    assert counted.requests == plan.requests[:12]  # no conversation is cut
    assert "3 conversations of 4 turns: 12 requests" in said(counted)


def test_a_ramp_that_ends_by_its_count_has_not_the_rate_of_a_whole_one() -> None:
    ramp = Ramp(1, 10)
    assert make_plan(Workload(prompt="4"), ramp, duration_s=60.0).offered_rate == 5.5
    assert make_plan(Workload(prompt="4"), ramp, count=50, duration_s=60.0).offered_rate is None


def test_a_closed_loop_counts_the_requests_of_conversations() -> None:
    workload = Workload(kind="conversation", prompt="4", turns=4)
    assert len(make_plan(workload, None, count=8).requests) == 8


def test_what_the_rate_of_conversations_is_made_of_is_said() -> None:
    workload = Workload(kind="conversation", prompt="4", turns=4)
    plan = make_plan(workload, Constant(8), count=80)
    assert "constant:8 of requests, constant:2 of conversations: 20 arrivals at 2/s" in said(plan)


def test_a_trace_plays_at_its_own_times_or_others(tmp_path: Path) -> None:
    workload = Workload(kind="trace", path=written(tmp_path, TRACE))
    plan = make_plan(workload, Recorded())
    assert [one.at_s for one in plan.requests] == [0, 1, 4]
    assert (plan.offered_rate, plan.duration_s) == (None, 4)
    first, second, third = (one.prompt_ids for one in plan.requests)
    assert first[:512] == second[:512]
    assert first[512:] != second[512:]
    assert first[:512] != third[:512]
    faster = make_plan(workload, Recorded(rate=5.0))
    assert [one.at_s for one in faster.requests] == pytest.approx([0, 0.1, 0.4])
    assert "stretched by 0.1 for 5 requests/s" in said(faster)
    assert prompts(faster.requests) == prompts(plan.requests)
    cut = make_plan(workload, Recorded(), duration_s=2.0)
    assert cut.requests == plan.requests[:2]
    drawn = make_plan(workload, Constant(10))
    assert [one.at_s for one in drawn.requests] == pytest.approx([0, 0.1, 0.2])
    assert make_plan(workload, None).requests[2].at_s is None


@pytest.mark.parametrize("rate", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("path", ["azure-code", "azure-conv"])
def test_a_recorded_shape_offers_the_rate_asked_for_within_its_duration(
    path: str, rate: float
) -> None:
    workload = Workload(kind="trace", path=path, trace=TraceOptions(max_input=20, max_output=20))
    plan = make_plan(workload, Recorded(rate), duration_s=120.0)
    assert len(plan.requests) == 120 * rate
    assert plan.offered_rate == plan.planned_rate == pytest.approx(rate)
    assert plan.requests[-1].at_s == pytest.approx(120 - 1 / rate)
    assert plan.requests == make_plan(workload, Recorded(rate), count=int(120 * rate)).requests
    shorter = make_plan(workload, Recorded(rate), count=30, duration_s=120.0)
    assert (len(shorter.requests), shorter.planned_rate) == (30, pytest.approx(rate))
    # The rows keep their shape: the same gaps as recorded, all by one factor.
    recorded = [one.at_s for one in make_plan(workload, Recorded(), count=30).requests]
    factor = 29 / rate / (recorded[-1] or 0.0)
    assert [one.at_s for one in shorter.requests] == pytest.approx(
        [(at_s or 0.0) * factor for at_s in recorded]
    )


def test_a_recording_too_short_for_its_rate_ends_early_and_says_so(tmp_path: Path) -> None:
    workload = Workload(kind="trace", path=written(tmp_path, TRACE))
    plan = make_plan(workload, Recorded(rate=2.0), duration_s=60.0)
    assert [one.at_s for one in plan.requests] == pytest.approx([0, 0.25, 1])
    assert "the recording ends after 1 s" in said(plan)
    alone = make_plan(workload, Recorded(rate=0.01), duration_s=60.0)
    assert [one.at_s for one in alone.requests] == [0]
    with pytest.raises(ConfigError, match="no recorded request arrives within 10"):
        make_plan(workload, Recorded(rate=0.01), duration_s=10.0)


def test_a_recorded_rate_counts_from_the_first_row_of_a_file(tmp_path: Path) -> None:
    rows = "".join(f'{{"prompt": "{at}", "at_s": {at}}}\n' for at in (100, 101, 103, 109))
    workload = Workload(kind="file", path=written(tmp_path, rows))
    plan = make_plan(workload, Recorded(rate=1.0), duration_s=3.0)
    assert [one.at_s for one in plan.requests] == pytest.approx([0, 2 / 3, 2])


def test_rows_of_one_moment_have_no_rate(tmp_path: Path) -> None:
    rows = "".join(f'{{"prompt": "{number}", "at_s": {number // 3}}}\n' for number in range(9))
    workload = Workload(kind="file", path=written(tmp_path, rows))
    assert len(make_plan(workload, Recorded(rate=1.0), duration_s=4.0).requests) == 4
    with pytest.raises(ConfigError, match="the first 3 recorded requests come at one moment"):
        make_plan(workload, Recorded(rate=1.0), duration_s=3.0)


def test_a_trace_that_starts_over_says_which_prompts_come_again(tmp_path: Path) -> None:
    row = '{"timestamp": 0, "input_length": 512, "output_length": 2, "hash_ids": [%d]}\n'
    path = written(tmp_path, row % 1 + row % 2)
    workload = Workload(kind="trace", path=path, repeat=True)
    assert "come again" not in said(make_plan(workload, Poisson(5), count=2))
    plan = make_plan(workload, Poisson(5), count=5)
    assert plan.requests[0].prompt_ids == plan.requests[2].prompt_ids
    assert "the trace starts over: 3 of 5 prompts come again, as a prefix cache knows" in said(plan)


def test_a_trace_scales_and_says_so(tmp_path: Path) -> None:
    options = TraceOptions(length_scale=1 / 64, max_input=9)
    workload = Workload(kind="trace", path=written(tmp_path, TRACE), trace=options)
    plan = make_plan(workload, Recorded(), warm_up=2)
    assert [len(one.prompt_ids) for one in plan.requests] == [9] * 5
    assert "blocks of 8 tokens" in said(plan)
    assert "3 of 3 inputs were clamped" in said(plan)


def test_a_shipped_trace_goes_by_its_name() -> None:
    plan = make_plan(Workload(kind="trace", path="azure-code"), Recorded(), count=50)
    assert [len(one.prompt_ids) for one in plan.requests[:3]] == [4808, 3180, 110]
    assert [one.output_tokens for one in plan.requests[:3]] == [10, 8, 27]


FILE = """{"prompt": "one two three", "output_tokens": 5, "at_s": 0.5}
{"prompt": [5, 6, 7], "at_s": 0.5}

{"messages": [{"role": "user", "content": "hi there"}], "at_s": 2}
"""


def test_a_file_is_asked_as_it_is_written(tmp_path: Path) -> None:
    workload = Workload(kind="file", path=written(tmp_path, FILE), output="8")
    plan = make_plan(workload, Recorded(), warm_up=3)
    measured = plan.requests[3:]
    assert [one.at_s for one in measured] == [0.5, 0.5, 2]
    assert [one.output_tokens for one in measured] == [5, 8, 8]
    assert measured[0].prompt == "one two three"
    assert measured[1].prompt_ids == (5, 6, 7)
    assert measured[2].messages == (Message("user", "hi there"),)
    likewise = plan.requests[:3]
    assert len(likewise[0].prompt.split()) == 3
    assert len(likewise[1].prompt_ids) == 3
    assert len(likewise[2].messages[0].content.split()) == 2
    assert not set(prompts(likewise)) & set(prompts(measured))


def test_a_file_repeats_only_when_told_to(tmp_path: Path) -> None:
    workload = Workload(kind="file", path=written(tmp_path, FILE))
    with pytest.raises(ConfigError, match=r"4 requests are wanted.*has 3"):
        make_plan(workload, None, count=4)
    plan = make_plan(msgspec.structs.replace(workload, repeat=True), Poisson(5), count=4)
    assert "1 of 4 prompts repeat an earlier one" in said(plan)
    assert "repeat an earlier" not in said(make_plan(workload, None))


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ('{"prompt": ""}', "either a prompt or messages"),
        ("{}", "either a prompt or messages"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "either a prompt or"),
        ('{"prompt": [1, -2]}', "a token id is below 0"),
        ('{"prompt": [1, "x"]}', "prompt"),
        ('{"prompt": "a", "output_tokens": 0}', "0 output tokens"),
        ('{"prompt": "a", "outputs": 3}', "unknown field"),
        ('{"prompt": "a", "at_s": -1}', "below 0"),
        ('{"prompt": "a"}', "some rows say at_s"),
        ('{"prompt": "a", "at_s": 0.1}', "before that of the row above"),
        ('{"prompt": "a"', "truncated"),
        ('"a"', "object"),
    ],
)
def test_a_malformed_row_of_a_file_is_named_by_its_line(tmp_path: Path, row: str, why: str) -> None:
    path = written(tmp_path, '{"prompt": "first", "at_s": 3}\n' + row)
    with pytest.raises(ConfigError, match=why) as caught:
        make_plan(Workload(kind="file", path=path), None)
    assert caught.value.message.startswith(f"{path}:2: ")


@pytest.mark.parametrize(
    ("workload", "arrivals", "count", "why"),
    [
        (Workload(), None, None, "a closed loop needs a number of requests"),
        (Workload(), None, 0, "are none"),
        (Workload(), Poisson(5), None, "a number of requests, a duration"),
        (Workload(), Recorded(), 5, "need a trace"),
        (Workload(), Ramp(1, 2), 5, "a ramp needs a duration"),
        (Workload(turns=0), None, 5, "turns"),
        (Workload(shared_prefix=-1), None, 5, "shared_prefix"),
        (Workload(vocabulary=(9, 3)), None, 5, "holds no token ids"),
        (Workload(prompt="x"), None, 5, "lengths 'x'"),
        (Workload(kind="trace"), None, 5, "needs a path"),
        (Workload(path="x"), None, 5, "has no path"),
        (Workload(kind="trace", path="azure-code"), Recorded(), 9000, "9000 .* of 8819"),
        (Workload(kind="trace", path="azure-code"), Poisson(5), 9000, "has 8819"),
        (
            Workload(shared_prefix=MAX_PLAN_TOKENS),
            None,
            20,
            f"holds over {MAX_PLAN_TOKENS} prompt tokens",
        ),
    ],
)
def test_a_plan_that_cannot_be_is_refused(
    workload: Workload, arrivals: Poisson | None, count: int | None, why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        make_plan(workload, arrivals, count=count)
    assert "\n" not in caught.value.message


def test_a_plan_says_what_it_is() -> None:
    plan = make_plan(SMALL, Poisson(5), count=200, warm_up=2)
    assert plan.offered_rate == 5
    assert plan.realised is not None
    assert plan.realised.num_arrivals == 200
    assert plan.duration_s == plan.requests[-1].at_s
    for words in ("poisson:5: 200 arrivals", "outputs, tokens: mean", "2 warm-up", "seed 0"):
        assert words in said(plan)
    timed = make_plan(SMALL, Poisson(5), duration_s=10.0)
    assert timed.duration_s == 10
    assert make_plan(SMALL, None, count=3).offered_rate is None
    with pytest.raises(ConfigError, match=r"no request of poisson:0.01 arrives within 0.5 s"):
        make_plan(SMALL, Poisson(0.01), duration_s=0.5)
