"""The bodies of embeddings, scores and rerankings, and their prompts as token ids."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.protocol.errors import RequestError
from baton.protocol.pooling import Pooling
from baton.protocol.sampling import EVERYONE, Scope
from baton.router.core.admission import check_vocabulary
from baton.router.core.health import ServedModel
from baton.router.http.api.decoding import decoded
from baton.router.http.api.prepare import lora_of, packed
from baton.router.http.api.schema import LONGEST_PROMPT, KeptTokens
from baton.router.http.errors import blaming
from baton.router.text.pooled_texts import (
    PooledTexts,
    PromptOptions,
    cosine_of,
    score_of,
)

# OpenAI's limit for one request.
MAX_TEXTS = 2048
PoolingEndpoint = Literal["embeddings", "score", "rerank"]

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Texts = Annotated[list[str], Meta(max_length=MAX_TEXTS)]


class PoolingBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that all three have. In each of them, null means the default."""

    model: str | None = None
    truncate_prompt_tokens: KeptTokens | None = None  # the first ones of a text
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    # These change nothing about a response.
    user: str | None = None
    priority: int | None = None
    request_id: str | None = None
    metadata: dict[str, object] | None = None


class EmbeddingBody(PoolingBody, kw_only=True):
    """The body of POST /v1/embeddings."""

    input: str | Annotated[list[int | str | list[int]], Meta(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    normalize: bool | None = None  # by default as the model's folder says
    prompt_name: str | None = None  # of the folder's prompts
    add_special_tokens: bool | None = None


class ScoreBody(PoolingBody, kw_only=True):
    """The body of POST /v1/score: one query or as many as documents."""

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None  # other names of the same
    documents: str | Texts | None = None
    instruction: str | None = None


class Document(msgspec.Struct):
    text: str


class RerankBody(PoolingBody, kw_only=True):
    """The body of POST /v1/rerank, as Jina and Cohere have it."""

    query: str
    documents: Annotated[list[str | Document], Meta(max_length=MAX_TEXTS)]
    top_n: Positive | None = None
    return_documents: bool | None = None  # true by default
    max_tokens_per_doc: Positive | None = None
    instruction: str | None = None


class PooledPrompts(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What a body asks for. The prompts are token ids, each packed by `packed`."""

    prompts: list[bytes]
    pooling: Pooling
    scope: Scope = EVERYONE
    # Of embeddings that are compared: the prompts of each pair. Else each prompt is a pair itself.
    pairs: tuple[tuple[int, int], ...] = ()
    is_base64: bool = False
    dimensions: int | None = None
    normalizes: bool = True
    is_probability: bool = True
    top_n: int | None = None
    documents: tuple[str, ...] | None = None  # to show with their scores
    sent: dict[str, str] = {}  # as `blaming` takes it
    ignored: tuple[str, ...] = ()


_embedding_decoder = msgspec.json.Decoder(EmbeddingBody)
_score_decoder = msgspec.json.Decoder(ScoreBody)
_rerank_decoder = msgspec.json.Decoder(RerankBody)


def pooled_prompts(
    endpoint: PoolingEndpoint, data: bytes, model: ServedModel, texts: PooledTexts
) -> PooledPrompts:
    """Return what a body asks for. Raises `RequestError`."""
    match endpoint:
        case "embeddings":
            return _of_embeddings(data, model, texts)
        case "score":
            return _of_scores(data, model, texts)
        case "rerank":
            return _of_ranks(data, model, texts)


def _of_embeddings(
    data: bytes, model: ServedModel, texts: PooledTexts
) -> PooledPrompts:
    body, ignored = decoded(_embedding_decoder, data)
    scope = _scope_of(body, model)
    if model.tasks.embedding is None:
        raise cannot(
            model, "embeddings", "model.convert=embed (--convert embed) makes some"
        )
    options = PromptOptions(
        max_tokens=max_tokens(model),
        cut_to=cut_to(body.truncate_prompt_tokens, max_tokens(model)),
        add_special_tokens=body.add_special_tokens is not False,
        prompt_name=body.prompt_name,
    )
    normalizes = model.tasks.normalizes if body.normalize is None else body.normalize
    size = model.tasks.embedding_size
    if body.dimensions is not None and 0 < size < body.dimensions:
        text = f"dimensions can be at most {size}, the length of the model's embeddings"
        raise RequestError(text, param="dimensions")
    with blaming({"prompt": "input"}):
        token_ids = [texts.of_input(one, options) for one in _inputs_of(body.input)]
        prompts = checked(token_ids, model)
    return PooledPrompts(
        prompts=prompts,
        pooling=model.tasks.embedding,
        scope=scope,
        is_base64=body.encoding_format == "base64",
        dimensions=body.dimensions,
        normalizes=normalizes,
        sent={"prompt": "input"},
        ignored=tuple(ignored),
    )


def _inputs_of(given: str | list[int | str | list[int]]) -> Sequence[str | list[int]]:
    if isinstance(given, str):
        return [given]
    if all(isinstance(item, int) for item in given):
        return [given]  # type: ignore[list-item]
    if any(isinstance(item, int) for item in given):
        raise RequestError(
            "token ids and texts cannot be mixed in one list", param="input"
        )
    if len(given) > MAX_TEXTS:
        text = f"input holds {len(given)} texts; at most {MAX_TEXTS} fit one request"
        raise RequestError(text, param="input")
    return given  # type: ignore[return-value]


def _of_scores(data: bytes, model: ServedModel, texts: PooledTexts) -> PooledPrompts:
    body, ignored = decoded(_score_decoder, data)
    scope = _scope_of(body, model)
    first, queries = _given(body, "text_1", "queries")
    second, documents = _given(body, "text_2", "documents")
    if len(queries) not in (1, len(documents)) or not documents:
        text = f"{first} must be one text or as many as {second} has, which is {len(documents)}"
        raise RequestError(text, param=first)
    if len(queries) < len(documents):
        queries = queries * len(documents)
    options = PromptOptions(
        max_tokens=max_tokens(model),
        cut_to=cut_to(body.truncate_prompt_tokens, max_tokens(model)),
        instruction=body.instruction,
    )
    pairs = list(zip(queries, documents, strict=True))
    prompts = scored(pairs, model, texts, options, (first, second))
    return msgspec.structs.replace(
        prompts, scope=scope, sent={"prompt": second}, ignored=tuple(ignored)
    )


def _given(body: ScoreBody, *names: str) -> tuple[str, list[str]]:
    """Return the field of a body that has texts, of two that mean the same, and the texts."""
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        raise RequestError(f"give either {' or '.join(names)}", param=names[0])
    value = getattr(body, given[0])
    return given[0], [value] if isinstance(value, str) else value


def _of_ranks(data: bytes, model: ServedModel, texts: PooledTexts) -> PooledPrompts:
    body, ignored = decoded(_rerank_decoder, data)
    scope = _scope_of(body, model)
    if not body.documents:
        raise RequestError("documents must not be empty", param="documents")
    documents = [one if isinstance(one, str) else one.text for one in body.documents]
    options = PromptOptions(
        max_tokens=max_tokens(model),
        cut_to=cut_to(body.truncate_prompt_tokens, max_tokens(model)),
        instruction=body.instruction,
        max_document_tokens=body.max_tokens_per_doc,
    )
    pairs = [(body.query, one) for one in documents]
    prompts = scored(pairs, model, texts, options, ("query", "documents"))
    return msgspec.structs.replace(
        prompts,
        scope=scope,
        top_n=body.top_n,
        documents=None if body.return_documents is False else tuple(documents),
        sent={"prompt": "documents"},
        ignored=tuple(ignored),
    )


def scored(
    pairs: Sequence[tuple[str, str]],
    model: ServedModel,
    texts: PooledTexts,
    options: PromptOptions,
    fields: tuple[str, str],
) -> PooledPrompts:
    """Return the prompts of pairs: those of a classifier, or those of embeddings to compare.

    `fields` are those of the queries and of the documents. Raises `RequestError`.
    """
    tasks = model.tasks
    if tasks.num_labels == 1:
        asks = tasks.scores_by_tokens
        with blaming({"prompt": fields[1]}):
            prompts = checked(
                [texts.of_pair(*pair, options, asks=asks) for pair in pairs], model
            )
        return PooledPrompts(
            prompts=prompts, pooling="classify", is_probability=tasks.is_probability
        )
    if tasks.embedding is None:
        raise cannot(
            model, "scores", "model.convert=classify (--convert classify) asks it"
        )
    if options.instruction is not None:
        text = "instruction is for rerankers, and this model compares embeddings"
        raise RequestError(text, code="unsupported", param="instruction")
    # Equal texts have one embedding.
    queries = dict.fromkeys(query for query, _ in pairs)
    documents = dict.fromkeys(document for _, document in pairs)
    places = {one: place for place, one in enumerate({**queries, **documents})}
    shorter = options
    if options.max_document_tokens is not None:
        most = options.max_tokens if options.cut_to is None else options.cut_to
        most = min(options.max_document_tokens, most)
        shorter = msgspec.structs.replace(options, cut_to=most)
    others = [one for one in documents if one not in queries]
    prompts = []
    for field, those, cut in zip(
        fields, (queries, others), (options, shorter), strict=True
    ):
        with blaming({"prompt": field}):
            prompts += checked([texts.of_input(one, cut) for one in those], model)
    return PooledPrompts(
        prompts=prompts,
        pooling=tasks.embedding,
        pairs=tuple((places[query], places[document]) for query, document in pairs),
    )


def checked(prompts: Sequence[list[int]], model: ServedModel) -> list[bytes]:
    """Return prompts packed. Raises `RequestError` for those that no node could compute."""
    for token_ids in prompts:
        check_vocabulary(token_ids, model.vocab_size)
    return list(map(packed, prompts))


def scores_of(asked: PooledPrompts, numbers: Sequence[bytes]) -> Iterator[float]:
    """Yield the score of each pair, of what nodes have made of the prompts."""
    for first, second in asked.pairs:
        yield cosine_of(numbers[first], numbers[second])
    if not asked.pairs:
        for row in numbers:
            yield score_of(row, is_probability=asked.is_probability)


def _scope_of(body: PoolingBody, model: ServedModel) -> Scope:
    return Scope(lora_of(body.model, model), body.cache_salt or "")


def max_tokens(model: ServedModel) -> int:
    """Return the length of the longest text or pair."""
    return min(filter(None, (model.max_model_len, model.tasks.max_embedded_tokens)))


def cut_to(kept: int | None, most: int) -> int | None:
    """Return how many tokens are left of a longer text. Raises `RequestError`."""
    if kept == LONGEST_PROMPT:
        return most
    if kept is not None and not 1 <= kept <= most:
        text = f"truncate_prompt_tokens must be -1, or at least 1 and at most {most}"
        raise RequestError(text, param="truncate_prompt_tokens")
    return kept


def cannot(model: ServedModel, what: str, advice: str) -> RequestError:
    text = f"the model {model.name} cannot be asked for {what}: {model.tasks.described}; {advice}"
    return RequestError(text, code="unsupported", param="model")
