"""The LoRA adapters that are loaded at run time, as routers and nodes agree on them.

Each of them has a list with an entry for each name. Of two entries for a name the later one counts,
so lists that are merged in any order become equal.
"""

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.protocol.ids import Count

MAX_NAME = 256
MAX_PATH = 4096
# Names that were ever loaded, of which the oldest removed ones are forgotten.
MAX_ENTRIES = 1024
SEPARATOR = "="  # no name of an adapter has it


class AdapterEntry(msgspec.Struct, frozen=True, array_like=True):
    """The last change of an adapter: it was loaded from a folder, or removed."""

    name: Annotated[str, Meta(max_length=MAX_NAME)]
    number: Count  # of the change; a router counts on from the greatest that it knows
    # The epoch of the router that made the change.
    router: Annotated[str, Meta(max_length=64)]
    path: Annotated[str, Meta(max_length=MAX_PATH)] = ""  # empty: it was removed
    digest: Annotated[str, Meta(max_length=64)] = ""  # of its files, in hex

    @property
    def lora(self) -> str:
        """Return the name of this version in requests; empty if it was removed."""
        return lora_version(self.name, self.digest) if self.path else ""

    @property
    def stamp(self) -> tuple[int, str]:
        return self.number, self.router


def lora_version(name: str, digest: str) -> str:
    """Return the name in requests of an adapter that was loaded at run time.

    It differs between versions of an adapter, so these share no blocks.
    """
    return f"{name}{SEPARATOR}{digest}"


def shown_lora(lora: str) -> str:
    """Return the name that clients know of an adapter in a request."""
    return lora.partition(SEPARATOR)[0]


def is_of_run_time(lora: str) -> bool:
    return SEPARATOR in lora


class AdapterList:
    """The last change of each name that is known here."""

    def __init__(self) -> None:
        self._entries: dict[str, AdapterEntry] = {}

    @property
    def entries(self) -> tuple[AdapterEntry, ...]:
        """Return all entries in the order of their names."""
        return tuple(self._entries[name] for name in sorted(self._entries))

    @property
    def loaded(self) -> dict[str, AdapterEntry]:
        """Return the entries of adapters that may be used, by name."""
        return {name: entry for name, entry in self._entries.items() if entry.path}

    def merge(self, entries: Iterable[AdapterEntry]) -> bool:
        """Take over later changes, and return whether there were any."""
        is_changed = False
        for entry in entries:
            known = self._entries.get(entry.name)
            if known is None or known.stamp < entry.stamp:
                self._entries[entry.name] = entry
                is_changed = True
        if is_changed:
            self._forget()
        return is_changed

    def is_ahead_of(self, entries: Iterable[AdapterEntry]) -> bool:
        """Return whether `entries` lack a change that is known here."""
        theirs = {entry.name: entry.stamp for entry in entries}
        return any(
            name not in theirs or theirs[name] < entry.stamp
            for name, entry in self._entries.items()
        )

    def next_number(self) -> int:
        return 1 + max((entry.number for entry in self._entries.values()), default=0)

    def _forget(self) -> None:
        removed = [entry for entry in self._entries.values() if not entry.path]
        removed.sort(key=lambda entry: entry.stamp)
        for entry in removed[: max(len(self._entries) - MAX_ENTRIES, 0)]:
            del self._entries[entry.name]
