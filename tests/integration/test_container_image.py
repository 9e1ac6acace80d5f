"""The image, built by buildah on a base of Debian's packages, and compose.yaml's processes in it.

No image registry takes part: debootstrap makes the base, and podman runs what compose.yaml says, in
network namespaces in the place of Compose's network. It takes some minutes and the rights of root.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.hosts import Hosts, hosts
from tests.support.sources import REPOSITORY

TOOLS = ("debootstrap", "buildah", "podman", "runc")
COMPOSE: dict[str, Any] = yaml.safe_load(
    (REPOSITORY / "deploy/containers/compose.yaml").read_text()
)
HOST_OF = {"router": 1, "prefill": 2, "decode": 3}
IMAGE = "localhost/baton-tested"
TIMEOUT_S = 300.0
BUILD_S = 1800.0  # for the base, the image and the processes in it
QUOTE = "'"
# Compose's variables, of which the defaults count.
DEFAULT = r"\$\{\w+:-(.*?)\}"
DEFAULTED = r"\1"
# Limits of this machine may be below podman's defaults.
LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
ASK = """
import sys, urllib.request
headers = {"Content-Type": "application/json"}
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode() or None, headers)
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""
# Too long for a decode node to compute it itself.
TOLD = "The code of Lima is 4071. " * 8 + "What is the code of Lima?"


class Store:
    """Images and containers of this test alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._where = (
            "--root",
            str(folder / "storage"),
            "--runroot",
            str(folder / "run"),
        )

    def run(self, tool: str, *words: str) -> str:
        done = self._done(tool, *words)
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout.strip()

    def podman(self, *words: str) -> str:
        return self.run("podman", "--runtime", "runc", *words)

    def is_healthy(self, name: str) -> bool:
        words = ("--runtime", "runc", "healthcheck", "run", name)
        return self._done("podman", *words).returncode == 0

    def said(self) -> str:
        return "".join(self._done("podman", "logs", name).stderr for name in HOST_OF)

    def _done(self, tool: str, *words: str) -> "subprocess.CompletedProcess[str]":
        command = [tool, *self._where, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The image for CPUs, as docs/deploy/containers.md builds it."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs the rights of root and {', '.join(missing or TOOLS)}")
    store = Store(tmp_path_factory.mktemp("store"))
    base = store.folder / "base"
    include = "--include=python3,python3-venv,ca-certificates"
    release = Path("/etc/os-release").read_text()
    (suite,) = re.findall(r"VERSION_CODENAME=(\w+)", release)
    subprocess.run(
        ["debootstrap", "--variant=minbase", include, suite, str(base)], check=True
    )
    store.run("buildah", "from", "--name", "base", "scratch")
    store.run("buildah", "add", "base", str(base), "/")
    store.run("buildah", "commit", "base", f"{IMAGE}-base")
    store.run(
        "buildah",
        "bud",
        "--isolation",
        "chroot",
        "--format",
        "docker",
        *as_pip_is_set_up(),
        "--build-arg",
        f"BASE={IMAGE}-base",
        "-f",
        "deploy/containers/Dockerfile",
        "-t",
        IMAGE,
        str(REPOSITORY),
    )
    shutil.rmtree(base)
    yield store
    store.run("buildah", "rm", "--all")
    store.run("buildah", "rmi", "--all", "--force")


def as_pip_is_set_up() -> list[str]:
    """Return what hands pip's settings on this machine, and the folders in them, to the build."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words: dict[str, None] = {}
    for line in said.splitlines():
        name, _, text = line.partition("=")
        variable = "PIP_" + name.rpartition(".")[2].upper().replace("-", "_")
        words[f"--env={variable}={text.strip(QUOTE)}"] = None
        for path in re.findall(r"(?:(?<=file://)|(?<=')|(?<= ))(/\w+/[\w.-]+)", text):
            words[f"--volume={path}:{path}:ro"] = None
    return list(words)


@contextmanager
def composed(store: Store, on: Hosts) -> Iterator[None]:
    """Run the services of compose.yaml, each on a host of its own, until they are healthy."""
    names = [f"--add-host={name}:10.0.0.{host}" for name, host in HOST_OF.items()]
    confined = [
        "--cap-drop",
        "ALL",
        "--security-opt",
        "no-new-privileges",
        "--read-only",
        "--tmpfs",
        "/tmp",
        *LIMITS,
    ]
    made = COMPOSE["services"]["key"]
    store.podman(
        "run",
        "--rm",
        "--network",
        "none",
        *confined,
        *volumes(made),
        "--entrypoint",
        made["entrypoint"][0],
        IMAGE,
        *made["entrypoint"][1:],
        *made["command"],
    )
    with ExitStack() as stack:
        for name, host in HOST_OF.items():
            service = COMPOSE["services"][name]
            given = [
                f"--env={variable}={re.sub(DEFAULT, DEFAULTED, text)}"
                for variable, text in service["environment"].items()
            ]
            store.podman(
                "run",
                "--detach",
                "--name",
                name,
                "--hostname",
                service["hostname"],
                *names,
                "--network",
                f"ns:{on.namespace(host)}",
                *confined,
                *volumes(service),
                *given,
                IMAGE,
                *service["command"],
            )
            stack.callback(store.podman, "rm", "--force", name)
        deadline_s = time.monotonic() + TIMEOUT_S
        while ask(on, "/health").get("status") != "ready":
            assert time.monotonic() < deadline_s, store.said()
            time.sleep(0.5)
        yield


def volumes(service: dict[str, Any]) -> list[str]:
    """Return the flags of its volumes, which get the owner that the image gave their folders."""
    return [f"--volume={volume}" for volume in service["volumes"]]


def ask(on: Hosts, path: str, body: object = None) -> dict[str, Any]:
    """Return what the router answers to another host; nothing while it does not."""
    content = json.dumps(body) if body else ""
    done = on.run(2, sys.executable, "-c", ASK, f"http://10.0.0.1:8000{path}", content)
    answer: dict[str, Any] = json.loads(done.stdout or "{}")
    return answer


@pytest.mark.release
@pytest.mark.timeout(BUILD_S)
def test_the_image_serves_in_containers_that_share_no_memory(store):
    with hosts(3) as on, composed(store, on):
        body = {"prompt": TOLD, "max_tokens": 8, "temperature": 0}
        assert ask(on, "/v1/completions", body)["choices"][0]["text"] == " 4071.", (
            store.said()
        )
        (transfer,) = ask(on, "/health")["transfers"]
        assert (transfer["num_handoffs"], transfer["num_bytes"] > 0) == (1, True)
        assert all(map(store.is_healthy, HOST_OF))
        user = store.podman(
            "exec", "router", "python3", "-c", "import os; print(os.getuid())"
        )
        assert user == "10001"
        for name in HOST_OF:
            store.podman("stop", "--time", "45", name)
            assert (
                store.podman("inspect", "--format", "{{.State.ExitCode}}", name) == "0"
            )
