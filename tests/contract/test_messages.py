"""The form of every message: it stays what it was, and nothing else is taken for one."""

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.protocol import messages
from baton.protocol.codec import (
    UNREADABLE,
    Codec,
    NodeInbox,
    Unreadable,
    peer_codec,
    to_node_codec,
    to_router_codec,
)
from baton.protocol.messages import PROTOCOL_VERSION, Cancel

# Lines of `union message hex`. No field is at its default in all examples of a message. A line may
# be added, also for a field that came later; one that changes breaks every older process, so it
# needs another PROTOCOL_VERSION and a new file.
GOLDEN = Path(__file__).parent / f"golden_messages_v{PROTOCOL_VERSION}.txt"
CODECS: dict[str, Codec[Any]] = {
    "ToNode": to_node_codec(),
    "ToRouter": to_router_codec(),
    "PeerMessage": peer_codec(),
}
LINES = [
    line.split() for line in GOLDEN.read_text().splitlines() if not line.startswith("#")
]
CASES = [(union, bytes.fromhex(data)) for union, _, data in LINES]


def says(new: object, old: object) -> bool:
    """Whether an older process finds in `new` what `old` says. It ignores what an array adds."""
    if isinstance(new, dict) and isinstance(old, dict):
        return new.keys() == old.keys() and all(says(new[key], old[key]) for key in old)
    if isinstance(new, list) and isinstance(old, list):
        return len(new) >= len(old) and all(map(says, new, old))
    return repr(new) == repr(old)


def test_every_message_is_written_as_it_always_was():
    for union, data in CASES:
        encoded = CODECS[union].encode(CODECS[union].decode(data))
        # A map's length may be written in one byte or in three, which all readers take alike.
        assert says(msgspec.msgpack.decode(encoded), msgspec.msgpack.decode(data))


def test_there_is_an_example_of_every_message():
    for union in CODECS:
        members = {
            member.__name__ for member in typing.get_args(getattr(messages, union))
        }
        assert {name for known, name, _ in LINES if known == union} == members


def test_every_field_differs_from_its_default_in_some_example():
    told: dict[tuple[str, type], set[str]] = {}
    for union, data in CASES:
        message = CODECS[union].decode(data)
        told.setdefault((union, type(message)), set()).update(
            field.name
            for field in msgspec.structs.fields(type(message))
            if getattr(message, field.name) != field.default
        )
    for (_, kind), names in told.items():
        assert names == {field.name for field in msgspec.structs.fields(kind)}


def test_a_field_of_a_newer_version_is_ignored():
    for union, data in CASES:
        newer = msgspec.msgpack.decode(data) | {"added_later": [1, {"more": None}]}
        assert CODECS[union].decode(msgspec.msgpack.encode(newer)) == CODECS[
            union
        ].decode(data)


def test_a_message_that_was_cut_is_malformed():
    for union, data in CASES:
        for length in range(len(data)):
            with pytest.raises(UNREADABLE):
                CODECS[union].decode(data[:length])


def test_what_is_no_message_is_malformed():
    for data in (
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "Nonsense"}),
        msgspec.msgpack.encode({"type": "Hello"}),
        msgspec.msgpack.encode({"type": "Hello", "version": "one"}),
        msgspec.msgpack.encode(["Hello", 1]),
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion entries
        b"\xc6\xff\xff\xff\xff",  # a string of bytes of 4 GiB
        b"\x91" * 100_000,
        b"\x81\xa4type\xa5\xff\xfe\xfd\xfc\xfb",
        CODECS["ToNode"].encode(Cancel(())),  # of another channel
    ):
        with pytest.raises(UNREADABLE):
            CODECS["ToRouter"].decode(data)


def with_one_changed(value: object, number: int) -> Iterator[object]:
    """`value` as often as it holds an integer, each time with another one replaced by `number`."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield number
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from (
                {**value, key: changed} for changed in with_one_changed(part, number)
            )
    elif isinstance(value, list):
        for at, part in enumerate(value):
            for changed in with_one_changed(part, number):
                yield [*value[:at], changed, *value[at + 1 :]]


def test_no_integer_of_a_message_can_be_out_of_range():
    for union, data in CASES:
        for number in (1 << 63, (1 << 64) - 1):
            for changed in with_one_changed(msgspec.msgpack.decode(data), number):
                with pytest.raises(UNREADABLE):
                    CODECS[union].decode(msgspec.msgpack.encode(changed))


@pytest.mark.parametrize("kind", ["Prefill", "Decode"])
def test_a_request_that_cannot_be_read_can_be_refused_by_its_key(kind):
    examples = {
        name: bytes.fromhex(data) for union, name, data in LINES if union == "ToNode"
    }
    data = examples[kind]
    inbox = NodeInbox()
    plain = msgspec.msgpack.decode(data)
    message = inbox.decode(data)
    assert message == CODECS["ToNode"].decode(data)
    plain["sampling"]["max_tokens"] = 2.5
    refused = inbox.decode(msgspec.msgpack.encode(plain))
    assert isinstance(refused, Unreadable)
    assert (refused.key, refused.failure.code) == (message.key, "malformed_message")
    assert "max_tokens" in refused.failure.message
    for wrong in ({**plain, "key": ["r"] * 3}, {**plain, "type": "Cancel"}):
        with pytest.raises(UNREADABLE):
            inbox.decode(msgspec.msgpack.encode(wrong))
