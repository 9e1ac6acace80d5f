"""A small client of an OpenAI-compatible server: it lists models and streams answers to chats.

`chat` uses it. Every failure is a `NodeError` of one line that names the server and its answer.
"""

import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import TypedDict

import aiohttp
import msgspec

from baton.protocol.errors import ConfigError, NodeError
from baton.runtime.tls import client_context

CONNECT_TIMEOUT_S = 5.0
# A server is silent while it computes a long prompt; baton sends a comment every 10 s.
SILENCE_TIMEOUT_S = 300.0
_DATA, _END = b"data:", b"[DONE]"


class ChatTurn(TypedDict):
    role: str
    content: str


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # another name that servers have for the same


class _StreamChoice(msgspec.Struct, frozen=True):
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class _StreamEvent(msgspec.Struct, frozen=True):
    choices: list[_StreamChoice] = []
    usage: Usage | None = None
    error: object = None


class Piece(msgspec.Struct, frozen=True):
    """A part of an answer: text or, in the last pieces, the finish reason and the usage.

    `thought` is what a reasoning model says before its answer.
    """

    text: str = ""
    thought: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None


class OpenAIClient:
    """A connection to one server. It is an asynchronous context manager."""

    def __init__(self, url: str, api_key: str = "", ca_file: str = "") -> None:
        """Take the server's URL, with or without `/v1`. Raises `ConfigError`.

        `ca_file` holds the authority of an https server's certificate; if it is empty, those that
        this machine trusts are used.
        """
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is not a URL such as http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=client_context(ca_file)),
            headers=headers,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_TIMEOUT_S
            ),
        )

    async def __aenter__(self) -> "OpenAIClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def models(self) -> list[str]:
        """Return the names of the models that the server offers. Raises `NodeError`."""
        try:
            async with self._session.get(f"{self.url}/v1/models") as answer:
                body = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error
        if answer.status != 200:
            raise self._refused(answer.status, body)
        try:
            return [str(model["id"]) for model in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise NodeError(f"{self.url}/v1/models is not a list of models") from error

    async def chat(
        self, model: str, messages: Sequence[ChatTurn], settings: Mapping[str, object]
    ) -> AsyncIterator[Piece]:
        """Yield the answer to `messages` in pieces as they arrive. Raises `NodeError`."""
        body = {
            **settings,
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._session.post(f"{self.url}/v1/chat/completions", json=body) as answer:
                if answer.status != 200:
                    raise self._refused(answer.status, await answer.read())
                async for line in answer.content:
                    data = line.strip().removeprefix(_DATA).strip()
                    if not line.startswith(_DATA) or data == _END:
                        continue
                    for piece in self._pieces(data):
                        yield piece
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error

    def _pieces(self, data: bytes) -> list[Piece]:
        try:
            chunk = msgspec.json.decode(data, type=_StreamEvent)
        except msgspec.DecodeError as error:
            raise NodeError(
                f"{self.url} sent an event that is not a chat chunk: {error}"
            ) from error
        if chunk.error is not None:
            raise NodeError(f"{self.url} ended the answer: {_message(chunk.error)}")
        pieces = [
            Piece(
                choice.delta.content or "",
                choice.delta.reasoning or choice.delta.reasoning_content or "",
                choice.finish_reason,
            )
            for choice in chunk.choices[:1]
        ]
        return [*pieces, Piece(usage=chunk.usage)] if chunk.usage is not None else pieces

    def _refused(self, status: int, body: bytes) -> NodeError:
        try:
            reason = _message(json.loads(body)["error"])
        except (ValueError, KeyError, TypeError):
            reason = body[:200].decode(errors="replace").strip() or "no reason given"
        return NodeError(f"{self.url} answered {status}: {reason}")

    def _unreachable(self, error: Exception) -> NodeError:
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            why = getattr(error.certificate_error, "verify_message", error.certificate_error)
            reason = (
                f"the server's certificate is not trusted ({why}); name its authority with "
                "--ca-file"
            )
        elif isinstance(error, aiohttp.ClientConnectorError):
            # asyncio replaces the system's text with its own, which shows the address as a tuple.
            why = os.strerror(error.errno) if error.errno else error.os_error
            reason = f"{why}; start a server, or name one with --url"
        else:
            reason = str(error) or type(error).__name__
        return NodeError(f"no answer from {self.url}: {reason}")


def _message(error: object) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
