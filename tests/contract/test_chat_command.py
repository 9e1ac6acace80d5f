"""`baton chat` against a server that is not baton: what it shows and what it sends."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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


class Reasoner(ThreadingHTTPServer):
    """Thinks aloud before each answer, as reasoning models do on other servers."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked: list[list[dict[str, str]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Reasoner)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body["messages"])
        self.send_response(200)
        self.end_headers()
        for delta in DELTAS:
            self.wfile.write(b"data: %s\n\n" % json.dumps({"choices": [{"delta": delta}]}).encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name there
        pass


@pytest.fixture
def server() -> Iterator[Reasoner]:
    with Reasoner() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_thoughts_are_shown_before_the_answer_on_a_terminal_and_never_sent_back(
    server: Reasoner, is_terminal: bool
) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=is_terminal, no_color=True, color_system=None)
    chat = Chat(server.url, model="any", console=console)
    for question in ("17 + 25?", "And again?"):
        chat.say(question)
    assert shown.getvalue() == ("Let me think.\n\n42.\n" if is_terminal else "42.\n") * 2
    assert server.asked[1] == [
        {"role": "user", "content": "17 + 25?"},
        {"role": "assistant", "content": "42."},
        {"role": "user", "content": "And again?"},
    ]


def test_a_message_may_have_several_lines(
    server: Reasoner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{FENCE}one\n two\n\nthree{FENCE}\nfour\n"))
    chat = Chat(server.url, model="any", console=Console(file=io.StringIO()))
    assert chat.converse() == 0
    said = [turn["content"] for turn in chat.messages if turn["role"] == "user"]
    assert said == ["one\n two\n\nthree", "four"]
