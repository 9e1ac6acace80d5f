"""The key of a cluster: who has it may talk to its routers and nodes, nobody else.

One file, made by `baton keygen` and copied to each host, serves every process: listeners prove that
they have it and let in those who have it too. Channels get it as `Keys`; without one they stay on
this host, unless the settings say that the network is private. It never sends a key anywhere.
"""

import os
import stat
from pathlib import Path

import msgspec
import zmq

from baton.protocol.config import KeysConfig
from baton.protocol.errors import ConfigError
from baton.runtime.channels.endpoint import Endpoint

# The file is one line: this word, the secret half, the public half (Z85, 40 characters each).
FORMAT = "baton-key-1"
MAX_FILE_BYTES = 1024
OTHERS = stat.S_IRWXG | stat.S_IRWXO
HOW_TO = (
    "make a key with `baton keygen FILE`, copy it to each host and name it with --keys FILE "
    "(keys.file); or set --keys-insecure where the control network is private"
)


class Keys(msgspec.Struct, frozen=True):
    """Both halves of the cluster's key in Z85, or none."""

    secret: bytes = b""
    public: bytes = b""
    is_insecure: bool = False  # without a key, other hosts may be reached all the same

    def check(self, endpoint: Endpoint, what: str) -> None:
        """Raises `ConfigError` where a channel at `endpoint` would have to trust other hosts."""
        if not self.secret and not self.is_insecure and not endpoint.is_loopback:
            raise ConfigError(f"{what} {endpoint} reaches beyond this host: {HOW_TO}")

    def __repr__(self) -> str:
        return f"Keys({'with' if self.secret else 'without'} a key)"


NO_KEYS = Keys()


def load_keys(config: KeysConfig) -> Keys:
    """What the settings name; raises `ConfigError` when the file is missing, open or damaged."""
    if not config.file:
        return Keys(is_insecure=config.insecure)
    path = config.file
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES)
            # Of the open file, so that nobody can put another in its place in between.
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise ConfigError(f"cannot read the key {path} (keys.file): {error.strerror}") from error
    if mode & OTHERS:
        raise ConfigError(
            f"the key {path} (keys.file) is open to others: run `chmod 600 {path}`, or make a new "
            "one with `baton keygen` if somebody may have read it"
        )
    return _parsed(content, path)


def write_key(path: Path) -> None:
    """Makes a new key that only this user can read; raises `ConfigError`, also if it is there."""
    _check_curve()
    public, secret = zmq.curve_keypair()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} is there already: name another file, or delete it") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    with open(descriptor, "wb") as file:
        file.write(b" ".join((FORMAT.encode(), secret, public)) + b"\n")


def _parsed(content: bytes, path: str) -> Keys:
    damaged = ConfigError(f"{path} (keys.file) is not a key of `baton keygen`, or it is damaged")
    words = content.split()
    if len(words) != 3 or words[0] != FORMAT.encode():
        raise damaged
    _check_curve()
    _, secret, public = words
    try:
        is_pair = zmq.curve_public(secret) == public
    except (ValueError, zmq.ZMQError):
        raise damaged from None
    if not is_pair:
        raise damaged
    return Keys(secret, public)


def _check_curve() -> None:
    if not zmq.has("curve"):
        raise ConfigError("this build of libzmq has no CURVE: install the pyzmq wheel")
