"""Turn the form that a client asks of a response into a grammar for the engines, and check it.

Grammars are those of llguidance, as text. The nodes apply them to tokens; no vocabulary is needed
here. What a check costs cannot be told from a form: the intersection of twenty short patterns takes
gigabytes. So `Forms` has each form checked by a process with limits.
"""

import re
import sys
from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, grammar_from

from baton.protocol.errors import RequestError
from baton.protocol.sampling import StructuredOutputsParams
from baton.router.text.formats import reasoning_format
from baton.router.worker import Lane, TooMuchWork, Worker, serve
from baton.runtime.log import clip

MAX_GRAMMAR_BYTES = 256 << 10
# Of checked forms and their grammars.
MAX_KEPT = 64
MAX_KEPT_BYTES = 8 << 20
# With free white space, a weak model writes line breaks until it is cut off.
WHITE_SPACE = r"( |\n[ ]{0,40})?"
# A schema of 2,300 optional fields takes a quarter of a second here and on the nodes; more are
# refused for their size.
_LIMITS = LLParserLimits(max_grammar_size=20_000, initial_lexer_fuel=200_000)
_ESCAPE = re.compile(r"\\.", re.DOTALL)
# Classes, which may stand in classes.
_ASCII = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
}
# Keywords of JSON schemas whose values are schemas by name, and those whose values are no schemas.
_SCHEMAS_BY_NAME = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
)
_VALUES = ("enum", "const", "default", "examples")
# Where llguidance finds a JSON schema wrong.
_POSITION = re.compile(
    r"at (?P<line>\d+)\(\d+\): failed to compile JSON schema: (?P<problem>.*)",
    re.DOTALL,
)
# The beginnings of the rules of the tool with this number, in grammars of calls.
_RULE_OF_TOOL = re.compile(r"(args|v_p|tag)_(?P<number>\d+)")


_Fields = dict[str, msgspec.Raw]


class Form(msgspec.Struct, frozen=True):
    """What a client asks of a response, with schemas as JSON text."""

    kind: str
    text: str


class Forms:
    """Checks forms, each in a process with limits. Call `close` in the end."""

    def __init__(self) -> None:
        self._worker = Worker[Form, str](
            "baton.router.text.grammars", (), msgspec.msgpack.Decoder(str)
        )
        # Nearly every form is checked within some milliseconds. Those that take longer wait for one
        # another, and not the others for them. Their limit is one of CPU time, which the load of
        # the host does not change, and more than twice what any form within `_LIMITS` takes. A
        # hostile form has its answer within 2 s wherever half a core is left for its check.
        self._quick = Lane(2, cpu_s=0.1, memory_mib=128, wall_s=10.0)
        self._long = Lane(2, cpu_s=0.6, memory_mib=256, wall_s=10.0)
        # Agents send the same schema again and again.
        self._grammars: dict[Form, str] = {}

    async def grammar_of(
        self, wanted: StructuredOutputsParams, client: str = ""
    ) -> str:
        """Return the grammar of a form, in whose check the clients take turns.

        Raises a `RequestError` for a value that is none, an unsupported keyword of a schema, and a
        grammar that takes too much work; `Overloaded` if it cannot be checked now.
        """
        form = form_of(wanted)
        grammar = self._grammars.pop(form, None)
        if grammar is None:
            grammar = await self._checked(form, client)
            self._make_room(len(form.text) + len(grammar))
        self._grammars[form] = grammar  # the latest is last
        return grammar

    def close(self) -> None:
        self._worker.close()

    async def _checked(self, form: Form, client: str) -> str:
        try:
            return await self._worker.run(form, self._quick, client)
        except TooMuchWork:
            pass
        try:
            return await self._worker.run(form, self._long, client)
        except TooMuchWork:
            raise _wrong(form.kind, "the form takes too much work to check") from None

    def _make_room(self, num_bytes: int) -> None:
        """Drop the oldest grammars, as long as there are too many or they are too large."""
        num_bytes += sum(
            len(form.text) + len(text) for form, text in self._grammars.items()
        )
        while self._grammars and (
            len(self._grammars) >= MAX_KEPT or num_bytes > MAX_KEPT_BYTES
        ):
            oldest = next(iter(self._grammars))
            num_bytes -= len(oldest.text) + len(self._grammars.pop(oldest))


def problem_of_tokenizer(tokenizer_json: bytes) -> str:
    """Return why nodes cannot hold a form in this tokenizer's tokens; "" if they can.

    llguidance has to know the bytes of each token, which it takes from the kind of decoder.
    """
    parts = msgspec.json.decode(tokenizer_json, type=dict[str, msgspec.Raw])
    model: dict[str, object] = {**msgspec.json.decode(parts["model"], type=_Fields)}
    # The vocabulary does not matter, and takes half a second to read.
    vocabulary = msgspec.json.decode(parts["model"], type=_Vocabulary)
    if bytes(vocabulary.vocab).startswith(b"["):
        tokens = msgspec.json.decode(vocabulary.vocab, type=list[msgspec.Raw])
        model["vocab"] = tokens[: (vocabulary.unk_id or 0) + 1]
    else:
        model["vocab"] = {vocabulary.unk_token or "a": 0}
    if "merges" in model:
        model["merges"] = []
    small: dict[str, object] = {
        **parts,
        "model": model,
        "added_tokens": [],
        "post_processor": None,
    }
    try:
        LLTokenizer(msgspec.json.encode(small).decode(), eos_token=0)
    except ValueError as error:
        return clip(str(error).partition("\n")[0])
    return ""


class _Vocabulary(msgspec.Struct):
    vocab: msgspec.Raw
    unk_id: int | None = None
    unk_token: str | None = None


def form_of(wanted: StructuredOutputsParams) -> Form:
    """Return a form as text. Raises a `RequestError` for one that is too large or no JSON."""
    kind, value = wanted.form
    try:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    except (ValueError, TypeError, RecursionError) as error:
        raise _wrong(kind, str(error)) from error
    if len(text) > MAX_GRAMMAR_BYTES:
        raise _wrong(kind, f"it is larger than {MAX_GRAMMAR_BYTES} bytes")
    return Form(kind, text)


def checked_grammar(wanted: StructuredOutputsParams) -> str:
    """Return the grammar of a form, at a cost that nothing bounds. Raises a `RequestError`."""
    return _checked(form_of(wanted))


def _checked(form: Form) -> str:
    kind = form.kind
    try:
        grammar = _GRAMMARS[kind](form.text)
    except (ValueError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise _wrong(kind, str(error)) from error
    if len(grammar) > 2 * MAX_GRAMMAR_BYTES:
        raise _wrong(kind, f"its grammar is larger than {2 * MAX_GRAMMAR_BYTES} bytes")
    if problem := LLMatcher.validate_grammar(grammar, limits=_LIMITS):
        raise _wrong_line(kind, problem, grammar)
    return grammar


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


def _wrong(kind: str, problem: str) -> RequestError:
    what = clip(problem.partition("\n")[0])
    return RequestError(
        f"structured_outputs.{kind}: {what}", param="structured_outputs"
    )


def _wrong_line(kind: str, problem: str, grammar: str) -> RequestError:
    """Return the error for a grammar, with the number of the tool whose rule is wrong."""
    position = _POSITION.match(problem)
    if position is None:
        return _wrong(kind, problem)
    lines = grammar.split("\n")
    number = int(position["line"]) - 1
    rule = _RULE_OF_TOOL.match(lines[number]) if number < len(lines) else None
    if rule is None or not position["problem"]:
        return _wrong(kind, problem)
    what = clip(position["problem"].partition("\n")[0])
    text = f"the JSON schema cannot be enforced: {what}"
    return RequestError(text, param=f"structured_outputs[{rule['number']}]")


def _json_grammar(text: str) -> str:
    schema = msgspec.json.decode(text)
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema is an object")
    if '"uniqueItems"' in text:
        schema = without_unique_items(schema)
        text = msgspec.json.encode(schema).decode()
    return LLMatcher.grammar_from_json_schema(
        text, overrides={"whitespace_pattern": WHITE_SPACE}
    )


def without_unique_items(schema: dict[str, object]) -> dict[str, object]:
    """Return a JSON schema without `uniqueItems`, which no grammar can hold.

    Libraries write it for each set, so other servers leave it out, too.
    """
    try:
        return _without_unique_items(schema)
    except RecursionError:
        return schema


def _without_unique_items(schema: dict[str, object]) -> dict[str, object]:
    kept: dict[str, object] = {}
    for keyword, value in schema.items():
        if keyword == "uniqueItems":
            continue
        if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
            kept[keyword] = {name: _in_schema(inner) for name, inner in value.items()}
        else:
            kept[keyword] = value if keyword in _VALUES else _in_schema(value)
    return kept


def _in_schema(value: object) -> object:
    """Return schemas inside a schema without `uniqueItems`, and other values as they are."""
    if isinstance(value, list):
        return [_in_schema(item) for item in value]
    return _without_unique_items(value) if isinstance(value, dict) else value


def _regex_grammar(text: str) -> str:
    r"""Return the grammar of a pattern; its `\d` and `\w` are ASCII, as in ECMA-262 and schemas."""
    ascii_only = _ESCAPE.sub(lambda match: _ASCII.get(match[0], match[0]), text)
    return LLMatcher.grammar_from_regex(ascii_only)


def _choice_grammar(text: str) -> str:
    choices = msgspec.json.decode(
        text, type=list[Annotated[str, msgspec.Meta(min_length=1)]]
    )
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
        trigger = next(
            (trigger for trigger in form.triggers if one.begin.startswith(trigger)), ""
        )
        if not trigger:
            raise ValueError(f"no trigger begins {one.begin!r}")
        schema = {
            **without_unique_items(one.schema),
            "x-guidance": {"whitespace_pattern": WHITE_SPACE},
        }
        tags.append(
            StructTag(trigger=trigger, begin=one.begin, grammar=schema, end=one.end)
        )
    return StructTag.to_grammar(tags, assume_special=False)


_GRAMMARS: Mapping[str, Callable[[str], str]] = {
    "json": _json_grammar,
    "json_object": lambda _: _json_grammar('{"type":"object"}'),
    "regex": _regex_grammar,
    "choice": _choice_grammar,
    "grammar": lambda text: grammar_from("grammar", text),
    "structural_tag": _structural_tag,
}


if __name__ == "__main__":
    serve(int(sys.argv[1]), msgspec.msgpack.Decoder(Form), _checked)
