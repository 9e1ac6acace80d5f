"""Turn the form that a client asks of a response into a grammar for the engines, and check it.

Grammars are those of llguidance, as text. The nodes apply them to tokens; no vocabulary is needed
here. A check may take a second, so it runs off the event loop.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Annotated

import msgspec
from llguidance import LLMatcher, LLParserLimits, StructTag, grammar_from

from baton.protocol.errors import RequestError
from baton.protocol.sampling import StructuredOutputsParams
from baton.router.text.formats import reasoning_format
from baton.runtime.log import clip

MAX_GRAMMAR_BYTES = 256 << 10
# With free white space, a weak model writes line breaks until it is cut off.
WHITE_SPACE = r"( |\n[ ]{0,40})?"
# A schema of 2,000 optional fields takes half a second here and on the nodes; 5,000 are too many.
_LIMITS = LLParserLimits(max_grammar_size=20_000, initial_lexer_fuel=200_000)


def checked_grammar(wanted: StructuredOutputsParams) -> str:
    """Return the grammar of a form.

    Raises a `RequestError` for a value that is none, an unsupported keyword of a schema, and a
    grammar that takes too much work.
    """
    kind, value = wanted.form
    try:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    except (ValueError, TypeError, RecursionError) as error:
        raise _wrong(kind, str(error)) from error
    if len(text) > MAX_GRAMMAR_BYTES:
        raise _wrong(kind, f"it is larger than {MAX_GRAMMAR_BYTES} bytes")
    return _checked(kind, text)


def after_reasoning(grammar: str, name: str, *, is_open: bool) -> str:
    """Return a grammar of reasoning up to its tag, then a text of `grammar`.

    The reasoning, in the format `name`, may be missing unless the prompt has opened it.
    """
    row = reasoning_format(name)
    opening, end = (msgspec.json.encode(tag).decode() for tag in (row.begin, row.end))
    begin = "think" if is_open else f"({opening} think)?"
    lark = f"start: {begin} /\\n{{0,2}}/ @answer\nthink[suffix={end}]: /(?s:.*)/\n"
    if not grammar.lstrip().startswith("{"):
        answer: list[dict[str, object]] = [{"lark_grammar": grammar}]
    else:
        answer = msgspec.json.decode(grammar, type=_Grammars).grammars
    answer[0]["name"] = "answer"
    return msgspec.json.encode(_Grammars([{"lark_grammar": lark}, *answer])).decode()


class _Grammars(msgspec.Struct):
    grammars: list[dict[str, object]]


@lru_cache(maxsize=64)  # agents send the same schema again and again
def _checked(kind: str, text: str) -> str:
    try:
        grammar = _GRAMMARS[kind](text)
    except (ValueError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise _wrong(kind, str(error)) from error
    if len(grammar) > 2 * MAX_GRAMMAR_BYTES:
        raise _wrong(kind, f"its grammar is larger than {2 * MAX_GRAMMAR_BYTES} bytes")
    if problem := LLMatcher.validate_grammar(grammar, limits=_LIMITS):
        raise _wrong(kind, problem)
    return grammar


def _wrong(kind: str, problem: str) -> RequestError:
    what = clip(problem.partition("\n")[0])
    return RequestError(f"structured_outputs.{kind}: {what}", param="structured_outputs")


def _json_grammar(text: str) -> str:
    schema = msgspec.json.decode(text)
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema is an object")
    return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITE_SPACE})


def _choice_grammar(text: str) -> str:
    choices = msgspec.json.decode(text, type=list[Annotated[str, msgspec.Meta(min_length=1)]])
    if not choices:
        raise ValueError("it names no choice")
    return LLMatcher.grammar_from_regex("|".join(map(re.escape, choices)))


class _Structure(msgspec.Struct):
    begin: str
    schema: dict[str, object]
    end: str = ""


class _StructuralTag(msgspec.Struct):
    structures: Annotated[list[_Structure], msgspec.Meta(min_length=1)]
    triggers: list[Annotated[str, msgspec.Meta(min_length=1)]]
    type: str = "structural_tag"


def _structural_tag(text: str) -> str:
    """Return the grammar of free text in which what follows a trigger has a form."""
    form = msgspec.json.decode(text, type=_StructuralTag)
    tags = []
    for one in form.structures:
        trigger = next((trigger for trigger in form.triggers if one.begin.startswith(trigger)), "")
        if not trigger:
            raise ValueError(f"no trigger begins {one.begin!r}")
        schema = {**one.schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}
        tags.append(StructTag(trigger=trigger, begin=one.begin, grammar=schema, end=one.end))
    return StructTag.to_grammar(tags, assume_special=False)


_GRAMMARS: Mapping[str, Callable[[str], str]] = {
    "json": _json_grammar,
    "json_object": lambda _: _json_grammar('{"type":"object"}'),
    "regex": LLMatcher.grammar_from_regex,
    "choice": _choice_grammar,
    "grammar": lambda text: grammar_from("grammar", text),
    "structural_tag": _structural_tag,
}
