"""What the endpoints compute that tokenize, detokenize or count the tokens of a prompt."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.protocol.errors import RequestError
from baton.router.core.health import ServedModel
from baton.router.http.api.anthropic import chat_of, count_decoder
from baton.router.http.api.decoding import decoded
from baton.router.http.api.prepare import check_ids, checked_prompt, lora_of
from baton.router.http.api.responses_body import parse_response
from baton.router.http.api.schema import Chat, ParsedRequest, check_continued
from baton.router.http.api.turns import (
    MAX_TURNS,
    ToolList,
    Turn,
    functions_of,
    plain_tools,
    plain_turns,
)
from baton.router.http.errors import blaming
from baton.router.text.chat_template import ChatTemplate
from baton.router.text.tokenizer import (
    Text,
)

TokenEndpoint = Literal["tokenize", "detokenize", "count_tokens", "input_tokens"]


class TokenResponse(msgspec.Struct, frozen=True, tag=True):
    """The response to a body, and the names of the fields that were ignored."""

    body: bytes
    ignored: tuple[str, ...] = ()


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /tokenize, with either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Turn], Meta(max_length=MAX_TURNS)] | None = None
    tools: ToolList | None = None
    add_special_tokens: bool | None = None  # true for a prompt, false for messages
    add_generation_prompt: bool | None = None  # true by default
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


def token_response(
    endpoint: TokenEndpoint,
    data: bytes,
    model: ServedModel,
    text: Text,
    template: ChatTemplate | None,
) -> TokenResponse:
    """Return the response to a body. Raises `RequestError`."""
    match endpoint:
        case "tokenize":
            tokenize, ignored = decoded(_tokenize_decoder, data)
            response = _tokenized(tokenize, ignored, model, text, template)
        case "detokenize":
            detokenize, ignored = decoded(_detokenize_decoder, data)
            response = _detokenized(detokenize, model, text)
        case "count_tokens":
            counted, ignored = decoded(count_decoder, data)
            num_tokens = _num_tokens(
                chat_of(counted, {}, ignored), model, text, template
            )
            response = msgspec.json.encode({"input_tokens": num_tokens})
        case "input_tokens":
            parsed = parse_response(data, {})
            ignored = [*parsed.ignored]
            num_tokens = _num_tokens(parsed, model, text, template)
            described = {"object": "response.input_tokens", "input_tokens": num_tokens}
            response = msgspec.json.encode(described)
    return TokenResponse(response, tuple(ignored))


def _tokenized(
    body: TokenizeBody,
    ignored: list[str],
    model: ServedModel,
    text: Text,
    template: ChatTemplate | None,
) -> bytes:
    lora_of(body.model, model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    prompt = body.prompt
    adds_tokens = body.add_special_tokens is not False
    if prompt is None:
        turns = plain_turns(body.messages or ())
        if not turns:
            raise RequestError("messages must not be empty", param="messages")
        tools = plain_tools(functions_of(body.tools or (), None, ignored))
        continues = body.continue_final_message
        if continues:
            check_continued(
                turns, add_generation_prompt=body.add_generation_prompt is True
            )
        generates = body.add_generation_prompt is not False and not continues
        chat = Chat(turns, generates, body.chat_template_kwargs, tools, continues)
        prompt = checked_prompt(chat, template)
        adds_tokens = body.add_special_tokens is True
    with blaming({"prompt": "prompt" if body.messages is None else "messages"}):
        token_ids = text.encode_now(prompt, adds_tokens, model.max_model_len)
    return msgspec.json.encode(
        {
            "count": len(token_ids),
            "max_model_len": model.max_model_len,
            "tokens": token_ids,
            "token_strs": text.spellings(token_ids) if body.return_token_strs else None,
        }
    )


def _detokenized(body: DetokenizeBody, model: ServedModel, text: Text) -> bytes:
    lora_of(body.model, model)
    if body.tokens:
        with blaming({"prompt": "tokens"}):
            check_ids(body.tokens, model)
    prompt = text.decode(body.tokens, skip_special_tokens=False)
    return msgspec.json.encode({"prompt": prompt})


def _num_tokens(
    parsed: ParsedRequest, model: ServedModel, text: Text, template: ChatTemplate | None
) -> int:
    """Return how many tokens the prompt of a chat has."""
    lora_of(parsed.model, model)
    (chat,) = parsed.prompts
    assert isinstance(chat, Chat)
    with blaming(parsed.sent):
        token_ids = text.encode_now(
            checked_prompt(chat, template), False, model.max_model_len
        )
    return len(token_ids)
