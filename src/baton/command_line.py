"""The command line: `baton serve`, `router`, `prefill`, `decode`, and the commands around them.

Every setting of a cluster and its flag comes from `protocol.config` through `runtime.settings`;
`bench`, and the commands that take a cluster.yaml, have command lines of their own. A subcommand's
code is imported when it is chosen, so that a router or `--help` never loads torch. A user's mistake
prints one line on stderr and exits with code 2; a failure prints one line and exits with code 1.
"""

# ruff: noqa: ARG001  (every command takes the same arguments)

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton import __version__
from baton.protocol.config import DEFAULT_CONTROL, ClusterConfig
from baton.protocol.errors import BatonError, ConfigError
from baton.protocol.ids import NodeId
from baton.runtime.fields import FlagParser, did_you_mean
from baton.runtime.host import spin_briefly
from baton.runtime.log import print_failure, print_warning, setup_process_log
from baton.runtime.process import die_with_parent, end_by_signal
from baton.runtime.settings import Subcommand, ignored_variables, load

EXIT_FAILED, EXIT_MISUSED = 1, 2
SHELLS = ("bash", "zsh", "fish", "tcsh")

NODE_SECTIONS = ("model", "cache", "engine", "node", "transfer", "keys", "log")
COMMANDS = {
    command.name: command
    for command in (
        Subcommand(
            "serve",
            "Serve a model on this host: a router, prefill nodes and decode nodes.",
            ("", "model", "cache", "engine", "router", "transfer", "keys", "log"),
        ),
        Subcommand(
            "router",
            "Serve HTTP and hand requests to the nodes that dial in.",
            ("model", "router", "keys", "log"),
        ),
        Subcommand(
            "prefill",
            "Compute prompts for the routers that this node dials.",
            NODE_SECTIONS,
        ),
        Subcommand(
            "decode",
            "Generate tokens for the routers that this node dials.",
            NODE_SECTIONS,
        ),
    )
}
DRAIN_HELP = "Remove a node from a running cluster and wait until it is gone."
DRAIN_MORE = """ The node takes no new requests, finishes or hands over its requests within its
node.shutdown_timeout_s, and exits with 0. `serve` does not start it again."""
KEY_MADE = """\
{path} is a new key (mode 0600). Anyone who has it can join the cluster: keep it like an ssh key.
Copy it to each host, and start every router and node with it:

  scp -p {path} HOST:
  baton router --keys {name} ...
"""
API_KEY_MADE = """\
The line above is the key; it is stored nowhere. {path} holds its hash and name: remove that line to
refuse the key. Routers with --api-key-file {path} read the file when they start and at SIGHUP.
"""
COMPLETION_USE = """\
# Keep it: write `source <(baton completion bash)` into ~/.bashrc, `source <(baton completion zsh)`
# into ~/.zshrc after compinit; or: baton completion fish > ~/.config/fish/completions/baton.fish
"""


@dataclass(slots=True, frozen=True)
class OtherCommand:
    """A command that is not a process of a cluster. One without flags takes the words `operands`.

    `run` gets the command's name, its line in the help, and the words after the name.
    """

    help: str
    run: Callable[[str, str, list[str]], int]
    operands: str = ""


def run(arguments: Sequence[str]) -> int:
    """Run one command and return the exit code of the process."""
    # This comes first, because a parent that is gone by now must not leave this process behind.
    die_with_parent()
    end_by_signal()
    try:
        _check_folder()
        return _run(list(arguments))
    except ConfigError as error:
        print_failure(error.message, error.code)
        return EXIT_MISUSED
    except BatonError as error:
        print_failure(error.message, error.code)
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader of our output is gone, so flushing stdout at exit would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _check_folder() -> None:
    """Raise `ConfigError` in a folder that was removed, where libraries end with riddles."""
    try:
        os.getcwd()
    except OSError:
        raise ConfigError(
            "the working directory was removed: change to another one"
        ) from None


def _run(words: list[str]) -> int:
    name, rest = (words[0], words[1:]) if words else ("--help", [])
    if name in ("-h", "--help", "help"):
        print(_overview())
        return 0 if words else EXIT_MISUSED
    if name in ("-V", "--version"):
        print(f"baton {__version__}")
        return 0
    if (other := OTHERS.get(name)) is not None:
        _warn_of_variables()
        return other.run(name, other.help, rest)
    if name not in COMMANDS:
        hint = did_you_mean(name, _summaries()) or "; see baton --help"
        raise ConfigError(f"unknown command {name!r}{hint}")
    return _start(name, load(COMMANDS[name], rest))


def _start(name: str, config: ClusterConfig) -> int:
    from baton.deploy.model_folder import check_tokenizer, with_model
    from baton.deploy.startup import check_cache_folder, check_reach, check_router_ports
    from baton.runtime.tls import server_context

    setup_process_log(config.log, config.node.id or name)
    _warn_of_variables()
    config = with_model(config, needs_weights=name != "router")
    if name != "router":
        check_cache_folder(config.cache.folder)
    if name in ("serve", "router"):
        check_tokenizer(Path(config.model.path))
        server_context(config.router)  # an unusable file ends the command here
    if name == "serve":
        from baton.deploy.serve import serve

        return serve(config)
    if name == "router":
        check_reach(config, "router.control", config.control)
        check_router_ports(config)
        from baton.router.main import run as run_router

        return run_router(config)
    check_reach(config, "node.routers", *config.node.routers)
    spin_briefly()
    from baton.model.executors import make_executor
    from baton.node.node import EngineNode

    if name == "prefill":
        from baton.prefill_node.scheduler import PrefillScheduler

        if config.engine.graphs == "all":  # it has no decode steps
            engine = msgspec.structs.replace(config.engine, graphs="prompts")
            config = msgspec.structs.replace(config, engine=engine)
        return EngineNode(config, "prefill", PrefillScheduler, make_executor).run()
    check_reach(config, "node.bind", config.node.bind)
    from baton.decode_node.scheduler import DecodeScheduler

    return EngineNode(config, "decode", DecodeScheduler, make_executor).run()


def _warn_of_variables() -> None:
    for warning in ignored_variables():
        print_warning(warning)


def _cluster(name: str, summary: str, rest: list[str]) -> int:
    from baton.deploy.cluster.commands import main

    return main(name, summary, rest)


def _doctor(name: str, summary: str, rest: list[str]) -> int:
    from baton.deploy.doctor.commands import main

    return main(name, summary, rest)


def _chat(name: str, summary: str, rest: list[str]) -> int:
    from baton.chat import main

    return main(rest)


def _bench(name: str, summary: str, rest: list[str]) -> int:
    from baton.bench.cli import main

    return main(rest)


def _drain(name: str, summary: str, rest: list[str]) -> int:
    parsed, others = _drain_parser().parse_known_args(rest)
    from baton.deploy.drain import drain

    given = {flag: getattr(parsed, flag) for flag in ("control", "keys", "config")}
    flags = [f"--{flag}={text}" for flag, text in given.items() if text is not None]
    config = load(Subcommand(name, summary, ("router", "keys")), flags + others)
    return drain(config, NodeId(parsed.node))


def _drain_parser() -> FlagParser:
    built = FlagParser("baton drain", description=DRAIN_HELP + DRAIN_MORE)
    built.add_argument(
        "node", metavar="NODE", help="the node's id, as /health shows it"
    )
    built.add_argument(
        "--control",
        metavar="ENDPOINT",
        help=f"endpoint of a router that the node dials (default: {DEFAULT_CONTROL})",
    )
    built.add_argument(
        "--keys", metavar="FILE", help="the cluster's key, if it has one"
    )
    built.add_argument("--config", metavar="FILE", help="YAML file of settings")
    return built


def _keygen(name: str, summary: str, rest: list[str]) -> int:
    path = Path(_operands(name, rest)[0])
    from baton.runtime.channels.keys import write_key

    write_key(path)
    print(KEY_MADE.format(path=path, name=path.name), end="")
    return 0


def _api_key(name: str, summary: str, rest: list[str]) -> int:
    path, owner = _operands(name, rest)
    from baton.router.http.auth import add_key

    print(add_key(Path(path), owner))
    print(API_KEY_MADE.format(path=path), end="", file=sys.stderr)
    return 0


def _completion(name: str, summary: str, rest: list[str]) -> int:
    (shell,) = _operands(name, rest)
    import shtab

    if shell not in SHELLS:
        raise ConfigError(
            f"{shell!r} is not a shell that is known: {', '.join(SHELLS)}"
        )
    root = argparse.ArgumentParser("baton")
    groups = {"": root.add_subparsers()}
    for command, parser in parsers().items():
        parser.mark_values(shtab.FILE)
        group, _, last = command.rpartition(" ")
        if group not in groups:
            groups[group] = (
                groups[""].add_parser(group, help=OTHERS[group].help).add_subparsers()
            )
        summary = parser.description or ""
        groups[group].add_parser(last, parents=[parser], add_help=False, help=summary)
    print(COMPLETION_USE + shtab.complete(root, shell))
    return 0


def _operands(name: str, rest: list[str]) -> list[str]:
    parsed = vars(_operand_parser(name).parse_args(rest))
    return [parsed[operand] for operand in OTHERS[name].operands.split()]


def _operand_parser(name: str) -> FlagParser:
    built = FlagParser(f"baton {name}", description=OTHERS[name].help)
    for operand in OTHERS[name].operands.split():
        built.add_argument(operand, metavar=operand)
    return built


# They are in the order of the help.
OTHERS = {
    "up": OtherCommand(
        "Start the cluster that a cluster.yaml describes, and wait until it serves.",
        _cluster,
    ),
    "down": OtherCommand("Stop a cluster that `up` has started.", _cluster),
    "restart": OtherCommand(
        "Let one process of a cluster that `up` runs here drain and start again.",
        _cluster,
    ),
    "status": OtherCommand(
        "Show the processes of a cluster live: their state, load, KV use and handoffs.",
        _cluster,
    ),
    "render": OtherCommand(
        "Write the files with which a platform runs a cluster, and start nothing.",
        _cluster,
    ),
    "doctor": OtherCommand(
        "Find problems of this machine, a cluster's hosts, or the paths between them.",
        _doctor,
    ),
    "chat": OtherCommand(
        "Talk to a running server in the terminal (`baton chat --help`).", _chat
    ),
    "drain": OtherCommand(DRAIN_HELP, _drain),
    "bench": OtherCommand(
        "Measure the latency of any OpenAI-compatible server (`baton bench --help`).",
        _bench,
    ),
    "keygen": OtherCommand(
        "Make the key that the processes of a cluster on several hosts share.",
        _keygen,
        "FILE",
    ),
    "api-key": OtherCommand(
        "Make a key for clients of the router, and add its hash to a file of keys.",
        _api_key,
        "FILE NAME",
    ),
    "completion": OtherCommand(
        "Print a script with which bash, zsh, fish or tcsh completes baton's commands and flags.",
        _completion,
        "SHELL",
    ),
}


def parsers() -> dict[str, FlagParser]:
    from baton.bench.cli import COMMANDS as LOADS
    from baton.bench.cli import parser as bench_parser
    from baton.chat import parser as chat_parser
    from baton.deploy.cluster.commands import parser_of
    from baton.deploy.doctor.commands import parser_of as doctor_parser_of
    from baton.runtime.settings import parser

    found = {name: parser(command) for name, command in COMMANDS.items()}
    for name, other in OTHERS.items():
        if other.run is _cluster:
            found[name] = parser_of(name, other.help)
        elif other.operands:
            found[name] = _operand_parser(name)
    found["doctor"] = doctor_parser_of("doctor", OTHERS["doctor"].help)
    found["chat"] = chat_parser()
    found["drain"] = _drain_parser()
    found["completion"].words["SHELL"] = SHELLS
    return found | {
        f"bench {name}": bench_parser(load.settings) for name, load in LOADS.items()
    }


def _summaries() -> dict[str, str]:
    summaries = {name: command.description for name, command in COMMANDS.items()}
    return summaries | {name: other.help for name, other in OTHERS.items()}


def _overview() -> str:
    lines = "\n".join(f"  {name:<12}{text}" for name, text in _summaries().items())
    return f"""\
usage: baton COMMAND [flags]

Disaggregated prefill/decode serving for large language models.

{lines}

`baton COMMAND --help` lists its settings with defaults and units; all of them are in
docs/config.md. `baton --version` prints the version."""
