"""Make the words of `baton doctor` for one host of a cluster from the host's processes.

`cluster_check` runs them. Flags tell the check what settings tell a node. This file is pure.
"""

from collections.abc import Sequence

from baton.deploy.cluster.host_seat import HostSeat
from baton.deploy.cluster.processes import ProcessSpec
from baton.deploy.doctor.arguments import SETTINGS
from baton.runtime.channels.endpoint import bindable

BIND, ROUTERS, HTTP_HOST = "BATON_NODE_BIND", "BATON_NODE_ROUTERS", "BATON_ROUTER_HOST"
POOL = "cache.memory_mib"


def look_words(seat: HostSeat, seats: Sequence[HostSeat], *, is_up: bool) -> list[str]:
    """Return the words that check a host of `seats`. Running nodes have their pools already."""
    words = ["doctor", "--json", *_settings(seat)]
    pool_mib = sum(int(_settings_of(one).get(POOL, 0)) for one in seat.nodes if not one.gpus)
    if pool_mib and not is_up:
        words += [_flag(POOL), str(pool_mib)]
    for address in _listened(seat):
        words += ["--port", address]
    for address in _dialled(seat, seats):
        words += ["--reach", address]
    if gpus := sum(spec.gpus for spec in seat.specs):
        words += ["--gpus", str(gpus)]
    if seat.nodes and (gpus or sum(bool(one.nodes) for one in seats) > 1):
        words.append("--nixl")
    return words


def listen_words(seat: HostSeat, timeout_s: float) -> list[str]:
    """Return the words with which a decode host listens, at its nodes' address and a free port."""
    bind = bindable(next(spec.env[BIND] for spec in seat.nodes if spec.role == "decode"))
    words = ["doctor", "--listen", f"tcp://{_bracketed(bind.host)}", "--once", "--json"]
    return [*words, "--timeout", f"{timeout_s:g}", *_settings(seat)]


def connect_words(seat: HostSeat, address: str, timeout_s: float) -> list[str]:
    words = ["doctor", "--connect", address, "--json", "--timeout", f"{timeout_s:g}"]
    return [*words, *_settings(seat)]


def _settings(seat: HostSeat) -> list[str]:
    """Return flags for the settings of a host's processes, except their pools."""
    given: dict[str, str] = {}
    for spec in seat.specs:
        given = _settings_of(spec) | given
    return [word for name, text in given.items() if name != POOL for word in (_flag(name), text)]


def _settings_of(spec: ProcessSpec) -> dict[str, str]:
    """Return those settings of a process that matter here."""
    pairs = [word.partition("=") for word in spec.argv]
    return {name: value for name, _, value in pairs if name in SETTINGS}


def _flag(name: str) -> str:
    return "--" + name.replace(".", "-").replace("_", "-")


def _listened(seat: HostSeat) -> list[str]:
    found = []
    for spec in seat.specs:
        for port in spec.ports:
            host = spec.env.get(HTTP_HOST, spec.host) if port.name == "http" else spec.host
            found.append(f"{_bracketed(host or '0.0.0.0')}:{port.port}")
    return found


def _dialled(seat: HostSeat, seats: Sequence[HostSeat]) -> list[str]:
    """Return the addresses that a host's nodes dial: routers, and decode nodes with fixed ports."""
    found: dict[str, None] = {}
    for spec in seat.nodes:
        found |= dict.fromkeys(one.removeprefix("tcp://") for one in spec.env[ROUTERS].split(","))
    if any(spec.role == "prefill" for spec in seat.nodes):
        decode = [spec for one in seats for spec in one.nodes if spec.role == "decode"]
        binds = [bindable(spec.env[BIND]) for spec in decode]
        found |= {f"{_bracketed(one.host)}:{one.port}": None for one in binds if one.port}
    return list(found)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
