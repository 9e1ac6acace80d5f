"""Errors as clients get them: what is wrong with a body, and the document of every error."""

import math
import re
from collections.abc import Mapping

import msgspec

from baton.protocol.errors import BatonError, RequestError
from baton.runtime.fields import did_you_mean
from baton.runtime.log import clip

# The error types that OpenAI's clients expect for a status. The code is more specific.
_ERROR_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "overloaded_error",
}
RETRY_STATUSES = (429, 503, 504)
DEFAULT_RETRY_AFTER_S = 1.0

_PLACE = re.compile(
    r"(?P<text>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?", re.DOTALL
)
_NAMED = re.compile(r"field `(.*?)`", re.DOTALL)

# What the engine calls every field that asks for a form.
FORM_PARAM = "structured_outputs"


def error_of(error: BatonError) -> bytes:
    """Return an error in OpenAI's form, for a body or an SSE event."""
    status = error.http_status
    kind = _ERROR_TYPES.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    # It may quote bytes of a header.
    message = error.message.encode(errors="replace").decode()
    details = {
        "message": message,
        "type": kind,
        "param": error.param,
        "code": error.code,
    }
    return msgspec.json.encode({"error": details})


def retry_headers(error: BatonError) -> dict[str, str]:
    """Return the headers for retries: in seconds for HTTP, in ms for OpenAI's clients."""
    if error.http_status not in RETRY_STATUSES:
        return {}
    after_s = (
        DEFAULT_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
    )
    return {
        "Retry-After": str(max(1, math.ceil(after_s))),
        "retry-after-ms": str(max(1, math.ceil(after_s * 1000))),
    }


class blaming:  # noqa: N801 - a function to its callers; a generator would take five times as long
    """Let errors name the field that a client sent, by what the field was turned into."""

    __slots__ = ("_sent",)

    def __init__(self, sent: Mapping[str, str]) -> None:
        self._sent = sent

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        if isinstance(error, RequestError) and error.param:
            # The place within a field is that of the turn, not of what the client sent.
            field = error.param.partition("[")[0]
            error.param = (
                self._sent.get(error.param) or self._sent.get(field) or error.param
            )


def invalid(text: str, kind: type[msgspec.Struct], place: str = "") -> RequestError:
    """Return what msgspec says of a value of the type `kind`, which is at `place` of a body."""
    found = _PLACE.fullmatch(text)
    assert found is not None, "the pattern matches every text"
    what = clip(found["text"].replace("`", ""))
    path = clip(found["path"] or "")
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
    param = (
        path
        if path.startswith(("messages", "tools", "input"))
        else path.partition("[")[0]
    )
    return RequestError(f"{path}: {what}", param=param)
