"""`baton status` shows the processes of a cluster in the terminal, as the page `/` does.

The state folder says which processes run, and the routers report their states over HTTP; either is
enough, so `--url` works on every platform. A node that several routers know is one row, with its
worst state; counts of handoffs are summed over all routers.
"""

import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from baton.deploy.cluster.arguments import ClusterArguments
from baton.deploy.cluster.processes import ROUTERS, ClusterPlan
from baton.deploy.cluster.state import Platform, ProcessStatus, read_deployment
from baton.runtime.tls import client_context

TIMEOUT_S = 2.0
KEY_VARIABLE, KEYS = "BATON_API_KEY", "BATON_ROUTER_API_KEYS"
# The states of a node at a router, the worst first; "absent" means that the router does not know
# it.
STATES = ("lost", "silent", "stuck", "absent", "starting", "degraded", "draining", "ready")
HEAD = (
    "process", "role", "host", "state", "running", "waiting", "KV", "handoffs", "", "last end",
)  # fmt: skip


class NodeLoad(msgspec.Struct, frozen=True):
    num_running: int = 0
    num_waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0


class NodeDocument(msgspec.Struct, frozen=True):
    node_id: str
    role: str = ""
    state: str = ""
    phase: str = ""
    done: int = 0
    total: int = 0
    load: NodeLoad = NodeLoad()
    heartbeat_age_s: float = 0.0

    @property
    def doing(self) -> str:
        """Return the state, with the progress if the node is starting."""
        if self.state != "starting":
            return self.state
        return f"{self.phase} {self.done}/{self.total}" if self.total else self.phase or self.state


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
    nodes: tuple[NodeDocument, ...] = ()
    lost: tuple[NodeDocument, ...] = ()
    pairs: tuple[PairDocument, ...] = ()


class RouterAnswer(msgspec.Struct, frozen=True):
    """A router that is asked, and its answer or why there is none."""

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


class ClusterView:
    """The current knowledge of one cluster: of its deployment, or of named routers."""

    def __init__(
        self,
        given: ClusterArguments,
        folder: Path | None = None,
        platform: Platform | None = None,
        plan: ClusterPlan | None = None,
    ) -> None:
        """Take the state folder of a deployment, what runs it, and its plan if its file is there.

        Without a deployment, only the routers that `given` names are asked.

        Raises `ConfigError` for certificates that cannot be read.
        """
        self._given = given
        self._trust = client_context(given.ca_file)
        self._folder, self._platform, self._plan = folder, platform, plan
        self._deployment = read_deployment(folder) if folder is not None else None
        self._answers: list[RouterAnswer] = []
        self.problems: list[str] = []
        self.statuses: list[ProcessStatus] = []
        self.rows: list[StatusRow] = []

    @property
    def is_well(self) -> bool:
        """Return whether every process runs; without a deployment, whether every router answers."""
        if self._deployment is None:
            return not self.problems
        return all(one.state == "running" for one in self.statuses)

    def look(self) -> None:
        """Ask the platform and every router. Raises `NodeError` if the platform does not answer."""
        if self._platform is not None and self._folder is not None:
            self.statuses = self._platform.status(self._folder)
        routers = self._routers()
        with ThreadPoolExecutor(max(1, len(routers))) as threads:
            self._answers = list(threads.map(partial(ask, self._trust), routers))
        self.problems = [
            f"{one.name} at {one.url} {one.problem}" for one in self._answers if one.problem
        ]
        self.rows = rows_of(self.statuses, self._answers)

    def text(self) -> str:
        """Return the cluster as a table below a line that sums it up."""
        lines = [summary_of(self._deployment.name if self._deployment else "", self._answers)]
        if self.rows:
            table = cells(self.rows)
            kept = [i for i in range(len(HEAD)) if i < 2 or any(row[i] for row in table)]
            head = [HEAD[i] for i in kept]
            lines.append(lines_of(head, [[row[i] for i in kept] for row in table]))
        return "\n".join(filter(None, [*lines, *self.problems]))

    def _routers(self) -> list[RouterAnswer]:
        """Return the routers to ask: those of `--url`, or those of the deployment."""
        own: list[RouterAnswer] = []
        if self._plan is not None and self._platform is not None and self._folder is not None:
            own = [
                RouterAnswer(spec.name, url, spec.secret_env.get(KEYS, "").partition(",")[0])
                for spec, url in zip(
                    self._plan.pool(ROUTERS),
                    self._platform.urls(self._plan, self._folder),
                    strict=False,
                )
            ]
        key = self._given.api_key or os.environ.get(KEY_VARIABLE, "")
        urls = [url.rstrip("/").removesuffix("/v1") for url in self._given.urls]
        if not urls:
            return [msgspec.structs.replace(one, api_key=key or one.api_key) for one in own]
        key = key or next((one.api_key for one in own if one.api_key), "")
        return [RouterAnswer(url.partition("://")[2], url, key) for url in urls]


def show(view: ClusterView, given: ClusterArguments) -> int:
    """Print the cluster once, and return the exit code."""
    view.look()
    print(msgspec.json.encode(view.rows).decode() if given.json else view.text())
    return 0 if view.is_well else 1


def ask(trust: ssl.SSLContext, router: RouterAnswer) -> RouterAnswer:
    """Return a router with its answer at /status.json, or why there is none."""
    request = urllib.request.Request(f"{router.url}/status.json")
    if router.api_key:
        request.add_header("Authorization", f"Bearer {router.api_key}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=trust) as reply:
            document = msgspec.json.decode(reply.read(), type=RouterDocument)
            return msgspec.structs.replace(router, document=document)
    except urllib.error.HTTPError as error:
        with error:
            problem = {
                401: f"asks for an API key: give one with --api-key, or in {KEY_VARIABLE}",
                404: "has no status page: router.page is off",
            }.get(error.code, f"answers {error.code}")
    except (OSError, msgspec.MsgspecError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            why = f"its certificate is not trusted ({reason.verify_message}); name its authority "
            problem = f"cannot be asked: {why}with --ca-file"
        else:
            problem = f"does not answer: {getattr(reason, 'strerror', None) or reason}"
    return msgspec.structs.replace(router, problem=problem)


def summary_of(name: str, answers: Sequence[RouterAnswer]) -> str:
    """Return one line on the whole cluster, empty if no router answers."""
    documents = [one.document for one in answers if one.document is not None]
    if not documents:
        return ""
    parts = [
        " and ".join(sorted({one.status for one in documents})),
        ", ".join(sorted({one.model for one in documents if one.model})) or "no model yet",
        f"baton {', '.join(sorted({one.version for one in documents}))}",
        f"{sum(one.num_running for one in documents)} running",
        f"{sum(one.num_queued for one in documents)} queued",
        *sorted({one.message for one in documents if one.message}),
    ]
    return (f"{name}: " if name else "") + " · ".join(parts)


def rows_of(statuses: Sequence[ProcessStatus], answers: Sequence[RouterAnswer]) -> list[StatusRow]:
    """Return the processes of the deployment, then those that only the routers know."""
    rows = [StatusRow(**msgspec.structs.asdict(one)) for one in statuses]
    documents = {one.name: one.document for one in answers if one.document is not None}
    nodes = {
        node.node_id: node.role
        for document in documents.values()
        for node in (*document.nodes, *document.lost)
    }
    known = {row.name for row in rows}
    rows += [StatusRow(one.name, "router") for one in answers if one.name not in known]
    rows += [StatusRow(name, nodes[name]) for name in sorted(nodes.keys() - known)]
    return [_row(row, documents) if row.name in documents | nodes else row for row in rows]


def _row(row: StatusRow, documents: dict[str, RouterDocument]) -> StatusRow:
    """Add what the routers know of a process."""
    if (own := documents.get(row.name)) is not None:
        row = msgspec.structs.replace(
            row, health=own.status, num_running=own.num_running, num_waiting=own.num_queued
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
    return msgspec.structs.replace(row, num_handoffs=sum(pair.num_handoffs for pair in pairs))


def _with_health(row: StatusRow, documents: dict[str, RouterDocument]) -> StatusRow:
    """Add a node's worst state at the routers, and the newest load that one of them has."""
    seen = {name: NodeDocument(row.name, row.role, "absent") for name in documents}
    for name, document in documents.items():
        lost = [msgspec.structs.replace(one, state="lost") for one in document.lost]
        for node in (*document.nodes, *lost):
            if node.node_id == row.name:
                seen[name] = node
    router, worst = min(
        seen.items(), key=lambda one: STATES.index(one[1].state) if one[1].state in STATES else 0
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


def table_of(statuses: Sequence[ProcessStatus]) -> str:
    """Return one line per process below the names of the columns."""
    return lines_of(
        ("process", "role", "host", "state", "", "last end"),
        [(one.name, one.role, one.host, one.state, one.note, one.last_end) for one in statuses],
    )


def lines_of(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the rows below the names of the columns, each column as wide as its longest text."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
