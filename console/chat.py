"""`baton chat`: a conversation with a running server in the terminal, or one answer for a script.

The command line calls it. An answer is printed as it arrives. Ctrl-C ends the answer and keeps the
part that has arrived; Ctrl-D, or Ctrl-C at the prompt, ends the conversation.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from baton.console.openai_client import ChatTurn, OpenAIClient, Usage
from baton.protocol.errors import BatonError, ConfigError
from baton.runtime.clock import monotonic
from baton.runtime.fields import FlagParser

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "BATON_API_KEY"
PROMPT, MORE = "> ", ". "
FENCE = '"""'
COMMANDS = """\
/reset  forget the conversation
/help   this list
/exit   end (also Ctrl-D)
\"\"\"     begin and end a message of several lines"""


def main(words: Sequence[str]) -> int:
    """Run `baton chat` with its flags and return the exit code. Raises `BatonError`."""
    flags = parser().parse_args(list(words))
    settings = {
        name: value
        for name, value in (("max_tokens", flags.max_tokens), ("temperature", flags.temperature))
        if value is not None
    }
    key = flags.api_key or os.environ.get(KEY_VARIABLE, "")
    chat = TerminalChat(flags.url, key, flags.model, flags.system, settings, ca_file=flags.ca_file)
    if flags.message:
        chat.say(flags.message)
        return 0
    return chat.converse()


def parser() -> FlagParser:
    built = FlagParser("baton chat", description="Talk to a running server in the terminal.")
    built.add_argument(
        "message",
        nargs="?",
        default="",
        help="one message to answer; without it, a conversation begins",
    )
    built.add_argument(
        "--url", default=DEFAULT_URL, help=f"URL of the server to talk to (default: {DEFAULT_URL})"
    )
    built.add_argument(
        "--model", default="", help="model to ask (default: the first one that the server lists)"
    )
    built.add_argument("--system", default="", help="system message before the conversation")
    built.add_argument(
        "--api-key",
        default="",
        help=f"API key that the server asks for (default: the variable {KEY_VARIABLE})",
    )
    built.add_argument(
        "--ca-file",
        metavar="PATH",
        default="",
        help="PEM file with the authority that signed an https server's certificate",
    )
    built.add_argument("--max-tokens", type=_count, help="longest answer, in tokens")
    built.add_argument("--temperature", type=float, help="sampling temperature; 0 is greedy")
    return built


def _count(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of tokens")
    return int(word)


@dataclass(slots=True)
class _AnswerSoFar:
    """The part of an answer that has arrived. Times are in seconds."""

    begun_s: float
    text: str = ""
    has_thought: bool = False  # something was printed before the text
    first_s: float | None = None
    finish_reason: str = ""
    usage: Usage | None = None


@dataclass(slots=True)
class TerminalChat:
    """A conversation with one model. `messages` is sent to the server each time."""

    url: str
    api_key: str = ""
    model: str = ""
    system: str = ""
    settings: dict[str, object] = field(default_factory=dict)
    messages: list[ChatTurn] = field(default_factory=list)
    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))
    ca_file: str = ""

    def converse(self) -> int:
        """Answer each line of stdin until it ends; return the exit code."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            with suppress(ImportError):
                import readline  # noqa: F401  (line editing and history for `input`)
            self._meet()
            self.console.print(Text(f"{self.model} at {self.url}; /help lists commands", "dim"))
        while True:
            try:
                line = _message(PROMPT if is_terminal else "", MORE if is_terminal else "")
            except (EOFError, KeyboardInterrupt):
                if is_terminal:
                    self.console.print()
                return 0
            if line.strip() in ("/exit", "/quit"):
                return 0
            self._obey(line.strip(), is_terminal)

    def say(self, text: str) -> None:
        """Send one message, print the answer as it arrives, and remember both."""
        self._meet()
        self.messages.append({"role": "user", "content": text})
        answer = _AnswerSoFar(monotonic())
        try:
            asyncio.run(self._print_answer(answer))
        except KeyboardInterrupt:
            answer.finish_reason = "stopped"
        except BaseException:
            self.messages.pop()
            raise
        finally:
            if answer.text or answer.has_thought:
                self.console.print()
        self.messages.append({"role": "assistant", "content": answer.text})
        if sys.stdin.isatty() and sys.stdout.isatty():
            self.console.print(Text(_summary(answer, monotonic()), "dim"))

    def _obey(self, line: str, is_terminal: bool) -> None:
        if not line:
            return
        if line == "/help":
            self.console.print(COMMANDS, markup=False)
        elif line == "/reset":
            self.messages.clear()
        elif line.startswith("/"):
            self.console.print(
                f"unknown command {line.split(maxsplit=1)[0]}; /help lists them", markup=False
            )
        else:
            try:
                self.say(line)
            except BatonError as error:
                if not is_terminal:
                    raise
                self.console.print(Text(error.message, "red"))

    def _meet(self) -> None:
        """Ask the server for its model once, unless one was named."""
        if not self.model:
            self.model = asyncio.run(self._first_model())

    async def _first_model(self) -> str:
        async with OpenAIClient(self.url, self.api_key, self.ca_file) as client:
            models = await client.models()
        if not models:
            raise ConfigError(f"{self.url} offers no model")
        return models[0]

    async def _print_answer(self, answer: _AnswerSoFar) -> None:
        system: list[ChatTurn] = [{"role": "system", "content": self.system}] if self.system else []
        async with OpenAIClient(self.url, self.api_key, self.ca_file) as client:
            async for piece in client.chat(self.model, system + self.messages, self.settings):
                if (piece.text or piece.thought) and answer.first_s is None:
                    answer.first_s = monotonic()
                if piece.text and answer.has_thought and not answer.text:
                    self.console.out("\n")
                answer.has_thought |= bool(piece.thought) and self.console.is_terminal
                answer.text += piece.text
                answer.finish_reason = piece.finish_reason or answer.finish_reason
                answer.usage = piece.usage or answer.usage
                if piece.thought and self.console.is_terminal:  # a script wants the answer alone
                    self.console.out(piece.thought, end="", style="dim", highlight=False)
                self.console.out(piece.text, end="", highlight=False)


def _message(prompt: str, more: str) -> str:
    """Return a line of stdin, or the lines between two fences, each asked for with a prompt."""
    line = input(prompt)
    if not line.lstrip().startswith(FENCE):
        return line
    text = line.lstrip().removeprefix(FENCE)
    while not text.rstrip().endswith(FENCE):
        text += "\n" + input(more)
    return text.rstrip().removesuffix(FENCE)


def _summary(answer: _AnswerSoFar, now_s: float) -> str:
    """Return one line with the answer's end, tokens, time to first token, and pace."""
    parts = [answer.finish_reason] if answer.finish_reason not in ("", "stop") else []
    if answer.usage is not None:
        parts.append(f"{answer.usage.completion_tokens} tokens")
    if answer.first_s is not None:
        parts.append(f"first after {(answer.first_s - answer.begun_s) * 1e3:.0f} ms")
        seconds = now_s - answer.first_s
        if answer.usage is not None and answer.usage.completion_tokens > 1 and seconds > 0:
            parts.append(f"{(answer.usage.completion_tokens - 1) / seconds:.0f} tokens/s")
    return ", ".join(parts) or "no text"
