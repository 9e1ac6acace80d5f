"""Read JSON into a body's struct, with errors that name the field that is wrong."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import TypeVar

import msgspec

from baton.protocol.errors import RequestError
from baton.runtime.fields import did_you_mean
from baton.runtime.log import clip

# A larger body is not decoded a second time to look for null fields or for a mistake.
_MAX_SECOND_BYTES = 2 * 1024 * 1024
_PLACE = re.compile(r"(?P<text>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?", re.DOTALL)
_NAMED = re.compile(r"field `(.*?)`", re.DOTALL)

# What the engine calls every field that asks for a form.
FORM_PARAM = "structured_outputs"

S = TypeVar("S", bound=msgspec.Struct)
_Fields = dict[str, msgspec.Raw]


def decoded(decoder: msgspec.json.Decoder[S], data: bytes) -> S:
    """Return the body. Raises `RequestError`. Any field may be null, even an unknown one."""
    try:
        try:
            return decoder.decode(data)
        except msgspec.ValidationError as error:
            if "unknown field" not in str(error):
                raise
            return decoder.decode(_without_nulls(data))
    except msgspec.ValidationError as error:
        raise invalid(str(error), decoder.type) from None
    except RecursionError:
        text = "the body is nested too deeply"
        raise RequestError(text, code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(str(error), data) from None


@contextlib.contextmanager
def blaming(sent: Mapping[str, str]) -> Iterator[None]:
    """Let errors name the field that a client sent, by what the field was turned into."""
    try:
        yield
    except RequestError as error:
        error.param = sent.get(error.param or "", error.param)
        raise


def _without_nulls(data: bytes) -> bytes:
    """Return a body without null fields, at its top, in its options and in each message.

    Clients send back messages of answers, with nulls in fields that requests do not have.
    """
    if len(data) > _MAX_SECOND_BYTES or b"null" not in data:
        return data
    try:
        fewer: dict[str, object] = {**_given(msgspec.json.decode(data, type=_Fields))}
        if isinstance(turns := fewer.get("messages"), msgspec.Raw):
            found = msgspec.json.decode(turns, type=list[_Fields])
            fewer["messages"] = [_given(turn) for turn in found]
        if isinstance(options := fewer.get("stream_options"), msgspec.Raw):
            fewer["stream_options"] = _given(msgspec.json.decode(options, type=_Fields))
    except msgspec.DecodeError:
        return data
    return msgspec.json.encode(fewer)


def _given(fields: _Fields) -> _Fields:
    return {name: value for name, value in fields.items() if bytes(value) != b"null"}


def _malformed(error: str, data: bytes) -> RequestError:
    """Return the error for a body that is no JSON, with the field if others read it as JSON."""
    # Some encoders write NaN, Infinity and halves of characters, which are not JSON.
    lenient = None
    with contextlib.suppress(ValueError, RecursionError):
        lenient = json.loads(data) if len(data) <= _MAX_SECOND_BYTES else None
    for name, value in lenient.items() if isinstance(lenient, dict) else ():
        try:
            json.dumps({name: value}, allow_nan=False, ensure_ascii=False).encode()
        except ValueError as mistake:
            what = "is not Unicode text: a character has only one of its two surrogates"
            if not isinstance(mistake, UnicodeEncodeError):
                what = "must be finite: NaN and Infinity are not JSON"
            shown = clip(name.encode("ascii", "backslashreplace").decode())
            return RequestError(f"{shown} {what}", param=shown)
    return RequestError(f"the body is not valid JSON: {clip(error)}", code="invalid_json")


def invalid(text: str, kind: type[msgspec.Struct], place: str = "") -> RequestError:
    """Return what msgspec says of a value of the type `kind`, which is at `place` of a body."""
    found = _PLACE.fullmatch(text)
    assert found is not None, "the pattern matches every text"
    what, path = clip(found["text"].replace("`", "")), clip(found["path"] or "")
    path = ".".join(filter(None, (place, path)))
    if named := _NAMED.search(text):
        name = clip(named[1])
        hint = (
            did_you_mean(name, kind.__struct_fields__)
            if "unknown" in what and path == place
            else ""
        )
        return RequestError(what + hint, param=f"{path}.{name}" if path else name)
    if not path:
        return RequestError(f"the body is wrong: {what}")
    # The message names the place inside a list; `param` names it only for turns, items and tools.
    param = path if path.startswith(("messages", "tools", "input")) else path.partition("[")[0]
    return RequestError(f"{path}: {what}", param=param)
