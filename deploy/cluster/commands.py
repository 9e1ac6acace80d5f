"""`baton up`, `down`, `status` and `render`: one cluster.yaml on this machine or any platform.

`up` runs a description on this machine or on Ray, and records what it starts in a state folder,
where `status` and `down` find it. It returns once the cluster serves, or stays in the foreground on
this machine. If it fails, it leaves nothing running. Kubernetes, Slurm and systemd run the files
that `render` writes.
"""

import contextlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from baton.deploy.cluster.arguments import RAY, ClusterArguments, arguments_of
from baton.deploy.cluster.description import Description
from baton.deploy.cluster.hosts import places_by_name
from baton.deploy.cluster.local import LocalPlatform
from baton.deploy.cluster.processes import ClusterPlan, ProcessPlaces, plan_of
from baton.deploy.cluster.readiness import check_ids, wait_until_ready
from baton.deploy.cluster.reading import read_description
from baton.deploy.cluster.state import (
    Deployment,
    Platform,
    deployment_of,
    forget_deployment,
    make_private,
    read_deployment,
    state_folder,
    write_deployment,
)
from baton.deploy.cluster.status import routers_of, show
from baton.protocol.errors import ConfigError
from baton.runtime.process import Interrupts

WATCH_S = 0.2
RAY_ADDRESS = "RAY_ADDRESS"  # the variable that Ray reads, too
# Added to the nodes' own deadline: the time for interpreters and the platform to start.
EXTRA_START_S = 20.0


def main(command: str, summary: str, arguments: Sequence[str]) -> int:
    """Run `up`, `down`, `status` or `render`; return the exit code.

    Raises `ConfigError` and `NodeError`.
    """
    given = arguments_of(command, summary, arguments)
    run = {"up": up, "down": down, "status": status, "render": render}[command]
    return run(given)


def render(given: ClusterArguments) -> int:
    """Write the files of a platform into a folder and print their names."""
    from baton.deploy.cluster import kubernetes, slurm, systemd

    places, write = {
        "kubernetes": (kubernetes.places_of, kubernetes.render),
        "slurm": (slurm.places_of, slurm.render),
        "systemd": (places_by_name, systemd.render),
    }[given.platform]
    plan = _planned(given.file, places)
    folder = Path(given.out or f"{plan.description.name}-{given.platform}")
    folder.mkdir(parents=True, exist_ok=True)
    for path in write(plan, folder):
        print(path)
    return 0


def up(given: ClusterArguments) -> int:
    """Start a cluster and wait until it serves."""
    plan = _planned(given.file, _places_on(given.platform))
    deployment = Deployment(
        plan.description.name,
        given.platform,
        str(Path(given.file).absolute()),
        given.hosts,
        given.address or os.environ.get(RAY_ADDRESS, ""),
    )
    platform = _platform_of(deployment, given)
    name = plan.description.name
    folder = state_folder(name, given.state)
    if read_deployment(folder) is not None:
        raise ConfigError(
            f"{name} is up already, or was not ended: run `baton down {given.file}` first, or name "
            f"another folder than {folder} with --state"
        )
    make_private(folder)
    write_deployment(folder, deployment)
    with Interrupts() as interrupts:
        try:
            check_ids(plan, platform.own(plan), platform.urls(plan, folder))
            platform.start(plan, folder)
            timeout_s = given.timeout_s or plan.start_timeout_s + EXTRA_START_S
            if not wait_until_ready(plan, platform, folder, timeout_s, interrupts):
                raise KeyboardInterrupt
            print(_report(plan, platform, folder, stays=given.stays), flush=True)
            # `baton down` may end it from elsewhere.
            while given.stays and not interrupts.wait(WATCH_S) and read_deployment(folder):
                pass
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
    folder, deployment = deployment_of(given.file, given.state)
    platform = _platform_of(deployment)
    try:
        platform.stop(folder)
    except KeyboardInterrupt:
        platform.stop(folder, is_hurried=True)
    forget_deployment(folder)
    print(f"{deployment.name} is down")
    return 0


def status(given: ClusterArguments) -> int:
    """Print the state of a cluster. The exit code is 0 if every process runs."""
    if given.urls and not given.names_deployment:
        return show(given, routers_of(given))
    folder, deployment = deployment_of(given.file, given.state)
    platform = _platform_of(deployment)
    statuses = platform.status(folder)
    routers = routers_of(given)
    # If the file was changed or moved, the processes that run are shown without their routers.
    with contextlib.suppress(ConfigError):
        plan = _planned(deployment.file, _places_on(deployment.platform))
        routers = routers_of(given, plan, platform.urls(plan, folder))
    return show(given, routers, deployment.name, statuses)


def _planned(file: str, places_of: Callable[[Description], ProcessPlaces]) -> ClusterPlan:
    description = read_description(Path(file))
    try:
        return plan_of(description, places_of(description))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}") from error


def _places_on(platform: str) -> Callable[[Description], ProcessPlaces]:
    if platform != RAY:
        return places_by_name
    _check_ray()
    from baton.deploy.cluster.ray import places_of

    return places_of


def _platform_of(deployment: Deployment, given: ClusterArguments | None = None) -> Platform:
    """Return what runs a deployment; `given` are the arguments of `up`."""
    if deployment.platform != RAY:
        return LocalPlatform(deployment.hosts, is_tied=given is not None and given.stays)
    _check_ray()
    from baton.deploy.cluster.ray import RayPlatform

    return RayPlatform(deployment.address, may_wait=given is not None and given.timeout_s > 0)


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
