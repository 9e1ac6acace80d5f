"""`baton chat` with a model that reasons: what it shows and what it sends."""

import contextlib
import io
import json
from collections.abc import Iterator

import pytest
from rich.console import Console

from baton.chat import FENCE, Chat

DELTAS: list[dict[str, str | None]] = [
    {"role": "assistant", "content": None},
    {"reasoning_content": "Let me "},
    {"reasoning": "think."},
    {"content": "4", "reasoning": None},
    {"content": "2."},
]


@pytest.fixture
def asked(monkeypatch):
    """The conversations that a server was sent, which thinks aloud before each answer."""
    sent: list[list[dict[str, str]]] = []

    @contextlib.contextmanager
    def answered(
        _chat: Chat, _method: str, _path: str, body: bytes
    ) -> Iterator[list[bytes]]:
        sent.append(json.loads(body)["messages"])
        events = [json.dumps({"choices": [{"delta": delta}]}) for delta in DELTAS]
        yield [f"data: {event}\n".encode() for event in (*events, "[DONE]")]

    monkeypatch.setattr(Chat, "_request", answered)
    return sent


@pytest.mark.parametrize("is_terminal", [True, False])
def test_thoughts_are_shown_before_the_answer_on_a_terminal_and_never_sent_back(
    asked, is_terminal
):
    shown = io.StringIO()
    console = Console(
        file=shown, force_terminal=is_terminal, no_color=True, color_system=None
    )
    chat = Chat("http://reasoner", model="any", console=console)
    for question in ("17 + 25?", "And again?"):
        chat.say(question)
    assert (
        shown.getvalue() == ("Let me think.\n\n42.\n" if is_terminal else "42.\n") * 2
    )
    assert asked[1] == [
        {"role": "user", "content": "17 + 25?"},
        {"role": "assistant", "content": "42."},
        {"role": "user", "content": "And again?"},
    ]


def test_a_message_may_have_several_lines(asked, monkeypatch):
    monkeypatch.setattr(
        "sys.stdin", io.StringIO(f"{FENCE}one\n two\n\nthree{FENCE}\nfour\n")
    )
    chat = Chat("http://reasoner", model="any", console=Console(file=io.StringIO()))
    assert chat.converse() == 0
    said = [turn["content"] for turn in asked[-1] if turn["role"] == "user"]
    assert said == ["one\n two\n\nthree", "four"]
