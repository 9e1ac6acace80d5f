"""Read JSON into a body's struct, with errors that name the field that is wrong."""

import re
from typing import TypeVar

import msgspec

from baton.protocol.errors import RequestError
from baton.runtime.fields import did_you_mean
from baton.runtime.log import clip

# A larger body is not decoded a second time because of null fields.
_MAX_SECOND_BYTES = 2 * 1024 * 1024
# How many bytes around a mistake are searched for its field.
_NEAR_BYTES = 256
_NOT_FINITE = re.compile(rb'"(\w+)"\s*:\s*-?(?:NaN|Infinity)')
_BYTE = re.compile(r"\(byte (\d+)\)")
_PLACE = re.compile(r"(?P<text>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?", re.DOTALL)
_NAMED = re.compile(r"field `(.*?)`", re.DOTALL)

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
    # Some encoders write NaN and Infinity, which are not JSON. The error should name the field.
    if place := _BYTE.search(error):
        at = int(place[1])
        near = data[max(at - _NEAR_BYTES, 0) : at + _NEAR_BYTES]
        if found := _NOT_FINITE.search(near):
            name = found[1].decode()
            return RequestError(f"{name} must be a finite number", param=name)
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
