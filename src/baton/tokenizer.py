"""`ModelTokenizer`, the tokenizer that `get_tokenizer` returns, which has no coroutines.

Its methods have the names of those of `transformers`' tokenizers; that package is not loaded. It
uses the router's tokenizer and chat template, so the model reads text that was encoded here in the
same way.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, overload

import msgspec

from baton.protocol.config import ModelConfig
from baton.protocol.errors import RequestError
from baton.router.http.api.schema import check_continued
from baton.router.http.api.turns import ToolList, functions_of, plain_tools
from baton.router.text.chat_template import ChatTemplate
from baton.router.text.tokenizer import Text

# A turn: "role", "content" and other fields that the template reads.
ChatMessage = Mapping[str, object]
Conversation = Sequence[ChatMessage]


class ModelTokenizer:
    """The tokenizer of one model. Any thread may call it."""

    def __init__(self, text: Text, model: ModelConfig) -> None:
        self._text = text
        self._model = model
        self._template: ChatTemplate | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, including those that the tokenizer adds to every text."""
        return self._text.encode_now(text, add_special_tokens)

    def decode(
        self, token_ids: int | Sequence[int], skip_special_tokens: bool = False
    ) -> str:
        """Return the text of `token_ids`."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._text.decode(ids, skip_special_tokens=skip_special_tokens)

    @overload
    def apply_chat_template(
        self,
        conversation: Conversation,
        *,
        tokenize: Literal[True] = True,
        add_generation_prompt: bool = False,
        **options: object,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        conversation: Conversation,
        *,
        tokenize: Literal[False],
        add_generation_prompt: bool = False,
        **options: object,
    ) -> str: ...

    def apply_chat_template(
        self,
        conversation: Conversation,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **options: object,
    ) -> str | list[int]:
        """Return the prompt that the model's chat template makes from a conversation.

        `add_generation_prompt` opens the turn of the assistant, and the option
        `continue_final_message` leaves the last message open for the model to continue. The
        template sees `tools`, in OpenAI's form, and the other `options`.
        Raises `RequestError` if the model has no template or the template refuses the messages.
        """
        for name in ("documents", "chat_template"):
            if options.pop(name, None) is not None:
                text = f"{name} is not supported: leave it out"
                raise RequestError(text, code="unsupported", param=name)
        template = self._chat_template()
        messages = [
            _plain(index, message) for index, message in enumerate(conversation)
        ]
        tools = _plain_tools(options.pop("tools", None))
        continues = bool(options.pop("continue_final_message", False))
        if continues:
            check_continued(messages, add_generation_prompt=add_generation_prompt)
        prompt = template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            options=options,
        )
        template.check_shown(
            prompt,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            options=options,
        )
        if continues:
            prompt = template.open_ended(messages, tools=tools, options=options)
        return self.encode(prompt, add_special_tokens=False) if tokenize else prompt

    def _chat_template(self) -> ChatTemplate:
        self._template = self._template or ChatTemplate.load(
            self._model.path, self._model.chat_template
        )
        if self._template is None:
            raise RequestError(
                "this model has no chat template", code="no_chat_template"
            )
        return self._template


def _plain(index: int, message: ChatMessage) -> dict[str, object]:
    """Return a message whose content is text or a list of text parts."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        text = f"message {index} must be a dict with a role and a content"
        raise RequestError(text, param="messages")
    content = message.get("content") or ""
    parts = (
        content if isinstance(content, list) else [{"type": "text", "text": content}]
    )
    texts = [found for part in parts if (found := _text_of(part)) is not None]
    if len(texts) < len(parts):
        text = f"the content of message {index} must be text or a list of text parts"
        raise RequestError(text, param="messages")
    if isinstance(content, str):
        return {**message, "content": content}
    return {**message, "content": [{"type": "text", "text": text} for text in texts]}


def _plain_tools(tools: object) -> list[dict[str, object]] | None:
    try:
        declared = msgspec.convert(tools, ToolList | None)
    except msgspec.ValidationError as error:
        raise RequestError(f"tools: {error}", param="tools") from error
    return plain_tools(functions_of(declared or (), None, []))


def _text_of(part: object) -> str | None:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        return None
    text = part.get("text")
    return text if isinstance(text, str) else None
