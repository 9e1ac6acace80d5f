"""`baton bench` as a stranger uses it, on a cluster of real processes.

Loads are closed loops: whether an open one is valid depends on the machine that runs the tests.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from baton.bench.records import Outcome
from baton.bench.report.document import read_json
from baton.bench.report.page import shown

SECRET = "a-key-that-must-not-be-written"
ASKED = (
    "--prompt",
    "uniform:20-90",
    "--output",
    "12",
    "--warm-up",
    "2",
    "--vocabulary",
    "300-1000",
    "--requests",
    "6",
)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "baton", "bench", *words]


def bench(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "BATON_BENCH_API_KEY": SECRET}
    done = subprocess.run(
        command(*words),
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert "Traceback" not in done.stderr
    assert SECRET not in done.stdout + done.stderr
    return done


def test_a_run_is_measured_and_reported(cluster, tmp_path):
    words = (
        "run",
        "--url",
        cluster.url(""),
        "--concurrency",
        "2",
        "--ttft-ms",
        "60000",
    )
    done = bench(*words, *ASKED, "--out", "report", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("VALID")
    written = {path.name for path in (tmp_path / "report").iterdir()}
    assert written == {"report.json", "report.html"}
    for path in (tmp_path / "report").iterdir():
        assert SECRET.encode() not in path.read_bytes()
    report = read_json(tmp_path / "report" / "report.json")
    run = report.runs[0]
    assert run.summary.outcomes == {"answered": 6}
    assert run.summary.attainment == 1.0
    assert sum(record.warm_up for record in run.records) == 2


def test_a_storm_of_refusals_ends_early_with_the_servers_words(cluster, tmp_path):
    words = (
        "run",
        "--url",
        cluster.url(""),
        "--concurrency",
        "1",
        *ASKED,
        "--give-up-after",
        "3",
    )
    asked = (
        *words,
        "--requests",
        "5000",
        "--vocabulary",
        "70000-70100",
        "--out",
        "report",
    )
    done = bench(*asked, folder=tmp_path)
    assert done.returncode == 1
    assert (
        "stopped early: the first 3 requests all failed: token ids must be"
        in done.stdout
    )
    report = read_json(tmp_path / "report" / "report.json")
    assert report.invalid
    assert {record.outcome for record in report.runs[0].records} <= {
        Outcome.CLIENT_ERROR,
        Outcome.STOPPED,
    }
    assert len(report.runs[0].records) < 5000


def test_an_interrupted_run_says_so_and_keeps_what_it_has(cluster, tmp_path):
    words = (
        "run",
        "--url",
        cluster.url(""),
        "--concurrency",
        "1",
        *ASKED,
        "--out",
        "report",
    )
    running = subprocess.Popen(
        command(*words, "--requests", "3000", "--prompt", "20"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # The first line says that the server was reached, the others come from the load itself.
        assert "serves tiny" in running.stderr.readline()
        assert any(re.search(r"[1-9]\d*/3000 ended", line) for line in running.stderr)
        running.send_signal(signal.SIGINT)
        said, _ = running.communicate(timeout=60.0)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 1
    report = read_json(tmp_path / "report" / "report.json")
    sent = sum(not record.warm_up for record in report.runs[0].records)
    assert f"INVALID: interrupted: {sent} of 3000 requests had been sent" in said
    assert report.runs[0].summary.outcomes["answered"] > 0
    assert shown(report) in said


def test_arms_of_a_comparison_are_asked_the_same_in_turn(cluster, tmp_path):
    arms = (f"a={cluster.url('')}", f"b={cluster.url('')}#tiny")
    flags = (
        "--flags",
        "a=--quantization fp8 --threads 1",
        "--flags",
        "b=quantization: none",
    )
    words = ("compare", *arms, *flags, "--rounds", "2", "--concurrency", "2", *ASKED)
    done = bench(*words, "--out", "report", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a was started with: --quantization fp8 --threads 1" in done.stdout
    report = read_json(tmp_path / "report" / "report.json")
    assert [run.round for run in report.runs] == [1, 1, 2, 2]
    tokens = {
        (run.arm, run.round): [record.token_ids for record in run.records]
        for run in report.runs
    }
    assert tokens["a", 1] == tokens["b", 1]
    assert tokens["a", 2] == tokens["b", 2]
    assert tokens["a", 1] != tokens["a", 2]
    assert {row.name for row in report.comparison} >= {"tokens/s", "TTFT p50"}
    assert all(row.ratios["b"].rounds == 2 for row in report.comparison)
