"""Plain tables of the processes of a deployment, for `baton up` and `baton status`."""

from collections.abc import Sequence

from baton.deploy.cluster.platform import ProcessStatus

HEAD = ("process", "role", "host", "state", "", "last end")


def table_of(statuses: Sequence[ProcessStatus]) -> str:
    """Return one line per process below the names of the columns."""
    return lines_of(
        HEAD,
        [(one.name, one.role, one.host, one.state, one.note, one.last_end) for one in statuses],
    )


def lines_of(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the rows below the names of the columns, each column as wide as its longest text."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head) - 1)]
    return "\n".join(
        "  ".join(
            [*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[-1]]
        ).rstrip()
        for line in lines
    )
