"""The endpoints that pool prompts: embeddings, scores and rerankings.

A body is one HTTP request of several prompts, each of which has exactly one outcome; the first
error ends the others.
"""

import asyncio
import base64
import secrets
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec
from aiohttp import web

from baton.protocol.adapters import shown_lora
from baton.router.core.request import Caller
from baton.router.core.stream import RequestStream
from baton.router.http.api.large_bodies import BodyWork
from baton.router.http.api.pooling_bodies import (
    PooledPrompts,
    PoolingEndpoint,
    scores_of,
)
from baton.router.http.api.prepare import num_packed, unpacked
from baton.router.http.auth import TENANT
from baton.router.http.connections import Bodies
from baton.router.http.errors import blaming
from baton.router.http.metrics import HttpMetrics
from baton.router.http.request_log import Running, counted_request
from baton.router.text.pooled_texts import embedding_of
from baton.router.text_router import TextRouter

# Prompts of one body that wait or run at once, so that none takes the whole queue, and their tokens
# for each prefill node, so that none waits for its own neighbours until the queue's limit.
MAX_AT_ONCE = 256
MAX_TOKENS_AT_ONCE = 16_384

_ID_PREFIXES: dict[PoolingEndpoint, str] = {
    "embeddings": "embd-",
    "score": "score-",
    "rerank": "rerank-",
}


class PoolingHandlers:
    def __init__(
        self, engine: TextRouter, bodies: Bodies, metrics: HttpMetrics, work: BodyWork
    ) -> None:
        self._engine = engine
        self._bodies = bodies
        self._metrics = metrics
        self._work = work

    async def answer(
        self, request: web.Request, endpoint: PoolingEndpoint, request_id: str
    ) -> web.Response:
        """Answer a POST. Raises `BatonError`."""
        with counted_request(request, self._metrics) as running:
            asked = await self._read(request, endpoint)
            running.request_id = request_id
            response_id = f"{_ID_PREFIXES[endpoint]}{secrets.token_hex(12)}"
            caller = Caller.of(asked.scope, request[TENANT])
            with blaming(asked.sent):
                numbers = await self._numbers(asked, caller, response_id, running)
                body = await self._body(endpoint, asked, numbers, response_id)
            running.outcome = "finished"
        headers = {"X-Request-Id": request_id}
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def _read(
        self, request: web.Request, endpoint: PoolingEndpoint
    ) -> PooledPrompts:
        model = self._engine.get_model_config()
        with self._bodies.room() as room:
            # Many short texts may be longer than the model's longest prompt.
            body = await self._bodies.read(request, room, self._bodies.max_body_bytes)
            asked = await self._work.pooled_prompts(
                endpoint, model, body, request[TENANT].name
            )
        self._metrics.ignored(asked.ignored)
        return asked

    async def _numbers(
        self, asked: PooledPrompts, caller: Caller, name: str, running: Running
    ) -> list[bytes]:
        """Return what nodes make of each prompt. Raises the first error in their order."""
        numbers: list[bytes] = []
        # With their numbers of tokens.
        waiting: deque[tuple[RequestStream, int]] = deque()
        num_tokens = 0  # of those, and of the next one
        for index, prompt in enumerate(asked.prompts):
            if index:  # a long list must not delay other requests
                await asyncio.sleep(0)
            num_tokens += num_packed(prompt)
            most = MAX_TOKENS_AT_ONCE * max(1, self._engine.num_prefill_nodes)
            while waiting and (len(waiting) == MAX_AT_ONCE or num_tokens > most):
                first, size = waiting.popleft()
                numbers.append(await _pooled(first))
                num_tokens -= size
            stream = await self._engine.pool(
                unpacked(prompt), asked.pooling, f"{name}-{index}", caller
            )
            running.streams.append(stream)
            waiting.append((stream, num_packed(prompt)))
        return numbers + [await _pooled(stream) for stream, _ in waiting]

    async def _body(
        self,
        endpoint: PoolingEndpoint,
        asked: PooledPrompts,
        numbers: Sequence[bytes],
        response_id: str,
    ) -> bytes:
        num_tokens = sum(map(num_packed, asked.prompts))
        model = shown_lora(asked.scope.lora) or self._engine.get_model_config().name
        fields: dict[str, object] = {
            "id": response_id,
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "results" if endpoint == "rerank" else "data": await _items(
                endpoint, asked, numbers
            ),
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return msgspec.json.encode(fields)


async def _pooled(stream: RequestStream) -> bytes:
    await stream.ended()
    return stream.pooled


async def _items(
    endpoint: PoolingEndpoint, asked: PooledPrompts, numbers: Sequence[bytes]
) -> list[msgspec.Raw]:
    """Return the entries of a response as JSON, made one by one, because each takes its time."""
    if endpoint == "embeddings":
        entries = _embeddings(asked, numbers)
    else:
        scores = []
        for score in scores_of(asked, numbers):
            scores.append(score)
            await asyncio.sleep(0)
        entries = _scored(scores) if endpoint == "score" else _ranked(asked, scores)
    items = []
    for entry in entries:
        items.append(msgspec.Raw(msgspec.json.encode(entry)))
        await asyncio.sleep(0)
    return items


def _embeddings(
    asked: PooledPrompts, numbers: Sequence[bytes]
) -> Iterator[dict[str, object]]:
    for index, row in enumerate(numbers):
        values = embedding_of(row, asked.dimensions, normalizes=asked.normalizes)
        shown: object = values
        if asked.is_base64:
            shown = base64.b64encode(array("f", values).tobytes()).decode()
        yield {"object": "embedding", "index": index, "embedding": shown}


def _scored(scores: Sequence[float]) -> Iterator[dict[str, object]]:
    for index, score in enumerate(scores):
        yield {"object": "score", "index": index, "score": score}


def _ranked(
    asked: PooledPrompts, scores: Sequence[float]
) -> Iterator[dict[str, object]]:
    """Yield the best first; of equal ones, the first."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    for index in order[: asked.top_n]:
        entry: dict[str, object] = {"index": index, "relevance_score": scores[index]}
        if asked.documents is not None:
            entry["document"] = {"text": asked.documents[index]}
        yield entry
