"""The cluster's key: those who have it talk, all others are kept out and told so."""

import os
import select
import socket
from pathlib import Path

import pytest
import zmq

from baton.__main__ import main
from baton.protocol.codec import MAX_MESSAGE_BYTES, to_decode_codec, to_prefill_codec
from baton.protocol.config import KeysConfig
from baton.protocol.errors import ConfigError
from baton.protocol.messages import ToNode, ToRouter
from baton.runtime.channels.dialer import Dialer
from baton.runtime.channels.keys import NO_KEYS, Keys, load_keys, write_key
from baton.runtime.channels.listener import Listener, Received
from baton.runtime.channels.wire import HEADER, HEADER_BYTES
from baton.runtime.clock import monotonic
from tests.support.channel_ends import (
    DEADLINE_S,
    Ends,
    ends,
    new_key,
    note,
    until_refused,
    wait,
)  # fmt: skip
from tests.support.checkpoints import model_folder

# What a ZMTP 3.0 client with CURVE sends first: signature, version, mechanism, filler.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
REMOTE = "tcp://192.0.2.1:5570"  # an address of no host


def until_connected(dialer: Dialer[ToRouter, ToNode], pair: Ends) -> None:
    """As `connect`, where the listener has to answer the handshake meanwhile."""
    deadline_s = monotonic() + DEADLINE_S
    while not dialer.connected:
        assert pair.listener.receive() is None
        dialer.receive()
        assert monotonic() < deadline_s
        select.select([dialer.fileno(), pair.listener.fileno()], [], [], 0.05)


# --- channels -----------------------------------------------------------------------------------


def test_who_has_the_key_talks(tmp_path: Path) -> None:
    with ends(tmp_path, "tcp", new_key(tmp_path)) as pair:
        first, second = pair.dial("d0"), pair.dial("d1")
        for number in range(300):
            first.send(note(number))
            second.send(note(number))
        heard = pair.hear(600)
        for peer in (b"d0", b"d1"):
            said = [item.message for item in heard if item.peer == peer]
            assert said == [note(number) for number in range(300)]
        first.close()
        assert pair.hear(1) == [Received(b"d0", None, disconnected=True)]
        assert (pair.listener.refusals, second.refusals) == (0, 0)


def test_the_largest_message_fits_with_its_encryption(tmp_path: Path) -> None:
    with ends(tmp_path, "ipc", new_key(tmp_path)) as pair:
        dialer = pair.dial()
        dialer.send(note(1))
        pair.hear(1)
        payload = bytes(MAX_MESSAGE_BYTES)  # no message, but it has to get as far as the decoder
        dialer.socket.send(HEADER.pack(dialer._session.id, 1) + payload)
        dialer._session.sent()
        dialer.send(note(2))
        assert pair.hear(1) == [Received(b"d0", note(2))]
        assert pair.listener.num_malformed == 1
        dialer.socket.send(bytes(HEADER_BYTES + MAX_MESSAGE_BYTES + 1))
        assert pair.hear(1) == [Received(b"d0", None, disconnected=True)]


@pytest.mark.parametrize("has_key", [True, False])
def test_who_has_another_key_or_none_is_kept_out_while_others_talk(
    has_key: bool, tmp_path: Path
) -> None:
    with ends(tmp_path, "ipc", new_key(tmp_path)) as pair:
        friend = pair.dial("friend")
        friend.send(note(1))
        assert pair.hear(1) == [Received(b"friend", note(1))]
        other = new_key(tmp_path, "other.key") if has_key else NO_KEYS
        stranger = pair.dial("stranger", keys=other)
        stranger.send(note(2))
        until_refused(stranger, pair, 3)
        friend.send(note(3))
        assert pair.hear(1) == [Received(b"friend", note(3))]
        assert pair.listener.refusals >= 3


def test_who_knows_only_the_public_half_is_kept_out(tmp_path: Path) -> None:
    """It can encrypt to the listener, but not prove that it has the secret half."""
    keys = new_key(tmp_path)
    key = keys.first
    with ends(tmp_path, "tcp", keys) as pair:
        stranger = pair.context.socket(zmq.DEALER)
        _, secret = zmq.curve_keypair()
        for option, value in (
            (zmq.CURVE_SERVERKEY, key.public),
            (zmq.CURVE_PUBLICKEY, key.public),
            (zmq.CURVE_SECRETKEY, secret),
        ):
            stranger.setsockopt(option, value)
        stranger.connect(pair.listener.endpoint)
        stranger.send(HEADER.pack(7, 0) + b"x")
        assert pair.listener.receive() is None
        while pair.listener.refusals == 0:
            wait(pair.listener)
            # All that is there at once: the refusal may come with the end of the connection.
            assert pair.listener.receive() is None
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.close()
        friend = pair.dial("friend")
        friend.send(note(3))
        assert pair.hear(1) == [Received(b"friend", note(3))]
        assert pair.listener.num_malformed == 0


def test_who_has_a_key_does_not_talk_to_a_listener_without(tmp_path: Path) -> None:
    with ends(tmp_path, "tcp") as pair:
        dialer = pair.dial(keys=new_key(tmp_path))
        dialer.send(note(1))
        until_refused(dialer, pair)


def test_a_dialer_tries_each_key_of_its_file(tmp_path: Path) -> None:
    """So that a cluster can be restarted host by host with another key."""
    old, new = new_key(tmp_path, "old"), new_key(tmp_path, "new")
    both = tmp_path / "both"
    both.write_bytes((tmp_path / "old").read_bytes() + (tmp_path / "new").read_bytes())
    both.chmod(0o600)
    for number, keys in enumerate((old, new)):
        (tmp_path / str(number)).mkdir()
        with ends(tmp_path / str(number), "ipc", keys) as pair:
            until_connected(pair.dial("d0", keys=load_keys(KeysConfig(str(both)))), pair)


def test_a_dialer_that_was_refused_gets_through_when_the_listener_has_its_key(
    tmp_path: Path,
) -> None:
    with ends(tmp_path, "ipc", new_key(tmp_path)) as pair:
        key = new_key(tmp_path, "other.key")
        keyed, plain = pair.dial("keyed", keys=key), pair.dial("plain", keys=NO_KEYS)
        until_refused(keyed, pair)
        until_refused(plain, pair)
        pair.listener.close()
        pair.keys = key
        pair.listener = pair.listen(f"ipc://{tmp_path}/channel")
        until_connected(keyed, pair)
        assert keyed.refusals == 0
        pair.listener.close()
        pair.keys = NO_KEYS
        pair.listener = pair.listen(f"ipc://{tmp_path}/channel")
        until_connected(plain, pair)


# --- without a key ------------------------------------------------------------------------------


def test_a_dialer_that_ends_in_its_handshake_was_not_refused(tmp_path: Path) -> None:
    """It is the same to the router as one that paused: nothing is wrong with its key."""
    with ends(tmp_path, keys=new_key(tmp_path)) as pair:
        for _ in range(5):
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(str(tmp_path / "channel"))
                link.sendall(GREETING)
                link.settimeout(DEADLINE_S)
                assert link.recv(1)
        until_connected(pair.dial("d0"), pair)
        assert pair.listener.refusals == 0


def test_a_flood_of_one_peer_keeps_no_other_out(tmp_path: Path) -> None:
    """The listener answers handshakes itself, so it must look up from its messages."""
    with ends(tmp_path, keys=new_key(tmp_path)) as pair:
        flooder = pair.dial("d0")
        flooder.send(note(0))
        pair.hear(1)
        newcomer = pair.dial("d1")
        deadline_s, num_unread = monotonic() + DEADLINE_S, 0
        while not newcomer.connected:
            assert monotonic() < deadline_s
            while num_unread < 2000:  # so that there is always something left to read
                assert flooder.send(note(1))
                num_unread += 1
            num_unread -= pair.listener.receive() is not None
            newcomer.receive()


def test_no_channel_leaves_this_host_without_a_key(tmp_path: Path) -> None:
    with ends(tmp_path) as pair:
        with pytest.raises(ConfigError, match="baton keygen FILE"):
            pair.dial(endpoint=REMOTE)
        with pytest.raises(ConfigError, match="baton keygen FILE"):
            pair.listen("tcp://0.0.0.0")
        pair.dial("far", REMOTE, Keys(is_insecure=True))
        pair.dial("farther", REMOTE, new_key(tmp_path))
        pair.keys = Keys(is_insecure=True)
        open_to_all = Listener(
            "tcp://0.0.0.0", to_prefill_codec(), to_decode_codec(), pair.context, pair.keys
        )
        open_to_all.close()


@pytest.mark.parametrize(
    "words",
    [
        ["router", "--control", "tcp://*:5570"],
        ["decode", "--routers", f"tcp://127.0.0.1:5570,{REMOTE}"],
        ["decode", "--bind", "tcp://192.0.2.1"],
    ],
)
def test_a_process_that_would_trust_other_hosts_says_what_to_do(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--model", str(model_folder("qwen3"))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(hint in line for hint in ("beyond this host", "baton keygen FILE", "--keys FILE"))


# --- the file -----------------------------------------------------------------------------------


def test_a_new_key_is_for_its_owner_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.key"
    before = os.umask(0)
    try:
        assert main(["keygen", str(path)]) == 0
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    keys = load_keys(KeysConfig(str(path)))
    key = keys.first
    out = capsys.readouterr().out
    assert "--keys cluster.key" in out
    assert key.secret.decode() not in out
    assert key.secret.decode() not in f"{keys!r}{key!r}"
    assert new_key(tmp_path).first != key


def test_a_key_that_is_there_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.key"
    write_key(path)
    content = path.read_bytes()
    for words, hint in (
        ([str(path)], "is there already"),
        ([str(tmp_path / "no" / "folder")], "cannot write"),
        ([], "required: FILE; see baton keygen --help"),
        (["--file"], "required: FILE"),
    ):
        assert main(["keygen", *words]) == 2
        assert hint in capsys.readouterr().err
    assert path.read_bytes() == content


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_key_that_others_can_touch_is_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    write_key(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_keys(KeysConfig(str(path)))


def test_a_file_that_holds_no_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    write_key(path)
    word, secret, public = path.read_bytes().split()
    for content in (
        b"",
        b"\xff\xfe nonsense",
        secret,
        b" ".join((b"baton-key-2", secret, public)),
        b" ".join((word, secret[:-1], public)),
        b" ".join((word, b"\xff" * 40, public)),
        b" ".join((word, secret[::-1], public)),
        b" ".join((word, public, secret)),
        b" ".join((word, secret, public, public)),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="damaged"):
            load_keys(KeysConfig(str(path)))
    with pytest.raises(ConfigError, match="cannot read"):
        load_keys(KeysConfig(str(tmp_path / "gone")))
    with pytest.raises(ConfigError, match="cannot read"):
        load_keys(KeysConfig(str(tmp_path)))
