"""The transition tables: total, printed in the docs, and walked by the nemesis."""

from pathlib import Path
from random import Random

import pytest

from baton.kv_transfer.state_table import StateTable
from baton.kv_transfer.tables_doc import TABLES, with_tables
from tests.support.transfer_nemesis import run_schedule

PAGE = Path(__file__).parents[3] / "docs" / "transfer.md"
# Only a peer that breaks the protocol leads here; `test_liars` does.
NEEDS_A_LIAR = {
    ("source", "OFFERED", "Done"),
    ("source", "CLAIMED", "Done"),
    ("source", "CLAIMED", "Landing"),
    ("source", "CLAIMED", "Reconnected"),
    ("landing", "EXPECTED", "Span"),
    ("landing", "EXPECTED", "End"),
}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_state_answers_every_event_and_has_a_limit(table: StateTable) -> None:
    states = {state for entry in table.rules for state in entry.states}
    assert states == set(table.limits)
    missing = [(s, e) for s in states for e in table.events if (s, e) not in table.targets]
    assert missing == []


def test_the_docs_show_the_tables_of_the_code() -> None:
    page = PAGE.read_text()
    assert with_tables(page) == page, "run python -m baton.kv_transfer.tables_doc docs/transfer.md"


def test_the_nemesis_walks_through_every_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: set[tuple[str, str, str]] = set()
    check = StateTable.check

    def watch(self: StateTable, before: object, event: object, after: object) -> None:
        walked.add((self.name, before.name, type(event).__name__))  # type: ignore[attr-defined]
        check(self, before, event, after)  # type: ignore[arg-type]

    monkeypatch.setattr(StateTable, "check", watch)
    for seed in range(300):
        run_schedule(Random(seed), num_actions=300)
    rules = {(t.name, *pair) for t in TABLES for pair, targets in t.targets.items() if targets}
    assert rules - walked - NEEDS_A_LIAR == set()
