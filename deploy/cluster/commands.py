"""`baton up`, `down`, `restart`, `status` and `render`: one cluster.yaml on any platform.

`up` runs a description on this machine or on Ray, and records what it starts in a state folder,
where `status` and `down` find it. It stays in the foreground, or on this machine returns once the
cluster serves. If it fails, it leaves nothing running. Kubernetes, Slurm and systemd run the files
that `render` writes.
"""

import contextlib
import importlib.util
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from baton.deploy.cluster.description import Description
from baton.deploy.cluster.hosts import addresses_by_name
from baton.deploy.cluster.platforms import ray_plan
from baton.deploy.cluster.platforms.local import LocalPlatform
from baton.deploy.cluster.processes import ClusterAddresses, ClusterPlan, plan_of
from baton.deploy.cluster.readiness import check_ids, is_ready, wait_until_ready
from baton.deploy.cluster.reading import read_description
from baton.deploy.cluster.state import (
    Deployment,
    Platform,
    ProcessId,
    deployment_of,
    forget_deployment,
    make_private,
    read_deployment,
    state_folder,
    write_deployment,
)
from baton.deploy.cluster.status import routers_of, show
from baton.protocol.config import about
from baton.protocol.errors import ConfigError, NodeError
from baton.runtime.clock import monotonic
from baton.runtime.fields import Field, FlagParser, did_you_mean, fields_of, with_values
from baton.runtime.process import Interrupts
from baton.runtime.unix_socket import is_url

WATCH_S = 0.2
RAY_ADDRESS = "RAY_ADDRESS"  # the variable that Ray reads, too
# Added to the nodes' own deadline: the time for interpreters and the platform to start.
EXTRA_START_S = 20.0
# Added to the graces of routers and nodes: what platforms take beyond them, a forced end included.
EXTRA_STOP_S = 60.0
LOCAL = "local"
RAY = "ray"
# How the files that `render` writes for a platform are run.
RENDERED = {
    "helm": "helm install NAME CHART -f FOLDER/values.yaml -f FOLDER/secrets.yaml",
    "kubernetes": "kubectl apply -k FOLDER/base",
    "slurm": "bash FOLDER/submit.sh",
    "systemd": "systemctl start baton-NAME.target",
}
DEFAULT_FILE = "cluster.yaml"
SERVED_URL = "http://127.0.0.1:8000"


class ClusterArguments(msgspec.Struct, frozen=True):
    """The arguments of one command: a file, and those of these flags that the command has."""

    file: str = ""
    process: str = ""  # of `restart`
    on: Annotated[
        str,
        about(
            f"what runs the processes: {LOCAL} (the default of `up`) or {RAY}, or to render "
            f"{', '.join(RENDERED)}"
        ),
    ] = ""
    out: Annotated[
        str, about("folder for the files (default: NAME-PLATFORM)", kind="path")
    ] = ""
    state: Annotated[
        str,
        about(
            "folder in which `up` records what it starts (default: ~/.local/state/baton/NAME)",
            kind="path",
        ),
    ] = ""
    host: Annotated[
        tuple[str, ...],
        about(
            "hosts of the description whose processes this command starts (default: the hosts "
            "whose addresses this machine has)"
        ),
    ] = ()
    address: Annotated[
        str,
        about(
            "HOST:PORT of the Ray cluster to use (default: RAY_ADDRESS, or that of this host)"
        ),
    ] = ""
    detach: Annotated[
        bool,
        about(
            "return once the cluster serves; without this flag, `up` stays in the foreground and "
            "ends the cluster with Ctrl-C",
            kind="switch",
        ),
    ] = False
    timeout: Annotated[
        float,
        about(
            "longest wait until the cluster serves; 0 waits until nothing has made progress for "
            "node.start_timeout_s of the slowest pool, plus 20 s",
            "s",
            ge=0,
        ),
    ] = 0.0
    json: Annotated[bool, about("print JSON instead of a table", kind="switch")] = False
    url: Annotated[
        tuple[str, ...],
        about(
            "URL of a router to ask, such as http://10.0.0.1:8000; may be repeated; without FILE "
            f"and --state, only these routers are asked, or {SERVED_URL} if there is no "
            f"{DEFAULT_FILE}",
            kind="repeated",
        ),
    ] = ()
    api_key: Annotated[
        str,
        about(
            "API key that the routers ask for (default: BATON_API_KEY, or the key in the file)"
        ),
    ] = ""
    ca_file: Annotated[
        str,
        about(
            "PEM file with the authority that signed the certificates of https routers",
            kind="path",
        ),
    ] = ""

    @property
    def path(self) -> str:
        return self.file or DEFAULT_FILE

    @property
    def stays(self) -> bool:
        """Return whether `up` stays in front, and the cluster ends with it."""
        return not self.detach


FLAGS = {
    "up": ("on", "state", "host", "address", "detach", "timeout"),
    "down": ("state",),
    "restart": ("state", "timeout"),
    "status": ("state", "json", "url", "api_key", "ca_file"),
    "render": ("on", "out"),
}


def main(command: str, summary: str, arguments: Sequence[str]) -> int:
    """Run `up`, `down`, `restart`, `status` or `render`; return the exit code.

    Raises `ConfigError` and `NodeError`.
    """
    given = arguments_of(command, summary, arguments)
    commands = {
        "up": up,
        "down": down,
        "restart": restart,
        "status": status,
        "render": render,
    }
    run = commands[command]
    return run(given)


def render(given: ClusterArguments) -> int:
    """Write the files of a platform into a folder and print their names."""
    from baton.deploy.cluster.platforms import helm, kubernetes, slurm, systemd

    addresses_of, write = {
        "helm": (helm.addresses_of, helm.render),
        "kubernetes": (helm.addresses_of, kubernetes.render),
        "slurm": (slurm.addresses_of, slurm.render),
        "systemd": (systemd.addresses_of, systemd.render),
    }[given.on]
    has_addresses = given.on in ("helm", "kubernetes")  # each pod has one
    plan = _planned(given.path, addresses_of, shares_hosts=not has_addresses)
    folder = Path(given.out or f"{plan.description.name}-{given.on}")
    folder.mkdir(parents=True, exist_ok=True)
    for path in write(plan, folder):
        print(path)
    return 0


def up(given: ClusterArguments) -> int:
    """Start a cluster and wait until it serves."""
    plan = _planned(given.path, _addresses_on(given.on))
    name = plan.description.name
    folder = state_folder(name, given.state)
    if read_deployment(folder) is not None:
        raise ConfigError(
            f"{name} is up already, or was not ended: run `baton down {given.path}` first, or name "
            f"another folder than {folder} with --state"
        )
    platform = _platform_for(given)
    make_private(folder)
    file = str(Path(given.path).absolute())
    this = ProcessId.of(os.getpid()) if given.stays else None
    stop_s = 3 * max(spec.grace_s for spec in plan.processes) + EXTRA_STOP_S
    write_deployment(folder, Deployment(name, given.on, file, given.host, this, stop_s))
    with Interrupts() as interrupts:
        try:
            check_ids(plan, platform.own(plan), platform.urls(plan, folder))
            platform.start(plan, folder)
            timeout_s = given.timeout or plan.start_timeout_s + EXTRA_START_S
            is_given = given.timeout > 0
            if not wait_until_ready(
                plan, platform, folder, timeout_s, interrupts, is_absolute=is_given
            ):
                raise KeyboardInterrupt
            print(_report(plan, platform, folder, stays=given.stays), flush=True)
            while given.stays and not interrupts.wait(WATCH_S):
                # Ray's actors start their nodes again when they are asked.
                platform.status(folder)
        except BaseException:
            platform.stop(folder, is_hurried=True)
            forget_deployment(folder)
            raise
        if given.stays:
            platform.stop(folder, is_hurried=interrupts.is_hurried)
            forget_deployment(folder)
    return 0


def down(given: ClusterArguments) -> int:
    """End every process of a deployment."""
    folder, deployment = deployment_of(given.path, given.state)
    platform = LocalPlatform(deployment.hosts)
    up = deployment.up
    try:
        if up is not None and up.signal(signal.SIGTERM):
            up.wait(deployment.stop_timeout_s)
            up.signal(signal.SIGKILL)  # if it is there still; its processes end with it
        platform.stop(folder)
    except KeyboardInterrupt:
        if up is not None:
            up.signal(signal.SIGINT)
        platform.stop(folder, is_hurried=True)
    forget_deployment(folder)
    print(f"{deployment.name} is down")
    return 0


def restart(given: ClusterArguments) -> int:
    """Let one process drain and start again, with the release that is installed now."""
    folder, deployment = deployment_of(given.path, given.state)
    if deployment.platform != LOCAL:
        raise ConfigError(
            f"{deployment.name} runs on {deployment.platform}, which restarts nodes"
        )
    platform = LocalPlatform(deployment.hosts)
    before = {status.name: status for status in platform.status(folder)}
    if given.process not in before:
        hint = did_you_mean(given.process, before) or f": it has {', '.join(before)}"
        raise ConfigError(
            f"{deployment.name} has no process {given.process} here{hint}"
        )
    platform.restart(folder, given.process)
    plan = _planned(deployment.file, addresses_by_name)
    timeout_s = given.timeout or plan.start_timeout_s + EXTRA_START_S
    timeout_s += max(
        spec.grace_s for spec in plan.processes if spec.name == given.process
    )
    deadline_s = monotonic() + timeout_s
    urls = platform.urls(plan, folder)
    with Interrupts() as interrupts:
        while not interrupts.wait(WATCH_S):
            now = {status.name: status for status in platform.status(folder)}[
                given.process
            ]
            is_new = now.state == "running" and now.note != before[given.process].note
            if is_new and is_ready(given.process, urls):
                print(f"{given.process} is ready again")
                return 0
            if monotonic() > deadline_s:
                raise NodeError(
                    f"{given.process} is not ready within {timeout_s:g} s: see its log"
                )
    return 0


def status(given: ClusterArguments) -> int:
    """Print the state of a cluster. The exit code is 0 if every process runs."""
    is_alone = not (given.file or given.state)
    urls_alone = given.url
    if is_alone and not given.url and not Path(DEFAULT_FILE).exists():
        # Where `baton serve` serves without further settings.
        urls_alone = (SERVED_URL,)
    if is_alone and urls_alone:
        routers = routers_of(urls_alone, given.api_key)
        return show(routers, ca_file=given.ca_file, is_json=given.json)
    folder, deployment = deployment_of(given.path, given.state)
    platform = LocalPlatform(deployment.hosts)
    plan: ClusterPlan | None = None
    # If the file was changed or moved, the processes that run are shown without their routers.
    with contextlib.suppress(ConfigError):
        plan = _planned(deployment.file, _addresses_on(deployment.platform))
    statuses = platform.status(folder)
    urls = platform.urls(plan, folder) if plan is not None else ()
    routers = routers_of(given.url, given.api_key, plan, urls)
    return show(
        routers, deployment.name, statuses, ca_file=given.ca_file, is_json=given.json
    )


def _planned(
    file: str,
    addresses_of: Callable[[Description], ClusterAddresses],
    *,
    shares_hosts: bool = True,
) -> ClusterPlan:
    description = read_description(Path(file), shares_hosts=shares_hosts)
    try:
        return plan_of(description, addresses_of(description))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}") from error


def _addresses_on(platform: str) -> Callable[[Description], ClusterAddresses]:
    return ray_plan.addresses_of if platform == RAY else addresses_by_name


def _platform_for(given: ClusterArguments) -> Platform:
    """Return what runs the processes of `up`. Raises `NodeError` if it cannot be reached."""
    if given.on != RAY:
        return LocalPlatform(given.host, is_tied=given.stays)
    _check_ray()
    from baton.deploy.cluster.platforms.ray import RayPlatform

    address = given.address or os.environ.get(RAY_ADDRESS, "")
    return RayPlatform(address, may_wait=given.timeout > 0)


def _check_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "Ray is not installed in this Python: install baton with its extra `ray`, here and on "
            "the hosts of the Ray cluster"
        )


def _report(plan: ClusterPlan, platform: Platform, folder: Path, *, stays: bool) -> str:
    """Return a text that says where clients connect, and how to end the cluster."""
    urls = platform.urls(plan, folder)
    lines = [f"{plan.description.name} serves at {url}/v1" for url in urls]
    how = "Ctrl-C ends it" if stays else f"end it with: baton down --state {folder}"
    return "\n".join([*lines, how])


def arguments_of(
    command: str, summary: str, arguments: Sequence[str]
) -> ClusterArguments:
    """Return the parsed arguments; `--help` prints and exits. Raises `ConfigError`."""
    parser = parser_of(command, summary)
    parsed = parser.parse_args(arguments)
    values = parser.values_in(parsed, _fields(command)) | {"file": parsed.file or ""}
    if command == "restart":
        values["process"] = parsed.process
    given = with_values(ClusterArguments(), values)
    platforms = _platforms(command)
    if command == "up" and not given.on:
        given = msgspec.structs.replace(given, on=LOCAL)
    for url in given.url:
        if not is_url(url):
            raise ConfigError(
                f"--url {url}: give a URL such as http://10.0.0.1:8000 or unix:/run/baton.sock"
            )
    if command == "up" and given.on in RENDERED:
        raise ConfigError(
            f"--on {given.on}: write its files with `baton render {given.path} --on {given.on}` "
            f"and run them with `{RENDERED[given.on]}`"
        )
    if command == "render" and not given.on:
        raise ConfigError(f"name a platform: --on {', --on '.join(platforms)}")
    if command in ("up", "render") and given.on not in platforms:
        raise ConfigError(f"--on {given.on}: choose one of {', '.join(platforms)}")
    if given.address and given.on != RAY:
        raise ConfigError(
            "--address is that of a Ray cluster: add `--on ray`, or leave it out"
        )
    if given.detach and given.on == RAY:
        raise ConfigError(
            "--detach: a cluster on Ray ends with its driver; leave it in the background with "
            f"`ray job submit --no-wait -- baton up {given.path} --on ray`"
        )
    if given.host and given.on == RAY:
        raise ConfigError(
            "--host: Ray chooses the hosts of all processes; leave this out"
        )
    return given


def parser_of(command: str, summary: str) -> FlagParser:
    """Return the parser of `baton command`."""
    parser = FlagParser(prog=f"baton {command}", description=summary)
    if command == "restart":
        name = "the process, such as decode-1, as `baton status` shows it"
        parser.add_argument("process", metavar="NAME", help=name)
    text = f"the description of the cluster (default: {DEFAULT_FILE})"
    parser.add_argument("file", metavar="FILE", nargs="?", help=text)
    parser.add_settings(_fields(command), group_of=lambda _: "flags")
    if "on" in FLAGS[command]:
        parser.words["on"] = _platforms(command)
    return parser


def _fields(command: str) -> list[Field]:
    return [
        field for field in fields_of(ClusterArguments) if field.name in FLAGS[command]
    ]


def _platforms(command: str) -> tuple[str, ...]:
    return tuple(RENDERED) if command == "render" else (LOCAL, RAY)
