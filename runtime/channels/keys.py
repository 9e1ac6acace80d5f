"""The keys of a cluster. A process that has the first one may talk to its routers and nodes.

One file, made by `baton keygen` and copied to each host, serves every process. Listeners prove that
they have its first key and let in processes that have it too; dialers try one key after the other.
Without a key, channels stay on this host, unless the settings say that the network is private. A
key is never sent anywhere, and a file is read once, at start.
"""

import os
import stat
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from baton.protocol.config import KeysConfig
from baton.protocol.errors import ConfigError
from baton.runtime.channels.endpoint import Endpoint

# A line is this word, the secret half, the public half (Z85, 40 characters each). What cannot
# compute the public half, such as a chart that makes a key, leaves it out.
FORMAT = "baton-key-1"
MAX_FILE_BYTES = 4096
OTHERS = stat.S_IRWXG | stat.S_IRWXO
# ZMQ allows one such address per context, so a context has one listener with a key.
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
DOMAIN = b"baton"
HOW_TO = (
    "make a key with `baton keygen FILE`, copy it to each host and name it with --keys FILE "
    "(keys.file); or set --keys-insecure where the control network is private"
)


class KeyPair(msgspec.Struct, frozen=True):
    """Both halves of a key in Z85."""

    secret: bytes
    public: bytes

    def __repr__(self) -> str:
        return "KeyPair(hidden)"


class Keys:
    """The keys of a process: those of a file, or none. Threads may share this object."""

    def __init__(self, file: str = "", *, is_insecure: bool = False) -> None:
        """Read the file. Raises `ConfigError` if it is missing, damaged or readable by others.

        With `is_insecure`, channels to other hosts need no key.
        """
        self.pairs = _read(file) if file else ()
        self._file = file
        self._is_insecure = is_insecure

    @property
    def first(self) -> KeyPair | None:
        return self.pairs[0] if self.pairs else None

    def check(self, endpoint: Endpoint, what: str) -> None:
        """Raise `ConfigError` if a channel at `endpoint` would reach other hosts without a key."""
        if not self.pairs and not self._is_insecure and not endpoint.is_loopback:
            raise ConfigError(f"{what} {endpoint} reaches beyond this host: {HOW_TO}")

    def __repr__(self) -> str:
        return f"Keys({len(self.pairs)} of {self._file or 'no file'})"


NO_KEYS = Keys()


def load_keys(config: KeysConfig) -> Keys:
    """Return the keys that the settings name. Raises `ConfigError` as `Keys` does."""
    return Keys(config.file, is_insecure=config.insecure)


def write_key(path: Path) -> None:
    """Make a new key that only this user can read. Raises `ConfigError` if the file exists."""
    public, secret = zmq.curve_keypair()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} is there already: name another file, or delete it"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    with open(descriptor, "wb") as file:
        file.write(b" ".join((FORMAT.encode(), secret, public)) + b"\n")


def key_in_memory(content: bytes) -> str:
    """Return the path of a private file of a key, which vanishes with this process.

    Empty content, of a cluster without a key, has no file.
    """
    if not content:
        return ""
    descriptor = os.memfd_create("baton-key")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, content)
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _read(path: str) -> tuple[KeyPair, ...]:
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES)
            # Check the open file and not the path, because another file may replace it at any time.
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        hint = "make one with `baton keygen`, copy it here, or name another file"
        why = f"cannot read the key {path} (keys.file): {error.strerror}; {hint}"
        raise ConfigError(why) from error
    if mode & OTHERS:
        raise ConfigError(
            f"the key {path} (keys.file) can be read by other users: run `chmod 600 {path}`, or "
            "make a new key with `baton keygen` if another user may have read this one"
        )
    pairs = tuple(_parsed(line, path) for line in content.splitlines() if line.strip())
    if not pairs:
        raise _damaged(path)
    return pairs


def _parsed(line: bytes, path: str) -> KeyPair:
    words = line.split()
    if len(words) not in (2, 3) or words[0] != FORMAT.encode():
        raise _damaged(path)
    secret, *named = words[1:]
    try:
        public = zmq.curve_public(secret)
    except (ValueError, zmq.ZMQError):
        raise _damaged(path) from None
    if named and named != [public]:
        raise _damaged(path)
    return KeyPair(secret, public)


def _damaged(path: str) -> ConfigError:
    return ConfigError(
        f"{path} (keys.file) is not a key made by `baton keygen`, or it is damaged"
    )


class Authenticator:
    """Lets a process connect to a listener only if it proves that it has the listener's key.

    ZMQ sends a request of its authentication protocol (ZAP, RFC 27) over a socket inside the
    process, once per handshake. The listener answers on its own thread, so there is no thread to
    start or to join.
    """

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", pair: KeyPair
    ) -> None:
        """Let in only the processes that hold this key."""
        self._allowed = z85.decode(pair.public)
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP_ENDPOINT)

    def answer(self) -> None:
        version, number, domain, _address, _identity, mechanism, *credentials = (
            self.socket.recv_multipart(zmq.NOBLOCK)
        )
        is_allowed = (version, domain, mechanism, credentials) == (
            ZAP_VERSION,
            DOMAIN,
            b"CURVE",
            [self._allowed],
        )
        verdict = (b"200", b"OK") if is_allowed else (b"400", b"another key")
        self.socket.send_multipart(
            (ZAP_VERSION, number, *verdict, b"", b""), zmq.NOBLOCK
        )

    def close(self) -> None:
        # Unbind at once, so that the context's next listener can bind its own there.
        self.socket.unbind(ZAP_ENDPOINT)
        self.socket.close(0)
