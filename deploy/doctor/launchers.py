"""The hosts of a description, and how to run a command on each.

`cluster_check` calls it. This machine needs no launcher, `--via` says how to reach another host,
and a platform that has chosen the hosts of a deployment reaches those on which it has started
processes.
"""

import shlex
from collections.abc import Callable

from baton.deploy.cluster.description import Description
from baton.deploy.cluster.host_seat import HostSeat
from baton.deploy.cluster.hosts import is_here, places_by_name
from baton.deploy.cluster.processes import plan_of
from baton.deploy.cluster.systemd import program_of
from baton.protocol.errors import ConfigError

HOST = "{host}"

Launch = Callable[[str], tuple[str, ...]]


def seats_of(description: Description, via: str) -> list[HostSeat]:
    """Return every host. Raises `ConfigError` for a mistake in `via`."""
    launch = _launch(via) if via else None
    plan = plan_of(description, places_by_name(description))
    program = program_of(description)
    seats = []
    for host in dict.fromkeys(spec.host for spec in plan.processes):
        specs = tuple(spec for spec in plan.processes if spec.host == host)
        if is_here(host):
            seats.append(HostSeat(host, specs, program, ()))
        elif launch is not None:
            seats.append(HostSeat(host, specs, program, launch(host), has_shell=True))
        else:
            seats.append(HostSeat(host, specs, program, None))
    return seats


def _launch(template: str) -> Launch:
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise ConfigError(f"--via {template}: {error}") from error
    if not any(HOST in word for word in words):
        raise ConfigError(f"--via {template}: write {HOST} where the host belongs: 'ssh {HOST}'")
    return lambda host: tuple(word.replace(HOST, host) for word in words)
