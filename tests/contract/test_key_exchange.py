"""The cluster's key is exchanged while channels, and then a whole cluster, are at work."""

import select
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from baton.protocol.config import ClusterConfig, KeysConfig
from baton.runtime.channels.dialer import Disconnected
from baton.runtime.channels.keys import Keys, load_keys, write_key
from baton.runtime.channels.listener import Received
from baton.runtime.clock import monotonic
from tests.support.channel_ends import (
    DEADLINE_S,
    answers,
    ends,
    new_key,
    note,
    until_refused,
)  # fmt: skip
from tests.support.checkpoints import tiny_cluster
from tests.support.cluster import Cluster


def rewrite(path: Path, *lines: bytes) -> None:
    """Replace a file of keys at once, as a person does it who has read docs/operations.md."""
    (path.parent / "next").write_bytes(b"".join(lines))
    (path.parent / "next").chmod(0o600)
    (path.parent / "next").replace(path)


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_keys_are_exchanged_step_by_step_and_the_removed_one_is_refused(
    kind: str, tmp_path: Path
) -> None:
    """In each step either side may be the first to have the new file."""
    for name in ("old", "new"):
        new_key(tmp_path, name)
    old, new = ((tmp_path / name).read_bytes() for name in ("old", "new"))
    files = (tmp_path / "listener.key", tmp_path / "dialer.key")
    now_s = 0.0
    for file in files:
        rewrite(file, old)
    listens, dials = (Keys(str(file), clock=lambda: now_s) for file in files)
    with ends(tmp_path, kind, listens) as pair:
        num_dialled = 0

        def talk() -> None:
            """Connect anew, as a dialer must that has lost its connection."""
            nonlocal num_dialled
            num_dialled += 1
            dialer = pair.dial(f"d{num_dialled}", keys=dials)
            dialer.send(note(num_dialled))
            deadline_s = monotonic() + DEADLINE_S
            while (heard := pair.listener.receive()) is None or heard.message is None:
                assert monotonic() < deadline_s
                if isinstance(dialer.receive(), Disconnected):
                    dialer.send(note(num_dialled))
                select.select([dialer.fileno(), pair.listener.fileno()], [], [], 0.05)
            assert heard.message == note(num_dialled)
            dialer.close()

        talk()
        for lines in ((old, new), (new, old), (new,)):
            for file in files if lines != (new, old) else reversed(files):
                rewrite(file, *lines)
                now_s += 2.0
                talk()
        until_refused(pair.dial("stranger", keys=Keys(str(tmp_path / "old"))), pair, 2)
        (tmp_path / "dialer.key").chmod(0o644)  # what cannot be read leaves the keys as they were
        now_s += 2.0
        talk()


def test_a_stranger_that_has_connected_with_the_old_key_is_cut_off(tmp_path: Path) -> None:
    own = new_key(tmp_path)
    stolen = tmp_path / "stolen.key"
    rewrite(stolen, (tmp_path / "own.key").read_bytes())
    new_key(tmp_path, "next.key")
    with ends(tmp_path, "tcp", own) as pair:
        stranger = pair.dial("stranger", keys=load_keys(KeysConfig(str(stolen))))
        stranger.send(note(1))
        assert pair.hear(1) == [Received(b"stranger", note(1))]
        rewrite(tmp_path / "own.key", (tmp_path / "next.key").read_bytes())
        assert pair.hear(1) == [Received(b"stranger", None, disconnected=True)]
        assert isinstance(answers(stranger, 1)[0], Disconnected)
        until_refused(stranger, pair)


class KeptApart(Cluster):
    """A cluster in which each process has a file of keys of its own, as on several hosts.

    A process without such a file has no key.
    """

    def start(self, name: str, config: ClusterConfig, command: str = "") -> None:
        file = self.folder / f"{name}.key"
        keys = KeysConfig(str(file)) if file.exists() else KeysConfig()
        super().start(name, msgspec.structs.replace(config, keys=keys), command)


def test_a_cluster_keeps_strangers_out_and_exchanges_its_keys_while_it_serves(
    tmp_path: Path,
) -> None:
    """The steps of docs/operations.md, process by process, with a stream at any time."""
    for name in ("old", "new", "wrong.key"):
        write_key(tmp_path / name)
    old, new = ((tmp_path / name).read_bytes() for name in ("old", "new"))
    names = ("router", "prefill-0", "decode-0")
    for name in (*names, "stranger"):
        rewrite(tmp_path / f"{name}.key", old)
    config = tiny_cluster(cache={"num_blocks": 400}, router={"local_prefill": "never"})
    body = {"model": "tiny", "prompt": [11, 12, 13], "temperature": 0}
    body |= {"max_tokens": 400, "ignore_eos": True}
    with KeptApart(tmp_path, config, over="tcp") as cluster, ThreadPoolExecutor(1) as thread:
        is_over = threading.Event()

        def read() -> list[str]:
            return [event["choices"][0]["text"] for event in cluster.stream(**body)]  # type: ignore[index]

        def read_on() -> list[str]:
            texts = []
            while not is_over.is_set():
                texts.append("".join(read()))
            return texts

        wanted = "".join(read())
        for name in ("wrong", "without"):
            cluster.start(name, cluster.config, "decode")
            cluster.wait_for_lines(f"{name} | ", "refused this node", 1)
        assert "".join(read()) == wanted
        health = msgspec.json.decode(cluster.get("/health")[1])
        assert {node["node_id"] for node in health["nodes"]} == {"prefill-0", "decode-0"}
        cluster.wait_for_lines("router | ", "were refused", 1)
        streams = thread.submit(read_on)
        try:
            for step, lines in enumerate(((old, new), (new, old), (new,)), 1):
                for name in names if step != 2 else reversed(names):
                    rewrite(tmp_path / f"{name}.key", *lines)
                    cluster.wait_for_lines(f"{name} | ", "keys of the cluster read again", step)
                cluster.wait_until_healthy()
            assert not streams.done(), streams.result()
        finally:
            is_over.set()
        assert set(streams.result()) == {wanted}
        assert "".join(read()) == wanted
        cluster.start("stranger", cluster.config, "decode")
        cluster.wait_for_lines("stranger | ", "refused this node's key", 1)
