"""From a body to the prompts that a model gets: its adapter, its chat template, its tool calls."""

from array import array
from collections.abc import Callable, Mapping

import msgspec

from baton.protocol.errors import RequestError
from baton.router.core.admission import check_prompt
from baton.router.core.health import ServedModel
from baton.router.http.api.anthropic import parse_message
from baton.router.http.api.model_format import ModelFormat
from baton.router.http.api.responses_body import parse_response
from baton.router.http.api.schema import (
    LONGEST_PROMPT,
    BodyPrompt,
    Chat,
    Endpoint,
    ParsedRequest,
    parse_chat,
    parse_completion,
)
from baton.router.http.errors import blaming
from baton.router.text.chat_template import ChatTemplate
from baton.router.text.grammars import form_of
from baton.router.text.tokenizer import Text
from baton.runtime.log import clip

_PARSERS: dict[Endpoint, Callable[[bytes, Mapping[str, object]], ParsedRequest]] = {
    "completions": parse_completion,
    "chat": parse_chat,
    "responses": parse_response,
    "messages": parse_message,
}


def parse_body(
    endpoint: Endpoint, data: bytes, model: ServedModel, model_format: ModelFormat
) -> ParsedRequest:
    """Return the checked body of a request to the model.

    Raises `RequestError`. A form is text, however large the schema in the body is.
    """
    parsed = _PARSERS[endpoint](data, model.sampling)
    if lora := lora_of(parsed.model, model):
        scope = msgspec.structs.replace(parsed.scope, lora=lora)
        parsed = msgspec.structs.replace(parsed, scope=scope)
    parsed = model_format.apply(parsed)
    wanted = parsed.params.structured_outputs
    if wanted is not None:
        with blaming(parsed.sent):
            form = form_of(wanted)
        if form.kind in ("json", "structural_tag"):
            sampling = {**parsed.sampling, "structured_outputs": {form.kind: form.text}}
            parsed = msgspec.structs.replace(parsed, sampling=sampling)
    return parsed


def tokenized(
    parsed: ParsedRequest, model: ServedModel, text: Text, template: ChatTemplate | None
) -> ParsedRequest:
    """Return a request with its prompts as token ids. Raises `RequestError`."""
    num_kept = _num_kept(parsed, model)
    prompts = []
    echoes = []
    for prompt in parsed.prompts:
        with blaming(parsed.sent):
            token_ids = _ids_of(prompt, parsed, model, text, template)
            if num_kept is not None:
                token_ids = token_ids[-num_kept:]
            check_ids(token_ids, model)
        prompts.append(packed(token_ids))
        if parsed.echo:
            if num_kept is None and isinstance(prompt, str):
                echoes.append(prompt)
            else:
                echoes.append(text.decode(token_ids))
    return msgspec.structs.replace(
        parsed, packed_prompts=tuple(prompts), echoes=tuple(echoes)
    )


def lora_of(name: str | None, model: ServedModel) -> str:
    """Return the adapter that a body's `model` names, as requests do; "" for the model itself.

    Raises `RequestError` if this server has neither.
    """
    names = (model.name, *model.other_names)
    if not name or name in names or name == model.path:
        return ""
    if name in model.lora_modules:
        return name
    if name in model.run_time_loras:
        return model.run_time_loras[name]
    known = ", ".join(map(repr, (*names, *model.lora_modules, *model.run_time_loras)))
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
    if chat.continues_final:
        return template.open_ended(
            chat.messages, tools=chat.tools, options=chat.options
        )
    return prompt


def packed(token_ids: list[int]) -> bytes:
    """Pack the ids of a prompt that `check_vocabulary` accepts, so that each fits its place."""
    return array("i", token_ids).tobytes()


def num_packed(data: bytes) -> int:
    return len(data) // array("i").itemsize


def unpacked(data: bytes) -> list[int]:
    return array("i", data).tolist()


def _num_kept(parsed: ParsedRequest, model: ServedModel) -> int | None:
    """Return how many of its last tokens are left of a prompt; None for all.

    Raises `RequestError`.
    """
    num_kept = parsed.truncate_prompt_tokens
    if num_kept is None:
        return None
    if num_kept > model.max_model_len:
        text = f"truncate_prompt_tokens can be at most {model.max_model_len}, the model's length"
        raise RequestError(text, param="truncate_prompt_tokens")
    if num_kept == LONGEST_PROMPT:
        num_kept = model.max_model_len - (parsed.params.max_tokens or 1)
    if num_kept < 1:
        text = "max_tokens leaves no room for a prompt in the model's length"
        raise RequestError(text, param="truncate_prompt_tokens")
    return num_kept


def _ids_of(
    prompt: BodyPrompt,
    parsed: ParsedRequest,
    model: ServedModel,
    text: Text,
    template: ChatTemplate | None,
) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    if isinstance(prompt, Chat):
        prompt = checked_prompt(prompt, template)
    # A prompt that is cut may be longer than the model takes.
    is_cut = parsed.truncate_prompt_tokens is not None
    max_tokens = None if is_cut else model.max_model_len - 1
    return text.encode_now(prompt, parsed.add_special_tokens, max_tokens)
