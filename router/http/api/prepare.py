"""From a body to the prompts that a model gets: its adapter, its chat template, its tool calls."""

from array import array
from collections.abc import Callable, Mapping

import msgspec

from baton.protocol.errors import RequestError
from baton.router.core.admission import check_prompt
from baton.router.core.health import ServedModel
from baton.router.http.api.anthropic import parse_message
from baton.router.http.api.responses_body import parse_response
from baton.router.http.api.schema import (
    BodyPrompt,
    Chat,
    Endpoint,
    ParsedRequest,
    parse_chat,
    parse_completion,
)
from baton.router.http.errors import blaming
from baton.router.text.chat_template import ChatTemplate
from baton.router.text.tokenizer import Text
from baton.runtime.log import clip

_PARSERS: dict[Endpoint, Callable[[bytes, Mapping[str, object]], ParsedRequest]] = {
    "completions": parse_completion,
    "chat": parse_chat,
    "responses": parse_response,
    "messages": parse_message,
}


class Job(msgspec.Struct, frozen=True):
    """A body to prepare for the model that is served."""

    endpoint: Endpoint
    model: ServedModel


class Prepared(msgspec.Struct, frozen=True):
    """A checked body whose prompts are token ids, each packed by `packed`."""

    parsed: ParsedRequest
    prompts: list[bytes]
    echoes: list[str]


def prepare(job: Job, data: bytes, text: Text, template: ChatTemplate | None) -> Prepared:
    """Return what a body asks for. Raises `RequestError`."""
    parsed = parse_body(job, data)
    prompts, echoes = [], []
    for prompt in parsed.prompts:
        with blaming(parsed.sent):
            token_ids = _ids_of(prompt, job.model, text, template)
            check_ids(token_ids, job.model)
        prompts.append(packed(token_ids))
        if parsed.echo:
            echoes.append(prompt if isinstance(prompt, str) else text.decode(token_ids))
    return Prepared(msgspec.structs.replace(parsed, prompts=()), prompts, echoes)


def parse_body(job: Job, data: bytes) -> ParsedRequest:
    """Return the checked body of a request to the model. Raises `RequestError`."""
    parse, model = _PARSERS[job.endpoint], job.model
    parsed = parse(data, model.sampling)
    if not (lora := lora_of(parsed.model, model)):
        return parsed
    return msgspec.structs.replace(parsed, scope=msgspec.structs.replace(parsed.scope, lora=lora))


def lora_of(name: str | None, model: ServedModel) -> str:
    """Return the adapter that a body's `model` names, or "" for the model itself.

    Raises `RequestError` if this server has neither.
    """
    if not name or name in (model.name, model.path):
        return ""
    if name in model.lora_modules:
        return name
    known = ", ".join(map(repr, (model.name, *model.lora_modules)))
    text = f"the model {clip(name)!r} does not exist; this server has {known}"
    raise RequestError(text, code="model_not_found", param="model", http_status=404)


def check_ids(token_ids: list[int], model: ServedModel) -> None:
    """Raise `RequestError` for a prompt that the model cannot take."""
    check_prompt(token_ids, model.vocab_size, model.max_model_len)


def rendered(chat: Chat, template: ChatTemplate | None) -> str:
    """Return a chat as the text of a prompt. Raises `RequestError`."""
    if template is None:
        text = "this model has no chat template; use /v1/completions"
        raise RequestError(text, code="no_chat_template", http_status=404)
    return template.render(
        chat.messages,
        tools=chat.tools,
        add_generation_prompt=chat.add_generation_prompt,
        options=chat.options,
    )


def checked_prompt(chat: Chat, template: ChatTemplate | None) -> str:
    """Return a chat as the text of a prompt, which has all that was sent. Raises `RequestError`."""
    prompt = rendered(chat, template)
    assert template is not None, "it has rendered the prompt"
    template.check_shown(
        prompt,
        chat.messages,
        tools=chat.tools,
        add_generation_prompt=chat.add_generation_prompt,
        options=chat.options,
    )
    return prompt


def packed(token_ids: list[int]) -> bytes:
    return array("i", token_ids).tobytes()


def unpacked(data: bytes) -> list[int]:
    return array("i", data).tolist()


def _ids_of(
    prompt: BodyPrompt, model: ServedModel, text: Text, template: ChatTemplate | None
) -> list[int]:
    max_tokens = model.max_model_len - 1
    if isinstance(prompt, str):
        return text.encode_now(prompt, max_tokens=max_tokens)
    if isinstance(prompt, Chat):
        return text.encode_now(checked_prompt(prompt, template), False, max_tokens)
    return prompt
