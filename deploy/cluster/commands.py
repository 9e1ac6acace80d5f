"""`baton up`, `down`, `status` and `render`: one cluster.yaml on any platform.

The command line calls `main`. `up` writes what it starts into a state folder, where `status` and
`down` find it. It returns once the cluster serves, or stays in the foreground on this machine. If
it fails, it leaves nothing running.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from baton.deploy.cluster.arguments import Words, words_of
from baton.deploy.cluster.platform import Platform, PlatformOptions
from baton.deploy.cluster.platforms import platform_named
from baton.deploy.cluster.processes import ClusterPlan, plan_of
from baton.deploy.cluster.readiness import check_ids, wait_until_ready
from baton.deploy.cluster.reading import read_description
from baton.deploy.cluster.running import (
    Deployment,
    deployment_of,
    forget_deployment,
    make_private,
    read_deployment,
    state_folder,
    write_deployment,
)
from baton.deploy.cluster.status import ClusterView, show
from baton.deploy.cluster.table import table_of
from baton.protocol.errors import ConfigError
from baton.runtime.process import Interrupts

WATCH_S = 0.2
# Added to the nodes' own deadline: the time for interpreters and the platform to start.
EXTRA_START_S = 20.0
# Platforms that first fetch an image, and perhaps the model.
FETCH_S = {"kubernetes": 1800.0}


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
        extra_s = EXTRA_START_S + FETCH_S.get(words.platform, 0.0)
        timeout_s = words.timeout_s or plan.start_timeout_s + extra_s
        if not wait_until_ready(plan, platform, folder, timeout_s, interrupts):
            raise KeyboardInterrupt
        print(_report(plan, platform, folder, stays=words.stays), flush=True)
        # `baton down` may end it from elsewhere.
        while words.stays and not interrupts.wait(WATCH_S) and read_deployment(folder) is not None:
            pass
    return 0


def down(words: Words) -> int:
    """End every process of a deployment."""
    folder, deployment = deployment_of(words.file, words.state)
    platform = platform_named(deployment.platform, PlatformOptions(deployment.hosts))
    try:
        platform.stop(folder)
    except KeyboardInterrupt:
        platform.stop(folder, is_hurried=True)
    forget_deployment(folder)
    print(f"{deployment.name} is down")
    return 0


def status(words: Words) -> int:
    """Print the state of a cluster. The exit code is 0 if every process runs."""
    if words.urls and not words.names_deployment:
        return show(ClusterView(words), words)
    folder, deployment = deployment_of(words.file, words.state)
    return show(ClusterView(words, folder, deployment), words)


@contextlib.contextmanager
def _ended(
    platform: Platform, folder: Path, words: Words, interrupts: Interrupts
) -> Iterator[None]:
    """End the cluster if the block fails, or when `up` in the foreground is done."""
    try:
        yield
    except BaseException:
        if words.keep:
            print(
                f"baton: --keep leaves the cluster as it is; its state is in {folder}",
                file=sys.stderr,
            )
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


def _report(plan: ClusterPlan, platform: Platform, folder: Path, *, stays: bool) -> str:
    """Return a text that says what runs, where clients connect, and how to end it."""
    urls = platform.urls(plan, folder)
    lines = [table_of(platform.status(folder)), ""]
    lines += [f"{plan.description.name} serves at {url}/v1" for url in urls]
    how = "Ctrl-C ends it" if stays else f"end it with: baton down --state {folder}"
    return "\n".join([*lines, how])
