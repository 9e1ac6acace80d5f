"""The cluster's key: those who have it talk, all others are kept out and told so."""

import os

import pytest

from baton.__main__ import main
from baton.protocol.codec import peer_codec
from baton.protocol.config import KeysConfig
from baton.protocol.errors import ConfigError
from baton.protocol.messages import ToNode, ToRouter
from baton.runtime.channels.dialer import Dialer
from baton.runtime.channels.keys import NO_KEYS, KeyPair, Keys, load_keys, write_key
from baton.runtime.channels.listener import Listener, Received
from baton.runtime.clock import monotonic
from tests.support.channel_ends import (
    DEADLINE_S,
    Ends,
    ends,
    new_key,
    note,
    until_refused,
    work,
)
from tests.support.checkpoints import model_folder

REMOTE = "tcp://192.0.2.1:5570"  # an address of no host


def until_connected(dialer: Dialer[ToRouter, ToNode], pair: Ends) -> None:
    """As `connect`, where the listener has to answer the handshake meanwhile."""
    work(pair, dialer, lambda: dialer.connected)


def test_who_has_the_key_talks(tmp_path):
    with ends(tmp_path, "tcp", new_key(tmp_path)) as pair:
        first = pair.dial("d0")
        second = pair.dial("d1")
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


def test_who_has_another_key_or_none_is_kept_out_while_others_talk(tmp_path):
    """So is one that knows the public half alone: it cannot prove that it has the secret one."""
    key = new_key(tmp_path)
    other = new_key(tmp_path, "other.key")
    half = Keys()
    half.pairs = (KeyPair(other.pairs[0].secret, key.pairs[0].public),)
    with ends(tmp_path, "ipc", key) as pair:
        friend = pair.dial("friend")
        friend.send(note(1))
        assert pair.hear(1) == [Received(b"friend", note(1))]
        for number, keys in enumerate((other, half, NO_KEYS)):
            stranger = pair.dial(f"stranger {number}", keys=keys)
            stranger.send(note(2))
            until_refused(stranger, pair, 2)
        friend.send(note(3))
        assert pair.hear(1) == [Received(b"friend", note(3))]
        assert pair.listener._wire.num_malformed == 0


def test_who_has_a_key_does_not_talk_to_a_listener_without(tmp_path):
    with ends(tmp_path, "tcp") as pair:
        dialer = pair.dial(keys=new_key(tmp_path))
        dialer.send(note(1))
        until_refused(dialer, pair)


def test_who_is_refused_knocks_less_and_less_often(tmp_path):
    with ends(tmp_path, "tcp", new_key(tmp_path)) as pair:
        dialer = pair.dial(keys=new_key(tmp_path, "other.key"))
        begun_s = monotonic()
        until_refused(dialer, pair, 5)
        assert monotonic() - begun_s > 0.1 + 0.2 + 0.4 + 0.8


def test_a_dialer_tries_each_key_of_its_file(tmp_path):
    """So that a cluster can be restarted host by host with another key."""
    old = new_key(tmp_path, "old")
    new = new_key(tmp_path, "new")
    both = tmp_path / "both"
    both.write_bytes((tmp_path / "old").read_bytes() + (tmp_path / "new").read_bytes())
    both.chmod(0o600)
    for number, keys in enumerate((old, new)):
        (tmp_path / str(number)).mkdir()
        with ends(tmp_path / str(number), "ipc", keys) as pair:
            until_connected(
                pair.dial("d0", keys=load_keys(KeysConfig(str(both)))), pair
            )


def test_a_dialer_that_was_refused_gets_through_when_the_listener_has_its_key(tmp_path):
    with ends(tmp_path, "ipc", new_key(tmp_path)) as pair:
        key = new_key(tmp_path, "other.key")
        keyed = pair.dial("keyed", keys=key)
        plain = pair.dial("plain", keys=NO_KEYS)
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


def test_a_flood_of_one_peer_keeps_no_other_out(tmp_path):
    """The listener answers handshakes itself, so it must look up from its messages."""
    with ends(tmp_path, keys=new_key(tmp_path)) as pair:
        flooder = pair.dial("d0")
        flooder.send(note(0))
        pair.hear(1)
        newcomer = pair.dial("d1")
        deadline_s = monotonic() + DEADLINE_S
        num_unread = 0
        while not newcomer.connected:
            assert monotonic() < deadline_s
            while num_unread < 2000:  # so that there is always something left to read
                assert flooder.send(note(1))
                num_unread += 1
            num_unread -= pair.listener.receive() is not None
            newcomer.receive()


def test_no_channel_leaves_this_host_without_a_key(tmp_path):
    with ends(tmp_path) as pair:
        with pytest.raises(ConfigError, match="baton keygen FILE"):
            pair.dial(endpoint=REMOTE)
        with pytest.raises(ConfigError, match="baton keygen FILE"):
            pair.listen("tcp://0.0.0.0")
        pair.dial("far", REMOTE, Keys(is_insecure=True))
        pair.dial("farther", REMOTE, new_key(tmp_path))
        pair.keys = Keys(is_insecure=True)
        open_to_all = Listener(
            "tcp://0.0.0.0", peer_codec(), peer_codec(), pair.context, pair.keys
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
def test_a_process_that_would_trust_other_hosts_says_what_to_do(words, capsys):
    assert main([*words, "--model", str(model_folder("qwen3"))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(
        hint in line
        for hint in ("beyond this host", "baton keygen FILE", "--keys FILE")
    )


def test_a_new_key_is_for_its_owner_alone(tmp_path, capsys):
    path = tmp_path / "cluster.key"
    before = os.umask(0)
    try:
        assert main(["keygen", str(path)]) == 0
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    content = path.read_bytes()
    keys = load_keys(KeysConfig(str(path)))
    key = keys.first
    assert key is not None
    assert key.secret.decode() not in f"{keys!r}{key!r}{capsys.readouterr().out}"
    for words, hint in (
        ([str(path)], "is there already"),
        ([str(tmp_path / "no" / "folder")], "cannot write"),
        ([], "required: FILE; see baton keygen --help"),
    ):
        assert main(["keygen", *words]) == 2
        assert hint in capsys.readouterr().err
    assert path.read_bytes() == content
    path.chmod(0o604)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_keys(KeysConfig(str(path)))


def test_a_file_that_holds_no_key_is_refused(tmp_path):
    path = tmp_path / "cluster.key"
    write_key(path)
    word, secret, public = path.read_bytes().split()
    for content in (
        b"",
        secret,
        b" ".join((b"baton-key-2", secret, public)),
        b" ".join((word, b"\xff" * 40, public)),
        b" ".join((word, secret[::-1], public)),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="damaged"):
            load_keys(KeysConfig(str(path)))
    with pytest.raises(ConfigError, match="cannot read"):
        load_keys(KeysConfig(str(tmp_path / "gone")))


def test_a_file_may_leave_out_the_public_half(tmp_path):
    whole = new_key(tmp_path)
    words = (tmp_path / "own.key").read_text().split()
    path = tmp_path / "half.key"
    path.write_text(" ".join(words[:2]))
    path.chmod(0o600)
    assert Keys(str(path)).pairs == whole.pairs
