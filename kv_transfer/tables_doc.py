"""Writes the state tables into `docs/transfer.md`, between their markers.

Run as `python -m baton.kv_transfer.tables_doc docs/transfer.md` after a table has changed; a test
compares the page with what this would write. Imports nothing but the two tables.
"""

import sys
from pathlib import Path

from baton.kv_transfer import landing_rules, source

TABLES = (source.TABLE, landing_rules.TABLE)


def with_tables(page: str) -> str:
    """`page` with the text between each table's markers replaced."""
    for table in TABLES:
        begin, end = f"<!-- begin {table.name} -->\n", f"<!-- end {table.name} -->"
        head, _, rest = page.partition(begin)
        _, found, tail = rest.partition(end)
        if not found:
            raise SystemExit(f"the page has no place for the table {table.name}")
        page = f"{head}{begin}\n{table.render()}\n{end}{tail}"
    return page


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text()))
