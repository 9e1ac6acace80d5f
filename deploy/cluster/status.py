"""`baton status` shows the processes of a cluster in the terminal, as the page `/` does.

The state folder says which processes run, and the routers report their states over HTTP; either is
enough, so `--url` works on every platform. A node that several routers know is one row, with its
worst state; counts of handoffs are summed over all routers.
"""

import contextlib
import http.client
import os
import ssl
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from baton.deploy.cluster.processes import ROUTERS, ClusterPlan
from baton.deploy.cluster.state import ProcessStatus
from baton.deploy.startup import NodeReply
from baton.runtime.tls import client_context
from baton.runtime.unix_socket import connection_to

TIMEOUT_S = 2.0
KEY_VARIABLE = "BATON_API_KEY"
KEYS = "BATON_ROUTER_API_KEYS"
# The states of a node at a router, the worst first; "absent" is one that the router does not know.
STATES = (
    "lost",
    "silent",
    "stuck",
    "absent",
    "starting",
    "degraded",
    "draining",
    "ready",
)
HEAD = (
    "process",
    "role",
    "host",
    "state",
    "running",
    "waiting",
    "KV",
    "handoffs",
    "",
    "last end",
)


class PairDocument(msgspec.Struct, frozen=True):
    prefill_node: str
    decode_node: str
    num_handoffs: int = 0


class RouterDocument(msgspec.Struct, frozen=True):
    """The part of `/status.json` that a terminal shows."""

    version: str = ""
    model: str = ""
    status: str = ""
    message: str = ""
    num_running: int = 0
    num_queued: int = 0
    nodes: tuple[NodeReply, ...] = ()
    lost: tuple[NodeReply, ...] = ()
    pairs: tuple[PairDocument, ...] = ()


class RouterReply(msgspec.Struct, frozen=True):
    """A router that is asked, and its reply or why there is none."""

    name: str
    url: str
    api_key: str = ""
    document: RouterDocument | None = None
    problem: str = ""


class StatusRow(msgspec.Struct, frozen=True):
    """One process: its `state` where it runs, and its `health` at the routers."""

    name: str
    role: str
    host: str = ""
    state: str = ""
    note: str = ""  # its pid
    last_end: str = ""
    health: str = ""
    num_running: int | None = None
    num_waiting: int | None = None
    kv_used: float | None = None  # of 1
    num_handoffs: int | None = None  # since the routers started


def routers_of(
    named: Sequence[str],
    api_key: str,
    plan: ClusterPlan | None = None,
    urls: Sequence[str] = (),
) -> list[RouterReply]:
    """Return the routers to ask: the `named` URLs, or those of a plan, which are at `urls`."""
    own = [
        RouterReply(spec.name, url, spec.secret_env.get(KEYS, "").partition(",")[0])
        for spec, url in zip(plan.pool(ROUTERS) if plan else (), urls, strict=False)
    ]
    key = api_key or os.environ.get(KEY_VARIABLE, "")
    if not named:
        return [msgspec.structs.replace(one, api_key=key or one.api_key) for one in own]
    key = key or next((one.api_key for one in own if one.api_key), "")
    bare = [url.rstrip("/").removesuffix("/v1") for url in named]
    return [RouterReply(url.partition("://")[2], url, key) for url in bare]


def show(
    routers: Sequence[RouterReply],
    name: str = "",
    statuses: Sequence[ProcessStatus] | None = None,
    *,
    ca_file: str = "",
    is_json: bool = False,
) -> int:
    """Ask the routers, print the cluster, and return the exit code.

    That is 0 if every process of the deployment `name` runs, or, without a deployment (None), if
    every router answers. Raises `ConfigError` for certificates that cannot be read.
    """
    trust = client_context(ca_file)
    with ThreadPoolExecutor(max(1, len(routers))) as threads:
        replies = list(threads.map(partial(ask, trust), routers))
    problems = [
        f"{one.name} at {one.url} {one.problem}" for one in replies if one.problem
    ]
    rows = rows_of(statuses or (), replies)
    if is_json:
        print(msgspec.json.encode(rows).decode())
    else:
        table = cells(rows)
        kept = [i for i in range(len(HEAD)) if i < 2 or any(row[i] for row in table)]
        lines = (
            lines_of([[row[i] for i in kept] for row in (HEAD, *table)]) if rows else ""
        )
        print("\n".join(filter(None, [summary_of(name, replies), lines, *problems])))
    if statuses is None:
        return int(bool(problems))
    return int(any(one.state != "running" for one in statuses))


def ask(trust: ssl.SSLContext, router: RouterReply) -> RouterReply:
    """Return a router with its reply at /status.json, or why there is none."""
    headers = {"Authorization": f"Bearer {router.api_key}"} if router.api_key else {}
    connection, base = connection_to(router.url, TIMEOUT_S, trust)
    try:
        with contextlib.closing(connection):
            connection.request(
                "GET", f"{base.rstrip('/')}/status.json", headers=headers
            )
            reply = connection.getresponse()
            if reply.status == 200:
                document = msgspec.json.decode(reply.read(), type=RouterDocument)
                return msgspec.structs.replace(router, document=document)
        problem = {
            401: f"asks for an API key: give one with --api-key, or in {KEY_VARIABLE}",
            404: "has no status page: router.page is off",
        }.get(reply.status, f"answers {reply.status}")
    except ssl.SSLCertVerificationError as error:
        why = f"its certificate is not trusted ({error.verify_message}); name its authority "
        problem = f"cannot be asked: {why}with --ca-file"
    except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
        problem = f"does not answer: {getattr(error, 'strerror', None) or error}"
    return msgspec.structs.replace(router, problem=problem)


def summary_of(name: str, replies: Sequence[RouterReply]) -> str:
    """Return one line on the whole cluster, empty if no router answers."""
    documents = [one.document for one in replies if one.document is not None]
    if not documents:
        return ""
    parts = [
        " and ".join(sorted({one.status for one in documents})),
        ", ".join(sorted({one.model for one in documents if one.model}))
        or "no model yet",
        f"baton {', '.join(sorted({one.version for one in documents}))}",
        f"{sum(one.num_running for one in documents)} running",
        f"{sum(one.num_queued for one in documents)} queued",
        *sorted({one.message for one in documents if one.message}),
    ]
    return (f"{name}: " if name else "") + " · ".join(parts)


def rows_of(
    statuses: Sequence[ProcessStatus], replies: Sequence[RouterReply]
) -> list[StatusRow]:
    """Return the processes of the deployment, then those that only the routers know."""
    rows = [StatusRow(**msgspec.structs.asdict(one)) for one in statuses]
    documents = {one.name: one.document for one in replies if one.document is not None}
    nodes = {
        node.node_id: node.role
        for document in documents.values()
        for node in (*document.nodes, *document.lost)
    }
    known = {row.name for row in rows}
    rows += [StatusRow(one.name, "router") for one in replies if one.name not in known]
    rows += [StatusRow(name, nodes[name]) for name in sorted(nodes.keys() - known)]
    return [
        _row(row, documents) if row.name in documents | nodes else row for row in rows
    ]


def _row(row: StatusRow, documents: dict[str, RouterDocument]) -> StatusRow:
    """Add what the routers know of a process."""
    if (own := documents.get(row.name)) is not None:
        row = msgspec.structs.replace(
            row,
            health=own.status,
            num_running=own.num_running,
            num_waiting=own.num_queued,
        )
        pairs = list(own.pairs)
    else:
        row = _with_health(row, documents)
        pairs = [
            pair
            for document in documents.values()
            for pair in document.pairs
            if row.name in (pair.prefill_node, pair.decode_node)
        ]
    return msgspec.structs.replace(
        row, num_handoffs=sum(pair.num_handoffs for pair in pairs)
    )


def _with_health(row: StatusRow, documents: dict[str, RouterDocument]) -> StatusRow:
    """Add a node's worst state at the routers, and the newest load that one of them has."""
    seen = {name: NodeReply(row.name, row.role, "absent") for name in documents}
    for name, document in documents.items():
        lost = [msgspec.structs.replace(one, state="lost") for one in document.lost]
        for node in (*document.nodes, *lost):
            if node.node_id == row.name:
                seen[name] = node
    router, worst = min(
        seen.items(),
        key=lambda one: STATES.index(one[1].state) if one[1].state in STATES else 0,
    )
    is_agreed = len({one.state for one in seen.values()}) == 1
    row = msgspec.structs.replace(
        row, health=worst.doing if is_agreed else f"{worst.doing} at {router}"
    )
    heard = [one for one in seen.values() if one.state not in ("lost", "absent")]
    if not heard:
        return row
    load = min(heard, key=lambda one: one.heartbeat_age_s).load
    used = load.total_blocks - load.free_blocks
    return msgspec.structs.replace(
        row,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        kv_used=used / load.total_blocks if load.total_blocks else None,
    )


def cells(rows: Sequence[StatusRow]) -> list[tuple[str, ...]]:
    """Return the text of each row, by the columns of `HEAD`."""
    return [
        (
            row.name,
            row.role,
            row.host,
            # The routers know more of a process that runs.
            row.health if row.health and row.state in ("", "running") else row.state,
            _shown(row.num_running),
            _shown(row.num_waiting),
            "" if row.kv_used is None else f"{100 * row.kv_used:.0f} %",
            _shown(row.num_handoffs),
            row.note,
            row.last_end,
        )
        for row in rows
    ]


def _shown(value: int | None) -> str:
    return "" if value is None else str(value)


def lines_of(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as lines, each column as wide as its longest text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    )
