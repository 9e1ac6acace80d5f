"""Turn a body into token ids, in a process of its own: `python -m baton.router.http.body_process`.

Parsing megabytes of JSON holds Python's lock for up to a second, which would stop every stream of
the router, so this process does it, one body at a time. It ends with the socket that it inherits,
and must never load torch.
"""

import os
import socket
import struct
import sys
from array import array
from collections.abc import Callable, Mapping

import msgspec

from baton.protocol.errors import BatonError, ConfigError, Failure, RequestError
from baton.router.chat_template import ChatTemplate
from baton.router.health import ServedModel
from baton.router.http.decoding import blaming
from baton.router.http.message_body import parse_message
from baton.router.http.response_body import parse_response
from baton.router.http.schema import (
    Ask,
    BodyPrompt,
    Chat,
    Endpoint,
    parse_chat,
    parse_completion,
)
from baton.router.queue import Limits, check_prompt
from baton.router.text import Text
from baton.runtime.log import clip
from baton.runtime.process import die_with_parent

# Running streams matter more than the start of a long prompt.
NICE = 5
# The lengths of a job and of its body, and the length of a reply, in bytes.
JOB_HEAD = struct.Struct("<II")
REPLY_HEAD = struct.Struct("<I")


_PARSERS: dict[Endpoint, Callable[[bytes, Mapping[str, object]], Ask]] = {
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

    ask: Ask  # its prompts removed
    prompts: list[bytes]
    echoes: list[str]


def prepare(job: Job, data: bytes, text: Text, template: ChatTemplate | None) -> Prepared:
    """Return what a body asks for. Raises `RequestError`."""
    ask = parsed(job, data)
    prompts, echoes = [], []
    for prompt in ask.prompts:
        with blaming(ask.sent):
            token_ids = _ids_of(prompt, job.model, text, template)
            check_ids(token_ids, job.model)
        prompts.append(packed(token_ids))
        if ask.echo:
            echoes.append(prompt if isinstance(prompt, str) else text.decode(token_ids))
    return Prepared(msgspec.structs.replace(ask, prompts=()), prompts, echoes)


def parsed(job: Job, data: bytes) -> Ask:
    """Return the checked body of a request to the model. Raises `RequestError`."""
    parse, model = _PARSERS[job.endpoint], job.model
    ask = parse(data, model.sampling)
    if not (lora := lora_of(ask.model, model)):
        return ask
    return msgspec.structs.replace(ask, scope=msgspec.structs.replace(ask.scope, lora=lora))


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
    limits = Limits(model.max_model_len, model.vocab_size, model.block_size, None, None)
    check_prompt(token_ids, limits)


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


class Reply(msgspec.Struct, frozen=True):
    """Exactly one of the two is set."""

    prepared: Prepared | None = None
    failure: Failure | None = None


def main(arguments: list[str]) -> int:
    """Serve the socket until its other end closes."""
    descriptor, model_path, template_file = arguments
    os.nice(NICE)
    stream = socket.socket(fileno=int(descriptor))
    text = Text.load(model_path)
    try:
        template = ChatTemplate.load(model_path, template_file)
    except ConfigError:  # the router has logged it, and serves all requests but chats
        template = None
    decoder = msgspec.msgpack.Decoder(Job)
    encoder = msgspec.msgpack.Encoder()
    while head := _received(stream, JOB_HEAD.size):
        job_bytes, body_bytes = JOB_HEAD.unpack(head)
        job, body = _received(stream, job_bytes), _received(stream, body_bytes)
        reply = encoder.encode(_reply_to(decoder.decode(job), body, text, template))
        stream.sendall(REPLY_HEAD.pack(len(reply)))
        stream.sendall(reply)
    return 0


def _reply_to(job: Job, body: bytes, text: Text, template: ChatTemplate | None) -> Reply:
    try:
        return Reply(prepare(job, body, text, template))
    except BatonError as error:
        return Reply(failure=error.to_failure())


def _received(stream: socket.socket, num_bytes: int) -> bytes:
    """Return that many bytes, or none at the end of the stream."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        received = stream.recv_into(view)
        if not received:
            return b""
        view = view[received:]
    return bytes(data)


if __name__ == "__main__":
    die_with_parent()
    try:
        sys.exit(main(sys.argv[1:]))
    except BatonError as error:
        sys.exit(f"baton: {error.message}")
