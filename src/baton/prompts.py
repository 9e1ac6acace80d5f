"""The forms in which a prompt may be given to `LLM` and `AsyncLLM`. Nothing is tokenized here."""

from collections.abc import Sequence
from typing import NamedTuple, NotRequired, TypedDict

import msgspec

from baton.protocol.errors import RequestError


class TextPrompt(TypedDict):
    """Text. Only prompts with the same `cache_salt` share blocks of the prefix caches."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids, and the text that outputs show as their prompt."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str | None]
    cache_salt: NotRequired[str]


Prompt = str | list[int] | TextPrompt | TokensPrompt


class LoRARequest(msgspec.Struct, frozen=True):
    """Names an adapter, which `LLM` loads when it is first asked for. The number means nothing."""

    lora_name: str
    lora_int_id: int = 1
    # Its folder; it may be left out for one of `model.lora_modules`.
    lora_path: str = ""


class GivenPrompt(NamedTuple):
    content: str | list[int]  # what the model reads
    text: str | None  # what outputs show as the prompt
    cache_salt: str = ""


def given_prompt(prompt: Prompt) -> GivenPrompt:
    """Return the content of `prompt`. Raises `RequestError` if it has none of the forms."""
    if isinstance(prompt, dict) and "cache_salt" in prompt:
        salt = prompt["cache_salt"]
        if not isinstance(salt, str) or not salt:
            raise RequestError(
                "cache_salt must be a text that is not empty", param="cache_salt"
            )
        unsalted = {
            name: value for name, value in prompt.items() if name != "cache_salt"
        }
        return given_prompt(unsalted)._replace(cache_salt=salt)  # type: ignore[arg-type]
    match prompt:
        case str():
            return GivenPrompt(prompt, prompt)
        case list():
            return GivenPrompt(_checked(prompt), None)
        case {
            "prompt": str() | None as text,
            "prompt_token_ids": list() as ids,
            **more,
        } if not more:
            return GivenPrompt(_checked(ids), text)
        case {"prompt_token_ids": list() as ids, **more} if not more:
            return GivenPrompt(_checked(ids), None)
        case {"prompt": str() as text, **more} if not more:
            return GivenPrompt(text, text)
    raise RequestError(
        "a prompt must be text, a list of token ids, or a dict of prompt, prompt_token_ids or both",
        param="prompt",
    )


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or many as a list. A list of ints is one prompt of token ids."""
    if isinstance(prompts, str | dict):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            "prompts must be one prompt or a list of prompts", param="prompts"
        )
    many = list(prompts)
    if many and isinstance(many[0], int):
        return [many]  # type: ignore[list-item]
    return many  # type: ignore[return-value]


def _checked(token_ids: list[int]) -> list[int]:
    if not all(type(token_id) is int for token_id in token_ids):
        raise RequestError("token ids must be integers", param="prompt")
    return token_ids
