"""Measure the CPU time of the router's process per streamed token and per short request.

It runs the real router, its HTTP side and its sockets in this process. A child process plays one
prefill node, one decode node and all clients, so that none of their work is counted here. It needs
a model folder with a tokenizer.json and nothing else.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import msgspec

from baton.protocol.config import ClusterConfig, LogConfig, ModelConfig, RouterConfig
from baton.router.http.app import App
from baton.router.http.server import Server
from baton.router.http.tracing import Tracer, exporter_to
from baton.router.main import spare_collector
from baton.router.text_router import TextRouter
from baton.runtime.log import setup
from tools.router_load import DONE, STARTED, Traffic

# Steps follow one another so fast that no cache gets cold, which makes the figure steady.
NUM_HOT_STREAMS, HOT_STEP_S = 32, 0.0002
STOPS = ["\n\nQuestion:", "<|never|>", "hexagonal"]
RUNNING = b'"finish_reason":null'


class Cost(msgspec.Struct, frozen=True):
    """The microseconds of CPU time per token or per request.

    The event loop's thread spends `path_us` on the messages of nodes, the whole process spends
    `process_us` on everything.
    """

    path_us: float
    process_us: float


class TimedLoop(asyncio.SelectorEventLoop):
    """An event loop that counts the CPU time of reading nodes' messages and acting on them.

    As long as `is_dropping` is set, transports drop the events of tokens, so that the time does not
    include the kernel's part of sending.
    """

    def __init__(self) -> None:
        super().__init__()
        self.path_s = 0.0
        self.is_dropping = False

    def add_reader(self, fd: object, callback: Callable[[], object]) -> None:  # type: ignore[override]
        """Time the reader of the socket that nodes dial; asyncio's transports do not call this."""

        def timed() -> None:
            before_s = time.thread_time()
            callback()
            self.path_s += time.thread_time() - before_s

        super().add_reader(fd, timed)  # type: ignore[arg-type]

    def _make_socket_transport(self, *args: object, **options: object) -> asyncio.Transport:
        made: asyncio.Transport = super()._make_socket_transport(*args, **options)  # type: ignore[misc]
        write = made.write

        def write_or_drop(data: bytes) -> None:
            if not (self.is_dropping and RUNNING in data):
                write(data)

        setattr(made, "write", write_or_drop)  # noqa: B010 - mypy refuses an assignment to a method
        return made


async def measure(
    loop: TimedLoop, model: str, loads: Sequence[Traffic], otlp_traces: str = ""
) -> list[Cost]:
    """Return the cost of each load; they run one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        config = ClusterConfig(
            model=ModelConfig(path=model),
            router=RouterConfig(control=f"ipc://{folder}/control", local_prefill="never", port=0),
        )
        router = TextRouter.from_config(config)
        tracer = Tracer(exporter_to(otlp_traces), "router_cost", "") if otlp_traces else None
        server = Server(App(router, config, tracer=tracer), config.router)
        router.start(config.control)
        url = await server.start()
        command = ["-m", "tools.router_load", url, config.control]
        player = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            return [await _measure(loop, player, load) for load in loads]
        finally:
            player.kill()
            await player.wait()
            await server.stop()
            router.close()
            if tracer is not None:
                tracer.close()


async def _measure(loop: TimedLoop, player: asyncio.subprocess.Process, load: Traffic) -> Cost:
    loop.is_dropping = load.step_s == HOT_STEP_S
    path_s = loop.path_s
    assert player.stdin is not None
    assert player.stdout is not None
    player.stdin.write(msgspec.json.encode(load) + b"\n")
    assert await player.stdout.readline() == STARTED
    process_s = time.process_time()
    assert await player.stdout.readline() == DONE
    num = load.num_requests if load.step_s is None else load.num_requests * load.num_tokens
    path_s, process_s = loop.path_s - path_s, time.process_time() - process_s
    return Cost(path_s / num * 1e6, process_s / num * 1e6)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.router_cost", description=__doc__)
    parser.add_argument("model", help="folder with a tokenizer.json")
    parser.add_argument("--streams", type=int, default=256, help="streams that run side by side")
    parser.add_argument("--tokens", type=int, default=80, help="tokens of each stream")
    parser.add_argument("--requests", type=int, default=1000, help="short requests")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; their median is printed")
    parser.add_argument("--otlp-traces-endpoint", default="", help="collector to send traces to")
    parser.add_argument("--json", action="store_true", help="print every round as JSON instead")
    given = parser.parse_args(arguments)
    num_tokens = given.tokens * given.streams // NUM_HOT_STREAMS
    hot = Traffic(NUM_HOT_STREAMS, num_tokens, HOT_STEP_S)
    streams = Traffic(given.streams, given.tokens, step_s=0.02)
    loads = {
        "token from message to event": hot,
        "token from message to event, three stop strings": msgspec.structs.replace(hot, stop=STOPS),
        "streamed token": streams,
        "short request": Traffic(given.requests, 2),
    }
    # The first, small loads only warm everything up.
    warm = [msgspec.structs.replace(load, num_requests=8) for load in loads.values()]
    setup(LogConfig(level="error"), "router")
    spare_collector()
    loop = TimedLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        todo = [*warm, *list(loads.values()) * given.rounds]
        costs = runner.run(measure(loop, given.model, todo, given.otlp_traces_endpoint))[
            len(warm) :
        ]
    for index, name in enumerate(loads):
        rounds = costs[index :: len(loads)]
        if given.json:
            print(json.dumps({name: msgspec.to_builtins(rounds)}))
            continue
        is_hot = loads[name].step_s == HOT_STEP_S
        costs_us = [cost.path_us if is_hot else cost.process_us for cost in rounds]
        print(f"{name}: {statistics.median(costs_us):.2f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
