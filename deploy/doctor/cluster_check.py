"""`baton doctor cluster.yaml` checks every reachable host, and the path of every pair of hosts.

It runs `baton doctor --json` on each host, compares the reports, and then lets each prefill host
offer a pool to each decode host, one pair after the other. `commands` calls it. A cluster that
serves is not touched.
"""

import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import msgspec

from baton.deploy.cluster.host_seat import HostSeat
from baton.deploy.cluster.reading import read_description
from baton.deploy.cluster.state import read_deployment, state_folder
from baton.deploy.doctor.arguments import DoctorWords
from baton.deploy.doctor.comparison import LookedAt, compared
from baton.deploy.doctor.findings import Finding, fault, warning
from baton.deploy.doctor.launchers import seats_of
from baton.deploy.doctor.machine_report import MachineReport
from baton.deploy.doctor.orders import connect_words, listen_words, look_words

PATHS = "paths"
MAX_AT_ONCE = 8
# The time to start an interpreter on a busy host, beyond the command's own timeout.
EXTRA_S = 60.0


def check_cluster(words: DoctorWords) -> Iterator[Finding]:
    """Yield the findings, host by host and then path by path. Raises `ConfigError`."""
    description = read_description(Path(words.file))
    folder = state_folder(description.name, words.state)
    seats, is_up = seats_of(description, words.via), read_deployment(folder) is not None
    reached = [seat for seat in seats if seat.launcher is not None]
    with ThreadPoolExecutor(MAX_AT_ONCE) as threads:
        looks = list(threads.map(lambda seat: _look(seat, seats, is_up=is_up), reached))
    for seat, (_, findings) in zip(reached, looks, strict=True):
        yield from (_at(seat.host, finding) for finding in findings)
    for seat in seats:
        if seat.launcher is None:
            yield _at(seat.host, warning("host", _unreached(words)))
    yield from compared([one for one, _ in looks if one is not None])
    answered = [seat for seat, (one, _) in zip(reached, looks, strict=True) if one is not None]
    for prefill, decode in product(_with(answered, "prefill"), _with(answered, "decode")):
        yield _at(PATHS, _path(prefill, decode, words.timeout_s))


def _unreached(words: DoctorWords) -> str:
    return (
        "not looked at, because this command cannot run there: say how to reach it with --via "
        f"'ssh {{host}}', or run `baton doctor {words.file}` on it too"
    )


def _at(host: str, finding: Finding) -> Finding:
    return msgspec.structs.replace(finding, host=host)


def _with(seats: Sequence[HostSeat], role: str) -> list[HostSeat]:
    return [seat for seat in seats if any(spec.role == role for spec in seat.specs)]


def _look(
    seat: HostSeat, seats: Sequence[HostSeat], *, is_up: bool
) -> tuple[LookedAt | None, Sequence[Finding]]:
    """Run the check of one machine on a host."""
    asked_s = time.time()
    said, complaint = _run(seat.command(look_words(seat, seats, is_up=is_up)), 2 * EXTRA_S)
    try:
        report = msgspec.json.decode(said, type=MachineReport)
    except msgspec.MsgspecError:
        why = f"baton does not run there ({complaint}): see that it is installed at the same path"
        return None, [fault("host", why)]
    return LookedAt(seat.host, report.facts, asked_s, time.time()), report.findings


def _path(prefill: HostSeat, decode: HostSeat, timeout_s: float) -> Finding:
    """Measure how a decode host reads a prefill host."""
    check = f"{decode.host} reads {prefill.host}"
    with subprocess.Popen(
        decode.command(listen_words(decode, timeout_s)),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as listener:  # fmt: skip
        try:
            assert listener.stdout is not None
            select.select([listener.stdout], [], [], EXTRA_S)
            line = listener.stdout.readline() if listener.poll() is None else ""
            if not line:
                listener.kill()
                _, complaint = listener.communicate()
                return fault(check, f"{decode.host} cannot listen: {_last(complaint)}")
            address = msgspec.json.decode(line, type=dict[str, str])["address"]
            words = connect_words(prefill, address, timeout_s)
            said, complaint = _run(prefill.command(words), EXTRA_S + 5 * timeout_s)
        finally:
            listener.terminate()
    try:
        finding = msgspec.json.decode(said, type=list[Finding])[0]
    except (msgspec.MsgspecError, IndexError):
        return fault(check, f"{prefill.host} cannot connect: {complaint}")
    return msgspec.structs.replace(finding, check=check)


def _run(command: Sequence[str], timeout_s: float) -> tuple[str, str]:
    """Return the output of a command, and the last line of its error output."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            timeout=timeout_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "", f"no answer within {timeout_s:g} s"
    except OSError as error:
        return "", f"cannot run {command[0]}: {error.strerror}"
    return done.stdout, _last(done.stderr) or f"exit code {done.returncode}"


def _last(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
