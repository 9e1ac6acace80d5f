"""Measure what many streams and requests cost router processes, on real sockets.

It starts routers as `baton serve` does, and one process that plays all nodes and clients, whose
CPU time is reported apart. CPU time is that of the routers' processes. It needs a model folder with
a tokenizer.json and nothing else.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from baton.deploy.startup import ask_health, reserve_port
from baton.protocol.config import ClusterConfig, LogConfig, ModelConfig, RouterConfig
from baton.runtime.settings import to_yaml
from tools.router_load import STARTED, Crowd, CrowdFigures

NUM_DECODES = 16
START_S = 60.0
SETTLE_S = 2.0  # for what a load leaves behind, before the memory is looked at
MARGIN_S = 0.5
MIB = 1 << 20


class RouterFigures(msgspec.Struct, frozen=True):
    """One load. `cpu_share` is the CPU time of each router over the time that passed."""

    load: str
    crowd: Crowd
    seen: CrowdFigures
    num_routers: int
    cpu_share: list[float]
    cpu_us: float  # of all routers, per token or request; 0 for idle streams
    player_cpu_share: float
    rss_mib: list[float]  # of each router under this load
    kib_per_stream: float = 0.0


class Scene:
    """Routers and a player that are ready."""

    def __init__(
        self, routers: list[psutil.Process], player: "subprocess.Popen[bytes]"
    ) -> None:
        self._routers = routers
        self._player = player
        self._player_process = psutil.Process(player.pid)

    def measure(self, load: str, crowd: Crowd) -> RouterFigures:
        assert self._player.stdin is not None
        before = self._rss_bytes()
        self._player.stdin.write(msgspec.json.encode(crowd) + b"\n")
        self._player.stdin.flush()
        self._expect(STARTED)
        began_s = time.monotonic()
        began = self._cpu_s()
        player_began_s = _cpu_s(self._player_process)
        if crowd.rate is None:
            # The clients leave as soon as the time is over, which must not count.
            time.sleep(crowd.seconds - MARGIN_S)
        else:
            seen = self._seen()
        passed_s = time.monotonic() - began_s
        used = [now - then for now, then in zip(self._cpu_s(), began, strict=True)]
        player_s = _cpu_s(self._player_process) - player_began_s
        rss = self._rss_bytes()
        if crowd.rate is None:
            seen = self._seen()
        rate = seen.num_ended / seen.seconds
        per_stream = (sum(rss) - sum(before)) / crowd.num / 1024 if crowd.num else 0.0
        return RouterFigures(
            load,
            crowd,
            seen,
            len(self._routers),
            [round(one / passed_s, 4) for one in used],
            sum(used) / passed_s / rate * 1e6 if rate else 0.0,
            player_s / passed_s,
            [one / MIB for one in rss],
            per_stream,
        )

    def _seen(self) -> CrowdFigures:
        assert self._player.stdout is not None
        return msgspec.json.decode(self._player.stdout.readline(), type=CrowdFigures)

    def _expect(self, line: bytes) -> None:
        assert self._player.stdout is not None
        if (said := self._player.stdout.readline()) != line:
            raise RuntimeError(f"the player said {said!r} instead of {line!r}")

    def _cpu_s(self) -> list[float]:
        return [_cpu_s(router) for router in self._routers]

    def _rss_bytes(self) -> list[int]:
        return [router.memory_info().rss for router in self._routers]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def scene(model: str, num_routers: int) -> Iterator[Scene]:
    """Start routers that share a port, and a player whose nodes dial them all."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        reserved = stack.enter_context(reserve_port("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        controls = [f"ipc://{folder}/control-{index}" for index in range(num_routers)]
        routers = []
        for index, control in enumerate(controls):
            config = ClusterConfig(
                model=ModelConfig(path=str(Path(model).resolve())),
                router=RouterConfig(
                    name=f"router-{index}",
                    port=port,
                    shares_port=num_routers > 1,
                    port_is_held=True,
                    control=control,
                    local_prefill="never",
                    max_inflight=1 << 16,
                    shutdown_timeout_s=0.0,
                ),
                log=LogConfig(level="error"),
            )
            file = Path(folder, f"router-{index}.yaml")
            file.write_text(to_yaml(config))
            command = [sys.executable, "-m", "baton", "router", "--config", str(file)]
            process = subprocess.Popen(command)
            stack.callback(_end, process)
            routers.append(psutil.Process(process.pid))
        url = f"http://127.0.0.1:{port}"
        player = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tools.router_load",
                url,
                ",".join(controls),
                str(NUM_DECODES),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        stack.callback(_end, player)
        _wait_for(url, num_routers)
        yield Scene(routers, player)


def _wait_for(url: str, num_routers: int) -> None:
    """Wait until each router has all nodes; the system chooses which router answers."""
    deadline_s = time.monotonic() + START_S
    ready: set[str] = set()
    while len(ready) < num_routers:
        health = ask_health(url)
        if health is not None and len(health.ready_ids) == NUM_DECODES + 1:
            ready.add(health.router)
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the routers were not ready within {START_S:g} s")
        time.sleep(0.05)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.router_scale", description=__doc__
    )
    parser.add_argument("model", help="folder with a tokenizer.json")
    parser.add_argument(
        "--routers", default="1,2", help="numbers of router processes to try"
    )
    parser.add_argument("--idle", type=int, default=10_000, help="idle streams")
    parser.add_argument(
        "--streams", type=int, default=1000, help="streams of a token per 50 ms"
    )
    parser.add_argument(
        "--stream-interval", type=int, default=1, help="tokens of an event"
    )
    parser.add_argument(
        "--rate", type=float, default=1500.0, help="short requests per second"
    )
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="length of each load"
    )
    given = parser.parse_args(arguments)
    loads = {
        "short requests": Crowd(0, given.seconds, rate=given.rate),
        "streams of 50 ms": Crowd(
            given.streams,
            given.seconds,
            step_s=0.05,
            stream_interval=given.stream_interval,
        ),
        "idle streams": Crowd(given.idle, given.seconds),
    }
    for num_routers in map(int, given.routers.split(",")):
        with scene(given.model, num_routers) as stage:
            stage.measure("warm-up", Crowd(100, 1.0, step_s=0.05))
            stage.measure("warm-up", Crowd(0, 1.0, rate=200.0))
            for name, crowd in loads.items():
                time.sleep(SETTLE_S)
                print(_line(stage.measure(name, crowd)), flush=True)
    return 0


def _line(one: RouterFigures) -> str:
    shares = ", ".join(f"{share:.1%}" for share in one.cpu_share)
    memory = ", ".join(f"{rss:.0f}" for rss in one.rss_mib)
    line = f"{one.num_routers} x {one.load}: CPU {shares} of a core, {memory} MiB"
    if one.crowd.num:
        line += f", {one.kib_per_stream:.1f} KiB a stream"
    if one.cpu_us:
        rate = one.seen.num_ended / one.seen.seconds
        line += f", {one.cpu_us:.1f} us each at {rate:.0f}/s, lag p50 {one.seen.lag_p50_ms:.1f} ms"
        line += f", p99 {one.seen.lag_p99_ms:.1f} ms"
    return f"{line} (player {one.player_cpu_share:.0%})"


if __name__ == "__main__":
    sys.exit(main())
