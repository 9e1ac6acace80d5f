"""`baton render --on systemd`: a folder for every host, with units and environment files.

One template serves a pool: an instance differs by its environment file alone. Units hold no
secrets: those are in environment files that only the owner can read, and in a copy of the key,
which systemd gives to the processes as a credential. systemd restarts processes that fail.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from baton.deploy.cluster.description import Description
from baton.deploy.cluster.hosts import addresses_by_name, with_shared_memory
from baton.deploy.cluster.processes import (
    ROUTERS,
    ClusterAddresses,
    ClusterPlan,
    ProcessSpec,
)
from baton.deploy.cluster.state import write_private
from baton.deploy.templates import filled_in, literal

# %E is the folder of configurations, %C that of caches: of the system or of the user.
CONFIGURATION = "%E/baton"
KEY = "cluster.key"
KEY_CREDENTIAL = f"%d/{KEY}"  # %d is the folder of a unit's credentials
_PLAIN = re.compile(r"[\w@+=:,./-]+")


def addresses_of(description: Description) -> ClusterAddresses:
    """Return the hosts of the processes, which find the key among their unit's credentials."""
    addresses = addresses_by_name(description)
    return msgspec.structs.replace(
        addresses, key=KEY_CREDENTIAL if description.key else ""
    )


def render(plan: ClusterPlan, folder: Path) -> list[Path]:
    """Write the files of every host into a subfolder with its name."""
    written = []
    for host in dict.fromkeys(spec.host for spec in plan.processes):
        specs = with_shared_memory(
            [spec for spec in plan.processes if spec.host == host]
        )
        (folder / host).mkdir(exist_ok=True)
        for name, text in _files_of(plan, specs).items():
            path = folder / host / name
            write_private(path, text.encode())
            if path.suffix not in (".env", ".key"):
                path.chmod(0o644)
            written.append(path)
    return written


def program_of(description: Description) -> tuple[str, ...]:
    """Return the path of baton on the hosts: that of the description, or the one here."""
    program = description.systemd.program
    return (program,) if program else (sys.executable, "-m", "baton")


def _target_of(name: str) -> str:
    return f"baton-{name}.target"


def _unit_of(name: str, spec: ProcessSpec) -> str:
    """Return the name of the instance that runs a process."""
    return f"baton-{name}-{spec.pool}@{spec.index}.service"


def _files_of(plan: ClusterPlan, specs: Sequence[ProcessSpec]) -> dict[str, str]:
    """Return the files of one host: the target, the templates and the environments, by name."""
    name = plan.description.name
    files = {_target_of(name): _target(plan.description, specs)}
    for pool in dict.fromkeys(spec.pool for spec in specs):
        first = next(spec for spec in specs if spec.pool == pool)
        others = [spec for spec in specs if spec.pool != pool]
        files[f"baton-{name}-{pool}@.service"] = _template(
            plan.description, first, others
        )
    files |= {f"{spec.name}.env": _environment(spec) for spec in specs}
    if plan.description.key:
        files[KEY] = Path(plan.description.key).read_text(encoding="utf-8")
    return files


def _target(description: Description, specs: Sequence[ProcessSpec]) -> str:
    return filled_in(
        "systemd.target",
        name=description.name,
        units=[_unit_of(description.name, spec) for spec in specs],
        is_system=description.systemd.scope == "system",
    )


def _template(
    description: Description,
    spec: ProcessSpec,
    others: Sequence[ProcessSpec],
) -> str:
    name = description.name
    key = f"keys.file={KEY_CREDENTIAL}"
    words = (*program_of(description), *spec.argv[1:])
    return filled_in(
        "systemd-pool.service",
        name=name,
        pool=spec.pool,
        role=spec.role,
        target=_target_of(name),
        nodes=[_unit_of(name, other) for other in others]
        if spec.pool == ROUTERS
        else [],
        command=" ".join(word if word == key else _quoted(word) for word in words),
        configuration=CONFIGURATION,
        key=KEY if description.key else "",
        grace_s=f"{spec.grace_s:g}",
        is_system=description.systemd.scope == "system",
        user=description.systemd.user,
        cpus=spec.cpus,
        memory_mib=spec.memory_mib,
        logs=description.logs,
        records=str(description.settings.get("log.records") or ""),
    )


def _environment(spec: ProcessSpec) -> str:
    return "".join(
        f"{name}={_in_file(text)}\n"
        for name, text in (spec.env | spec.secret_env).items()
    )


def _quoted(word: str) -> str:
    """Return a word of a command line, quoted for ExecStart=."""
    if _PLAIN.fullmatch(word):
        return word
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{literal(text)}"'


def _in_file(text: str) -> str:
    """Return a value, quoted for an environment file."""
    for special in ("\\", '"', "$", "`"):
        text = text.replace(special, f"\\{special}")
    return f'"{text}"'
