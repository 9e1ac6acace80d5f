"""Faults of real processes: signals come in time, stopped ones go on, started ones end."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.bench import cli
from baton.bench.figures.faults import Injected, parse_fault
from baton.bench.injector import FaultInjector
from baton.bench.loads import fault
from baton.bench.report.document import read_json
from baton.bench.selftest.scripted_server import ScriptedServer
from baton.bench.settings import FaultSettings
from baton.protocol.errors import ConfigError
from baton.runtime.clock import monotonic
from tests.support.waiting import until

DEADLINE_S = 20.0


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that waits."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    yield process
    process.kill()
    process.wait()


def state(pid: int) -> str:
    """R, S, T (stopped), Z, or empty when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def wait_for(pid: int, states: str) -> None:
    until(lambda: (state(pid) or "-") in states, lambda: f"{pid} is {state(pid)!r}")


@contextlib.contextmanager
def injecting(text: str) -> Iterator[FaultInjector]:
    """Yield an injector whose schedule has just begun."""
    with FaultInjector(parse_fault(text)) as injector:
        injector.begin(monotonic())
        yield injector


def finished(injector: FaultInjector) -> Injected:
    done = injector.finish()
    assert done is not None
    return done


def test_a_killed_process_is_gone_and_both_moments_are_known(
    victim: subprocess.Popen[bytes],
) -> None:
    with injecting(f"kill:{victim.pid}@0.2") as injector:
        assert victim.wait(DEADLINE_S) == -signal.SIGKILL
        done = finished(injector)
    assert done.problem == ""
    assert done.at_s >= 0.2
    assert done.gone_s >= done.at_s


def test_a_stopped_process_goes_on(victim: subprocess.Popen[bytes]) -> None:
    with injecting(f"stop:{victim.pid}@0+0.3") as injector:
        wait_for(victim.pid, "T")
        wait_for(victim.pid, "SR")
        done = finished(injector)
    assert done.resumed_s - done.at_s >= 0.3


def test_a_process_that_is_killed_while_it_stands_still_does_not_go_on(
    victim: subprocess.Popen[bytes],
) -> None:
    with injecting(f"stop:{victim.pid}@0+100") as injector:
        wait_for(victim.pid, "T")
        victim.kill()
        victim.wait(DEADLINE_S)
        stopped = finished(injector)
    assert stopped.resumed_s is None


def test_a_run_that_is_interrupted_leaves_no_process_stopped(
    victim: subprocess.Popen[bytes],
) -> None:
    def run() -> None:
        with injecting(f"stop:{victim.pid}@0+100"):
            wait_for(victim.pid, "T")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    wait_for(victim.pid, "SR")


def test_a_process_that_died_by_itself_is_no_fault(victim: subprocess.Popen[bytes]) -> None:
    spec = parse_fault(f"kill:{victim.pid}@0")
    with FaultInjector(spec) as injector:
        # Reaped, so that its id could be another's by now.
        victim.kill()
        victim.wait()
        # Late, so that the fault is due before the run can end.
        injector.begin(monotonic() - 1.0)
        done = finished(injector)
    assert done.problem == f"process {victim.pid} had ended before the fault"


def test_a_process_that_does_not_exist_is_refused_before_the_load(
    victim: subprocess.Popen[bytes],
) -> None:
    victim.kill()
    victim.wait()
    with pytest.raises(ConfigError, match=f"process {victim.pid}: No such process"):
        FaultInjector(parse_fault(f"kill:{victim.pid}@1")).__enter__()


def test_a_fault_run_that_ends_before_its_fault_leaves_an_invalid_report(
    victim: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    spec = f"kill:{victim.pid}@100"
    with ScriptedServer() as server:
        words = ("--url", server.url, "--model", "scripted", "--fault", spec, "--concurrency", "1",
                 "--requests", "3", "--warm-up", "0", "--prompt", "4", "--output", "2",
                 "--vocabulary", "300-400", "--out", str(tmp_path))  # fmt: skip
        assert fault(cli.parse(FaultSettings, words)[0]) == 1
    run = read_json(tmp_path / "report.json").runs[0]
    assert run.problems[0].is_invalid
    assert run.problems[0].text.startswith(f"fault {spec} was not carried out: the load ended")
    assert run.summary.outcomes == {"answered": 3}
    assert run.impacts == []
    assert victim.poll() is None
