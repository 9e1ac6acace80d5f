"""The text of systemd units and environment files that run the processes of one host.

`systemd` writes and installs them. One template serves a pool: an instance differs by its
environment file alone. This file is pure.
"""

import re
from collections.abc import Sequence

from baton.deploy.cluster.description import Description
from baton.deploy.cluster.processes import ROUTERS, ClusterPlan, ProcessSpec

# %E is the folder of configurations, %C that of caches: of the system or of the user.
CONFIGURATION = "%E/baton"
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


def target_of(name: str) -> str:
    return f"baton-{name}.target"


def unit_of(name: str, spec: ProcessSpec) -> str:
    """Return the name of the instance that runs a process."""
    return f"baton-{name}-{spec.pool}@{spec.index}.service"


def files_of(
    plan: ClusterPlan, specs: Sequence[ProcessSpec], program: Sequence[str]
) -> dict[str, str]:
    """Return the files of one host: the target, the templates and the environments, by name."""
    name = plan.description.name
    files = {target_of(name): _target(plan.description, specs)}
    for pool in dict.fromkeys(spec.pool for spec in specs):
        first = next(spec for spec in specs if spec.pool == pool)
        others = [spec for spec in specs if spec.pool != pool]
        files[f"baton-{name}-{pool}@.service"] = _template(plan.description, first, others, program)
    files |= {f"{spec.name}.env": _environment(spec) for spec in specs}
    return files


def _target(description: Description, specs: Sequence[ProcessSpec]) -> str:
    is_system = description.systemd.scope == "system"
    units = " ".join(unit_of(description.name, spec) for spec in specs)
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
    program: Sequence[str],
) -> str:
    name = description.name
    # systemd stops a unit before the units that it starts after, so routers end before their nodes.
    after = ["network-online.target"]
    if spec.pool == ROUTERS:
        after += [unit_of(name, other) for other in others]
    command = " ".join(quoted(word) for word in (*program, *spec.argv[1:]))
    lines = [
        "[Unit]",
        f"Description=baton {name} {spec.pool}-%i ({spec.role})",
        f"PartOf={target_of(name)}",
        "Wants=network-online.target",
        f"After={' '.join(after)}",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={command}",
        f"EnvironmentFile={CONFIGURATION}/{name}/{spec.pool}-%i.env",
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


def quoted(word: str) -> str:
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
