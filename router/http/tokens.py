"""The endpoints of the tokenizer, in vLLM's form: /tokenize, /detokenize and /tokenizer_info."""

import asyncio
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from baton.protocol.config import ClusterConfig
from baton.protocol.errors import RequestError
from baton.router.core.health import ServedModel
from baton.router.http.api.anthropic import CountBody, chat_of, count_decoder
from baton.router.http.api.prepare import check_ids, checked_prompt, lora_of
from baton.router.http.api.schema import Chat
from baton.router.http.api.turns import (
    ToolList,
    Turn,
    plain_tools,
    plain_turn,
)
from baton.router.http.connections import MIB, Bodies
from baton.router.http.errors import blaming, decoded
from baton.router.text.chat_template import ChatTemplate
from baton.router.text_router import TextRouter

# These bodies are parsed on the event loop.
MAX_BODY_BYTES = 4 * MIB


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /tokenize, with either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Turn] | None = None
    tools: ToolList | None = None
    add_special_tokens: bool | None = None  # true for a prompt, false for messages
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, object] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


S = TypeVar("S", TokenizeBody, DetokenizeBody, CountBody)

_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


class TokenEndpoints:
    def __init__(
        self,
        engine: TextRouter,
        config: ClusterConfig,
        bodies: Bodies,
        chat_template: ChatTemplate | None,
    ) -> None:
        self._engine = engine
        self._chat_template = chat_template
        self._bodies = bodies
        self._config_file = Path(config.model.path) / "tokenizer_config.json"

    async def tokenize(self, request: web.Request) -> web.Response:
        model, text = self._engine.get_model_config(), self._engine.get_tokenizer()
        body = await self._read(request, model, _tokenize_decoder)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        prompt, adds_tokens = body.prompt, body.add_special_tokens is not False
        if prompt is None:
            turns = [
                plain_turn(f"messages[{index}]", turn)
                for index, turn in enumerate(body.messages or [])
            ]
            if not turns:
                raise RequestError("messages must not be empty", param="messages")
            tools = plain_tools(body.tools)
            chat = Chat(turns, body.add_generation_prompt, body.chat_template_kwargs, tools)
            prompt = await asyncio.to_thread(checked_prompt, chat, self._chat_template)
            adds_tokens = body.add_special_tokens is True
        with blaming({"prompt": "prompt" if body.messages is None else "messages"}):
            token_ids = await text.encode(
                prompt, add_special_tokens=adds_tokens, max_tokens=model.max_model_len
            )
        return _json(
            {
                "count": len(token_ids),
                "max_model_len": model.max_model_len,
                "tokens": token_ids,
                "token_strs": text.spellings(token_ids) if body.return_token_strs else None,
            }
        )

    async def of_message(self, request: web.Request) -> web.Response:
        """Answer POST /v1/messages/count_tokens."""
        model = self._engine.get_model_config()
        body = await self._read(request, model, count_decoder)
        (chat,) = chat_of(body, {}).prompts
        assert isinstance(chat, Chat)
        prompt = await asyncio.to_thread(checked_prompt, chat, self._chat_template)
        with blaming({"prompt": "messages"}):
            token_ids = await self._engine.get_tokenizer().encode(
                prompt, add_special_tokens=False, max_tokens=model.max_model_len
            )
        return _json({"input_tokens": len(token_ids)})

    async def detokenize(self, request: web.Request) -> web.Response:
        model, text = self._engine.get_model_config(), self._engine.get_tokenizer()
        body = await self._read(request, model, _detokenize_decoder)
        if body.tokens:
            with blaming({"prompt": "tokens"}):
                check_ids(body.tokens, model)
        prompt = await asyncio.to_thread(text.decode, body.tokens, skip_special_tokens=False)
        return _json({"prompt": prompt})

    async def info(self, request: web.Request) -> web.Response:
        try:
            data = await asyncio.to_thread(self._config_file.read_bytes)
            return _json(msgspec.json.decode(data, type=dict[str, object]))
        except (OSError, msgspec.DecodeError):
            text = "the model has no tokenizer_config.json"
            raise RequestError(text, code="unknown_url", http_status=404) from None

    async def _read(
        self, request: web.Request, model: ServedModel, decoder: msgspec.json.Decoder[S]
    ) -> S:
        token_bytes = self._engine.get_tokenizer().max_token_bytes
        max_bytes = min(self._bodies.limit(model, token_bytes), MAX_BODY_BYTES)
        with self._bodies.room() as room:
            body = decoded(decoder, await self._bodies.read(request, room, max_bytes))
        lora_of(body.model, model)
        return body


def _json(value: dict[str, object]) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
