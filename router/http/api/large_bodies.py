"""Turn bodies into token ids: small ones in this process, and large ones in one of its own.

Parsing megabytes of JSON, and filling a template with them, holds Python's lock for up to a second,
which would stop every stream of the router.
"""

import sys
from functools import partial

import msgspec

from baton.protocol.config import ClusterConfig
from baton.protocol.errors import BatonError, ConfigError
from baton.router.core.health import ServedModel
from baton.router.http.api.model_format import ModelFormat
from baton.router.http.api.pooling_bodies import (
    PooledPrompts,
    PoolingEndpoint,
    pooled_prompts,
)
from baton.router.http.api.prepare import (
    parse_body,
    tokenized,
)
from baton.router.http.api.schema import Endpoint, ParsedRequest
from baton.router.http.api.tokens import TokenEndpoint, TokenResponse, token_response
from baton.router.text.chat_template import ChatTemplate
from baton.router.text.pooled_texts import PooledTexts, Prompts
from baton.router.text.tokenizer import (
    MAX_CHARS_ON_LOOP,
    Text,
)
from baton.router.worker import Lane, TooMuchWork, Worker, serve

# A body up to this size is parsed on the event loop, which takes a few milliseconds at most.
SMALL_BYTES = 128 * 1024


class Job(msgspec.Struct, frozen=True):
    """A body to prepare for the model that is served."""

    endpoint: Endpoint | TokenEndpoint | PoolingEndpoint
    model: ServedModel
    model_format: ModelFormat
    body: bytes


Reply = ParsedRequest | TokenResponse | PooledPrompts


class BodyWork:
    """Prepares the bodies of one router. Call `close` in the end."""

    def __init__(self, config: ClusterConfig, text: Text, template: ChatTemplate | None) -> None:
        self._text = text
        self._template = template
        self._format = ModelFormat.of(config.router, template)
        arguments = (config.model.path, config.model.chat_template)
        module = "baton.router.http.api.large_bodies"
        self._texts = PooledTexts(text, template, Prompts.load(config.model.path))
        replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
        self._worker = Worker[Job, Reply](module, arguments, replies)
        self._lane = Lane(2, cpu_s=30.0, memory_mib=512, wall_s=60.0)

    async def prepare(
        self, endpoint: Endpoint, model: ServedModel, body: bytes, client: str
    ) -> ParsedRequest:
        """Return what a client's body asks for. Raises `RequestError` or `Overloaded`."""
        if len(body) > SMALL_BYTES:
            prepared = await self._worked(Job(endpoint, model, self._format, body), client)
            assert isinstance(prepared, ParsedRequest)
            return prepared
        parsed = parse_body(endpoint, body, model, self._format)
        work = partial(tokenized, parsed, model, self._text, self._template)
        if _is_quick(parsed):
            return work()
        return await self._text.in_thread(len(body), work)

    async def token_response(
        self, endpoint: TokenEndpoint, model: ServedModel, body: bytes, client: str
    ) -> TokenResponse:
        """Return the response to a body of the tokenizer's endpoints. Raises as `prepare`."""
        if len(body) > SMALL_BYTES:
            response = await self._worked(Job(endpoint, model, self._format, body), client)
            assert isinstance(response, TokenResponse)
            return response
        work = partial(token_response, endpoint, body, model, self._text, self._template)
        return await self._text.in_thread(len(body), work)

    async def pooled_prompts(
        self, endpoint: PoolingEndpoint, model: ServedModel, body: bytes, client: str
    ) -> PooledPrompts:
        """Return what a body wants of prompts besides tokens. Raises as `prepare`."""
        if len(body) > SMALL_BYTES:
            asked = await self._worked(Job(endpoint, model, self._format, body), client)
            assert isinstance(asked, PooledPrompts)
            return asked
        work = partial(pooled_prompts, endpoint, body, model, self._texts)
        return await self._text.in_thread(len(body), work)

    def close(self) -> None:
        self._worker.close()

    async def _worked(self, job: Job, client: str) -> Reply:
        try:
            return await self._worker.run(job, self._lane, client)
        except TooMuchWork:
            text = "the body takes more time or memory to read than one request may have"
            raise TooMuchWork(text) from None


def _is_quick(parsed: ParsedRequest) -> bool:
    """Return whether handing the prompts to a thread would take longer than encoding them."""
    if parsed.echo:
        return False
    if len(parsed.prompts) > 1:
        return all(isinstance(prompt, list) for prompt in parsed.prompts)
    (prompt,) = parsed.prompts
    return isinstance(prompt, list) or (
        isinstance(prompt, str) and len(prompt) <= MAX_CHARS_ON_LOOP
    )


# --- the process --------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    descriptor, model_path, template_file = arguments
    text = Text.load(model_path)
    try:
        template = ChatTemplate.load(model_path, template_file)
    except ConfigError:  # the router has logged it, and serves all requests but chats
        template = None

    texts = PooledTexts(text, template, Prompts.load(model_path))

    def answer(job: Job) -> Reply:
        match job.endpoint:
            case "tokenize" | "detokenize" | "count_tokens" | "input_tokens":
                return token_response(job.endpoint, job.body, job.model, text, template)
            case "embeddings" | "score" | "rerank":
                return pooled_prompts(job.endpoint, job.body, job.model, texts)
        parsed = parse_body(job.endpoint, job.body, job.model, job.model_format)
        prepared = tokenized(parsed, job.model, text, template)
        # What is large has done its part: the prompts, and the tools, which are in `parsing`.
        return msgspec.structs.replace(prepared, prompts=(), tools=None)

    serve(int(descriptor), Job, answer)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BatonError as error:
        sys.exit(f"baton: {error.message}")
