"""Names of types are unique, closed matches are complete, and broad excepts are at boundaries."""

import ast
import re
from collections import Counter
from collections.abc import Iterator

from tests.support.sources import ROOMS, name_of, sources, tree

SERVING = tuple(room for room in ROOMS if room != "bench")
FILES = (*sources(*SERVING), *sources("src/baton"))
ALIAS = re.compile(r"_?[A-Z]+[a-z]\w*")


# Matches over something else than a closed union, by room and function.
OPEN_MATCHES = {
    "engine:_rope",  # a name in a checkpoint's configuration; unknown ones are refused
    "engine:_dtype",  # the same
    "engine:_scaled",  # the names that `_rope` lets through, or none
    "router:decoding_of",  # the shape of a tokenizer.json; other shapes are refused
    "src:given_prompt",  # what a caller of the library may pass
}
# Where every error is caught and kept, by room and function. All others must raise it again.
BOUNDARIES = {
    # The top of a thread or a process: the node is told, and ends.
    "engine:StepThreads._execute",
    "engine:StepThreads._launch",
    "engine:StepThreads._collect",
    "engine:StepThreads._load_and_launch",
    "engine:PortPump._run",
    "engine:Worker.run",
    "kv_transfer:TransferAgent._run",
    # A compiler can fail in any way; plain torch computes instead, and the log says why.
    "kernels:load_library",
    # The thread that called for the work raises it.
    "kernels:_work",
    # One request's error hurts no other request.
    "router:App._response_to",
    "router:OpenStream._one_ended",
    "router:OpenStream.begin",
    "router:RouterCore._step",
    "router:Reattaching._end",
    "router:ChatTemplate.render",  # a template can raise whatever Python can
}


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every node with the name of the innermost function around it, or of the class."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}.{child.name}".lstrip(".")
        yield name, child
        yield from functions(child, name)


def nodes() -> Iterator[tuple[str, ast.AST]]:
    for path in FILES:
        room = name_of(path).partition("/")[0]
        for name, node in functions(tree(path)):
            yield f"{room}:{name}", node


def test_a_type_name_exists_once() -> None:
    """A leading underscore does not make another name. Aliases of types are names too."""
    names = Counter(name.lstrip("_") for path in FILES for name in type_names(tree(path)))
    assert not {name for name, count in names.items() if count > 1}


def type_names(module: ast.Module) -> Iterator[str]:
    yield from (node.name for node in ast.walk(module) if isinstance(node, ast.ClassDef))
    for node in module.body:
        if isinstance(node, ast.Assign) and not ast.unparse(node.value).startswith("TypeVar("):
            yield from (name for name in map(ast.unparse, node.targets) if ALIAS.fullmatch(name))


def test_every_closed_match_ends_in_assert_never() -> None:
    found = {name for name, node in nodes() if isinstance(node, ast.Match) and is_open(node)}
    assert found <= OPEN_MATCHES


def is_open(match: ast.Match) -> bool:
    last = match.cases[-1]
    (statement, *more) = last.body
    return bool(
        more
        or last.guard is not None
        or not isinstance(last.pattern, ast.MatchAs)
        or last.pattern.pattern is not None
        or not isinstance(statement, ast.Expr)
        or not ast.unparse(statement).startswith("assert_never(")
    )


def test_every_error_is_kept_at_boundaries_only() -> None:
    found = {name for name, node in nodes() if isinstance(node, ast.ExceptHandler) and keeps(node)}
    assert found <= BOUNDARIES


def keeps(handler: ast.ExceptHandler) -> bool:
    """Whether it catches every error and does not raise it again in the end."""
    kinds = {"BaseException"} if handler.type is None else names_in(handler.type)
    last = handler.body[-1]
    raises_again = isinstance(last, ast.Raise) and last.exc is None
    return bool(kinds & {"Exception", "BaseException"}) and not raises_again


def names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
