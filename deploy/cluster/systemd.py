"""`--on systemd`: a target, a template per pool, and an environment file per process.

`render` writes a folder for every host. `start` installs the files of this machine and starts the
target, as root or, with `systemd: {scope: user}`, in the user's own manager. Units hold no secrets:
those are in environment files that only the owner can read. systemd restarts processes that fail.
"""

import os
import sys
from pathlib import Path

import msgspec

from baton.deploy.cluster.description import Description, SystemdScope
from baton.deploy.cluster.hosts import (
    check_machine,
    chosen,
    on_this_machine,
    places_by_name,
    routers_urls,
)
from baton.deploy.cluster.platform import PlatformOptions, ProcessState, ProcessStatus
from baton.deploy.cluster.processes import ClusterPlan, ProcessPlaces, ProcessRole, ProcessSpec
from baton.deploy.cluster.programs import order, question
from baton.deploy.cluster.running import make_private, write_private
from baton.deploy.cluster.units import files_of, target_of, unit_of
from baton.protocol.errors import ConfigError, NodeError

INSTALLED = "installed.json"
SHOWN = ("ActiveState", "SubState", "MainPID", "NRestarts", "ExecMainStatus")


class Installed(msgspec.Struct, frozen=True):
    """The files that `start` has installed on this machine, for `stop` and `status`."""

    scope: SystemdScope
    target: str
    files: tuple[str, ...]
    units: dict[str, tuple[str, ProcessRole, str]]  # unit -> name, role and host of its process


class SystemdPlatform:
    """Implements `Platform`."""

    def __init__(self, options: PlatformOptions) -> None:
        self._options = options

    def places(self, description: Description) -> ProcessPlaces:
        return places_by_name(description)

    def own(self, plan: ClusterPlan) -> tuple[ProcessSpec, ...]:
        return chosen(plan, self._options.hosts)

    def render(self, plan: ClusterPlan, folder: Path) -> list[Path]:
        written = []
        for host in dict.fromkeys(spec.host for spec in plan.processes):
            specs = [spec for spec in plan.processes if spec.host == host]
            (folder / host).mkdir(exist_ok=True)
            for name, text in files_of(plan, specs, program_of(plan.description)).items():
                written.append(_write(folder / host / name, text))
        return written

    def start(self, plan: ClusterPlan, folder: Path) -> None:
        specs = self.own(plan)
        check_machine(plan, specs)
        specs = on_this_machine(specs)
        description = plan.description
        scope = description.systemd.scope
        units, settings = _folders(scope, description.name)
        make_private(settings)
        units.mkdir(parents=True, exist_ok=True)
        if description.logs:
            Path(description.logs).mkdir(parents=True, exist_ok=True)
        files = {
            (settings if name.endswith(".env") else units) / name: text
            for name, text in files_of(plan, specs, program_of(description)).items()
        }
        installed = Installed(
            scope,
            target_of(description.name),
            tuple(map(str, files)),
            {unit_of(description.name, s): (s.name, s.role, s.host) for s in specs},
        )
        write_private(folder / INSTALLED, msgspec.json.encode(installed))
        for path, text in files.items():
            _write(path, text)
        _systemctl(scope, "daemon-reload")
        _systemctl(scope, "enable", installed.target)
        _systemctl(scope, "start", installed.target, *installed.units)

    def stop(self, folder: Path, *, is_hurried: bool = False) -> None:
        installed = _installed(folder)
        if installed is None:
            return
        _systemctl(installed.scope, "stop", installed.target, *installed.units)
        _systemctl(installed.scope, "disable", installed.target)
        for name in installed.files:
            Path(name).unlink(missing_ok=True)
        _systemctl(installed.scope, "daemon-reload")
        (folder / INSTALLED).unlink()

    def status(self, folder: Path) -> list[ProcessStatus]:
        installed = _installed(folder)
        if installed is None:
            return []
        return [_status(installed, unit) for unit in installed.units]

    def urls(self, plan: ClusterPlan, folder: Path) -> tuple[str, ...]:
        return routers_urls(plan)


def program_of(description: Description) -> tuple[str, ...]:
    """Return the path of baton on the hosts: that of the description, or the one here."""
    program = description.systemd.program
    return (program,) if program else (sys.executable, "-m", "baton")


def _status(installed: Installed, unit: str) -> ProcessStatus:
    name, role, host = installed.units[unit]
    said = _systemctl(installed.scope, "show", f"--property={','.join(SHOWN)}", unit)
    shown = dict(line.partition("=")[::2] for line in said.splitlines())
    state: ProcessState = "ended"
    if shown["ActiveState"] in ("active", "deactivating", "reloading"):
        state = "running"
    elif shown["ActiveState"] == "activating" and shown["SubState"] != "auto-restart":
        state = "waiting"
    note = f"pid {shown['MainPID']}" if state == "running" else ""
    last_end = ""
    if state == "ended" or shown["NRestarts"] != "0":
        # systemd forgets the exit code when it restarts a unit.
        code = f"exit code {shown['ExecMainStatus']}: " if state == "ended" else ""
        flag = " --user" if installed.scope == "user" else ""
        last_end = f"{code}see journalctl{flag} -u {unit}"
    return ProcessStatus(name, role, host, state, note, last_end)


def _installed(folder: Path) -> Installed | None:
    try:
        return msgspec.json.decode((folder / INSTALLED).read_bytes(), type=Installed)
    except FileNotFoundError:
        return None


def _folders(scope: SystemdScope, name: str) -> tuple[Path, Path]:
    """Return the folders of units and of environment files on this machine."""
    if scope == "system":
        return Path("/etc/systemd/system"), Path("/etc/baton") / name
    home = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    return home / "systemd/user", home / "baton" / name


def _write(path: Path, text: str) -> Path:
    """Write a file. Environments hold secrets; all users may read units."""
    try:
        write_private(path, text.encode())
        if path.suffix != ".env":
            path.chmod(0o644)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; run as root, or set systemd.scope to user"
        ) from error
    return path


def _systemctl(scope: SystemdScope, *words: str) -> str:
    """Run systemctl and return what it prints. Raises `NodeError` if it fails."""
    run = question if words[0] == "show" else order
    flags = ("--user",) if scope == "user" else ()
    try:
        return run(("systemctl", *flags, *words), "use another platform with --on")
    except NodeError as error:
        raise NodeError(f"systemctl {words[0]}: {error.message}") from error
