"""Measure how the house reads: `python -m tools.house [FOLDER]` prints two Markdown tables.

One table has the lines and files of each room, of which no total is a target. The other has what
makes a change dear: crowded folders, names for one thing, files to touch, dense lines. A program
cannot count all of that, so `house.yaml` has lists of files and records, each with the rule by
which a reader counted it. `tests/hygiene` fails where a list names something that is gone.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
LISTS = Path(__file__).with_name("house.yaml")
FRONT_DOOR = "src/baton"
SHIPPED = (
    FRONT_DOOR, "protocol", "runtime", "kernels", "kv_transfer", "node", "model", "prefill_node",
    "decode_node", "router", "deploy", "bench",
)  # fmt: skip
OTHERS = ("tools", "tests")
MAX_FILES = 15  # in a folder of sources


class Count(msgspec.Struct, frozen=True):
    """A list that a reader made: `rule` says what belongs to it, `aim` how long it may be."""

    title: str
    rule: str
    aim: int
    # Files, or `file:Name` for a class or function in one.
    items: tuple[str, ...] = ()
    number: int | None = None  # instead of items, where there is nothing to list

    @property
    def now(self) -> int:
        return len(self.items) if self.number is None else self.number


class Density(msgspec.Struct):
    """How dense the code lines of some files are."""

    num_lines: int = 0
    num_chars: int = 0
    num_skips: int = 0  # of the formatter
    num_pairs: int = 0  # assignments of several values at once


def python_files(root: Path, room: str) -> list[Path]:
    """Return the Python files of a room. `src/baton` links to the others, which count once."""
    return sorted((root / room).glob("*.py" if room == FRONT_DOOR else "**/*.py"))


def crowded_folders(root: Path) -> dict[str, int]:
    """Return the folders of sources that hold more than `MAX_FILES` Python files."""
    files = (path for room in SHIPPED for path in python_files(root, room))
    counts = Counter(path.parent.relative_to(root).as_posix() for path in files)
    return {folder: count for folder, count in counts.items() if count > MAX_FILES}


def density_of(paths: Sequence[Path]) -> Density:
    """Measure code lines: no blank lines, comments, imports or docstrings."""
    density = Density()
    for path in paths:
        source = path.read_text()
        tree = ast.parse(source)
        docstrings = _docstring_lines(tree)
        density.num_skips += source.count("# fmt: skip")
        density.num_pairs += sum(_assigns_pair(node) for node in ast.walk(tree))
        for number, line in enumerate(source.splitlines(), 1):
            code = line.strip()
            is_import = code.startswith(("import ", "from "))
            if (
                code
                and number not in docstrings
                and not is_import
                and not code.startswith("#")
            ):
                density.num_lines += 1
                density.num_chars += len(code)
    return density


def read_counts(path: Path = LISTS) -> dict[str, Count]:
    """Return the lists of `house.yaml` by name."""
    return msgspec.convert(yaml.safe_load(path.read_text()), dict[str, Count])


def missing_items(count: Count, root: Path = REPOSITORY) -> list[str]:
    """Return the items of a list that the checkout no longer has."""
    return [item for item in count.items if not _exists(root, item)]


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    root = Path(words[0]) if words else REPOSITORY
    print("| room | files | lines |\n|---|---|---|")
    for room in (*SHIPPED, *OTHERS):
        lengths = [
            len(path.read_text().splitlines()) for path in python_files(root, room)
        ]
        print(f"| {room} | {len(lengths)} | {sum(lengths)} |")
    print("\n| measure | now | aim |\n|---|---|---|")
    for title, now, aim in _measures(root):
        print(f"| {title} | {now} | {aim} |")
    stale = [
        item for count in read_counts().values() for item in missing_items(count, root)
    ]
    if stale:
        print(f"\n{LISTS.name} names what is gone: {', '.join(stale)}", file=sys.stderr)
    return 1 if stale else 0


def _measures(root: Path) -> Iterator[tuple[str, str, str]]:
    crowded = crowded_folders(root)
    shown = ", ".join(f"{folder} {count}" for folder, count in sorted(crowded.items()))
    yield f"source folders of more than {MAX_FILES} Python files", shown or "0", "0"
    for count in read_counts().values():
        yield count.title, str(count.now), str(count.aim)
    density = density_of(
        [path for room in SHIPPED for path in python_files(root, room)]
    )
    yield (
        "characters in a code line",
        f"{density.num_chars / density.num_lines:.1f}",
        "34",
    )
    yield "`# fmt: skip`", str(density.num_skips), "12"
    per_thousand = 1000 * density.num_pairs / density.num_lines
    yield "parallel assignments in 1,000 code lines", f"{per_thousand:.1f}", "4"


def _docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _assigns_pair(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def _exists(root: Path, item: str) -> bool:
    file, _, name = item.partition(":")
    path = root / file
    if not name:
        return path.is_file()
    if not path.is_file():
        return False
    defined = ast.parse(path.read_text()).body
    return any(getattr(node, "name", "") == name for node in defined)


if __name__ == "__main__":
    sys.exit(main())
