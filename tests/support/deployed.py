"""A small cluster on this machine that the cluster commands start and end."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from http.client import HTTPResponse
from pathlib import Path

import psutil
import yaml

from tests.support.cluster import free_port
from tests.support.completions import ask
from tests.support.waiting import TIMEOUT_S

TOLD = "The code of Lima is 4071. The code of Oslo is 2210. What is the code of Lima?"


class Deployed:
    """A small cluster in a folder of its own. `prefix` and `env` are those of every command."""

    def __init__(
        self,
        folder: Path,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self._prefix = prefix
        self._env = {**os.environ, **(env or {})}
        self.state = folder / "state"
        self.address = "127.0.0.1"  # of a router
        self.content: dict[str, object] = {
            "name": "small",
            "pools": {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}},
            "settings": {"cache": {"memory_mib": 64}},
        }
        self.seen: dict[int, psutil.Process] = {}
        self.take_ports()

    def take_ports(self) -> None:
        self.port = free_port()
        (router,) = self.content.get("routers", [{}])  # type: ignore[misc]
        self.content["routers"] = [
            {**router, "port": self.port, "control_port": free_port()}
        ]

    def write(self) -> None:
        text = yaml.safe_dump(self.content, sort_keys=False)
        (self.folder / "cluster.yaml").write_text(text)

    def baton(self, command: str, *words: str) -> "subprocess.Popen[str]":
        self.write()
        return subprocess.Popen(
            [
                *self._prefix,
                sys.executable,
                "-m",
                "baton",
                command,
                *words,
                "--state",
                str(self.state),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=self._env,
            start_new_session=True,
        )

    def run(self, command: str, *words: str) -> "tuple[int, str, str]":
        """Run a command to its end. `up` takes other ports while another process has these."""
        while True:
            process = self.baton(command, *words)
            said, complained = process.communicate(timeout=TIMEOUT_S)
            if command != "up" or "is in use" not in complained:
                return process.returncode, said, complained
            self.take_ports()

    def processes(self) -> dict[str, psutil.Process]:
        """Return the running processes by name, as `status` has them."""
        code, said, _ = self.run("status", "--json")
        found = {}
        for one in json.loads(said) if code != 2 else ():
            # The notes of a supervisor that was killed name processes that are gone.
            with contextlib.suppress(psutil.NoSuchProcess):
                if one["state"] == "running":
                    found[one["name"]] = psutil.Process(int(one["note"].split()[1]))
        self.seen |= {process.pid: process for process in found.values()}
        return found

    def rows(self) -> dict[str, dict[str, object]]:
        """Return what `status` says of each process."""
        _, said, _ = self.run("status", "--json")
        return {one["name"]: one for one in json.loads(said)}

    def all_gone(self) -> bool:
        return not psutil.wait_procs(list(self.seen.values()), timeout=TIMEOUT_S)[1]

    def ask(self, **body: object) -> HTTPResponse:
        """Return the answer to a question about what was told."""
        url = f"http://{self.address}:{self.port}"
        return ask(url, {"prompt": TOLD, "temperature": 0, **body})

    def complete(self) -> str:
        with self.ask(max_tokens=8) as reply:
            return str(json.load(reply)["choices"][0]["text"])
