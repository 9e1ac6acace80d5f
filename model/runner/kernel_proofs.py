"""Find which kernels may be used on this GPU: those that are proven in a process with a deadline.

A wrong kernel would cost tokens, and one that hangs or breaks its context would cost the node. So
each candidate is tried in a process of its own, all at once, and costs at most the speed that it
would have given. What was proven on a GPU, with a driver, compilers and the kernels' sources, stays
proven.
"""

import contextlib
import hashlib
import os
import select
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import BinaryIO

import msgspec

from baton.kernels.proofs import Candidate, Proof, ProofRequest, prove
from baton.node.executor import Progress
from baton.protocol.errors import NodeError
from baton.runtime.log import logger
from baton.runtime.private_cache import cache_folder, check_owner, make_private
from baton.runtime.process import Child, Command

# Of one candidate, which is compiled and compared, after imports of torch and a context.
LIMIT_S = 120.0
POLL_S = 0.5
# What a driver says where a GPU takes one process alone.
ONE_PROCESS = ("busy or unavailable", "cudaErrorDevicesUnavailable")

log = logger("kernels")


def proofs_of(
    request: ProofRequest,
    environment: str,
    progress: Progress,
    limit_s: float = LIMIT_S,
) -> tuple[Proof, ...]:
    """Return a proof of each candidate, in order, and log one line for each that failed.

    `environment` names all that a proof rests on, besides the request.
    """
    files = {
        candidate.name: _file_of(request, candidate, environment)
        for candidate in request.candidates
    }
    proofs = {name: Proof(name) for name, file in files.items() if _is_kept(file)}
    left = tuple(c for c in request.candidates if c.name not in proofs)
    if left:
        rest = msgspec.structs.replace(request, candidates=left)
        proofs |= {proof.name: proof for proof in tried(rest, progress, limit_s)}
    for name, proof in proofs.items():
        if proof.problem:
            log.warning(
                "kernels are not used: they were not proven on this GPU",
                kernels=name,
                problem=proof.problem,
            )
        else:
            _keep(files[name])
    return tuple(proofs[name] for name in files)


def tried(
    request: ProofRequest, progress: Progress, limit_s: float = LIMIT_S
) -> Iterator[Proof]:
    """Yield what came of each candidate. All are tried at once, each in a process of its own."""
    total = len(request.candidates)
    with contextlib.ExitStack() as running:
        trials: dict[BinaryIO, tuple[Candidate, Child]] = {}
        for candidate in request.candidates:
            alone = msgspec.structs.replace(request, candidates=(candidate,))
            try:
                pipe, child = _started(alone, running)
            except NodeError as error:
                yield Proof(candidate.name, error.message)
            else:
                trials[pipe] = candidate, child
        # Those that share a core have as long as if they took turns on it.
        limit_s *= max(1.0, total / len(os.sched_getaffinity(0)))
        deadline_s = monotonic() + limit_s
        at_home: list[Candidate] = []
        while trials:
            for pipe in select.select([*trials], [], [], POLL_S)[0]:
                candidate, child = trials.pop(pipe)
                proof = _said(pipe, candidate, child)
                if any(text in proof.problem for text in ONE_PROCESS):
                    at_home.append(candidate)
                else:
                    yield proof
            if monotonic() > deadline_s:
                for candidate, _ in trials.values():
                    yield Proof(candidate.name, f"it took longer than {limit_s:.0f} s")
                trials.clear()
            progress("proofs", total - len(trials), total)
    for candidate in at_home:
        yield prove(request, candidate)


def _started(
    request: ProofRequest, running: contextlib.ExitStack
) -> tuple[BinaryIO, Child]:
    """Return a process that proves kernels, and where to read what it says.

    Raises `NodeError`. Leaving `running` ends it.
    """
    read_end, write_end = os.pipe()
    pipe = running.enter_context(os.fdopen(read_end, "rb"))
    command = Command(
        "kernel proofs",
        (msgspec.json.encode(request).decode(), str(write_end)),
        module="baton.kernels.proofs",
        pass_fds=(write_end,),
    )
    try:
        child = Child(command, _ignore)
    finally:
        os.close(write_end)
    running.callback(child.stop, 0.0)
    return pipe, child


def _said(pipe: BinaryIO, candidate: Candidate, child: Child) -> Proof:
    """Return what a process says of its candidate, or how it has ended instead."""
    line = pipe.readline()
    if line.endswith(b"\n"):
        return msgspec.json.decode(line, type=Proof)
    child.wait(monotonic() + 1.0)
    last = child.tail[-1] if child.tail else "it said nothing"
    return Proof(candidate.name, f"its process ended with {child.exit_code}: {last}")


def _ignore(_name: str, _line: str) -> None:
    pass


def _file_of(request: ProofRequest, candidate: Candidate, environment: str) -> str:
    """Return the name of the file whose existence says that a candidate was proven."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (request.shapes, candidate):
        digest.update(msgspec.json.encode(part) + b"\n")
    digest.update(environment.encode())
    return f"{digest.hexdigest()}.proven"


def _is_kept(name: str) -> bool:
    """Return whether this user has proven it before, in a folder that nobody else may fill."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        folder = _folder()
        check_owner(folder)
        check_owner(folder / name)
        return True
    return False


def _keep(name: str) -> None:
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        make_private(_folder())
        (_folder() / name).touch(mode=0o600)


def _folder() -> Path:
    return cache_folder("proofs")
