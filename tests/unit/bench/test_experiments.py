"""What experiments make of runs: paired rounds, verdicts, and what is said on the terminal."""

from pathlib import Path

import msgspec
import pytest

from baton.bench.client.target import Target
from baton.bench.compare import Arm, arms_of, finish, flags_of, whole_rounds
from baton.bench.console import shown
from baton.bench.experiments import (
    ALL_FAILED,
    CACHED,
    Bench,
    Case,
    judge,
    loop_of,
    sent_so_far,
    shares_prompts,
    verification,
)
from baton.bench.figures.metrics import PRESETS
from baton.bench.figures.search import Ending, Found, RateSearch
from baton.bench.figures.validity import Severity
from baton.bench.one_load import spread
from baton.bench.plan.arrivals import Constant
from baton.bench.plan.prompts import shared_share
from baton.bench.plan.workloads import Plan, Workload, make_plan
from baton.bench.records import LoadResult, Outcome, Planned
from baton.bench.report.document import Report, Run, write_json
from baton.bench.report.publish import is_usable, write_again
from baton.bench.searching import is_servers_fault, observe
from baton.bench.settings import (
    ArrivalSettings,
    LoadSettings,
    ReportAgainSettings,
    WorkloadSettings,
)
from baton.bench.verify import Mismatch, MismatchKind
from baton.protocol.errors import BatonError, ConfigError
from tests.support.bench_records import (
    Scene,
    answered,
    failed,
    invalid,
    report_of,
    scene_run,
)


def case(num_requests: int, **changes: object) -> Case:
    plan = Plan([Planned(index, None, 2, (1,)) for index in range(num_requests)], ["a note"])
    made = Case(
        label="a load", target=Target("http://a", "m"), plan=plan, concurrency=1,
        load=LoadSettings(), bounds=PRESETS["chat"],
    )  # fmt: skip
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def result(*outcomes: Outcome) -> LoadResult:
    records = [
        answered(index, float(index), [0.1, 0.11])
        if outcome is Outcome.ANSWERED
        else failed(index, float(index), outcome, "the server's words")
        for index, outcome in enumerate(outcomes)
    ]
    return LoadResult(records, [], float(len(outcomes)), "2026-03-01T12:00:00+00:00")


def arm_run(arm: str, number: int, *, is_invalid: bool = False, seed: int = 1) -> Run:
    run = scene_run(Scene(duration_s=5.0, seed=seed), f"{arm} {number}")
    run.arm, run.round = arm, number
    run.problems = [invalid("late")] if is_invalid else []
    return run


def test_a_load_that_ran_to_its_end_is_judged_by_its_records() -> None:
    run = judge(case(2), result(Outcome.ANSWERED, Outcome.ANSWERED), "")
    assert not run.invalid
    assert run.summary.attainment == 1.0
    assert run.notes == ["a note"]


def test_a_load_of_which_nothing_was_answered_is_an_invalid_run() -> None:
    run = judge(case(2), result(Outcome.REFUSED, Outcome.REFUSED), "")
    assert run.invalid
    assert any("the server's words" in problem.text for problem in run.problems)
    assert run.summary.attainment == 0.0


def test_a_load_that_was_stopped_says_so_once() -> None:
    run = judge(case(5), result(Outcome.ANSWERED), "interrupted: 1 of 5 requests had been sent")
    texts = [problem.text for problem in run.problems if problem.is_invalid]
    assert texts == ["interrupted: 1 of 5 requests had been sent"]


def test_a_closed_loop_that_ends_by_time_misses_nothing() -> None:
    ended = case(5, load=LoadSettings(duration_s=1.0))
    assert not judge(ended, result(Outcome.ANSWERED), "").invalid
    assert judge(case(5), result(Outcome.ANSWERED), "").invalid


def test_a_load_without_any_record_is_a_failure() -> None:
    with pytest.raises(BatonError, match="no request arrived") as caught:
        judge(case(1), result(), "")
    assert caught.value.code != ALL_FAILED


def test_a_load_that_was_stopped_before_it_began_says_why() -> None:
    warm = result(Outcome.REFUSED)
    warm.records[0].warm_up = True
    with pytest.raises(BatonError, match="nothing was measured: the first 1 failed"):
        judge(case(1), warm, "the first 1 failed")


def test_a_load_that_was_stopped_with_all_under_way_has_no_failure() -> None:
    why = "interrupted: 2 of 2 requests had been sent"
    with pytest.raises(BatonError, match=f"nothing was measured: {why}"):
        judge(case(2), result(Outcome.STOPPED, Outcome.STOPPED), why)
    run = judge(case(2), result(Outcome.ANSWERED, Outcome.STOPPED), why)
    assert run.summary.attainment == 1.0
    assert not any("failed" in problem.text for problem in run.problems)


def test_how_far_a_load_came_is_said_without_warm_up_and_turns_that_were_not_sent() -> None:
    load = result(Outcome.ANSWERED, Outcome.ANSWERED, Outcome.STOPPED, Outcome.STOPPED)
    load.records[0].warm_up = True
    load.records[3].detail = "not sent: turn 0 of the conversation failed"
    planned = [Planned(index, None, 2, (1,), warm_up=not index) for index in range(9)]
    far = sent_so_far(load.records, planned)
    assert far == "2 of 8 requests had been sent; not ended by then, and in no figure: 1"
    assert sent_so_far(load.records[:2], planned) == "1 of 8 requests had been sent"


def test_clients_that_have_nothing_to_ask_are_no_concurrency() -> None:
    run = judge(case(2, concurrency=3), result(Outcome.ANSWERED, Outcome.ANSWERED), "")
    assert any("2 requests cannot keep 3 clients busy" in one.text for one in run.problems)
    run = judge(case(2, concurrency=2), result(Outcome.ANSWERED, Outcome.ANSWERED), "")
    assert not any("clients busy" in one.text for one in run.problems)


def test_pages_of_an_invalid_report_are_no_success(tmp_path: Path) -> None:
    for name, is_invalid in (("good", False), ("bad", True)):
        write_json(report_of([arm_run("", 0, is_invalid=is_invalid)]), tmp_path / name)
    assert write_again(ReportAgainSettings(), [str(tmp_path / "good")]) == 0
    assert write_again(ReportAgainSettings(), [str(tmp_path / "bad")]) == 1


def test_a_prefix_cache_that_helped_by_accident_is_a_warning() -> None:
    load = result(Outcome.ANSWERED)
    load.records[0].prompt_tokens, load.records[0].cached_tokens = 100, 50
    assert CACHED in [problem.text for problem in judge(case(1), load, "").problems]
    meant = judge(case(1, may_be_cached=True), load, "")
    assert CACHED not in [problem.text for problem in meant.problems]


def test_shared_prompts_are_meant_to_be_cached() -> None:
    assert not shares_prompts(WorkloadSettings())
    # Of token ids the plan knows what they share.
    assert not shares_prompts(WorkloadSettings(shared_prefix=16))
    assert not shares_prompts(WorkloadSettings(workload="trace"))
    assert shares_prompts(WorkloadSettings(workload="chat", shared_prefix=16))
    assert shares_prompts(WorkloadSettings(workload="conversation"))


def test_what_a_cache_should_know_is_counted_in_whole_blocks() -> None:
    start, other = list(range(40)), list(range(100, 140))
    assert shared_share([start, other]) == 0.0
    assert shared_share([start, [*start[:33], 7]]) == 32 / 74
    assert shared_share([start, start, other]) == 32 / 120
    assert shared_share([start, other], [start]) == 32 / 80
    # A block after a different one is a different block.
    assert shared_share([start, [*other[:16], *start[16:32]]]) == 0.0


def shared_prefix_run(window: str = "", num_prefixes: int = 1) -> Run:
    """20 requests with a prefix of 96 tokens that a prefix cache finds again, and 20 warm-ups."""
    workload = Workload(prompt="32", output="2", shared_prefix=96, num_prefixes=num_prefixes)
    plan = make_plan(workload, Constant(1.0), count=20, warm_up=20)
    records, known = [], set[tuple[int, ...]]()
    for one in plan.requests:
        record = answered(one.index, one.at_s or 0.0, [0.1, 0.11])
        record.prompt_tokens, record.warm_up = len(one.prompt_ids), one.warm_up
        record.cached_tokens = 96 * (one.prompt_ids[:96] in known)
        known.add(one.prompt_ids[:96])
        records.append(record)
    load = LoadResult(records, [], 20.0, "2026-03-01T12:00:00+00:00")
    return judge(case(0, plan=plan, concurrency=0, load=LoadSettings(window=window)), load, "")


@pytest.mark.parametrize(
    ("window", "num_prefixes", "share"),
    [("", 1, 19 / 20), ("10-20", 1, 1.0), ("10-20", 10, 1.0)],
)
def test_prompts_that_share_what_they_should_are_no_warning(
    window: str, num_prefixes: int, share: float
) -> None:
    run = shared_prefix_run(window, num_prefixes)
    assert run.summary.cached_share == pytest.approx(share * 96 / 128)
    assert CACHED not in [problem.text for problem in run.problems]


def test_lost_tokens_are_invalid_and_other_ones_a_warning() -> None:
    found = verification(
        9,
        [
            Mismatch(3, MismatchKind.LOST, 5, "token", "1 2", "2 3"),
            Mismatch(4, MismatchKind.WRONG, 0, "token", "1", "2"),
            Mismatch(5, MismatchKind.WRONG, 0, "token", "1", "2"),
        ],
    )
    assert [problem.severity for problem in found] == [Severity.INVALID, Severity.WARNING]
    assert found[0].text.startswith("1 of 9 outputs differ from those of the requests alone (lost)")
    assert "request 3: lost at token 5: expected 1 2, got 2 3" in found[0].text
    assert found[1].text.startswith("2 of 9 outputs")


def test_a_loop_is_named_by_what_drives_it() -> None:
    assert loop_of(ArrivalSettings(concurrency=4)) == "concurrency 4"
    assert loop_of(ArrivalSettings(arrivals="poisson:2")) == "poisson:2"


def test_an_arm_has_a_name_a_server_and_perhaps_a_model() -> None:
    arms = arms_of(["a=http://a:1", "b=http://b:2/v1#org/m"], "common")
    assert arms == [Arm("a", "http://a:1", "common"), Arm("b", "http://b:2/v1", "org/m")]


def test_flags_are_for_an_arm_that_exists() -> None:
    arms = [Arm("a", "http://a"), Arm("b", "http://b")]
    flags = flags_of(("a=--dtype half", "a=--tp 2"), arms)
    assert flags == {"a": {"dtype": "float16", "tensor parallel": "2"}, "b": {}}
    with pytest.raises(ConfigError, match="one of a, b"):
        flags_of(("c=--tp 2",), arms)


@pytest.mark.parametrize("text", ["nosuch.yaml", "configs/split yaml", "", "baton serve"])
def test_flags_without_a_setting_are_refused_as_a_mistyped_file_is(text: str) -> None:
    with pytest.raises(ConfigError, match="no such file, or no setting in it"):
        flags_of((f"a={text}",), [Arm("a", "http://a")])


def test_only_rounds_in_which_every_arm_is_valid_are_compared() -> None:
    runs = [
        arm_run("a", 1), arm_run("b", 1), arm_run("a", 2, is_invalid=True), arm_run("b", 2),
        arm_run("a", 3),
    ]  # fmt: skip
    assert list(whole_rounds(runs, ["a", "b"])) == [1]
    report = report_of(runs)
    finish(report, ["a", "b"], "poisson:6")
    assert any("2 rounds are not compared" in note for note in report.notes)
    assert all(row.ratios["b"].rounds == 1 for row in report.comparison)


def test_ratios_are_to_the_first_arm() -> None:
    runs = [arm_run(arm, number, seed=number) for number in range(1, 8) for arm in ("a", "b")]
    for run in runs:
        if run.arm == "b":
            faster = msgspec.structs.replace(run.summary, tokens_per_s=run.summary.tokens_per_s * 2)
            run.summary = faster
    report = report_of(runs)
    finish(report, ["a", "b"], "poisson:6")
    rows = {row.name: row for row in report.comparison}
    assert rows["tokens/s"].ratios["b"].median == pytest.approx(2.0)
    assert rows["tokens/s"].ratios["b"].is_conclusive
    assert rows["TTFT p50"].ratios["b"].median == 1.0
    assert not rows["TTFT p50"].ratios["b"].is_conclusive


def test_a_search_stands_by_what_it_confirmed() -> None:
    bad = arm_run("", 0, is_invalid=True)
    report = report_of([bad])
    assert not is_usable(report)
    report.search = Found(2.0, True, Ending.FOUND, 3.0, "2/s holds", [])
    assert is_usable(report)
    assert shown(report).endswith("CONFIRMED")
    report.search = Found(2.0, False, Ending.PROBES_SPENT, 3.0, "no result", [])
    assert not is_usable(report)
    assert shown(report).endswith("NOT CONFIRMED")


def test_a_report_without_a_run_is_of_no_use() -> None:
    assert not is_usable(report_of([]))


def test_a_run_that_the_server_failed_says_something_of_the_server() -> None:
    search = RateSearch()
    rate = search.next_rate()
    assert rate is not None
    observe(search, rate, judge(case(1), result(Outcome.REFUSED), ""))
    assert search.probes[0].is_valid
    assert search.probes[0].attainment == 0.0


def test_sampled_outputs_that_are_to_be_verified_are_refused_before_the_load() -> None:
    target = Target("http://a", "m", extra_body={"temperature": 0.7})
    with Bench() as bench, pytest.raises(ConfigError, match="when greedy, not with temperature"):
        bench.measure(case(1, verify=True, target=target))


@pytest.mark.parametrize("others", [(), (Outcome.ANSWERED,)])
def test_a_run_without_sockets_says_nothing_of_the_server(others: tuple[Outcome, ...]) -> None:
    search = RateSearch()
    rate = search.next_rate()
    assert rate is not None
    observe(search, rate, judge(case(1), result(Outcome.NO_SOCKET, *others), ""))
    assert not search.probes[0].is_valid


def test_answers_of_a_wrong_length_under_load_are_the_servers_fault() -> None:
    outcomes = [Outcome.ANSWERED] * 3 + [Outcome.WRONG_LENGTH]
    run = judge(case(4), result(*outcomes), "")
    assert run.invalid
    assert is_servers_fault(run)
    run.problems.append(invalid("the client sent late"))
    assert not is_servers_fault(run)


def test_several_runs_of_one_load_show_how_far_they_lie_apart() -> None:
    runs = [scene_run(Scene(duration_s=5.0, seed=seed), f"run {seed}") for seed in (1, 2, 3)]
    table = spread(runs)
    assert table.rows[0][0] == "tokens/s"
    assert {"ttft p50, ms", "itl p99, ms"} <= {row[0] for row in table.rows}
    report: Report = report_of(runs)
    report.tables.append(table)
    assert "Over the runs" in shown(report)
