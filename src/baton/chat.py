"""`baton chat`: a conversation with a running server in the terminal, or one response for a script.

It works with any server that has OpenAI's API. Ctrl-C ends a response and keeps the part that has
arrived; Ctrl-D, or Ctrl-C at the prompt, ends the conversation.
"""

import contextlib
import http.client
import os
import ssl
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
from rich.console import Console
from rich.text import Text

from baton.protocol.errors import BatonError, ConfigError, NodeError
from baton.runtime.fields import FlagParser
from baton.runtime.tls import client_context
from baton.runtime.unix_socket import connection_to, is_url

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "BATON_API_KEY"
CONNECT_TIMEOUT_S = 5.0
# A server is silent while it computes a long prompt; baton sends a comment every 10 s.
SILENCE_TIMEOUT_S = 300.0
FENCE = '"""'
COMMANDS = (
    f"/reset forgets the conversation, /exit ends it, {FENCE} encloses several lines"
)


def main(words: Sequence[str]) -> int:
    """Run `baton chat` with its flags and return the exit code. Raises `BatonError`."""
    flags = parser().parse_args(list(words))
    key = flags.api_key or os.environ.get(KEY_VARIABLE, "")
    given = {"max_tokens": flags.max_tokens, "temperature": flags.temperature}
    sampling = {name: value for name, value in given.items() if value is not None}
    chat = Chat(flags.url, flags.model, key, flags.ca_file, flags.system, sampling)
    if not flags.message:
        return chat.converse()
    chat.say(flags.message)
    return 0


def parser() -> FlagParser:
    built = FlagParser(
        "baton chat", description="Talk to a running server in the terminal."
    )
    add = built.add_argument
    add(
        "message",
        nargs="?",
        default="",
        help="one message; without it, a conversation begins",
    )
    add(
        "--url", default=DEFAULT_URL, help=f"URL of the server (default: {DEFAULT_URL})"
    )
    add(
        "--model",
        default="",
        help="model to use (default: the first one that the server lists)",
    )
    add("--system", default="", help="system message before the conversation")
    add("--api-key", default="", help=f"API key (default: the variable {KEY_VARIABLE})")
    add("--ca-file", metavar="PATH", default="",
        help="PEM file with the authority that signed an https server's certificate")  # fmt: skip
    add("--max-tokens", type=int, help="longest response, in tokens")
    add("--temperature", type=float, help="sampling temperature; 0 is greedy")
    return built


@dataclass
class Chat:
    """A conversation with one model; `messages` is sent to the server each time."""

    url: str  # with or without /v1
    model: str = ""
    api_key: str = ""
    ca_file: str = ""
    system: str = ""
    sampling: dict[str, object] = field(default_factory=dict)
    console: Console = field(
        default_factory=lambda: Console(highlight=False, soft_wrap=True)
    )
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not is_url(self.url):
            raise ConfigError(f"{self.url!r} is not a URL such as {DEFAULT_URL}")
        self.url = self.url.rstrip("/").removesuffix("/v1")

    def converse(self) -> int:
        """Respond to each message on stdin until it ends; return the exit code."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (line editing and history for `input`)
            self._choose_model()
            self.console.print(
                Text(f"{self.model} at {self.url}; /help lists commands", "dim")
            )
        while True:
            try:
                line = _read_message(is_terminal).strip()
            except (EOFError, KeyboardInterrupt):
                return 0
            match line:
                case "/exit" | "/quit":
                    return 0
                case "/reset":
                    self.messages.clear()
                case _ if line.startswith("/"):
                    self.console.print(COMMANDS, markup=False)
                case _ if line:
                    try:
                        self.say(line)
                    except BatonError as error:
                        if not is_terminal:
                            raise
                        self.console.print(Text(error.message, "red"))

    def say(self, text: str) -> None:
        """Send one message, print the response as it arrives, and remember both."""
        self._choose_model()
        messages, pieces = (
            [*self.messages, {"role": "user", "content": text}],
            list[str](),
        )
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {**self.sampling, "model": self.model, "messages": system + messages}
        has_thought = False
        try:
            for delta in self._stream({**body, "stream": True}):
                thought = delta.get("reasoning") or delta.get("reasoning_content")
                # A script wants the response alone.
                if thought and self.console.is_terminal:
                    has_thought = True
                    self.console.out(thought, end="", style="dim", highlight=False)
                if content := delta.get("content"):
                    gap = "\n\n" if has_thought and not pieces else ""
                    pieces.append(str(content))
                    self.console.out(f"{gap}{content}", end="", highlight=False)
        except KeyboardInterrupt:
            self.console.out(" (stopped)", end="", style="dim", highlight=False)
        finally:
            if pieces or has_thought:
                self.console.print()
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]

    def _choose_model(self) -> None:
        if not self.model:
            with self._request("GET", "/v1/models") as response:
                match msgspec.json.decode(response.read()):
                    case {"data": [{"id": str(name)}, *_]}:
                        self.model = name
                    case _:
                        raise NodeError(f"{self.url}/v1/models lists no model")

    def _stream(self, body: object) -> Iterator[dict[str, object]]:
        with self._request(
            "POST", "/v1/chat/completions", msgspec.json.encode(body)
        ) as response:
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    match msgspec.json.decode(data):
                        case {"error": error} if error:
                            raise NodeError(
                                f"{self.url} ended the response: {_reason(error)}"
                            )
                        case {"choices": [{"delta": dict(delta)}, *_]}:
                            yield delta

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: bytes | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request; a failure until the end of the context is a `NodeError`."""
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        tls = client_context(self.ca_file) if self.url.startswith("https:") else None
        connection, base = connection_to(self.url, CONNECT_TIMEOUT_S, tls)
        try:
            with contextlib.closing(connection):
                connection.connect()
                connection.sock.settimeout(SILENCE_TIMEOUT_S)
                connection.request(method, base + path, body, headers)
                response = connection.getresponse()
                if response.status != 200:
                    why = _reason(response.read().decode(errors="replace"))
                    raise NodeError(f"{self.url} answered {response.status}: {why}")
                yield response
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            hint = "start a server, or name one with --url"
            if isinstance(error, ssl.SSLCertVerificationError):
                hint = "name its authority with --ca-file"
            raise NodeError(f"no response from {self.url}: {why}; {hint}") from error


def _read_message(is_terminal: bool) -> str:
    line = input("> " if is_terminal else "")
    if not line.lstrip().startswith(FENCE):
        return line
    text = line.lstrip().removeprefix(FENCE)
    while not text.rstrip().endswith(FENCE):
        text += "\n" + input(". " if is_terminal else "")
    return text.rstrip().removesuffix(FENCE)


def _reason(error: object) -> str:
    """Return the message of an error in OpenAI's shape, or the error as text."""
    with contextlib.suppress(msgspec.DecodeError):
        error = msgspec.json.decode(error) if isinstance(error, str) else error
    while isinstance(error, dict) and (
        inner := error.get("error", error.get("message"))
    ):
        error = inner
    return str(error)[:200]
