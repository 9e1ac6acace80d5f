"""The settings of `baton bench`: one frozen Struct per command, made of groups of flags.

`cli.py` makes flags and their help of these annotations, so nothing heavy may be imported here. A
number of 0 and an empty text mean "not given" where the description says so.
"""

from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from baton.bench.figures.search import SearchOptions
from baton.protocol.config import about
from baton.protocol.errors import ConfigError

API_KEY_VARIABLE = "BATON_BENCH_API_KEY"
Preset = Literal["", "chat", "tight", "long-32k"]
MOST_REQUESTS = 2_000_000  # all are planned before the first is sent
Shape = Annotated[
    str, about("distribution of the arrivals: poisson, constant, gamma,cv=N or trace")
]
Kind = Literal["tokens", "text", "chat", "trace", "file"]
Vocabulary = tuple[int, int]  # lowest and highest token id to draw, both included

AUTO = "auto"
# Below 300 lie the bytes and special tokens of most.
AUTO_VOCABULARY: Vocabulary = (300, 8000)


class Target(msgspec.Struct, frozen=True):
    """A server, a model on it, and the fields that every request carries.

    `Probed.fit` turns off the fields that the server refuses. Without `ignore_eos`, output lengths
    are requested, but not forced.
    """

    url: Annotated[str, about("address of the server, without /v1")] = (
        "http://127.0.0.1:8000"
    )
    model: Annotated[str, about("name of the model, if the server has several")] = ""
    api: Annotated[
        Literal["auto", "completions", "chat"],
        about("endpoint to use; auto takes chat for messages, else completions"),
    ] = "auto"
    api_key: Annotated[
        str,
        about(
            f"bearer token, which is better kept in {API_KEY_VARIABLE}; it is never reported"
        ),
    ] = ""
    ca_file: Annotated[
        str,
        about(
            "PEM file with the authority that signed the server's certificate",
            kind="path",
        ),
    ] = ""
    insecure: Annotated[
        bool, about("trust any certificate, as curl --insecure does")
    ] = False
    timeout_s: Annotated[float, about("time limit of a response", "s", gt=0)] = 300.0
    extra_body: Annotated[
        str, about("JSON object that is merged into every request")
    ] = ""
    ignore_eos: Annotated[bool, about("ask for outputs of the full length")] = True
    token_ids: bool = True
    usage: bool = True

    @property
    def is_chat(self) -> bool:
        return self.api == "chat"

    @property
    def path(self) -> str:
        """Return the endpoint below the base path."""
        return "/chat/completions" if self.is_chat else "/completions"

    @property
    def extra(self) -> dict[str, object]:
        """Return `extra_body` as a dict. Raises `ConfigError`."""
        if not self.extra_body:
            return {}
        try:
            return msgspec.json.decode(self.extra_body, type=dict[str, object])
        except msgspec.DecodeError as error:
            text = f"--extra-body {self.extra_body!r} is not a JSON object: {error}"
            raise ConfigError(text) from error


class ServerAddress(msgspec.Struct, frozen=True):
    """The parts of a URL to which requests go."""

    host: str
    port: int
    is_tls: bool
    base_path: str  # up to and including /v1

    @property
    def authority(self) -> str:
        """Return the value of the header `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (
            host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"
        )


def server_address(url: str) -> ServerAddress:
    """Return the place of a URL, whose path may end in /v1 or not. Raises `ConfigError`."""
    shown = repr(url.rpartition("@")[2])  # the text before the @ may be a password
    try:
        parts = urlsplit(url)
        host = parts.hostname
        port = parts.port
    except ValueError as error:
        raise ConfigError(
            f"the server's address {shown} is not a URL: {error}"
        ) from None
    if parts.scheme not in ("http", "https") or not host:
        text = f"the server's address {shown} must be http://host:port or https://host:port"
        raise ConfigError(text)
    if parts.username is not None or parts.query or parts.fragment:
        # The address may hold a password, so it is not shown.
        raise ConfigError(
            "the server's address is host, port and path only; keys have a flag"
        )
    path = parts.path.rstrip("/")
    if not (path.isascii() and path.isprintable()) or " " in path:
        raise ConfigError(
            f"the path of the server's address {shown} must be plain ASCII"
        )
    is_tls = parts.scheme == "https"
    base_path = path if path.endswith("/v1") else f"{path}/v1"
    return ServerAddress(host, port or (443 if is_tls else 80), is_tls, base_path)


class Workload(msgspec.Struct, frozen=True):
    """A number of 0 and an empty text mean "not given" where the description says so."""

    workload: Annotated[Kind, about("source of the requests")] = "tokens"
    prompt: Annotated[
        str,
        about(
            "lengths of prompts: 512, uniform:100-900, normal:512,sd=100, "
            "lognormal:mean=1155,sd=1100 or choice:100,200",
            "tokens",
        ),
    ] = "512"
    output: Annotated[
        str,
        about("lengths of outputs in the same forms, forced on the server", "tokens"),
    ] = "64"
    vocabulary: Annotated[
        str,
        about(
            "token ids to draw prompts from, LOW-HIGH; auto takes 300-8000, or as many of these as "
            "the server accepts"
        ),
    ] = AUTO
    shared_prefix: Annotated[
        int,
        about(
            "common start of all prompts, in front of the tokens of --prompt",
            "tokens",
            ge=0,
        ),
    ] = 0
    path: Annotated[
        str,
        about("a JSONL file of prompts, a trace file, or a shipped trace", kind="path"),
    ] = ""
    time_scale: Annotated[
        float, about("stretch the trace's times: 2 halves its rate", gt=0)
    ] = 1.0
    length_scale: Annotated[
        float, about("scale the trace's lengths and prefix blocks", gt=0)
    ] = 1.0
    seed: Annotated[
        int, about("seed from which all prompts, lengths and arrivals are drawn", ge=0)
    ] = 0


def range_of(text: str) -> Vocabulary:
    """Read `--vocabulary`. Raises `ConfigError`."""
    if text == AUTO:
        return AUTO_VOCABULARY
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and int(low) < int(high)):
        raise ConfigError(
            f"--vocabulary {text!r}: write it as LOW-HIGH, such as 300-8000"
        )
    return int(low), int(high)


class ArrivalSettings(msgspec.Struct, frozen=True):
    arrivals: Annotated[
        str,
        about(
            "open loop: poisson:5, constant:5 or gamma:5,cv=3 requests/s; trace for the times as "
            "recorded (the default with --workload trace), trace:5 to stretch them to 5 requests/s"
        ),
    ] = ""
    concurrency: Annotated[
        int,
        about(
            "closed loop: number of clients that each wait for a response; 0 means an open loop",
            ge=0,
        ),
    ] = 0


class LoadSettings(msgspec.Struct, frozen=True):
    requests: Annotated[
        int, about("number of requests; 0 means no limit", ge=0, le=MOST_REQUESTS)
    ] = 0
    duration_s: Annotated[
        float, about("time in which requests arrive; 0 means no end", "s", ge=0)
    ] = 0.0
    warm_up: Annotated[
        int,
        about(
            "number of requests with other prompts that are sent first and do not count",
            ge=0,
            le=100_000,
        ),
    ] = 4
    processes: Annotated[
        int, about("number of client processes that share the load", ge=1, le=256)
    ] = 1
    give_up_after: Annotated[
        int,
        about("end the load if its first N requests all failed; 0 never ends it", ge=0),
    ] = 16


class BoundSettings(msgspec.Struct, frozen=True):
    preset: Annotated[
        Preset, about("named set of bounds; the next flags replace single bounds")
    ] = ""
    ttft_ms: Annotated[
        float, about("bound on the time to the first token; 0 sets none", "ms", ge=0)
    ] = 0.0
    tpot_ms: Annotated[
        float, about("bound on the mean time per later token", "ms", ge=0)
    ] = 0.0
    gap_max_ms: Annotated[
        float, about("bound on the largest gap between tokens", "ms", ge=0)
    ] = 0.0
    e2e_ms: Annotated[float, about("bound on the whole response", "ms", ge=0)] = 0.0


class ReportSettings(msgspec.Struct, frozen=True):
    out: Annotated[
        str, about("new folder for report.json and report.html", kind="path")
    ] = ""


class Settings(msgspec.Struct, frozen=True):
    """The flags of every command that puts a load on a server."""

    target: Target = Target()
    load: LoadSettings = LoadSettings()
    workload: Workload = Workload()
    bounds: BoundSettings = BoundSettings()
    report: ReportSettings = ReportSettings()


class RunSettings(Settings, frozen=True):
    """Put one load on a server and measure it."""

    runs: Annotated[
        int, about("number of runs of the load, each with its own prompts", ge=1)
    ] = 1
    arrival: ArrivalSettings = ArrivalSettings()


class SweepSettings(Settings, frozen=True):
    """Measure one load after the other, at several rates."""

    rates: Annotated[
        tuple[float, ...], about("rates in requests/s, separated by commas: 1,2,4,8")
    ] = ()
    shape: Shape = "poisson"


class SearchSettings(Settings, frozen=True):
    """Find the largest rate at which enough requests meet the bounds."""

    shape: Shape = "poisson"
    search: SearchOptions = SearchOptions()


class CompareSettings(Settings, frozen=True):
    """Measure several servers in turn with the same requests, and their ratios."""

    rounds: Annotated[
        int, about("number of rounds, each of which measures every arm once", ge=1)
    ] = 6
    flags: Annotated[
        tuple[str, ...],
        about(
            "NAME=FILE or NAME=TEXT: the flags that the server of this arm was started with; may "
            "be repeated",
            kind="repeated",
        ),
    ] = ()
    arrival: ArrivalSettings = ArrivalSettings()
