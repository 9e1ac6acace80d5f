"""Docstrings and comments are sentences: functions begin with a verb, and actors have names."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from tests.support.sources import name_of, sources

# A function's docstring begins with its verb: "Return the blocks that", not "The blocks that".
NO_VERB = re.compile(r"(What|How|Whether|Which|Why|Where|When|The|An?|Both|All|From|Not|Also)\b")
VAGUE = re.compile(r"\b(?i:nobody|whoever|whatever|somebody|anybody)\b|\bPure[.;:]")
TYPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def faults(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        told = ast.get_docstring(node) if isinstance(node, TYPES) else None
        if told is None:
            continue
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (is_function and NO_VERB.match(told)) or VAGUE.search(told):
            yield told.partition("\n")[0]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and VAGUE.search(token.string):
            yield token.string


def test_docstrings_and_comments_name_who_does_what() -> None:
    found = {name_of(p): list(faults(p.read_text())) for p in (*sources(), *sources("tools"))}
    assert not {name: texts for name, texts in found.items() if texts}


def test_fragments_and_nobody_are_found() -> None:
    assert list(faults('def f():\n    """The number of blocks."""\n'))
    assert list(faults("x = 1  # nobody reads it\n"))
    assert not list(faults('def f():\n    """Return the number of blocks."""\n'))
