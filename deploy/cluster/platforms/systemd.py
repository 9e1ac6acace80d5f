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
from baton.deploy.cluster.processes import ROUTERS, ClusterAddresses, ClusterPlan, ProcessSpec
from baton.deploy.cluster.state import write_private

# %E is the folder of configurations, %C that of caches: of the system or of the user.
CONFIGURATION = "%E/baton"
KEY = "cluster.key"
KEY_CREDENTIAL = f"%d/{KEY}"  # %d is the folder of a unit's credentials
SANDBOX = """\
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ProtectClock=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
CapabilityBoundingSet=
AmbientCapabilities=
"""
# Routers open no device. Nodes may use GPUs and RDMA ports.
ROUTER_SANDBOX = "PrivateDevices=yes\n"
_PLAIN = re.compile(r"[\w@+=:,./-]+")


def addresses_of(description: Description) -> ClusterAddresses:
    """Return the hosts of the processes, which find the key among their unit's credentials."""
    addresses = addresses_by_name(description)
    return msgspec.structs.replace(addresses, key=KEY_CREDENTIAL if description.key else "")


def render(plan: ClusterPlan, folder: Path) -> list[Path]:
    """Write the files of every host into a subfolder with its name."""
    written = []
    for host in dict.fromkeys(spec.host for spec in plan.processes):
        specs = with_shared_memory([spec for spec in plan.processes if spec.host == host])
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
        files[f"baton-{name}-{pool}@.service"] = _template(plan.description, first, others)
    files |= {f"{spec.name}.env": _environment(spec) for spec in specs}
    if plan.description.key:
        files[KEY] = Path(plan.description.key).read_text(encoding="utf-8")
    return files


def _target(description: Description, specs: Sequence[ProcessSpec]) -> str:
    is_system = description.systemd.scope == "system"
    units = " ".join(_unit_of(description.name, spec) for spec in specs)
    return f"""\
[Unit]
Description=baton cluster {description.name}
Wants={units}

[Install]
WantedBy={"multi-user.target" if is_system else "default.target"}
"""


def _template(
    description: Description,
    spec: ProcessSpec,
    others: Sequence[ProcessSpec],
) -> str:
    name = description.name
    # systemd stops a unit before the units that it starts after, so routers end before their nodes.
    after = ["network-online.target"]
    if spec.pool == ROUTERS:
        after += [_unit_of(name, other) for other in others]
    key = f"keys.file={KEY_CREDENTIAL}"
    words = (*program_of(description), *spec.argv[1:])
    command = " ".join(word if word == key else _quoted(word) for word in words)
    lines = [
        "[Unit]",
        f"Description=baton {name} {spec.pool}-%i ({spec.role})",
        f"PartOf={_target_of(name)}",
        "Wants=network-online.target",
        f"After={' '.join(after)}",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={command}",
        f"EnvironmentFile={CONFIGURATION}/{name}/{spec.pool}-%i.env",
        *([f"LoadCredential={KEY}:{CONFIGURATION}/{name}/{KEY}"] if description.key else []),
        "Environment=PYTHONUNBUFFERED=1 XDG_CACHE_HOME=%C/baton",
        # Home folders are read-only here, and GPU nodes compile kernels.
        "Environment=TRITON_CACHE_DIR=%C/baton/triton CUDA_CACHE_PATH=%C/baton/cuda",
        "CacheDirectory=baton",
        "Restart=always",
        "RestartSec=2",
        "KillMode=mixed",
        f"TimeoutStopSec={spec.grace_s:g}",
        "LimitNOFILE=65536",
        "LimitMEMLOCK=infinity",
        "UMask=0077",
        *_limits(description, spec),
    ]
    sandbox = SANDBOX + (ROUTER_SANDBOX if spec.role == "router" else "")
    # A user's own manager lacks the rights that a sandbox needs.
    return "\n".join(lines) + "\n" + (sandbox if description.systemd.scope == "system" else "")


def _limits(description: Description, spec: ProcessSpec) -> list[str]:
    lines = []
    if description.systemd.scope == "system":
        lines.append(f"User={description.systemd.user}")
    if spec.cpus:
        lines.append(f"CPUQuota={100 * spec.cpus}%")
    if spec.memory_mib:
        lines.append(f"MemoryMax={spec.memory_mib}M")
    if description.logs:
        lines.append(f"StandardOutput=append:{_literal(description.logs)}/{spec.pool}-%i.log")
    records = description.settings.get("log.records")
    if records:
        lines.append(f"ReadWritePaths=-{_literal(str(records))}")
    return lines


def _environment(spec: ProcessSpec) -> str:
    return "".join(
        f"{name}={_in_file(text)}\n" for name, text in (spec.env | spec.secret_env).items()
    )


def _quoted(word: str) -> str:
    """Return a word of a command line, quoted for ExecStart=."""
    if _PLAIN.fullmatch(word):
        return word
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{_literal(text)}"'


def _literal(text: str) -> str:
    """Return text in which systemd replaces nothing."""
    return text.replace("%", "%%")


def _in_file(text: str) -> str:
    """Return a value, quoted for an environment file."""
    for special in ("\\", '"', "$", "`"):
        text = text.replace(special, f"\\{special}")
    return f'"{text}"'
