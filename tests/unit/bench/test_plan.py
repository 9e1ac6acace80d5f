"""Plans: the same for a seed, no prompt twice, warm-up apart, everything that was done is said."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.plan.plan import (
    Gaps,
    Plan,
    Recorded,
    make_plan,
    parse_arrivals,
    realised,
    times,
)
from baton.bench.plan.prompts import MAX_PLAN_TOKENS, parse_lengths
from baton.bench.records import Message, Planned
from baton.bench.settings import Kind, Workload
from baton.protocol.errors import ConfigError

POISSON = Gaps(5, 1)
SMALL = Workload(prompt="uniform:4-40", output="uniform:1-9", shared_prefix=3)
TINY = Workload(prompt="1", vocabulary="0-9")
WORKLOADS = st.builds(
    Workload,
    workload=st.sampled_from(("tokens", "text", "chat")),
    prompt=st.sampled_from(("4", "uniform:4-40")),
    output=st.just("uniform:1-9"),
    shared_prefix=st.sampled_from((0, 3)),
    seed=st.integers(0, 2**40),
)
TRACE = "\n".join(
    json.dumps(
        {"timestamp": at, "input_length": 600, "output_length": 9, "hash_ids": ids}
    )
    for at, ids in ((0, [1, 2]), (1000, [1, 3]), (4000, [4, 5]))
)
FILE = """{"prompt": "one two three", "output_tokens": 5, "at_s": 0.5}
{"prompt": [5, 6, 7], "at_s": 0.5}

{"messages": [{"role": "user", "content": "hi there"}], "at_s": 2}
"""


def prompts(requests: Sequence[Planned]) -> list[object]:
    return [(one.prompt_ids, one.prompt, one.messages) for one in requests]


def moments(plan: Plan) -> list[float]:
    return [one.at_s for one in plan.requests if one.at_s is not None]


def of_file(folder: Path, text: str, kind: Kind = "file", **more: object) -> Workload:
    path = folder / "rows.jsonl"
    path.write_text(text)
    return msgspec.convert({"workload": kind, "path": str(path), **more}, Workload)


@given(
    WORKLOADS,
    st.sampled_from((None, Gaps(5, 0), POISSON, Gaps(5, 2))),
    st.integers(0, 3),
)
def test_a_plan_is_reproducible_ordered_and_repeats_nothing(
    workload, arrivals, warm_up
):
    plan = make_plan(workload, arrivals, count=20, warm_up=warm_up)
    requests = plan.requests
    assert make_plan(workload, arrivals, count=20, warm_up=warm_up) == plan
    assert [one.index for one in requests] == list(range(len(requests)))
    assert [one.warm_up for one in requests] == sorted(one.warm_up for one in requests)[
        ::-1
    ]
    assert sum(one.warm_up for one in requests) == warm_up
    assert len(set(prompts(requests))) == len(requests)
    assert moments(plan) == sorted(moments(plan))
    for one in requests:
        assert (one.at_s is None) == (arrivals is None)
        assert one.at_s is None or (one.at_s < 0) == one.warm_up
        assert (
            sum(bool(part) for part in (one.prompt_ids, one.prompt, one.messages)) == 1
        )
        assert 1 <= one.output_tokens <= 9
    # A shorter plan begins it; warm-up requests go at the rate that came out of a whole plan.
    shorter = make_plan(workload, arrivals, count=5, warm_up=warm_up).requests[warm_up:]
    assert shorter == requests[warm_up:][: len(shorter)]


@pytest.mark.parametrize("workload", [SMALL, TINY])
def test_warm_up_changes_nothing_of_what_is_measured(workload):
    cold = make_plan(workload, POISSON, count=6).requests
    warm = make_plan(workload, POISSON, count=6, warm_up=4).requests
    assert prompts(warm[4:]) == prompts(cold)
    assert [one.at_s for one in warm[4:]] == [one.at_s for one in cold]
    assert not {one.prompt_ids[:3] for one in warm[:4]} & {
        one.prompt_ids[:3] for one in cold
    }


def test_a_trace_plays_at_its_own_times_or_others(tmp_path):
    workload = of_file(tmp_path, TRACE, "trace")
    plan = make_plan(workload, Recorded())
    assert moments(plan) == [0, 1, 4]
    assert (plan.offered_rate, plan.duration_s) == (None, 4)
    first, second, third = (one.prompt_ids for one in plan.requests)
    assert first[:512] == second[:512] != third[:512]
    assert first[512:] != second[512:]
    faster = make_plan(workload, Recorded(rate=5.0))
    assert moments(faster) == pytest.approx([0, 0.1, 0.4])
    assert "stretched by 0.1 for 5 requests/s" in "\n".join(faster.notes)
    assert prompts(faster.requests) == prompts(plan.requests)
    assert make_plan(workload, Recorded(), duration_s=2.0).requests == plan.requests[:2]
    assert moments(make_plan(workload, Gaps(10, 0))) == pytest.approx([0, 0.1, 0.2])
    assert make_plan(workload, None).requests[2].at_s is None
    scaled = of_file(tmp_path, TRACE, "trace", length_scale=1 / 64)
    plan = make_plan(scaled, Recorded(), warm_up=2)
    assert max(len(one.prompt_ids) for one in plan.requests) < 16
    assert "blocks of 8 tokens" in "\n".join(plan.notes)


def test_a_file_is_asked_as_it_is_written(tmp_path):
    plan = make_plan(of_file(tmp_path, FILE, output="8"), Recorded(), warm_up=3)
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


@pytest.mark.parametrize(
    ("workload", "arrivals", "bounds", "why"),
    [
        (
            SMALL,
            Recorded(),
            {"count": 5},
            "at_s",
        ),
        (
            SMALL,
            Gaps(0.01, 1),
            {"duration_s": 0.5},
            "no request of poisson:0.01 arrives within",
        ),
        (
            Workload(workload="trace"),
            None,
            {"count": 5},
            "--workload trace needs --path FILE",
        ),
        (
            Workload(path="x"),
            None,
            {"count": 5},
            "--path",
        ),
        (
            Workload(workload="trace", path="azure-code"),
            Recorded(),
            {"count": 9000},
            "of 8819",
        ),
        (
            Workload(workload="trace", path="azure-code"),
            POISSON,
            {"count": 9000},
            "has 8819",
        ),
        (
            Workload(shared_prefix=MAX_PLAN_TOKENS),
            None,
            {"count": 20},
            "holds over 20000000 promp",
        ),
    ],
)
def test_a_plan_that_cannot_be_is_refused_in_a_line(workload, arrivals, bounds, why):
    count = int(bounds["count"]) if "count" in bounds else None
    with pytest.raises(ConfigError, match=why) as caught:
        make_plan(workload, arrivals, count=count, duration_s=bounds.get("duration_s"))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "mean", "sd"),
    [
        ("uniform:100-900", 500, 800 / math.sqrt(12)),
        ("normal:512,sd=100", 512, 100),
        ("lognormal:mean=1155,sd=1100", 1155, 1100),
        ("choice:100,200,400", 700 / 3, 124.7),
    ],
)
def test_mean_and_spread_are_those_of_the_text(text, mean, sd):
    rng = np.random.default_rng(0)
    form = parse_lengths(text)
    lengths = [form.draw(rng) for _ in range(20_000)]
    assert statistics.fmean(lengths) == pytest.approx(mean, rel=0.02)
    assert statistics.pstdev(lengths) == pytest.approx(sd, rel=0.05)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "1.5",
        "uniform:9-3",
        "normal:512",
        "normal:5,sd=inf",
        "choice:1,x",
        "zipf:3",
    ],
)
def test_a_text_that_is_wrong_is_refused(text):
    with pytest.raises(ConfigError, match="not of the form"):
        parse_lengths(text)
    with pytest.raises(ConfigError):
        parse_arrivals(text)


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_rate_and_burstiness_come_out_as_asked(cv):
    seen = [
        realised(times(Gaps(20, cv), duration_s=None, count=6000, seed=s))
        for s in range(40)
    ]
    rates, cvs = ([getattr(one, name) for one in seen] for name in ("rate", "cv"))
    assert statistics.fmean(rates) == pytest.approx(20, rel=0.02)
    assert statistics.fmean(cvs) == pytest.approx(cv, rel=0.02, abs=1e-6)


def test_a_seed_means_the_same_in_every_version():
    """Published runs name their seed. This fails if numpy ever draws otherwise."""
    first = times(Gaps(5, 1), duration_s=None, count=3, seed=0)
    assert first == pytest.approx(
        [0.494250992300, 0.670773612904, 0.807459311677], abs=1e-11
    )
