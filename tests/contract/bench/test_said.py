"""What servers say of themselves is asked of them alone."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from baton.bench.client.target import Target
from baton.bench.parity import facts_said


class Server(ThreadingHTTPServer):
    """Answers /version, and sends a client that asks for anything else to `elsewhere`."""

    def __init__(self, elsewhere: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.elsewhere = elsewhere
        self.keys: list[str | None] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def server_close(self) -> None:
        self.shutdown()
        super().server_close()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        is_known = self.path == "/version"
        body = b'{"version": "1.2"}' if is_known else b""
        self.send_response(200 if is_known else 302)
        if not is_known:
            self.send_header("Location", f"{self.server.elsewhere}/version")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keeps the output of the tests clean."""


def test_a_key_is_not_carried_to_another_server() -> None:
    with Server() as other, Server(other.url) as asked:
        facts = facts_said(Target(asked.url, "tiny", api_key="secret"))
    assert facts == {"version": "1.2"}
    assert set(asked.keys) == {"Bearer secret"}
    assert other.keys == []
