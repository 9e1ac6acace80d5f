"""The sources of the repository as syntax trees, for the tests of how they are written."""

import ast
import functools
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ROOMS = (
    "protocol",
    "runtime",
    "kernels",
    "kv_transfer",
    "node",
    "model",
    "prefill_node",
    "decode_node",
    "router",
    "bench",
    "deploy",
)
FRONT_DOOR = "src/baton"


@functools.cache
def sources(*folders: str) -> tuple[Path, ...]:
    """The Python files of these folders, all rooms and the command line by default."""
    found: list[Path] = []
    for folder in folders or (*ROOMS, FRONT_DOOR):
        # `src/baton` links to the rooms; each file counts once.
        pattern = "*.py" if folder == FRONT_DOOR else "**/*.py"
        found += sorted((REPOSITORY / folder).glob(pattern))
    return tuple(found)


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def written_kernels() -> set[str]:
    """The names of the Triton kernels that are launched; their device functions are inlined."""
    return {
        line.removeprefix("def ").rstrip("(\n")
        for path in (REPOSITORY / "kernels" / "cuda").rglob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def ") and line.endswith("_kernel(")
    }


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def module_of(path: Path) -> str:
    """Return the name by which a file of this repository is imported."""
    name = (
        name_of(path)
        .removeprefix(f"{FRONT_DOOR}/")
        .removesuffix(".py")
        .replace("/", ".")
    )
    return (name if name.startswith("tools.") else f"baton.{name}").removesuffix(
        ".__init__"
    )


@functools.cache
def our_modules() -> frozenset[str]:
    return frozenset(map(module_of, (*sources(), *sources("tools"))))


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Return every module that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: imports are absolute"
            assert node.module is not None
            found.add(node.module)
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if node.module == "baton" else names & our_modules()
    return frozenset(found)


def is_stdlib(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names
