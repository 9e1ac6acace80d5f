"""`baton up`, `down`, `status` and `render`: one cluster.yaml on any platform.

The command line calls `main`. `up` writes what it starts into a state folder, where `status` and
`down` find it. It returns once the cluster serves, or stays in front on this machine, and leaves
nothing running when it fails.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from baton.deploy.cluster.arguments import Words, words_of
from baton.deploy.cluster.document import read_document
from baton.deploy.cluster.platform import Platform, PlatformOptions, platform_named
from baton.deploy.cluster.processes import ClusterPlan, plan_of
from baton.deploy.cluster.readiness import check_ids, wait_until_ready
from baton.deploy.cluster.reading import read_description
from baton.deploy.cluster.running import (
    Deployment,
    forget_deployment,
    make_private,
    read_deployment,
    state_folder,
    write_deployment,
)
from baton.deploy.cluster.table import table_of
from baton.protocol.errors import ConfigError
from baton.runtime.interrupts import Interrupts

WATCH_S = 0.2
# Added to the nodes' own deadline: the time for interpreters and the platform to start.
EXTRA_START_S = 20.0


def main(command: str, summary: str, arguments: Sequence[str]) -> int:
    """Run `up`, `down`, `status` or `render`; return the exit code.

    Raises `ConfigError` and `NodeError`.
    """
    words = words_of(command, summary, arguments)
    run = {"up": up, "down": down, "status": status, "render": render}[command]
    return run(words)


def render(words: Words) -> int:
    """Write the files of a platform into a folder and print their names."""
    platform, plan = _planned(words)
    folder = Path(words.out or f"{plan.description.name}-{words.platform}")
    folder.mkdir(parents=True, exist_ok=True)
    for path in platform.render(plan, folder):
        print(path)
    return 0


def up(words: Words) -> int:
    """Start a cluster and wait until it serves."""
    platform, plan = _planned(words)
    name = plan.description.name
    folder = state_folder(name, words.state)
    if read_deployment(folder) is not None:
        raise ConfigError(
            f"{name} is up already, or was not ended: run `baton down {words.file}` first, or name "
            f"another folder than {folder} with --state"
        )
    make_private(folder)
    write_deployment(
        folder, Deployment(name, words.platform, str(Path(words.file).absolute()), words.hosts)
    )
    with Interrupts() as interrupts, _ended(platform, folder, words, interrupts):
        check_ids(plan, platform.own(plan), platform.urls(plan, folder))
        platform.start(plan, folder)
        timeout_s = words.timeout_s or plan.start_timeout_s + EXTRA_START_S
        if not wait_until_ready(plan, platform, folder, timeout_s, interrupts):
            raise KeyboardInterrupt
        print(_report(plan, platform, folder, stays=words.stays), flush=True)
        # `baton down` may end it from elsewhere.
        while words.stays and not interrupts.wait(WATCH_S) and read_deployment(folder) is not None:
            pass
    return 0


def down(words: Words) -> int:
    """End every process of a deployment."""
    folder, deployment = _deployment(words)
    platform = platform_named(deployment.platform, PlatformOptions(deployment.hosts))
    platform.stop(folder)
    forget_deployment(folder)
    print(f"{deployment.name} is down")
    return 0


def status(words: Words) -> int:
    """Print how a deployment is; the exit code is 0 if every process runs."""
    folder, deployment = _deployment(words)
    platform = platform_named(deployment.platform, PlatformOptions(deployment.hosts))
    statuses = platform.status(folder)
    if words.json:
        print(msgspec.json.encode(statuses).decode())
    else:
        print(table_of(statuses))
    return 0 if all(one.state == "running" for one in statuses) else 1


@contextlib.contextmanager
def _ended(
    platform: Platform, folder: Path, words: Words, interrupts: Interrupts
) -> Iterator[None]:
    """End what was started when the block fails, or when `up` stays in front and is done."""
    try:
        yield
    except BaseException:
        if words.keep:
            print(f"baton: --keep leaves it as it is; the state is in {folder}", file=sys.stderr)
            raise
        _end(platform, folder, is_hurried=True)
        raise
    if words.stays:
        _end(platform, folder, is_hurried=interrupts.is_hurried)


def _end(platform: Platform, folder: Path, *, is_hurried: bool) -> None:
    platform.stop(folder, is_hurried=is_hurried)
    forget_deployment(folder)


def _planned(words: Words) -> tuple[Platform, ClusterPlan]:
    options = PlatformOptions(
        words.hosts,
        is_tied=words.stays,
        address=words.address,
        may_wait=words.timeout_s > 0,
    )
    platform = platform_named(words.platform, options)
    description = read_description(Path(words.file))
    try:
        return platform, plan_of(description, platform.places(description))
    except ConfigError as error:
        raise ConfigError(f"{words.file}: {error.message}") from error


def _deployment(words: Words) -> tuple[Path, Deployment]:
    """Return the state folder and what `up` wrote there; raises `ConfigError` if nothing is up."""
    # The file may have changed since, so only its name counts.
    name = "" if words.state else _name_in(Path(words.file))
    folder = state_folder(name, words.state)
    deployment = read_deployment(folder)
    if deployment is None:
        raise ConfigError(
            f"nothing is up in {folder}: `baton up` was not run by this user on this machine, or "
            "with another --state"
        )
    return folder, deployment


def _name_in(path: Path) -> str:
    content = read_document(path)
    name = content.get("name") if isinstance(content, dict) else None
    if not isinstance(name, str):
        raise ConfigError(f"{path}: the key name is missing")
    return name


def _report(plan: ClusterPlan, platform: Platform, folder: Path, *, stays: bool) -> str:
    """Return what runs, where clients connect, and how it is ended."""
    urls = platform.urls(plan, folder)
    lines = [table_of(platform.status(folder)), ""]
    lines += [f"{plan.description.name} serves at {url}/v1" for url in urls]
    how = "Ctrl-C ends it" if stays else f"end it with: baton down --state {folder}"
    return "\n".join([*lines, how])
