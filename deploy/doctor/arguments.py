"""The command line of `baton doctor`.

`commands` reads it into one Struct. Options that are settings of nodes have the setting's flag.
"""

from collections.abc import Sequence

import msgspec

from baton.deploy.doctor.facts import Wants
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError
from baton.runtime.fields import Field, FlagParser, fields_of, timeout_of, with_values
from baton.runtime.settings import flags_of

SETTINGS = (
    "model.path", "cache.memory_mib", "transfer.transport", "transfer.device", "keys.file",
    "keys.insecure",
)  # fmt: skip
TIMEOUT_S = 20.0


class DoctorWords(msgspec.Struct, frozen=True):
    """The parsed words. Of `file`, `listen`, `connect` and `url`, at most one is set."""

    config: ClusterConfig
    wants: Wants
    file: str = ""
    listen: str = ""
    connect: str = ""
    url: str = ""
    state: str = ""
    via: str = ""  # a command that runs the words after it on {host}
    timeout_s: float = TIMEOUT_S
    once: bool = False
    json: bool = False


def words_of(name: str, summary: str, arguments: Sequence[str]) -> DoctorWords:
    """Return the parsed arguments; `--help` prints and exits. Raises `ConfigError`."""
    given = vars(parser_of(name, summary).parse_args(arguments))
    fields = {field.name: field for field in _fields()}
    values = {
        field.name: field.from_text(text)
        for field in fields.values()
        if (text := given.pop(field.name)) is not None
    }
    config = with_values(ClusterConfig(), values)
    wants = Wants(
        gpus=_count(given.pop("gpus")),
        pool_mib=config.cache.memory_mib,
        needs_nixl=given.pop("nixl") or config.transfer.transport == "nixl",
        # On a host of a cluster, the words name the ports to check, if any.
        ports=tuple(given.pop("port") or ([] if given["reach"] else _router_ports(config))),
        reach=tuple(given.pop("reach")),
    )
    for address in (*wants.ports, *wants.reach):
        if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdecimal():
            raise ConfigError(f"{address}: write it as HOST:PORT")
    words = DoctorWords(config, wants, **{k: v for k, v in given.items() if v is not None})
    if sum(map(bool, (words.file, words.listen, words.connect, words.url))) > 1:
        raise ConfigError(
            "give one of FILE, --listen, --connect and --url; see baton doctor --help"
        )
    return words


def _router_ports(config: ClusterConfig) -> list[str]:
    control = config.control.removeprefix("tcp://")
    return [f"{config.router.host}:{config.router.port}", control]


def _fields() -> list[Field]:
    return [field for field in fields_of(ClusterConfig) if field.name in SETTINGS]


def parser_of(name: str, summary: str) -> FlagParser:
    """Return the parser of `baton doctor`."""
    parser = FlagParser(prog=f"baton {name}", description=summary)
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="a cluster.yaml: check its hosts and measure every path between them; without it, "
        "check this machine",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument(
        "--timeout",
        dest="timeout_s",
        metavar="S",
        type=timeout_of,
        help=f"longest wait for an answer of another host, in seconds (default: {TIMEOUT_S:g})",
    )
    _add_paths(parser)
    _add_hosts(parser)
    parser.add_settings(_fields(), flags_of)
    return parser


def _add_paths(parser: FlagParser) -> None:
    group = parser.add_argument_group("one path, by hand on two hosts")
    group.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="on a decode node's host: wait at an address of it, as HOST or HOST:PORT, and read "
        "the pools of hosts that connect",
    )
    group.add_argument(
        "--connect",
        metavar="HOST:PORT",
        help="on a prefill node's host: let the host that listens there read a pool of this host",
    )
    group.add_argument(
        "--once", action="store_true", help="with --listen: end after one host has connected"
    )
    group.add_argument(
        "--url", metavar="URL", help="only ask a router how the transfers of its nodes went"
    )


def _add_hosts(parser: FlagParser) -> None:
    group = parser.add_argument_group("hosts")
    group.add_argument(
        "--via",
        metavar="COMMAND",
        help="how to run a command on another host of FILE, such as 'ssh {host}'; hosts of a "
        "deployment that is up on Slurm, Kubernetes or Ray are reached without it",
    )
    group.add_argument(
        "--state",
        metavar="FOLDER",
        help="the state folder of `baton up`, if it was started with --state",
    )
    group.add_argument("--gpus", metavar="N", help="number of GPUs that nodes need on this machine")
    group.add_argument(
        "--port",
        metavar="HOST:PORT",
        action="append",
        help="an address that must be free to listen on (default: those of a router, without "
        "--reach); may be repeated",
    )
    group.add_argument(
        "--reach",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help="an address of another host that must answer; may be repeated",
    )
    group.add_argument(
        "--nixl", action="store_true", help="report a fault if NIXL does not work on this machine"
    )


def _count(text: str | None) -> int:
    if text is not None and not text.isdecimal():
        raise ConfigError(f"--gpus {text}: give a number of GPUs")
    return int(text or 0)
