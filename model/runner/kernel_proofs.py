"""Find which kernels may be used on this GPU: those that are proven in a process with a deadline.

A wrong kernel would cost tokens, and one that hangs or breaks its context would cost the node. So
each candidate is tried in another process, and costs at most the speed that it would have given.
What was proven on a GPU, with a driver, compilers and the kernels' sources, stays proven.
"""

import contextlib
import hashlib
import os
import select
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

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
    total = len(files)
    while len(proofs) < total:
        progress("proofs", len(proofs), total)
        left = tuple(c for c in request.candidates if c.name not in proofs)
        rest = msgspec.structs.replace(request, candidates=left)
        for proof in _run(rest, progress, limit_s):
            proofs[proof.name] = proof
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


def _run(request: ProofRequest, progress: Progress, limit_s: float) -> Iterator[Proof]:
    """Yield what one process proves, and a failure for the candidate at which it ends early."""
    left = list(request.candidates)
    for line in _lines(request, progress, limit_s):
        if isinstance(line, str):
            yield Proof(left[0].name, line)
            return
        if any(text in line.problem for text in ONE_PROCESS):
            yield from (prove(request, candidate) for candidate in left)
            return
        del left[0]
        yield line


def _lines(
    request: ProofRequest, progress: Progress, limit_s: float
) -> Iterator[Proof | str]:
    """Yield the proofs of a process, and why it ended if it ended before the last one."""
    total = len(request.candidates)
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as pipe, contextlib.ExitStack() as running:
        command = Command(
            "kernel proofs",
            (msgspec.json.encode(request).decode(), str(write_end)),
            module="baton.kernels.proofs",
            pass_fds=(write_end,),
        )
        try:
            child = Child(command, _ignore)
        except NodeError as error:
            yield error.message
            return
        finally:
            os.close(write_end)
        running.callback(child.stop, 0.0)
        deadline_s = monotonic() + limit_s
        num_proven = 0
        while num_proven < total:
            if select.select([pipe], [], [], POLL_S)[0]:
                line = pipe.readline()
                if not line.endswith(b"\n"):
                    child.wait(monotonic() + 1.0)
                    last = child.tail[-1] if child.tail else "it said nothing"
                    yield f"its process ended with {child.exit_code}: {last}"
                    return
                yield msgspec.json.decode(line, type=Proof)
                num_proven += 1
                deadline_s = monotonic() + limit_s
            elif monotonic() > deadline_s:
                yield f"it took longer than {limit_s:.0f} s"
                return
            progress("proofs", num_proven, total)


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
