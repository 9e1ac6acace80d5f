"""`baton serve` as a stranger uses it: what it prints works as pasted, and how it ends.

It ends with Ctrl-C, against processes that do not answer, and at once, but not with a process.
"""

import http.client
import json
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
import yaml

from baton.deploy.startup import reserve_port
from baton.router.http.auth import add_key
from tests.support.certificates import make_certificate
from tests.support.completions import ask
from tests.support.pooling_folders import embedding_folder
from tests.support.sources import REPOSITORY
from tests.support.waiting import until

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0
API_KEY = "a-secret-of-clients"
ROLES = {"router", "prefill", "decode"}
SMALL = ("--memory-mib", "64")


class Serve:
    """A `baton serve` that is ready: its output so far, and its processes by role."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process = process
        self._output = output
        self.wait_for(r'(?m)^curl |"process": "serve", "message": "ready"')
        self.children: dict[str, psutil.Process] = {}  # the first of each role
        for child in psutil.Process(process.pid).children():
            # It has ended, or has no program yet.
            with suppress(psutil.NoSuchProcess, IndexError):
                if (role := child.cmdline()[3]) in ROLES:
                    self.children.setdefault(role, child)

    @property
    def text(self) -> str:
        return self._output.read_text()

    def wait_for(self, pattern: str) -> str:
        def found() -> re.Match[str] | None:
            assert self.process.poll() is None, self.text
            return re.search(pattern, self.text)

        return until(found, lambda: self.text).group()

    def wait_for_exit(self) -> int:
        return self.process.wait(STOP_TIMEOUT_S)

    def all_gone(self) -> bool:
        return not psutil.wait_procs(
            list(self.children.values()), timeout=STOP_TIMEOUT_S
        )[1]


@contextmanager
def serving(folder: Path, *arguments: str, roles: Set[str] = ROLES) -> Iterator[Serve]:
    output = folder / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            # What runs these tests may ignore SIGHUP.
            [
                "env",
                "--default-signal=HUP",
                sys.executable,
                "-m",
                "baton",
                "serve",
                "--port",
                "0",
                *arguments,
            ],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
        )
    try:
        serve = Serve(process, output)
        assert set(serve.children) == roles
        yield serve
    finally:
        process.kill()
        process.wait()


def chat(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "baton", "chat", *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60
    )


def test_what_serve_prints_works_as_pasted(tmp_path, monkeypatch, capsys):
    with serving(tmp_path) as serve:
        curl = serve.wait_for(r"(?m)^curl .*$")
        script = serve.wait_for(r"(?ms)^from openai import.*?^print\([^\n]*$")
        reply = subprocess.run(
            shlex.split(curl), capture_output=True, text=True, check=True
        )
        assert json.loads(reply.stdout)["choices"][0]["text"] == " 4071."
        said = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False
        )
        assert said.returncode == 0, said.stderr
        assert said.stdout.strip() == "42."
        monkeypatch.setenv("BATON_URL", serve.wait_for(r"http://\S+(?=/v1)"))
        for example in ("chat.py", "tools.py", "form.py"):
            runpy.run_path(str(REPOSITORY / "examples" / example), run_name="__main__")
            assert capsys.readouterr().out.strip(), example
        done = subprocess.run(
            ["sh", str(REPOSITORY / "examples" / "curl.sh")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        serve.process.send_signal(signal.SIGINT)
        assert serve.wait_for_exit() == 0, serve.text
        assert serve.all_gone()
        assert "Traceback" not in serve.text


def test_a_unix_socket_serves_what_is_pasted_and_outlives_its_router(tmp_path):
    path = tmp_path / "baton.sock"
    with serving(tmp_path, *SMALL, "--uds", str(path)) as serve:
        curl = serve.wait_for(r"(?m)^curl .*$")
        words = shlex.split(serve.wait_for(r"(?m)^baton chat .*$"))
        assert f"--unix-socket {path} http://localhost/v1/completions" in curl
        reply = subprocess.run(
            shlex.split(curl), capture_output=True, text=True, check=True
        )
        assert json.loads(reply.stdout)["choices"][0]["text"] == " 4071."
        said = chat(*words[2:])
        assert said.stdout == "42.\n", said.stderr
        status = [sys.executable, "-m", "baton", "status", "--url", f"unix:{path}"]
        shown = subprocess.run(status, capture_output=True, text=True, check=False)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert "decode-0" in shown.stdout
        named = [*curl.split(" http://", 1)[0].split(), "-sH", "Host: llm.example"]
        front = subprocess.run(
            [*named, "http://localhost/health"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(front.stdout)["status"] == "ready", (
            "no page can reach a socket"
        )

        serve.children["router"].kill()
        serve.wait_for(r"(?s)will start again.*in service.*in service")
        assert chat("--url", f"unix:{path}", "What is 17 + 25?").stdout == "42.\n"
        serve.process.send_signal(signal.SIGINT)
        assert serve.wait_for_exit() == 0, serve.text
        assert not path.exists()


def test_a_model_that_makes_no_tokens_gets_no_decode_node(tmp_path):
    model = str(embedding_folder("qwen3", num_layers=1))
    with serving(tmp_path, model, *SMALL, roles={"router", "prefill"}) as serve:
        curl = serve.wait_for(r"(?m)^curl .*$")
        reply = subprocess.run(
            shlex.split(curl), capture_output=True, text=True, check=True
        )
        assert len(json.loads(reply.stdout)["data"]) == 2
        serve.process.send_signal(signal.SIGINT)
        assert serve.wait_for_exit() == 0, serve.text
        assert serve.all_gone()


def test_no_stranger_takes_the_port_while_a_router_starts_again():
    def bound(**options: bool) -> socket.socket:
        return socket.create_server(("127.0.0.1", port), **options)

    with reserve_port("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
        for _ in range(2):
            with bound(reuse_port=True) as router, closing(socket.socket()) as client:
                client.connect(router.getsockname())
                # This end closes first, so the port has a leftover.
                router.accept()[0].close()
            # It sets SO_REUSEADDR, as most servers do.
            with pytest.raises(OSError, match="in use"):
                bound()
    with bound():
        pass


def files_of(serve: Serve) -> list[Path]:
    """The files in the folders of its router and its nodes, which a killed `serve` leaves."""
    settings = Path(serve.children["prefill"].cmdline()[-1])
    (control,) = yaml.safe_load(settings.read_text())["node"]["routers"]
    folders = settings.parent, Path(control.removeprefix("ipc://")).parent
    files = [path for folder in folders for path in folder.iterdir() if path.is_file()]
    assert settings in files
    return files


def test_it_speaks_https_and_json_alone_and_a_second_signal_ends_it_at_once(tmp_path):
    made = make_certificate(tmp_path)
    flags = (
        *SMALL,
        "--ssl-certfile",
        str(made.cert),
        "--ssl-keyfile",
        str(made.key),
        "--log-json",
    )
    keys = tmp_path / "keys.txt"
    keys.touch()
    flags += ("--api-key", API_KEY, "--api-key-file", str(keys))
    with serving(tmp_path, *flags) as serve:
        url = serve.wait_for(r"https://[^/\"]+(?=/v1)")
        question = "The code of Lima is 4071. What is the code of Lima?"
        assert not [
            file for file in files_of(serve) if API_KEY.encode() in file.read_bytes()
        ]
        words = ("--url", url, "--ca-file", str(made.cert), "--api-key", API_KEY)
        trusting = chat(*words, question)
        assert "4071" in trusting.stdout, trusting.stderr
        refusing = chat("--url", url, question)
        assert (refusing.returncode, refusing.stderr.count("\n")) == (1, 1)
        assert "name its authority with --ca-file" in refusing.stderr
        # With SIGHUP, new connections get the new certificate, and new keys are known.
        later = add_key(keys, "later")
        renewed = make_certificate(tmp_path, "renewed")
        for new, old in zip(renewed, made, strict=True):
            new.replace(old)
        assert "certificate verify failed" in chat(*words[:4], question).stderr
        serve.process.send_signal(signal.SIGHUP)
        serve.wait_for("API keys and certificates were read again")
        again = chat(*words[:4], "--api-key", later, question)
        assert "4071" in again.stdout, again.stderr
        keys.write_text("no key")
        serve.process.send_signal(signal.SIGHUP)
        serve.wait_for("the old API keys and certificate stay in use")
        processes = {json.loads(line)["process"] for line in serve.text.splitlines()}
        assert processes == {"serve", "router", "prefill-0", "decode-0"}
        for child in serve.children.values():
            child.suspend()  # so that the first signal has a process to wait for
        serve.process.send_signal(signal.SIGINT)
        # Two of a kind that are pending at once would count as one.
        serve.process.send_signal(signal.SIGTERM)
        assert serve.wait_for_exit() == 130
        assert serve.all_gone()


def test_what_dies_or_cannot_start_is_started_again_and_what_does_not_answer_is_ended_by_force(
    tmp_path,
):
    """The router serves on the same port, and the others serve before the node that cannot."""
    with ExitStack() as stack:
        # An address of this process alone on this host, so that its ports are free.
        address = "127." + ".".join(
            str(byte) for byte in os.getpid().to_bytes(3, "big")
        )
        # Decode-1 needs it.
        taken = stack.enter_context(socket.create_server((address, 18_002)))
        http = f"node.http={address}:18000"
        flags = (*SMALL, "--decode", "2", "--set", http)
        serve = stack.enter_context(serving(tmp_path, *flags))
        url = serve.wait_for(r"http://\S+(?=/v1)")
        serve.wait_for(r"process=decode-1 code=1 .*exits=1")
        taken.close()
        serve.wait_for("node in service node=decode-1")
        serve.children["decode"].kill()
        serve.wait_for("process=decode-0 code=-9")
        serve.children["router"].kill()
        serve.wait_for("process=router code=-9")
        assert complete_when_served(url) == 2
        serve.children |= {
            str(c.pid): c for c in psutil.Process(serve.process.pid).children()
        }
        serve.children["prefill"].suspend()  # which also shows that it is the first one
        serve.process.send_signal(signal.SIGTERM)
        assert serve.wait_for_exit() == 0
        assert serve.all_gone()


@pytest.mark.release
def test_router_processes_share_one_port_and_die_alone(tmp_path):
    """There are two of them before one pair of nodes: either gives the same answers."""
    with ExitStack() as open_ones:
        serve = open_ones.enter_context(
            serving(tmp_path, *SMALL, "--router-processes", "2")
        )
        connected_to = partial(
            connect, open_ones, int(serve.wait_for(r"(?<=:)\d+(?=/v1)"))
        )
        first, second = (connected_to(f"router-{index}") for index in range(2))
        alone = [completed(first, number) for number in range(8)]
        with ThreadPoolExecutor(8) as pool:
            lines = [connected_to(f"router-{number % 2}") for number in range(8)]
            assert list(pool.map(completed, lines, range(8))) == alone
        ended = streamed(first, 3_500)
        spared = streamed(second, 300)
        assert next(ended)
        text = next(spared)
        next(
            child
            for child in psutil.Process(serve.process.pid).children()
            if child.cmdline()[-1] == "router.name=router-0"
        ).kill()
        serve.wait_for("process=router-0 code=-9")
        assert "".join([text, *spared]) == completed(connected_to("router-1"), 0, 300)
        assert len(list(ended)) < 3_499
        again = connected_to("router-0", ready=True)
        assert [completed(again, number) for number in range(2)] == alone[:2]
        serve.process.send_signal(signal.SIGINT)
        assert serve.wait_for_exit() == 0, serve.text


def connect(
    open_ones: ExitStack, port: int, router: str, *, ready: bool = False
) -> http.client.HTTPConnection:
    """Return a connection to one of the routers that share `port`; the system chooses which."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
        open_ones.enter_context(closing(connection))
        connection.request("GET", "/health")
        reply = connection.getresponse()
        if json.load(reply)["router"] == router and (reply.status == 200 or not ready):
            return connection
        time.sleep(0.02)
    raise AssertionError(f"{router} does not answer")


def completed(
    connection: http.client.HTTPConnection, number: int, num_tokens: int = 24
) -> str:
    _ask(connection, number, num_tokens, stream=False)
    return str(json.load(connection.getresponse())["choices"][0]["text"])


def streamed(connection: http.client.HTTPConnection, num_tokens: int) -> Iterator[str]:
    """Return the pieces of the text of a stream as they come."""
    _ask(connection, 0, num_tokens, stream=True)
    with connection.getresponse() as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])["choices"][0]["text"]


def _ask(
    connection: http.client.HTTPConnection,
    number: int,
    num_tokens: int,
    *,
    stream: bool,
) -> None:
    body = {
        "prompt": f"The code of Lima is 407{number}. What is",
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)


def complete_when_served(url: str) -> int:
    """Return the number of tokens that a completion brings, asking until the server answers."""
    body = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with ask(url, body) as reply:
                return int(json.load(reply)["usage"]["completion_tokens"])
        except urllib.error.URLError:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
