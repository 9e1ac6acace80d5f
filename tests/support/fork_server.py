"""Forks processes from one that has imported torch, which takes most of a start.

These are routers, nodes, ranks, and those of tests that compile or interpret kernels. What runs is
the same module with the same arguments, descriptors and variables, and the test is the parent of
its process. Tests of commands start theirs as users do.
"""

import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from baton.runtime.host import spin_briefly
from tests.support.sources import REPOSITORY

WORKER = "baton.model.executors.worker"
IMPORTED = (
    "baton.command_line",
    "baton.deploy.model_folder",
    "baton.deploy.startup",
    "baton.model.executors",
    "baton.node.node",
    "baton.node.node_http",
    "baton.prefill_node.scheduler",
    "baton.router.main",
    "baton.decode_node.scheduler",
    WORKER,
    # Imported where they are first needed.
    "llvmlite.binding",
    "numpy.random",
)
# Variables that differ from process to process, or that a library or baton sets when it is first
# used, and that nothing reads while it is imported.
PASSING = (
    "BATON_",
    "CUBLAS",
    "GOMP_SPINCOUNT",
    "NCCL_",
    "NIXL_",
    "PYTEST_",
    "PYTHONUNBUFFERED",
    "TOKENIZERS_PARALLELISM",
    "TORCHINDUCTOR_",
    "TRITON_",  # which is not imported yet
    "UCX_",
)
# Modules of `tests.support` that need torch, and a process in which Triton starts anew.
OF_KERNELS = ("tests.support.compile_", "tests.support.interpret_")
PR_SET_CHILD_SUBREAPER = 36
MAX_MESSAGE = 1 << 20
ADOPTION_S = 30.0  # within which a child has the test for its parent
FIRST_SPARE_FD = 500  # above the numbers of a child's descriptors


def is_forked(arguments: Sequence[str]) -> bool:
    """Whether `python -m ...` starts what is forked."""
    match arguments:
        case [sys.executable, "-m", "baton", "prefill" | "decode" | "router", *_]:
            return True
        case [sys.executable, "-m", module, *_]:
            return module == WORKER or module.startswith(OF_KERNELS)
    return False


def lasting(env: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in env.items() if not name.startswith(PASSING)}


class Forked:
    """What `baton.runtime.process` uses of a `subprocess.Popen`."""

    def __init__(self, pid: int, stdout: IO[bytes]) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkServer:
    """The process that is forked, started when it is first needed."""

    def __init__(self) -> None:
        self._env = lasting(os.environ)
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def popen(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        **how: Any,
    ) -> Forked | subprocess.Popen[bytes]:
        """In place of `subprocess.Popen`, which starts all that cannot be forked."""
        can_fork = is_forked(arguments) and max(pass_fds, default=0) < FIRST_SPARE_FD
        if can_fork:
            strays = lasting(os.environ).items() ^ self._env.items()
            assert not strays, (
                f"no node can be forked any more after a change of {dict(strays)}: undo it, or add "
                "its name to PASSING if nothing reads it while it is imported"
            )
        if not can_fork or lasting(env) != self._env:
            return subprocess.Popen(arguments, env=env, pass_fds=pass_fds, **how)
        read_end, write_end = os.pipe()
        request = {
            "words": arguments[2:],
            "env": dict(env),
            "folder": os.getcwd(),
            "fds": [1, 2, *pass_fds],
            "parent": os.getpid(),
        }
        try:
            pid = self._fork(request, [write_end, write_end, *pass_fds])
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        return Forked(pid, os.fdopen(read_end, "rb"))

    def stop(self) -> None:
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()

    def _fork(self, request: dict[str, object], fds: Sequence[int]) -> int:
        with self._lock:
            requests = self._socket = self._socket or self._started()
            # The server's child ends at once, and this process takes over the child of that.
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(requests, [json.dumps(request).encode()], fds)
                return int(requests.recv(64))
            finally:
                ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(theirs.fileno())],
                cwd=REPOSITORY,
                env=self._env | {"PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        return ours


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; return it in the process that has been forked, None at the end."""
    while True:
        text, fds, _, _ = socket.recv_fds(requests, MAX_MESSAGE, 64)
        if not text:
            return None
        request: dict[str, Any] = json.loads(text)
        read_end, write_end = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child != 0:
                os.write(write_end, str(child).encode())
                os._exit(0)
            request["received"] = fds
            return request
        os.waitpid(between, 0)
        # Its child has its parent by now, so the test may wait for it.
        requests.send(os.read(read_end, 64))
        for descriptor in (*fds, read_end, write_end):
            os.close(descriptor)


def become(request: Mapping[str, Any]) -> None:
    """Make this process what `subprocess` would have made for the request."""
    give_up_s = time.monotonic() + ADOPTION_S
    while os.getppid() != request["parent"]:
        assert time.monotonic() < give_up_s, "the test has died"
        time.sleep(0.001)
    os.setsid()
    moved = [
        fcntl.fcntl(descriptor, fcntl.F_DUPFD, FIRST_SPARE_FD)
        for descriptor in request["received"]
    ]
    os.closerange(3, FIRST_SPARE_FD)
    for descriptor, number in zip(moved, request["fds"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        spin_briefly()
        for name in IMPORTED:
            importlib.import_module(name)
        assert threading.active_count() == 1
        assert len(os.listdir("/proc/self/task")) == 1, "a thread would not be forked"
        assert "triton" not in sys.modules, "it could no more be told to interpret"
        gc.collect()
        gc.freeze()
        request = serve(requests)
        if request is None:
            return
        requests.detach()
    become(request)
    module, *sys.argv[1:] = request["words"]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
