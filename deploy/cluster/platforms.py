"""The platforms by the names that `--on` takes.

A platform's module is imported only when it is chosen, so that `baton up --on local` does not load
what Kubernetes or Ray need.
"""

from collections.abc import Callable

from baton.deploy.cluster.platform import Platform, PlatformOptions
from baton.protocol.errors import ConfigError


def platform_named(name: str, options: PlatformOptions) -> Platform:
    """Return the platform of `--on`. Raises `ConfigError` for an unknown name."""
    if name not in PLATFORMS:
        raise ConfigError(f"--on {name}: choose one of {', '.join(PLATFORMS)}")
    return PLATFORMS[name](options)


def _local(options: PlatformOptions) -> Platform:
    from baton.deploy.cluster.local import LocalPlatform

    return LocalPlatform(options)


def _systemd(options: PlatformOptions) -> Platform:
    from baton.deploy.cluster.systemd import SystemdPlatform

    return SystemdPlatform(options)


def _kubernetes(options: PlatformOptions) -> Platform:
    from baton.deploy.cluster.kubernetes import KubernetesPlatform

    return KubernetesPlatform(options)


def _slurm(options: PlatformOptions) -> Platform:
    from baton.deploy.cluster.slurm import SlurmPlatform

    return SlurmPlatform(options)


def _ray(options: PlatformOptions) -> Platform:
    from baton.deploy.cluster.ray import RayPlatform

    return RayPlatform(options)


PLATFORMS: dict[str, Callable[[PlatformOptions], Platform]] = {
    "local": _local,
    "systemd": _systemd,
    "kubernetes": _kubernetes,
    "slurm": _slurm,
    "ray": _ray,
}
