"""`baton doctor cluster.yaml` checks every reachable host, and the path of every pair of hosts.

It runs `baton doctor` on each host, with flags made from the host's processes, compares the
reports, and then lets each prefill host offer a pool to each decode host, one pair after the other.
A cluster that serves is not touched.
"""

import select
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import msgspec

from baton.deploy.cluster.description import Description
from baton.deploy.cluster.hosts import addresses_by_name, bound_address, is_here
from baton.deploy.cluster.platforms.systemd import program_of
from baton.deploy.cluster.processes import ProcessSpec, plan_of
from baton.deploy.cluster.reading import read_description
from baton.deploy.cluster.state import read_deployment, state_folder
from baton.deploy.doctor.machine import Finding, MachineReport, fault, ok, warning
from baton.protocol.errors import ConfigError
from baton.runtime.channels.endpoint import bracketed, parse_endpoint

HOST = "{host}"
ALL = "all hosts"
PATHS = "paths"
POOL = "cache.memory_mib"
# The settings of a process that its machine's check needs, too.
SETTINGS = (
    "model.path",
    POOL,
    "transfer.transport",
    "transfer.device",
    "keys.file",
    "keys.insecure",
)
MAX_AT_ONCE = 8
# The time to start an interpreter on a busy host, beyond the command's own timeout.
EXTRA_S = 60.0


class RemoteHost(msgspec.Struct, frozen=True):
    """A host of a description, its processes, and how to run a command there."""

    name: str
    specs: tuple[ProcessSpec, ...]
    program: tuple[str, ...]  # what runs baton there
    # The words before a command, which hand it to a shell; empty on this machine.
    launcher: tuple[str, ...] | None  # None if the host cannot be reached

    @property
    def nodes(self) -> list[ProcessSpec]:
        return [spec for spec in self.specs if spec.role != "router"]

    def has(self, role: str) -> bool:
        return any(spec.role == role for spec in self.specs)

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command that runs `baton doctor` there, in a node's environment."""
        assert self.launcher is not None
        env = (self.nodes or self.specs)[0].env
        # Settings are in the words; other variables of a node, such as UCX_TLS, matter here too.
        given = [
            f"{name}={text}"
            for name, text in env.items()
            if not name.startswith("BATON_")
        ]
        settings: dict[str, str] = {}
        for spec in self.specs:
            settings = settings_of(spec) | settings
        settings.pop(POOL, None)
        flags = [
            word for name, text in settings.items() for word in (_flag(name), text)
        ]
        inner = [
            *(["env", *given] if given else []),
            *self.program,
            "doctor",
            *words,
            *flags,
        ]
        return [*self.launcher, *(map(shlex.quote, inner) if self.launcher else inner)]


def check_cluster(
    file: str, *, via: str, state: str, timeout_s: float
) -> Iterator[Finding]:
    """Yield the findings, host by host and then path by path. Raises `ConfigError`."""
    description = read_description(Path(file))
    hosts = _hosts_of(description, via)
    is_up = read_deployment(state_folder(description.name, state)) is not None
    reached = [host for host in hosts if host.launcher is not None]
    with ThreadPoolExecutor(MAX_AT_ONCE) as threads:
        reports = list(
            threads.map(lambda host: _report(host, hosts, is_up=is_up), reached)
        )
    for host, report in zip(reached, reports, strict=True):
        yield from (_at(host.name, finding) for finding in report.findings)
    for host in hosts:
        if host.launcher is None:
            text = (
                "not checked, because this command cannot run there: say how to reach it with "
                f"--via 'ssh {HOST}', or run `baton doctor {file}` on it too"
            )
            yield _at(host.name, warning("host", text))
    yield from compared(
        {host.name: one for host, one in zip(reached, reports, strict=True)}
    )
    able = [host for host, one in zip(reached, reports, strict=True) if one.version]
    for prefill, decode in product(able, able):
        if prefill.has("prefill") and decode.has("decode"):
            yield _at(PATHS, _path(prefill, decode, timeout_s))


def compared(reports: dict[str, MachineReport]) -> list[Finding]:
    """Return a finding for everything that must be equal on all hosts."""
    findings = []
    for check, values, advice in (
        (
            "versions",
            {h: one.version for h, one in reports.items()},
            "install one release on all",
        ),
        (
            "keys",
            {h: one.key for h, one in reports.items()},
            "copy one key file to all hosts",
        ),
        (
            "models",
            {h: one.model for h, one in reports.items()},
            "copy one model to all hosts",
        ),
    ):
        known = {host: value for host, value in values.items() if value}
        if len(known) < 2:
            continue
        usual, count = Counter(known.values()).most_common(1)[0]
        odd = "; ".join(
            f"{host} has {value}" for host, value in known.items() if value != usual
        )
        if odd:
            findings.append(
                fault(check, f"{odd}; {count} hosts have {usual}: {advice}")
            )
        else:
            findings.append(ok(check, f"{usual} on {count} hosts"))
    return [_at(ALL, finding) for finding in findings]


def machine_words(
    host: RemoteHost, hosts: Sequence[RemoteHost], *, is_up: bool
) -> list[str]:
    """Return the words that check a host. Running processes have their pools and ports already."""
    words = ["--json"]
    if not is_up:
        pool_mib = sum(
            int(settings_of(one).get(POOL, 0)) for one in host.nodes if not one.gpus
        )
        words += [_flag(POOL), str(pool_mib)] if pool_mib else []
        for spec in host.specs:
            for port in spec.ports:
                bound = bound_address(spec, port.name)
                words += ["--port", f"{bracketed(bound) or '0.0.0.0'}:{port.port}"]
    for address in _dialled(host, hosts):
        words += ["--reach", address]
    if gpus := sum(spec.gpus for spec in host.specs):
        words += ["--gpus", str(gpus)]
    if host.nodes and (gpus or sum(bool(one.nodes) for one in hosts) > 1):
        words.append("--nixl")
    return words


def settings_of(spec: ProcessSpec) -> dict[str, str]:
    """Return those settings of a process that matter to the check of its machine."""
    pairs = [word.partition("=") for word in spec.argv]
    return {name: value for name, _, value in pairs if name in SETTINGS}


def _hosts_of(description: Description, via: str) -> list[RemoteHost]:
    """Return every host. Raises `ConfigError` for a mistake in `via`."""
    try:
        launcher = shlex.split(via)
    except ValueError as error:
        raise ConfigError(f"--via {via}: {error}") from error
    if launcher and not any(HOST in word for word in launcher):
        raise ConfigError(
            f"--via {via}: write {HOST} where the host belongs: 'ssh {HOST}'"
        )
    plan = plan_of(description, addresses_by_name(description))
    hosts = []
    for name in dict.fromkeys(spec.host for spec in plan.processes):
        specs = tuple(spec for spec in plan.processes if spec.host == name)
        words: tuple[str, ...] | None = None
        if is_here(name):
            words = ()
        elif launcher:
            words = tuple(word.replace(HOST, name) for word in launcher)
        hosts.append(RemoteHost(name, specs, program_of(description), words))
    return hosts


def _dialled(host: RemoteHost, hosts: Sequence[RemoteHost]) -> list[str]:
    """Return the addresses that a host's nodes dial: routers, and decode nodes with fixed ports."""
    found: dict[str, None] = {}
    for spec in host.nodes:
        routers = spec.env["BATON_NODE_ROUTERS"].split(",")
        found |= dict.fromkeys(one.removeprefix("tcp://") for one in routers)
    if host.has("prefill"):
        decode = [spec for one in hosts for spec in one.nodes if spec.role == "decode"]
        binds = [parse_endpoint(spec.env["BATON_NODE_BIND"]) for spec in decode]
        found |= {
            f"{bracketed(one.host)}:{one.port}": None for one in binds if one.port
        }
    return list(found)


def _report(
    host: RemoteHost, hosts: Sequence[RemoteHost], *, is_up: bool
) -> MachineReport:
    """Run the check of one machine on a host."""
    said, complaint = _run(
        host.command(machine_words(host, hosts, is_up=is_up)), 2 * EXTRA_S
    )
    try:
        return msgspec.json.decode(said, type=MachineReport)
    except msgspec.MsgspecError:
        why = f"baton does not run there ({complaint}): check that it is installed at the same path"
        return MachineReport("", "", "", (fault("host", why),))


def _path(prefill: RemoteHost, decode: RemoteHost, timeout_s: float) -> Finding:
    """Measure how a decode host reads a prefill host."""
    check = f"{decode.name} reads {prefill.name}"
    bind = next(
        spec.env["BATON_NODE_BIND"] for spec in decode.nodes if spec.role == "decode"
    )
    timeout = ["--timeout", f"{timeout_s:g}"]
    with subprocess.Popen(
        decode.command(
            ["--listen", f"tcp://{bracketed(parse_endpoint(bind).host)}", *timeout]
        ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as listener:
        try:
            assert listener.stdout is not None
            select.select([listener.stdout], [], [], EXTRA_S)
            line = listener.stdout.readline() if listener.poll() is None else ""
            if not line:
                listener.kill()
                _, complaint = listener.communicate()
                return fault(check, f"{decode.name} cannot listen: {_last(complaint)}")
            command = prefill.command(
                ["--connect", line.split()[-1], "--json", *timeout]
            )
            said, complaint = _run(command, EXTRA_S + 5 * timeout_s)
        finally:
            listener.terminate()
    try:
        finding = msgspec.json.decode(said, type=list[Finding])[0]
    except (msgspec.MsgspecError, IndexError):
        return fault(check, f"{prefill.name} cannot connect: {complaint}")
    return msgspec.structs.replace(finding, check=check)


def _at(host: str, finding: Finding) -> Finding:
    return msgspec.structs.replace(finding, host=host)


def _flag(name: str) -> str:
    return "--" + name.replace(".", "-").replace("_", "-")


def _run(command: Sequence[str], timeout_s: float) -> tuple[str, str]:
    """Return the output of a command, and the last line of its error output."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {timeout_s:g} s"
    except OSError as error:
        return "", f"cannot run {command[0]}: {error.strerror}"
    return done.stdout, _last(done.stderr) or f"exit code {done.returncode}"


def _last(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
