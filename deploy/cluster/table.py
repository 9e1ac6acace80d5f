"""The processes of a deployment as a plain table, for `baton up` and `baton status`."""

from collections.abc import Sequence

from baton.deploy.cluster.platform import ProcessStatus

HEAD = ("process", "role", "host", "state", "", "last end")


def table_of(statuses: Sequence[ProcessStatus]) -> str:
    """Return one line per process below the names of the columns."""
    rows = [
        HEAD,
        *((one.name, one.role, one.host, one.state, one.note, one.last_end) for one in statuses),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD) - 1)]
    return "\n".join(
        "  ".join(
            [*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]
        ).rstrip()
        for row in rows
    )
