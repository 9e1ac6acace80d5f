"""Embeddings and scores for `LLM` and `AsyncLLM`: parameters, outputs, and how they are made."""

import asyncio
from dataclasses import dataclass

import msgspec

from baton.protocol.config import ModelConfig
from baton.protocol.errors import ConfigError, RequestError
from baton.protocol.pooling import Pooling
from baton.router.core.request import Caller
from baton.router.http.api.pooling_bodies import (
    cannot,
    cut_to,
    max_tokens,
    scored,
    scores_of,
)
from baton.router.http.api.prepare import unpacked
from baton.router.text.chat_template import ChatTemplate
from baton.router.text.pooled_texts import (
    PooledTexts,
    PromptOptions,
    Prompts,
    embedding_of,
)
from baton.router.text_router import TextRouter


class PoolingParams(msgspec.Struct, frozen=True):
    """The parameters of embeddings and scores. Names and defaults are vLLM's."""

    dimensions: int | None = None  # the first numbers of an embedding; None: all
    normalize: bool | None = None  # None: as the model's folder says
    # The first tokens of a text; -1: as many as fit.
    truncate_prompt_tokens: int | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """`prompt_token_ids` are those of the pair, or of both texts one after the other."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class Pooler:
    """Makes embeddings and scores with one router. All calls raise `RequestError`."""

    def __init__(self, router: TextRouter, model: ModelConfig) -> None:
        self._router = router
        self._model = model
        self._texts: PooledTexts | None = None

    async def embed(
        self, prompt: str | list[int], params: PoolingParams, name: str, caller: Caller
    ) -> EmbeddingRequestOutput:
        model = self._router.get_model_config()
        if model.tasks.embedding is None:
            raise cannot(model, "embeddings", 'convert="embed" makes some')
        options = self._options(params)
        text = self._router.get_tokenizer()
        texts = self._pooled_texts()
        ids = await text.in_thread(len(prompt), lambda: texts.of_input(prompt, options))
        row, num_cached = await self._row(ids, model.tasks.embedding, name, caller)
        normalizes = (
            model.tasks.normalizes if params.normalize is None else params.normalize
        )
        values = embedding_of(row, params.dimensions, normalizes=normalizes)
        return EmbeddingRequestOutput(name, EmbeddingOutput(values), ids, num_cached)

    async def score(
        self, pair: tuple[str, str], params: PoolingParams, name: str, caller: Caller
    ) -> ScoringRequestOutput:
        model, texts = self._router.get_model_config(), self._pooled_texts()
        options = self._options(params)
        fields = ("data_1", "data_2")
        asked = await self._router.get_tokenizer().in_thread(
            sum(map(len, pair)), lambda: scored([pair], model, texts, options, fields)
        )
        prompts = list(map(unpacked, asked.prompts))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._row(ids, asked.pooling, name, caller))
                    for ids in prompts
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        rows, num_cached = zip(*(task.result() for task in tasks), strict=True)
        (score,) = scores_of(asked, rows)
        token_ids = [token_id for ids in prompts for token_id in ids]
        return ScoringRequestOutput(
            name, ScoringOutput(score), token_ids, sum(num_cached)
        )

    async def _row(
        self, token_ids: list[int], pooling: Pooling, name: str, caller: Caller
    ) -> tuple[bytes, int]:
        """Return what a node makes of a prompt, and how many of its tokens were cached."""
        stream = await self._router.pool(token_ids, pooling, name, caller)
        try:
            await stream.ended()
        finally:
            stream.close()
        return stream.pooled, stream.metrics.num_cached_tokens

    def _options(self, params: PoolingParams) -> PromptOptions:
        if not isinstance(params, PoolingParams):
            raise RequestError(
                "pooling_params must be PoolingParams", param="pooling_params"
            )
        most = max_tokens(self._router.get_model_config())
        return PromptOptions(most, cut_to(params.truncate_prompt_tokens, most))

    def _pooled_texts(self) -> PooledTexts:
        if self._texts is None:
            path = self._model.path
            try:
                template = ChatTemplate.load(path, self._model.chat_template)
            except ConfigError:  # it is needed for pairs alone
                template = None
            text = self._router.get_tokenizer()
            self._texts = PooledTexts(text, template, Prompts.load(path))
        return self._texts
