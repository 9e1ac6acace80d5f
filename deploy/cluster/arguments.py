"""The command lines of `baton up`, `down`, `status` and `render`.

Settings have no flags here, because cluster.yaml has them.
"""

from collections.abc import Sequence

import msgspec

from baton.protocol.errors import ConfigError
from baton.runtime.fields import FlagParser, timeout_of

LOCAL, RAY = "local", "ray"
# How the files that `render` writes for a platform are run.
RENDERED = {
    "kubernetes": "kubectl apply -k FOLDER/base",
    "slurm": "sbatch FOLDER/job.sh",
    "systemd": "systemctl start baton-NAME.target",
}
DEFAULT_FILE = "cluster.yaml"


class ClusterArguments(msgspec.Struct, frozen=True):
    """The arguments of one command."""

    file: str
    platform: str = LOCAL
    state: str = ""
    hosts: tuple[str, ...] = ()
    address: str = ""
    out: str = ""
    timeout_s: float = 0.0  # 0 takes the nodes' own limit
    detach: bool = False
    json: bool = False
    urls: tuple[str, ...] = ()  # of routers to ask
    api_key: str = ""
    ca_file: str = ""
    names_deployment: bool = False  # a file or a state folder was named, and not taken by default

    @property
    def stays(self) -> bool:
        """Return whether `up` stays in front, and the cluster ends with it."""
        return self.platform == LOCAL and not self.detach


def arguments_of(command: str, summary: str, arguments: Sequence[str]) -> ClusterArguments:
    """Return the parsed arguments; `--help` prints and exits. Raises `ConfigError`."""
    given = vars(parser_of(command, summary).parse_args(arguments))
    hosts = tuple(filter(None, (given.pop("host", None) or "").split(",")))
    urls = tuple(given.pop("url", None) or ())
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url}: give a URL such as http://10.0.0.1:8000")
    parsed = ClusterArguments(
        hosts=hosts,
        urls=urls,
        names_deployment=bool(given["file"] or given.get("state")),
        **({"file": DEFAULT_FILE} | {name: one for name, one in given.items() if one is not None}),
    )
    platforms = _platforms(command)
    if command == "up" and parsed.platform in RENDERED:
        raise ConfigError(
            f"--on {parsed.platform}: write its files with `baton render {parsed.file} --on "
            f"{parsed.platform}` and run them with `{RENDERED[parsed.platform]}`"
        )
    if command in ("up", "render") and parsed.platform not in platforms:
        raise ConfigError(f"--on {parsed.platform}: choose one of {', '.join(platforms)}")
    if parsed.address and parsed.platform != RAY:
        raise ConfigError("--address is that of a Ray cluster: add `--on ray`, or leave it out")
    if parsed.hosts and parsed.platform == RAY:
        raise ConfigError("--host: Ray chooses the hosts of all processes; leave this out")
    return parsed


def parser_of(command: str, summary: str) -> FlagParser:
    """Return the parser of `baton command`."""
    parser = FlagParser(prog=f"baton {command}", description=summary)
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help=f"the description of the cluster (default: {DEFAULT_FILE})",
    )
    if command in ("up", "render"):
        platforms = _platforms(command)
        default = f" (default: {LOCAL}, this machine)" if command == "up" else ""
        parser.add_argument(
            "--on",
            dest="platform",
            metavar="PLATFORM",
            help=f"what runs the processes: {', '.join(platforms)}{default}",
        )
        parser.words["platform"] = platforms
    if command == "render":
        parser.add_argument(
            "--out", metavar="FOLDER", help="folder for the files (default: NAME-PLATFORM)"
        )
        return parser
    parser.add_argument(
        "--state",
        metavar="FOLDER",
        help="folder in which `up` records what it starts (default: ~/.local/state/baton/NAME)",
    )
    if command == "up":
        parser.add_argument(
            "--host",
            metavar="A,B",
            help="hosts of the description whose processes this command starts (default: the "
            "hosts whose addresses this machine has)",
        )
        parser.add_argument(
            "--address",
            metavar="HOST:PORT",
            help="with --on ray, the Ray cluster to use (default: RAY_ADDRESS, or the one of this "
            "host)",
        )
        _add_start(parser)
    if command == "status":
        _add_view(parser)
    return parser


def _platforms(command: str) -> tuple[str, ...]:
    return tuple(RENDERED) if command == "render" else (LOCAL, RAY)


def _add_view(parser: FlagParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--url",
        action="append",
        metavar="URL",
        help="URL of a router to ask, such as http://10.0.0.1:8000; may be repeated; without FILE "
        "and --state, only these routers are asked",
    )
    parser.add_argument(
        "--api-key",
        help="API key that the routers ask for (default: BATON_API_KEY, or the key in the file)",
    )
    parser.add_argument(
        "--ca-file",
        metavar="PATH",
        help="PEM file with the authority that signed the certificates of https routers",
    )


def _add_start(parser: FlagParser) -> None:
    parser.add_argument(
        "--detach",
        action="store_true",
        help="return once the cluster serves; without this flag, `--on local` stays in the "
        "foreground and ends the cluster with Ctrl-C",
    )
    parser.add_argument(
        "--timeout",
        dest="timeout_s",
        metavar="S",
        type=timeout_of,
        help="longest wait until the cluster serves, in seconds (default: node.start_timeout_s of "
        "the slowest pool, plus 20 s)",
    )
