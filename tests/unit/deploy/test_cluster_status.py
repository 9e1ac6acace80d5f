"""`baton status`: the rows that the words of several routers and a platform make."""

import msgspec
import pytest

from baton.deploy.cluster.arguments import words_of
from baton.deploy.cluster.overview import (
    FaultDocument,
    LostDocument,
    NodeDocument,
    NodeLoad,
    Overview,
    PairDocument,
    RouterAnswer,
    RouterDocument,
    StatusRow,
)
from baton.deploy.cluster.platform import ProcessStatus
from baton.deploy.cluster.status import HEAD, ClusterView, cells, plain
from baton.protocol.errors import ConfigError

PREFILL, DECODE = "prefill-0", "decode-0"


def document(now: float, num_handoffs: int = 0, **changes: object) -> RouterDocument:
    nodes = (
        NodeDocument(PREFILL, "prefill", "ready", load=NodeLoad(1, 2, 60, 80)),
        NodeDocument(DECODE, "decode", "ready", load=NodeLoad(3, 0, 80, 80)),
    )
    pairs = (PairDocument(PREFILL, DECODE, num_handoffs, 0.002 * num_handoffs),)
    told = RouterDocument(now, now, "0.1.0", "tiny", "ready", nodes=nodes, pairs=pairs)
    return msgspec.structs.replace(told, **changes)


def answer(index: int, told: RouterDocument | None, problem: str = "") -> RouterAnswer:
    return RouterAnswer(f"router-{index}", f"http://10.0.0.{index}:8000", told, problem)


def by_name(rows: list[StatusRow]) -> dict[str, StatusRow]:
    return {row.name: row for row in rows}


def test_counts_of_several_routers_are_added_and_rates_are_those_of_the_last_looks() -> None:
    overview = Overview()
    overview.take([answer(0, document(10.0, 10)), answer(1, document(20.0, 30))])
    rows = by_name(overview.rows([]))
    assert set(rows) == {"router-0", "router-1", PREFILL, DECODE}
    node = rows[DECODE]
    assert (node.num_handoffs, node.handoffs_per_s) == (40, None)
    assert node.handoff_s == pytest.approx(0.002)
    assert (rows[PREFILL].num_running, rows[PREFILL].kv_used) == (1, 0.25)
    overview.take([answer(0, document(12.0, 14)), answer(1, document(22.0, 30))])
    rows = by_name(overview.rows([]))
    assert (rows[DECODE].num_handoffs, rows[DECODE].handoffs_per_s) == (44, 2.0)
    assert (rows["router-0"].handoffs_per_s, rows["router-1"].handoffs_per_s) == (2.0, 0.0)
    # A router that has started again counts from zero.
    overview.take([answer(0, document(3.0, 1)), answer(1, document(23.0, 30))])
    assert by_name(overview.rows([]))[DECODE].num_handoffs == 31


def test_the_worst_word_on_a_node_counts_and_says_whose_it_is() -> None:
    overview = Overview()
    lost = document(1.0, nodes=document(1.0).nodes[:1], lost=(LostDocument(DECODE, "decode"),))
    overview.take([answer(0, document(1.0)), answer(1, lost)])
    rows = by_name(overview.rows([]))
    assert (rows[PREFILL].health, rows[DECODE].health) == ("ready", "lost at router-1")
    assert rows[PREFILL].in_service_at == "router-0, router-1"
    overview.take([answer(0, document(2.0)), answer(1, document(2.0, nodes=()))])
    row = by_name(overview.rows([]))[DECODE]
    assert (row.health, row.in_service_at) == ("absent at router-1", "router-0")
    starting = (NodeDocument(DECODE, "decode", "starting", "loading", 3, 9),)
    overview.take([answer(0, document(3.0, nodes=starting)), answer(1, None, "does not answer")])
    assert by_name(overview.rows([]))[DECODE].health == "loading 3/9"


def test_rows_join_what_the_platform_and_the_routers_say() -> None:
    overview = Overview()
    fault = FaultDocument(90.0, "node_lost", "x" * 100, PREFILL, DECODE)
    overview.take([answer(0, document(100.0, 2, faults=(fault,)))])
    statuses = [
        ProcessStatus("router-0", "router", "10.0.0.1", "running", "pid 1"),
        ProcessStatus(PREFILL, "prefill", "10.0.0.2", "running", "pid 2"),
        ProcessStatus(DECODE, "decode", "10.0.0.3", "ended", "", "exit code 1: oh"),
    ]
    lines = [dict(zip(HEAD, one, strict=True)) for one in cells(overview.rows(statuses), 100.0)]
    assert [(one["process"], one["host"], one["state"]) for one in lines] == [
        ("router-0", "10.0.0.1", "ready"), (PREFILL, "10.0.0.2", "ready"),
        (DECODE, "10.0.0.3", "ended"),
    ]  # fmt: skip
    assert [one["KV"] for one in lines] == ["", "25 %", "0 %"]
    assert lines[1]["last fault"].startswith("10 s ago, node_lost: xxx")
    assert lines[1]["last fault"].endswith("…")
    assert (lines[1]["handoffs"], lines[1]["mean"]) == ("2", "2.0 ms")
    assert overview.summary("small") == "small: ready · tiny · baton 0.1.0 · 0 running · 0 queued"


def test_a_router_that_cannot_be_reached_is_one_line() -> None:
    words = words_of("status", "", ["--url", "http://127.0.0.1:1/v1"])
    assert not words.names_deployment
    view = ClusterView(words)
    view.look()
    assert not view.is_well
    assert plain(view).splitlines()[-1] == (
        "127.0.0.1:1 at http://127.0.0.1:1 does not answer: Connection refused"
    )
    with pytest.raises(ConfigError, match="--url ftp"):
        words_of("status", "", ["--url", "ftp://x"])
