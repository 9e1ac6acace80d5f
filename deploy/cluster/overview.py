"""Merge the reports of a cluster's routers and of its platform into one row per process.

`status` feeds it with the documents of `/status.json` and prints the rows. A node that several
routers know is one row; counts of handoffs are summed over all routers. Rates come from the
documents of the last seconds, so the first rows have none. This file is pure.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from baton.deploy.cluster.platform import ProcessStatus

# Rates and times cover this many last looks.
WINDOW = 10
# The states of a node at a router, the worst first; "absent" means that the router does not know
# it.
STATES = ("lost", "silent", "stuck", "absent", "starting", "degraded", "draining", "ready")
IN_SERVICE = ("degraded", "ready")
ROUTER = "router"


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
    beat_age_s: float = 0.0

    @property
    def doing(self) -> str:
        """Return the state, with the progress if the node is starting."""
        if self.state != "starting":
            return self.state
        return f"{self.phase} {self.done}/{self.total}" if self.total else self.phase or self.state


class LostDocument(msgspec.Struct, frozen=True):
    node_id: str
    role: str = ""


class PairDocument(msgspec.Struct, frozen=True):
    prefill_node: str
    decode_node: str
    num_handoffs: int = 0
    transfer_s: float = 0.0


class FaultDocument(msgspec.Struct, frozen=True):
    at: float  # seconds since 1970
    code: str
    message: str
    prefill_node: str | None = None
    decode_node: str | None = None


class RouterDocument(msgspec.Struct, frozen=True):
    """The part of `/status.json` that a terminal shows."""

    now: float  # seconds since 1970
    uptime_s: float
    version: str
    model: str = ""
    status: str = ""
    message: str = ""
    num_running: int = 0
    num_queued: int = 0
    nodes: tuple[NodeDocument, ...] = ()
    lost: tuple[LostDocument, ...] = ()
    pairs: tuple[PairDocument, ...] = ()
    faults: tuple[FaultDocument, ...] = ()  # the newest first


class RouterAnswer(msgspec.Struct, frozen=True):
    """The answer of one router, or why there is none."""

    name: str
    url: str
    document: RouterDocument | None
    problem: str = ""


class StatusRow(msgspec.Struct, frozen=True):
    """One process: its `state` at the platform, and its `health` at the routers."""

    name: str
    role: str
    host: str = ""
    state: str = ""
    note: str = ""  # its pid or its pod
    last_end: str = ""
    health: str = ""
    in_service_at: str = ""  # the router, if several know the node
    num_running: int | None = None
    num_waiting: int | None = None
    kv_used: float | None = None  # of 1
    num_handoffs: int | None = None  # since the routers started
    handoffs_per_s: float | None = None
    handoff_s: float | None = None  # mean, recent or since the routers started
    last_fault: str = ""
    last_fault_at: float | None = None  # seconds since 1970
    version: str = ""  # of a router


class Handoffs(msgspec.Struct, frozen=True):
    """The handoffs of one pair, or of several pairs."""

    count: int = 0
    spent_s: float = 0.0

    def __add__(self, other: "Handoffs") -> "Handoffs":
        return Handoffs(self.count + other.count, self.spent_s + other.spent_s)


class Overview:
    """The last looks at the routers, and the rows that they make with a platform's statuses."""

    def __init__(self) -> None:
        self._past: dict[str, deque[RouterDocument]] = {}
        self._answers: Sequence[RouterAnswer] = ()

    def take(self, answers: Sequence[RouterAnswer]) -> None:
        """Take in the routers' latest answers."""
        self._answers = answers
        for answer in answers:
            if (document := answer.document) is None:
                continue
            past = self._past.setdefault(answer.url, deque(maxlen=WINDOW + 1))
            if past and past[-1].uptime_s > document.uptime_s:
                past.clear()  # another process, whose counts start again
            past.append(document)

    def rows(self, statuses: Sequence[ProcessStatus]) -> list[StatusRow]:
        """Return the processes of the platform, then the nodes that only the routers know."""
        routers = {one.name: one for one in self._answers}
        nodes = self._nodes()
        rows = []
        for status in statuses:
            row = StatusRow(**msgspec.structs.asdict(status))
            if status.role == ROUTER and status.name in routers:
                row = self._router(row, routers.pop(status.name))
            elif status.name in nodes:
                row = self._node(row, nodes.pop(status.name))
            rows.append(row)
        rows += [self._router(StatusRow(one.name, ROUTER), one) for one in routers.values()]
        rows += [
            self._node(StatusRow(name, next(iter(seen.values())).role), seen)
            for name, seen in sorted(nodes.items())
        ]
        return rows

    def summary(self, name: str) -> str:
        """Return one line on the whole cluster, empty if no router answers."""
        documents = [one.document for one in self._answers if one.document is not None]
        if not documents:
            return ""
        models = ", ".join(sorted({one.model for one in documents if one.model})) or "no model yet"
        versions = ", ".join(sorted({one.version for one in documents}))
        running = sum(one.num_running for one in documents)
        queued = sum(one.num_queued for one in documents)
        states = sorted({one.status for one in documents})
        messages = sorted({one.message for one in documents if one.message})
        parts = [
            " and ".join(states), models, f"baton {versions}", f"{running} running",
            f"{queued} queued", *messages,
        ]  # fmt: skip
        return (f"{name}: " if name else "") + " · ".join(parts)

    # --- inside --------------------------------------------------------------------------------

    def _nodes(self) -> dict[str, dict[str, NodeDocument]]:
        """Return each node's states, by the names of the routers that answer."""
        found: dict[str, dict[str, NodeDocument]] = {}
        answered = [one for one in self._answers if one.document is not None]
        for answer in answered:
            assert answer.document is not None
            for node in answer.document.nodes:
                found.setdefault(node.node_id, {})[answer.name] = node
            for lost in answer.document.lost:
                gone = NodeDocument(lost.node_id, lost.role, "lost")
                found.setdefault(lost.node_id, {})[answer.name] = gone
        for name, seen in found.items():
            for answer in answered:
                role = next(iter(seen.values())).role
                seen.setdefault(answer.name, NodeDocument(name, role, "absent"))
        return found

    def _router(self, row: StatusRow, answer: RouterAnswer) -> StatusRow:
        if answer.document is None:
            return row
        document = answer.document
        faults = document.faults[:1]
        return self._with_counts(
            msgspec.structs.replace(
                row,
                health=document.status,
                num_running=document.num_running,
                num_waiting=document.num_queued,
                version=document.version,
            ),
            (answer,),
            "",
            faults,
        )

    def _node(self, row: StatusRow, seen: dict[str, NodeDocument]) -> StatusRow:
        router, worst = min(seen.items(), key=lambda item: _rank(item[1].state))
        states = {one.state for one in seen.values()}
        heard = [one for one in seen.values() if one.state not in ("lost", "absent")]
        row = msgspec.structs.replace(
            row,
            health=worst.doing if len(states) == 1 else f"{worst.doing} at {router}",
            in_service_at=_named([name for name, one in seen.items() if one.state in IN_SERVICE])
            if len(seen) > 1
            else "",
        )
        if heard:
            load = min(heard, key=lambda one: one.beat_age_s).load
            used = load.total_blocks - load.free_blocks
            row = msgspec.structs.replace(
                row,
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                kv_used=used / load.total_blocks if load.total_blocks else None,
            )
        faults = [
            fault
            for answer in self._answers
            for fault in (answer.document.faults if answer.document else ())
            if row.name in (fault.prefill_node, fault.decode_node)
        ]
        return self._with_counts(row, self._answers, row.name, faults)

    def _with_counts(
        self,
        row: StatusRow,
        answers: Iterable[RouterAnswer],
        node: str,
        faults: Sequence[FaultDocument],
    ) -> StatusRow:
        """Add the handoffs of a node, or of all nodes, at some routers, and the last fault."""
        total, lately, per_s = Handoffs(), Handoffs(), 0.0
        is_compared = False
        for answer in answers:
            past = self._past.get(answer.url)
            if answer.document is None or not past:
                continue
            now, before = _handoffs(past[-1], node), _handoffs(past[0], node)
            total += now
            span_s = past[-1].now - past[0].now
            if span_s > 0:
                is_compared = True
                per_s += (now.count - before.count) / span_s
                lately += Handoffs(now.count - before.count, now.spent_s - before.spent_s)
        mean = lately if lately.count else total
        last = max(faults, key=lambda one: one.at, default=None)
        return msgspec.structs.replace(
            row,
            num_handoffs=total.count,
            handoffs_per_s=per_s if is_compared else None,
            handoff_s=mean.spent_s / mean.count if mean.count else None,
            last_fault=f"{last.code}: {last.message}" if last is not None else "",
            last_fault_at=last.at if last is not None else None,
        )


def _handoffs(document: RouterDocument, node: str) -> Handoffs:
    """Return a node's handoffs since a router started, or those of all for an empty name."""
    pairs = [
        pair for pair in document.pairs if not node or node in (pair.prefill_node, pair.decode_node)
    ]
    return Handoffs(sum(p.num_handoffs for p in pairs), sum(p.transfer_s for p in pairs))


def _named(routers: Sequence[str]) -> str:
    return ", ".join(sorted(routers)) or "no router"


def _rank(state: str) -> int:
    return STATES.index(state) if state in STATES else 0
