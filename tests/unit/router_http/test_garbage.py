"""Answers leave no cycles, since a collector that walks them stops every stream of the router."""

import asyncio
import gc
from collections.abc import Callable

import pytest

from baton.protocol.errors import Overloaded
from baton.router.http.request_log import Running
from baton.router.stream import RequestStream
from tests.support.http_bench import HttpBench, ScriptedEngine, lost, well


def count(kind: type) -> int:
    return sum(type(one) is kind for one in gc.get_objects())


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("script", [well, lost, None])
def test_an_answer_is_gone_without_the_collector(
    script: Callable[[RequestStream], None] | None, is_streamed: bool
) -> None:
    async def ask() -> int:
        engine = ScriptedEngine(script)
        engine.refusal = None if script is not None else Overloaded("full", code="queue_full")
        async with HttpBench(engine) as bench:
            reply = await bench.post({"prompt": [5, 6], "stream": is_streamed})
        assert bool(engine.streams) == (script is not None)
        engine.refusal = None
        engine.streams.clear()
        engine.close()
        return reply.status

    gc.collect()
    gc.disable()
    try:
        before = count(Running), count(RequestStream)
        assert asyncio.run(ask()) in (200, 502, 503)
        assert (count(Running), count(RequestStream)) == before
    finally:
        gc.enable()
