"""The child processes of the test's own process, told apart by their command lines."""

import contextlib

import psutil


def node_pid(name: str) -> int | None:
    """The pid of the youngest node that a `LocalCluster` calls `name`; None while it is down."""
    found: dict[float, int] = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any(argument.endswith(f"/{name}.yaml") for argument in child.cmdline()):
                found[child.create_time()] = child.pid
    return found[max(found)] if found else None
