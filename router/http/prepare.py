"""Turn the body of a request into token ids in one call, off the event loop.

`body_process` calls `prepare` for large bodies; `handlers` does the same step by step for small
ones, with `parsed`, `check_name` and `rendered`. Nothing here does I/O.
"""

from array import array

import msgspec

from baton.protocol.errors import RequestError
from baton.router.chat_template import ChatTemplate
from baton.router.health import ServedModel
from baton.router.http.schema import Ask, BodyPrompt, Chat, parse_chat, parse_completion
from baton.router.queue import Limits, check_prompt
from baton.router.text import Text
from baton.runtime.log import clip


class Job(msgspec.Struct, frozen=True):
    """A body to prepare for the model that is served."""

    is_chat: bool
    model: ServedModel


class Prepared(msgspec.Struct, frozen=True):
    """A checked body whose prompts are token ids, each packed by `packed`."""

    ask: Ask  # its prompts removed
    prompts: list[bytes]
    echoes: list[str]


def prepare(job: Job, data: bytes, text: Text, template: ChatTemplate | None) -> Prepared:
    """Return what a body asks for. Raises `RequestError`."""
    ask = parsed(job, data)
    check_name(ask.model, job.model)
    prompts, echoes = [], []
    for prompt in ask.prompts:
        token_ids = _ids_of(prompt, job.model, text, template)
        check_ids(token_ids, job.model)
        prompts.append(packed(token_ids))
        if ask.echo:
            echoes.append(prompt if isinstance(prompt, str) else text.decode(token_ids))
    return Prepared(msgspec.structs.replace(ask, prompts=()), prompts, echoes)


def parsed(job: Job, data: bytes) -> Ask:
    parse = parse_chat if job.is_chat else parse_completion
    return parse(data, job.model.sampling)


def check_name(name: str | None, model: ServedModel) -> None:
    """Raise `RequestError` if a client names a model that is not served."""
    if name and name not in (model.name, model.path):
        text = f"the model {clip(name)!r} does not exist; this server has {model.name!r}"
        raise RequestError(text, code="model_not_found", param="model", http_status=404)


def check_ids(token_ids: list[int], model: ServedModel) -> None:
    """Raise `RequestError` for a prompt that the model cannot take."""
    limits = Limits(model.max_model_len, model.vocab_size, model.block_size, None, None)
    check_prompt(token_ids, limits)


def rendered(chat: Chat, template: ChatTemplate | None) -> str:
    """Return a chat as the text of a prompt. Raises `RequestError`."""
    if template is None:
        text = "this model has no chat template; use /v1/completions"
        raise RequestError(text, code="no_chat_template", http_status=404)
    return template.render(
        chat.messages, add_generation_prompt=chat.add_generation_prompt, options=chat.options
    )


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
        return text.encode_now(rendered(prompt, template), False, max_tokens)
    return prompt
