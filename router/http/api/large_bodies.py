"""Turn bodies into token ids: small ones in this process, and large ones in one of its own.

Parsing megabytes of JSON, and filling a template with them, holds Python's lock for up to a second,
which would stop every stream of the router.
"""

import sys
from functools import partial
from typing import TypeVar

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


AnyEndpoint = Endpoint | TokenEndpoint | PoolingEndpoint
# A body for the model that is served.
Job = tuple[AnyEndpoint, ServedModel, bytes]
Reply = ParsedRequest | TokenResponse | PooledPrompts
R = TypeVar("R", ParsedRequest, TokenResponse, PooledPrompts)


class Preparing:
    """Turns bodies into what is asked for, with prompts as token ids, in either process."""

    def __init__(
        self,
        text: Text,
        template: ChatTemplate | None,
        model_format: ModelFormat,
        path: str,
    ) -> None:
        self.text = text
        self._template = template
        self._format = model_format
        self._texts = PooledTexts(text, template, Prompts.load(path))

    def reply(self, endpoint: AnyEndpoint, model: ServedModel, body: bytes) -> Reply:
        """Return what a body asks for. Raises `RequestError`."""
        match endpoint:
            case "tokenize" | "detokenize" | "count_tokens" | "input_tokens":
                return token_response(endpoint, body, model, self.text, self._template)
            case "embeddings" | "score" | "rerank":
                return pooled_prompts(endpoint, body, model, self._texts)
        return self.tokenized(self.parsed(endpoint, model, body), model)

    def parsed(
        self, endpoint: Endpoint, model: ServedModel, body: bytes
    ) -> ParsedRequest:
        return parse_body(endpoint, body, model, self._format)

    def tokenized(self, parsed: ParsedRequest, model: ServedModel) -> ParsedRequest:
        return tokenized(parsed, model, self.text, self._template)


class BodyWork:
    """Prepares the bodies of one router. Call `close` in the end."""

    def __init__(
        self, config: ClusterConfig, text: Text, template: ChatTemplate | None
    ) -> None:
        model_format = ModelFormat.of(config.router, template)
        path = config.model.path
        self._preparing = Preparing(text, template, model_format, path)
        arguments = (
            path,
            config.model.chat_template,
            model_format.tools,
            model_format.reasoning,
        )
        module = "baton.router.http.api.large_bodies"
        replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
        self._worker = Worker[Job, Reply](module, arguments, replies)
        self._lane = Lane(2, cpu_s=30.0, memory_mib=512, wall_s=60.0)

    async def prepare(
        self, endpoint: Endpoint, model: ServedModel, body: bytes, client: str
    ) -> ParsedRequest:
        """Return what a client's body asks for. Raises `RequestError` or `Overloaded`."""
        if len(body) > SMALL_BYTES:
            return await self._worked(ParsedRequest, (endpoint, model, body), client)
        parsed = self._preparing.parsed(endpoint, model, body)
        work = partial(self._preparing.tokenized, parsed, model)
        if _is_quick(parsed):
            return work()
        return await self._preparing.text.in_thread(len(body), work)

    async def token_response(
        self, endpoint: TokenEndpoint, model: ServedModel, body: bytes, client: str
    ) -> TokenResponse:
        """Return the response to a body of the tokenizer's endpoints. Raises as `prepare`."""
        return await self._off_loop(TokenResponse, (endpoint, model, body), client)

    async def pooled_prompts(
        self, endpoint: PoolingEndpoint, model: ServedModel, body: bytes, client: str
    ) -> PooledPrompts:
        """Return what a body wants of prompts besides tokens. Raises as `prepare`."""
        return await self._off_loop(PooledPrompts, (endpoint, model, body), client)

    def close(self) -> None:
        self._worker.close()

    async def _off_loop(self, kind: type[R], job: Job, client: str) -> R:
        _, _, body = job
        if len(body) > SMALL_BYTES:
            return await self._worked(kind, job, client)
        reply = await self._preparing.text.in_thread(
            len(body), partial(self._preparing.reply, *job)
        )
        assert isinstance(reply, kind)
        return reply

    async def _worked(self, kind: type[R], job: Job, client: str) -> R:
        try:
            reply = await self._worker.run(job, self._lane, client)
        except TooMuchWork:
            text = (
                "the body takes more time or memory to read than one request may have"
            )
            raise TooMuchWork(text) from None
        assert isinstance(reply, kind)
        return reply


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
    descriptor, model_path, template_file, tools, reasoning = arguments
    text = Text.load(model_path)
    try:
        template = ChatTemplate.load(model_path, template_file)
    except ConfigError:  # the router has logged it, and serves all requests but chats
        template = None
    preparing = Preparing(text, template, ModelFormat(tools, reasoning), model_path)

    def answer(job: Job) -> Reply:
        reply = preparing.reply(*job)
        if isinstance(reply, ParsedRequest):
            # What is large has done its part: the prompts, and the tools, which are in `parsing`.
            return msgspec.structs.replace(reply, prompts=(), tools=None)
        return reply

    jobs: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)
    serve(int(descriptor), jobs, answer)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BatonError as error:
        sys.exit(f"baton: {error.message}")
