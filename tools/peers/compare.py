"""`python -m tools.peers.compare MODEL`: compare baton and vLLM on this machine, in one run.

It starts the servers of every arm, lets `baton bench compare` measure them in turn, and ends them.
All arms run at the same time, but only one works at a time, so that a slow hour of the machine is
slow for all of them. The words after `--` go to `baton bench compare`, or with `--chats` to
`tools.chats`. It needs two cores, the peers of `setup.sh`, and a Hugging Face folder;
`tools.random_model` makes one.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from baton.protocol.errors import BatonError, ConfigError
from tools.peers.arms import (
    MODEL_NAME,
    PORTS_PER_ARM,
    Arm,
    ArmSite,
    commands,
    flags_of,
    parse_arm,
)
from tools.peers.servers import ServerCommand, free_ports, running

MODULE = "tools.peers.compare"
START_TIMEOUT_S = 300.0
# The load of the row that is published: 512 tokens in, 64 out, eight clients.
LOAD = (
    "--concurrency",
    "8",
    "--requests",
    "24",
    "--prompt",
    "512",
    "--output",
    "64",
    "--rounds",
    "6",
)


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    own, load = split_words(words)
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument(
        "--arms",
        nargs="+",
        default=["baton-split", "baton", "vllm-pair", "vllm+chunk=256"],
        help="arms to compare; the first one is the base of the comparison",
    )
    parser.add_argument(
        "--out", type=Path, default=Path(".baton/peers"), help="report and logs"
    )
    parser.add_argument(
        "--chats", action="store_true", help="let servers answer the turns of chats"
    )
    given = parser.parse_args(own)
    # `finally` ends the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        arms = [parse_arm(text) for text in given.arms]
        return compare(given.model, arms, given.out, load, has_chats=given.chats)
    except BatonError as error:
        print(f"baton: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words for this command and the words for the load."""
    if "--" not in words:
        return list(words), []
    cut = list(words).index("--")
    return list(words[:cut]), list(words[cut + 1 :])


def compare(
    model: Path,
    arms: Sequence[Arm],
    out: Path,
    load: Sequence[str],
    *,
    has_chats: bool = False,
) -> int:
    """Start all servers, measure them, and return the exit code of what measures.

    That is `baton bench compare`, or `tools.chats` for a load that `has_chats`.
    """
    check(model, arms)
    out.mkdir(parents=True, exist_ok=True)
    ports = free_ports(PORTS_PER_ARM * len(arms))
    # A short path, as sockets lie in it.
    folder = Path(tempfile.mkdtemp(prefix="baton-peers-"))
    listed: list[ServerCommand] = []
    addresses: list[str] = []
    flags: list[str] = []
    try:
        for number, arm in enumerate(arms):
            own = tuple(ports[PORTS_PER_ARM * number : PORTS_PER_ARM * (number + 1)])
            site = ArmSite(model.absolute(), own, folder, home())
            servers = commands(arm, site)
            listed += servers
            file = out / f"{arm.name}.flags"
            file.write_text(flags_of(servers))
            addresses.append(f"{arm.name}={site.url}#{MODEL_NAME}")
            flags += ["--flags", f"{arm.name}={file}"]
        with running(listed, (out / "logs").absolute(), START_TIMEOUT_S):
            print(f"{len(listed)} servers of {len(arms)} arms are ready", flush=True)
            command = ["baton", "bench", "compare", *addresses, *flags]
            command += ["--out", str(out), *(load or LOAD)]
            if has_chats:
                command = ["tools.chats", *addresses, *load]
            done = subprocess.run([sys.executable, "-m", *command], check=False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return done.returncode


def check(model: Path, arms: Sequence[Arm]) -> None:
    """Raise `ConfigError` for mistakes that would otherwise show minutes later."""
    if not (model / "config.json").is_file():
        raise ConfigError(
            f"{model} is not a Hugging Face folder: it has no config.json"
        )
    if len({arm.name for arm in arms}) < max(2, len(arms)):
        raise ConfigError("name at least two arms, and each of them once")
    if len(os.sched_getaffinity(0)) < 2:
        raise ConfigError(
            "split arms are pinned to cores 0 and 1; this process has one core"
        )
    for arm in arms:
        check_installed(arm)


def check_installed(arm: Arm) -> None:
    if arm.kind.startswith("vllm") and not (home() / "venvs/vllm/bin/vllm").exists():
        raise ConfigError(
            f"vLLM is not installed in {home()}: run tools/peers/setup.sh"
        )


def home() -> Path:
    """Return the folder in which `setup.sh` installs."""
    return Path(
        os.environ.get("PEERS_HOME") or Path.home() / ".cache/baton-peers"
    ).absolute()


if __name__ == "__main__":
    sys.exit(main())
