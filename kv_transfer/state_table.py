"""Transition tables: what a machine may do, as data that is checked at run time and printed.

Both transfer machines check every transition against their table, so the tables in
`docs/transfer.md`, rendered from here, cannot say something else than the code does. A table is
total: each pair of a state that is not final and an event has a rule.
"""

from enum import Enum

import msgspec

from baton.protocol.errors import InvariantBroken


class Rule(msgspec.Struct, frozen=True):
    """In any of `states`, `event` leads to one of `to`; an empty `to` means a bug."""

    states: tuple[str, ...]
    event: str
    to: tuple[str, ...]
    does: str


def rule(states: str, event: str, to: str, does: str) -> Rule:
    """`states` and `to` are names apart by spaces; `to` "=" stands for the same state."""
    return Rule(tuple(states.split()), event, tuple(to.split()), does)


class StateTable:
    """`limits` says, for each state that is not final, what ends it when nothing happens."""

    def __init__(self, name: str, limits: dict[str, str], rules: tuple[Rule, ...]) -> None:
        self.name = name
        self.limits = limits
        self.rules = rules
        self.targets: dict[tuple[str, str], frozenset[str]] = {}
        for entry in rules:
            for state in entry.states:
                if (state, entry.event) in self.targets:
                    raise InvariantBroken(f"{name}: two rules for {entry.event} in {state}")
                to = frozenset(state if target == "=" else target for target in entry.to)
                self.targets[state, entry.event] = to

    @property
    def events(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(entry.event for entry in self.rules))

    def check(self, before: Enum, event: object, after: Enum) -> None:
        name = type(event).__name__
        if after.name not in self.targets.get((before.name, name), ()):
            raise InvariantBroken(f"{self.name}: {before.name} + {name} -> {after.name}")

    def render(self) -> str:
        """As Markdown: the limits, then the rules."""
        lines = ["| state | ends at the latest |", "|---|---|"]
        lines += [f"| {state} | {limit} |" for state, limit in self.limits.items()]
        lines += ["", "| in | on | does | then |", "|---|---|---|---|"]
        for entry in self.rules:
            targets = ["stays" if target == "=" else target for target in entry.to]
            to = " or ".join(targets) or "ends the process"
            states = ", ".join(entry.states)
            lines.append(f"| {states} | {entry.event} | {entry.does} | {to} |")
        return "\n".join(lines) + "\n"
