"""Measure what a token costs the front of `LLM` and `AsyncLLM`, on real sockets.

A process of its own plays a prefill and a decode node that compute nothing. This one asks for many
responses at once, for short ones and for long ones, and takes its own CPU time: the difference is
that of the tokens alone.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from baton.async_llm import AsyncLLM
from baton.protocol.sampling import RequestOutputKind, SamplingParams
from tools.router_load import PROMPT, PlayedNode

SHORT = 20  # tokens
KINDS = {
    "LLM": RequestOutputKind.FINAL_ONLY,
    "AsyncLLM, deltas": RequestOutputKind.DELTA,
}


async def play(control: str, num_streams: int, step_s: float) -> None:
    """Be the nodes: step once all streams are there, until they have ended; again for ever."""
    prefill = PlayedNode(control, "prefill-0", "prefill")
    decode = PlayedNode(control, "decode-0", "decode")
    prefill.join()
    decode.join()
    while True:
        while len(decode.running) < num_streams:  # noqa: ASYNC110  nothing signals it
            await asyncio.sleep(0.01)
        at_s = time.monotonic()
        index = 1
        while decode.running:
            decode.step(index)
            index += 1
            at_s += step_s
            await asyncio.sleep(max(0.0, at_s - time.monotonic()))


async def used_s(
    llm: AsyncLLM, kind: RequestOutputKind, num_streams: int, num_tokens: int
) -> float:
    """Return the CPU seconds of so many responses of so many tokens."""

    async def read(number: int) -> None:
        params = SamplingParams(
            max_tokens=num_tokens, seed=number, ignore_eos=True, output_kind=kind
        )
        async for output in llm.generate(PROMPT, params):
            last = output
        assert last.finished

    began_s = time.process_time()
    async with asyncio.TaskGroup() as group:
        for number in range(num_streams):
            group.create_task(read(number))
    return time.process_time() - began_s


async def measure(model: str, num_streams: int, num_tokens: int, step_s: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        control = f"ipc://{folder}/control"
        command = [sys.executable, "-m", "tools.front_scale", "--play", control]
        command += ["--streams", str(num_streams), "--step", str(step_s)]
        router = {"control": control, "local_prefill": "never", "max_inflight": 1 << 16}
        player = subprocess.Popen(command)  # noqa: ASYNC220  it returns at once
        try:
            async with AsyncLLM(model, start_nodes=False, router=router) as llm:
                for name, kind in KINDS.items():
                    await used_s(llm, kind, num_streams, SHORT)  # warms up
                    short_s = await used_s(llm, kind, num_streams, SHORT)
                    long_s = await used_s(llm, kind, num_streams, num_tokens)
                    each = (long_s - short_s) / (num_tokens - SHORT) / num_streams
                    print(
                        f"{num_streams} streams, {name}: {each * 1e6:.2f} us a token",
                        flush=True,
                    )
        finally:
            player.kill()
            player.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.front_scale", description=__doc__
    )
    parser.add_argument("model", nargs="?", default="", help="model folder")
    parser.add_argument("--streams", default="128,1024", help="numbers of responses")
    parser.add_argument("--tokens", type=int, default=320, help="of a long response")
    parser.add_argument("--step", type=float, default=0.02, help="seconds of a step")
    parser.add_argument("--play", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    for num_streams in map(int, given.streams.split(",")):
        if given.play:
            asyncio.run(play(given.play, num_streams, given.step))
        else:
            asyncio.run(measure(given.model, num_streams, given.tokens, given.step))
    return 0


if __name__ == "__main__":
    sys.exit(main())
