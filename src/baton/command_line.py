"""The command line: `baton serve`, `router`, `prefill`, `decode`, `bench`, `keygen`, `demo-model`.

Every setting of a cluster and its flag comes from `protocol.config` through `runtime.settings`;
`bench` has a command line of its own. A subcommand's code is imported when it is chosen, so that a
router or `--help` never loads torch. A user's mistake prints one line on stderr and exits with
code 2; a failure prints one line and exits with code 1.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from baton import __version__
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import BatonError, ConfigError
from baton.runtime.log import own_process, tell_failure
from baton.runtime.process import die_with_parent
from baton.runtime.settings import Subcommand, load

EXIT_FAILED, EXIT_MISUSED = 1, 2

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
        Subcommand("prefill", "Compute prompts for the routers that this node dials.", NODE_SECTIONS),
        Subcommand("decode", "Generate tokens for the routers that this node dials.", NODE_SECTIONS),
    )
}
KEYGEN = "keygen"
KEYGEN_HELP = "Make the key that the processes of a cluster on several hosts share."
KEY_MADE = """\
{path} is a new key (mode 0600). Anyone who has it can join the cluster: keep it like an ssh key.
Copy it to each host, and start every router and node with it:

  scp -p {path} HOST:
  baton router --keys {name} ...
"""
BENCH = "bench"
BENCH_HELP = "Measure the latency of any OpenAI-compatible server (`baton bench --help`)."
DEMO_MODEL = "demo-model"
DEMO_MODEL_HELP = "Write the small model that `serve` uses by default into a folder."


def run(arguments: Sequence[str]) -> int:
    """Run one command and return the exit code of the process. `__main__` calls it."""
    # This comes first: a parent that is gone by now must not leave this process behind.
    die_with_parent()
    try:
        return _run(list(arguments))
    except ConfigError as error:
        tell_failure(error.message, error.code)
        return EXIT_MISUSED
    except BatonError as error:
        tell_failure(error.message, error.code)
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader of our output left, so the flush of stdout at exit would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _run(words: list[str]) -> int:
    name, rest = (words[0], words[1:]) if words else ("--help", [])
    if name in ("-h", "--help", "help"):
        print(_overview())
        return 0 if words else EXIT_MISUSED
    if name in ("-V", "--version"):
        print(f"baton {__version__}")
        return 0
    if name == BENCH:
        from baton.bench.cli import main as bench

        return bench(rest)
    if name == DEMO_MODEL:
        return _demo_model(rest)
    if name == KEYGEN:
        return _keygen(rest)
    if name not in COMMANDS:
        known = ", ".join([*COMMANDS, BENCH, KEYGEN, DEMO_MODEL])
        raise ConfigError(f"unknown command {name!r}: {known}")
    return _start(name, load(COMMANDS[name], rest))


def _start(name: str, config: ClusterConfig) -> int:
    """Import the one room that this process needs and run it."""
    from baton.deploy.model_folder import with_model
    from baton.deploy.ports import check_reach, check_router_ports

    own_process(config.log, config.node.id or name)
    config = with_model(config)
    if name == "serve":
        from baton.deploy.serve import serve

        return serve(config)
    if name == "router":
        check_reach(config, "router.control", config.control)
        check_router_ports(config)
        from baton.router.main import run as run_router

        return run_router(config)
    check_reach(config, "node.routers", *config.node.routers)
    if name == "prefill":
        from baton.prefill_node.main import run as run_prefill

        return run_prefill(config)
    check_reach(config, "node.bind", config.node.bind)
    from baton.decode_node.main import run as run_decode

    return run_decode(config)


def _demo_model(rest: list[str]) -> int:
    if rest in (["-h"], ["--help"]):
        print(f"usage: baton {DEMO_MODEL} FOLDER\n\n{DEMO_MODEL_HELP}")
        return 0
    if len(rest) != 1 or rest[0].startswith("-"):
        raise ConfigError(f"name one folder: baton {DEMO_MODEL} FOLDER")
    from baton.deploy.demo_model import write_demo_model

    folder = Path(rest[0]).absolute()
    write_demo_model(folder)
    print(folder)
    return 0


def _keygen(rest: list[str]) -> int:
    if rest in (["-h"], ["--help"]):
        print(f"usage: baton {KEYGEN} FILE\n\n{KEYGEN_HELP}")
        return 0
    if len(rest) != 1 or rest[0].startswith("-"):
        raise ConfigError(f"name one file: baton {KEYGEN} FILE")
    from baton.runtime.channels.keys import write_key

    path = Path(rest[0])
    write_key(path)
    print(KEY_MADE.format(path=path, name=path.name), end="")
    return 0


def _overview() -> str:
    summaries = {name: command.description for name, command in COMMANDS.items()}
    summaries[BENCH] = BENCH_HELP
    summaries[KEYGEN] = KEYGEN_HELP
    summaries[DEMO_MODEL] = DEMO_MODEL_HELP
    lines = [f"  {name:<12}{text}" for name, text in summaries.items()]
    return "\n".join(
        [
            "usage: baton COMMAND [flags]",
            "",
            "Disaggregated prefill/decode serving for large language models.",
            "",
            *lines,
            "",
            "`baton COMMAND --help` lists its settings with defaults and units; all of them are in",
            "docs/config.md. `baton --version` prints the version.",
        ]
    )
