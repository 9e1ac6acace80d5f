"""Attack a router's process, and judge it by what its polite client sees."""

import asyncio
import contextlib
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import hypothesis
import msgspec
import psutil
from hypothesis import HealthCheck, Phase, given, settings

from baton.protocol.config import ClusterConfig
from tests.fuzz.attacks import volleys
from tests.fuzz.client import Attack, carry_out
from tests.fuzz.watch import Waits, serve_nodes, watch
from tests.support.router_process import Router, wait_until_ready

# How much longer than in calm moments the polite client may wait beside any attack.
MAX_EXTRA_WAIT_S = 0.25
# How much more memory than before the first attack the router may ever have.
MAX_MORE_BYTES = 400 << 20
# A wait that the machine causes does not come back; one that an attack causes does.
NUM_TRIES = 3
CALM_S = 1.0
VOLLEYS_PER_CALM = 20
_MIB = 1 << 20
_SPAWN = multiprocessing.get_context("spawn")


@dataclass
class Findings:
    """What a seed has found, and the figures of the run."""

    seed: int
    problems: list[str] = field(default_factory=list)
    num_volleys: int = 0
    num_attacks: Counter[str] = field(default_factory=Counter)
    calm: Waits = field(default_factory=Waits)
    # Beside attacks, whether they caused it or not.
    longest: Waits = field(default_factory=Waits)
    first_bytes: int = 0
    peak_bytes: int = 0

    def __str__(self) -> str:
        kinds = ", ".join(
            f"{name} {num}" for name, num in self.num_attacks.most_common()
        )
        lines = [
            f"seed {self.seed}: {self.num_volleys} volleys ({kinds})",
            f"longest wait for /live {self.longest.live_s * 1e3:.0f} ms beside attacks, "
            f"{self.calm.live_s * 1e3:.0f} ms in calm moments",
            f"longest wait for a token {self.longest.stream_s * 1e3:.0f} ms beside attacks, "
            f"{self.calm.stream_s * 1e3:.0f} ms in calm moments",
            f"memory of the router: {self.first_bytes // _MIB} MiB at first, "
            f"{self.peak_bytes // _MIB} MiB at most",
            f"{len(self.problems)} problems",
        ]
        return "\n".join(lines)


class Siege:
    """One router with its nodes and its polite client, as long as its context lasts."""

    def __init__(self, config: ClusterConfig) -> None:
        assert config.router.control is not None
        self._control = config.router.control
        self.router = Router(config)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Siege":
        with contextlib.ExitStack() as stack:
            stack.callback(self.router.close)
            url = self.router.wait_for_url()
            self._reader = threading.Thread(target=self._read_log, daemon=True)
            self._reader.start()
            self.port = int(url.rpartition(":")[2])
            self._nodes = stack.enter_context(_helper(serve_nodes, self._control))
            wait_until_ready(url)
            pid = self.router.process.pid
            self._watcher = stack.enter_context(_helper(watch, self.port, pid))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _read_log(self) -> None:
        assert self.router.process.stderr is not None
        with contextlib.suppress(ValueError):  # it was closed
            self.router.lines += self.router.process.stderr

    def take_waits(self) -> Waits:
        """Return the longest waits since the last call."""
        late_s = float(_ask(self._nodes))
        waits = msgspec.json.decode(_ask(self._watcher), type=Waits)
        waits.stream_s = max(0.0, waits.stream_s - late_s)
        return waits

    def rest(self) -> Waits:
        """Return the longest waits of a calm moment."""
        self.take_waits()
        time.sleep(CALM_S)
        return self.take_waits()

    def peak_bytes(self) -> int:
        status = Path(f"/proc/{self.router.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024

    def trouble(self) -> list[str]:
        """Return what the router says or is that it never may."""
        lines = self.router.lines
        bad = [line for line in lines if "Traceback" in line or "unhandled" in line]
        if self.router.process.poll() is not None:
            bad.append(f"the router ended with code {self.router.process.returncode}")
        return ["".join(lines[-30:]), *bad] if bad else []


@contextlib.contextmanager
def _helper(target: object, *arguments: object) -> Iterator[Connection]:
    """Run a function in a process of its own, which ends when its pipe is closed."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=target, args=(*arguments, theirs), daemon=True)  # type: ignore[arg-type]
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(5.0)
        process.kill()


def _ask(pipe: Connection) -> bytes:
    pipe.send(None)
    assert pipe.poll(60.0), "a helper of the fuzzer hangs"
    answer: bytes = pipe.recv()
    return answer


def _carry_out(port: int, volley: list[Attack]) -> list[str]:
    async def all_at_once() -> list[str]:
        copies = [
            carry_out(port, attack) for attack in volley for _ in range(attack.copies)
        ]
        problems = await asyncio.gather(*copies)
        return [problem for some in problems for problem in some]

    return asyncio.run(all_at_once())


def _longer(one: Waits, other: Waits) -> Waits:
    return Waits(max(one.live_s, other.live_s), max(one.stream_s, other.stream_s))


def _extra_s(waits: Waits, calm: Waits) -> float:
    return max(waits.live_s - calm.live_s, waits.stream_s - calm.stream_s)


def _strike(siege: Siege, volley: list[Attack], findings: Findings) -> list[str]:
    """Return what a volley shows that must not be. A long wait must come back to count."""
    extra_s = []
    for _ in range(NUM_TRIES):
        siege.take_waits()
        problems = _carry_out(siege.port, volley)
        waits = siege.take_waits()
        findings.longest = _longer(findings.longest, waits)
        problems += waits.problems + siege.trouble() + _growth(siege, findings)
        if problems:
            return problems
        extra_s.append(_extra_s(waits, findings.calm))
        if extra_s[-1] <= MAX_EXTRA_WAIT_S:
            return []
    return [
        f"others waited {min(extra_s):.2f} s longer, in {NUM_TRIES} of {NUM_TRIES} tries"
    ]


def _growth(siege: Siege, findings: Findings) -> list[str]:
    """Return a problem if the router has never been as large and is too large."""
    if siege.router.process.poll() is not None:
        return []
    before_bytes = findings.peak_bytes
    findings.peak_bytes = siege.peak_bytes()
    most_bytes = max(before_bytes, findings.first_bytes + MAX_MORE_BYTES)
    if findings.peak_bytes <= most_bytes:
        return []
    return [f"the router has {findings.peak_bytes // _MIB} MiB"]


def drawn(seed: int, number: int) -> list[Attack]:
    """Return the volley of a number. Each is drawn by itself, so any of them can be run alone."""
    volleys_drawn: list[list[Attack]] = []

    @hypothesis.seed(seed * 1_000_000 + number)
    @settings(
        max_examples=2,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(volleys())
    def draw(volley: list[Attack]) -> None:
        volleys_drawn.append(volley)

    draw()
    return volleys_drawn[-1]  # the first is the simplest that there is


def fuzz(
    config: ClusterConfig,
    seed: int,
    numbers: Iterable[int],
    limit_s: float,
    told: Callable[[str], None] = print,
) -> Findings:
    """Attack a router with volleys of a seed, and tell of each problem."""
    findings = Findings(seed)
    ends_s = time.monotonic() + limit_s
    with Siege(config) as siege:
        time.sleep(CALM_S)
        findings.calm = siege.rest()
        findings.first_bytes = (
            psutil.Process(siege.router.process.pid).memory_info().rss
        )
        for number in numbers:
            if time.monotonic() > ends_s or siege.router.process.poll() is not None:
                break
            if findings.num_volleys % VOLLEYS_PER_CALM == 0:
                findings.calm = _longer(findings.calm, siege.rest())
            volley = drawn(seed, number)
            findings.num_volleys += 1
            findings.num_attacks.update(attack.name.split(" ")[0] for attack in volley)
            problems = _strike(siege, volley, findings)
            if problems:
                findings.problems += problems
                shown = "\n  ".join(dict.fromkeys(problems))
                told(f"volley {number}: {volley}\n  {shown}")
        findings.calm = _longer(findings.calm, siege.rest())
    return findings
