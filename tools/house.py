"""Count the rooms of a checkout: `python -m tools.house [FOLDER]` prints a Markdown table.

Lines count everything in a Python file.
"""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

FRONT_DOOR = "src/baton"
SHIPPED = (
    FRONT_DOOR, "protocol", "runtime", "kernels", "kv_transfer", "engine", "prefill_node",
    "decode_node", "router", "deploy", "bench",
)  # fmt: skip
OTHERS = ("tools", "tests")


def lengths_of(root: Path, room: str) -> list[int]:
    """Return the lines of each file that has any."""
    # src/baton has links to the rooms, but each file counts once.
    files = (root / room).glob("*.py" if room == FRONT_DOOR else "**/*.py")
    return [length for file in files if (length := len(file.read_text().splitlines()))]


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    root = Path(words[0]) if words else Path(__file__).resolve().parents[1]
    rooms = {room: lengths_of(root, room) for room in SHIPPED}
    rooms["shipped"] = [length for lengths in rooms.values() for length in lengths]
    rooms |= {room: lengths_of(root, room) for room in OTHERS}
    print("| room | lines | files | median | longest |\n|---|---|---|---|---|")
    for room, lengths in rooms.items():
        median = int(statistics.median(lengths or [0]))
        print(
            f"| {room} | {sum(lengths)} | {len(lengths)} | {median} | {max(lengths, default=0)} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
