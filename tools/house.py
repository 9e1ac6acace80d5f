"""Count the rooms of a checkout: `python -m tools.house [FOLDER]` prints a Markdown table.

Lines count everything in a Python file. An import counts once per importing file and imported
module, between two different rooms. Settings are fields of Structs that have a help text.
"""

import ast
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

FRONT_DOOR = "src/baton"
SHIPPED = (
    FRONT_DOOR, "protocol", "runtime", "kernels", "kv_transfer", "engine", "prefill_node",
    "decode_node", "router", "deploy", "bench",
)  # fmt: skip
OTHERS = ("tools", "tests")


class RoomFigures(msgspec.Struct, frozen=True):
    """The figures of one room. `settings` counts the settings that a user has there."""

    name: str
    lengths: tuple[int, ...]  # lines of each file that has any
    settings: int

    @property
    def row(self) -> str:
        if not self.lengths:
            return f"| {self.name} | 0 | 0 | | | |"
        median, most = int(statistics.median(self.lengths)), max(self.lengths)
        return (
            f"| {self.name} | {sum(self.lengths)} | {len(self.lengths)} "
            f"| {median} | {most} | {self.settings or ''} |"
        )


def files_of(root: Path, room: str) -> list[Path]:
    # src/baton has links to the rooms, but each file counts once.
    pattern = "*.py" if room == FRONT_DOOR else "**/*.py"
    return sorted((root / room).glob(pattern))


def figures(root: Path, room: str) -> RoomFigures:
    texts = [path.read_text() for path in files_of(root, room)]
    lengths = tuple(len(text.splitlines()) for text in texts if text)
    return RoomFigures(room, lengths, sum(_settings(ast.parse(text)) for text in texts))


def imports_between(root: Path) -> Counter[tuple[str, str]]:
    """Return how many imports lead from one shipped room to another."""
    found: Counter[tuple[str, str]] = Counter()
    for room in SHIPPED:
        for path in files_of(root, room):
            for module in _modules(ast.parse(path.read_text())):
                parts = module.split(".")
                if parts[0] == "baton" and len(parts) > 1 and parts[1] in SHIPPED:
                    found[room, parts[1]] += parts[1] != room
    return +found


def _modules(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def _settings(tree: ast.Module) -> int:
    """Count the annotated fields with a help text: `about(...)` or `Meta(description=...)`."""
    fields = [node for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    return sum(any(map(_is_meaning, ast.walk(field.annotation))) for field in fields)


def _is_meaning(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    has_description = any(keyword.arg == "description" for keyword in node.keywords)
    return node.func.id == "about" or (node.func.id == "Meta" and has_description)


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    root = Path(words[0]) if words else Path(__file__).resolve().parents[1]
    print("| room | lines | files | median | longest | settings |\n|---|---|---|---|---|---|")
    rooms = [figures(root, room) for room in SHIPPED]
    lengths = tuple(length for room in rooms for length in room.lengths)
    rooms.append(RoomFigures("shipped", lengths, sum(room.settings for room in rooms)))
    rooms += [figures(root, room) for room in OTHERS]
    print("\n".join(room.row for room in rooms))
    arrows = imports_between(root)
    print(f"\n{sum(arrows.values())} imports between rooms:")
    print(", ".join(f"{a} → {b} {count}" for (a, b), count in sorted(arrows.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
