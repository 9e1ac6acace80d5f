"""A model of the Hugging Face hub is fetched by its name, from a stand-in of the hub."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from baton.deploy.model_folder import CHECKPOINT

NAME = "someone/tiny"
COMMIT = "0" * 40
FILES = {path.name: path for path in CHECKPOINT.iterdir() if path.is_file()}
FETCH = """
from baton.deploy.model_folder import with_model
from baton.protocol.config import ClusterConfig, ModelConfig

print(with_model(ClusterConfig(model=ModelConfig(path="someone/tiny"))).model.path)
"""


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does for one model."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if path.startswith(f"/api/models/{NAME}/tree/"):
            tree = [
                {
                    "type": "file",
                    "path": name,
                    "size": file.stat().st_size,
                    "oid": "0" * 40,
                }
                for name, file in FILES.items()
            ]
            self._answer(json.dumps(tree).encode(), "application/json")
        elif path.startswith(f"/api/models/{NAME}"):
            siblings = [{"rfilename": name} for name in FILES]
            about = {
                "id": NAME,
                "sha": COMMIT,
                "siblings": siblings,
                "tags": [],
                "private": False,
            }
            self._answer(json.dumps(about).encode(), "application/json")
        elif path.startswith(f"/{NAME}/resolve/") and name in FILES:
            self._answer(FILES[name].read_bytes(), "application/octet-stream")
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("X-Error-Message", "Repository not found")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _answer(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def fetched(
    hub: str, cache: Path, code: str = FETCH
) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "HF_ENDPOINT": hub,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_model_is_fetched_by_its_name(hub, tmp_path):
    first = fetched(hub, tmp_path)
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == FILES[
        "model.safetensors"
    ].read_bytes()
    # The cache is enough once the hub is gone.
    again = fetched("http://127.0.0.1:1", tmp_path)
    assert again.stdout == first.stdout, again.stderr


def test_a_model_that_the_hub_does_not_have_is_one_clear_line(hub, tmp_path):
    missing = fetched(hub, tmp_path, FETCH.replace("someone/tiny", "someone/none"))
    assert missing.returncode != 0
    assert "the hub does not give model someone/none" in missing.stderr.splitlines()[-1]
