"""`baton status`: the rows made from the reports of several routers and of a deployment."""

import msgspec
import pytest

from baton.deploy.cluster import commands
from baton.deploy.cluster.commands import arguments_of
from baton.deploy.cluster.state import ProcessStatus
from baton.deploy.cluster.status import (
    HEAD,
    PairDocument,
    RouterDocument,
    RouterReply,
    StatusRow,
    cells,
    routers_of,
    rows_of,
    show,
)
from baton.deploy.startup import NodeLoad, NodeReply
from baton.protocol.errors import ConfigError

PREFILL = "prefill-0"
DECODE = "decode-0"
READY = (
    NodeReply(PREFILL, "prefill", "ready", load=NodeLoad(1, 2, 60, 80)),
    NodeReply(DECODE, "decode", "ready", load=NodeLoad(3, 0, 80, 80)),
)


def document(num_handoffs: int = 0, **changes: object) -> RouterDocument:
    pairs = (PairDocument(PREFILL, DECODE, num_handoffs),)
    ready = RouterDocument("0.1.0", "tiny", "ready", nodes=READY, pairs=pairs)
    return msgspec.structs.replace(ready, **changes)


def rows(*documents: RouterDocument) -> dict[str, StatusRow]:
    replies = [
        RouterReply(f"router-{i}", f"http://10.0.0.{i}:8000", document=one)
        for i, one in enumerate(documents)
    ]
    return {row.name: row for row in rows_of([], replies)}


def test_a_server_on_this_host_is_asked_where_no_cluster_is_described(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "SERVED_URL", "http://127.0.0.1:1")
    assert commands.main("status", "", []) == 1
    assert "http://127.0.0.1:1" in capsys.readouterr().out
    (tmp_path / "cluster.yaml").write_text("name: a\npools:\n  d: {role: decode}\n")
    with pytest.raises(ConfigError, match="nothing is up"):
        commands.main("status", "", ["--state", str(tmp_path)])


def test_render_asks_for_a_platform():
    with pytest.raises(
        ConfigError, match="name a platform: --on helm, --on kubernetes"
    ):
        arguments_of("render", "", [])
    assert arguments_of("up", "", []).on == "local"


def test_handoffs_of_several_routers_are_added():
    found = rows(document(10), document(30))
    assert set(found) == {"router-0", "router-1", PREFILL, DECODE}
    assert (found[DECODE].num_handoffs, found["router-0"].num_handoffs) == (40, 10)
    assert (found[PREFILL].num_running, found[PREFILL].kv_used) == (1, 0.25)


@pytest.mark.parametrize(
    ("changes", "health"),
    [
        ({}, "ready"),
        (
            {"nodes": READY[:1], "lost": (NodeReply(DECODE, "decode"),)},
            "lost at router-1",
        ),
        ({"nodes": READY[:1]}, "absent at router-1"),
        (
            {"nodes": (NodeReply(DECODE, "decode", "starting", "loading", 3, 9),)},
            "loading 3/9 at router-1",
        ),
    ],
)
def test_the_worst_state_of_a_node_counts_and_names_its_router(changes, health):
    assert rows(document(), document(**changes))[DECODE].health == health


def test_rows_join_the_deployment_and_the_routers():
    reply = RouterReply("router-0", "http://10.0.0.1", document=document(2))
    statuses = [
        ProcessStatus("router-0", "router", "10.0.0.1", "running", "pid 1"),
        ProcessStatus(PREFILL, "prefill", "10.0.0.2", "running", "pid 2"),
        ProcessStatus(DECODE, "decode", "10.0.0.3", "ended", "", "exit code 1: oh"),
    ]
    table = cells(rows_of(statuses, [reply]))
    lines = [dict(zip(HEAD, one, strict=True)) for one in table]
    assert [(one["process"], one["host"], one["state"]) for one in lines] == [
        ("router-0", "10.0.0.1", "ready"),
        (PREFILL, "10.0.0.2", "ready"),
        (DECODE, "10.0.0.3", "ended"),
    ]
    assert [one["KV"] for one in lines] == ["", "25 %", "0 %"]
    assert lines[1]["handoffs"] == "2"


def test_a_router_that_cannot_be_reached_is_one_line(capsys):
    given = arguments_of("status", "", ["--url", "http://127.0.0.1:1/v1"])
    assert show(routers_of(given.url, "")) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "127.0.0.1:1 at http://127.0.0.1:1 does not answer: Connection refused"
    )
    with pytest.raises(ConfigError, match="--url ftp"):
        arguments_of("status", "", ["--url", "ftp://x"])
