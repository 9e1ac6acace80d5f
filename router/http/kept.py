"""The data that nodes keep of a streamed answer, so that its client can resume it at any router.

`handlers` makes it with the request and reads it when the client comes back. Nodes see only bytes.
This file is pure.
"""

import hashlib

import msgspec

from baton.protocol.errors import RequestError
from baton.protocol.ids import MAX_FORM_BYTES
from baton.protocol.messages import Kept
from baton.protocol.sampling import SamplingParams
from baton.router.http.answers import Answer
from baton.router.http.places import MAX_CHOICES

OWNER_BYTES = 16


class Form(msgspec.Struct, frozen=True, array_like=True):
    """The form of one answer: everything besides tokens on which its text and events depend."""

    answer: Answer
    sampling: dict[str, object]  # the given fields of `SamplingParams`
    request_id: str

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.sampling)  # type: ignore[arg-type]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Form).decode


def kept_of(form: Form, owner: bytes, num_choices: int) -> Kept | None:
    """Return what nodes keep of an answer; None for an answer that cannot be resumed."""
    data = _encode(form)
    if num_choices > MAX_CHOICES or len(data) > MAX_FORM_BYTES:
        return None
    return Kept(data, owner, num_choices)


def form_of(data: bytes) -> Form:
    """Read what a node kept. Raises `RequestError` if another version of baton wrote it."""
    try:
        form = _decode(data)
        SamplingParams(**form.sampling)  # type: ignore[arg-type]
    except (msgspec.MsgspecError, RequestError, TypeError) as error:
        text = "a router of another version began this stream: send the request again"
        raise RequestError(text, code="stream_gone", http_status=404) from error
    return form


def owner_of(authorization: str, *, wants_key: bool) -> bytes:
    """Return the client's identity, by its key; the same for all if there are no keys."""
    if not wants_key:
        return b""
    key = authorization.partition(" ")[2].strip()
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()[:OWNER_BYTES]
