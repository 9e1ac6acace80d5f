"""The bytes of every message: they stay what they were, and nothing else is taken for one."""

import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from baton.protocol import messages
from baton.protocol.codec import MAX_MESSAGE_BYTES, MalformedMessage, NodeInbox, Unreadable
from baton.protocol.messages import PROTOCOL_VERSION, Cancel, Hello, Message, Ready, Tokens
from tests.support.message_examples import EXAMPLES, INFO, KEY, codec_of

# Lines of `union message hex`. A line may be added; one that changes breaks every older process,
# so it needs another PROTOCOL_VERSION and a new file.
GOLDEN = Path(__file__).parent / f"golden_messages_v{PROTOCOL_VERSION}.txt"
CASES = [(union, message) for union, examples in EXAMPLES.items() for message in examples]
IDS = [f"{union}-{type(message).__name__}" for union, message in CASES]


def golden() -> dict[tuple[str, str], bytes]:
    lines = [line.split() for line in GOLDEN.read_text().splitlines() if not line.startswith("#")]
    return {(union, name): bytes.fromhex(data) for union, name, data in lines}


@pytest.mark.parametrize(("union", "message"), CASES, ids=IDS)
def test_a_message_has_the_bytes_it_always_had(union: str, message: Message) -> None:
    encoded = codec_of(union).encode(message)
    name = type(message).__name__
    assert golden().get((union, name)) == encoded, f"now: {union} {name} {encoded.hex()}"


@pytest.mark.parametrize(("union", "message"), CASES, ids=IDS)
def test_golden_bytes_are_read_as_the_same_message(union: str, message: Message) -> None:
    assert codec_of(union).decode(golden()[union, type(message).__name__]) == message


@pytest.mark.parametrize("union", EXAMPLES)
def test_there_is_an_example_of_every_message(union: str) -> None:
    members = set(typing.get_args(getattr(messages, union)))
    assert {type(message) for message in EXAMPLES[union]} == members


@pytest.mark.parametrize("message", [message for _, message in CASES], ids=IDS)
def test_every_field_of_an_example_differs_from_its_default(message: Message) -> None:
    for field in msgspec.structs.fields(type(message)):
        assert getattr(message, field.name) != field.default


@pytest.mark.parametrize(("union", "message"), CASES, ids=IDS)
def test_a_field_of_a_newer_version_is_ignored(union: str, message: Message) -> None:
    newer = msgspec.msgpack.decode(codec_of(union).encode(message))
    newer["added_later"] = [1, {"more": None}]
    assert codec_of(union).decode(msgspec.msgpack.encode(newer)) == message


@pytest.mark.parametrize(("union", "message"), CASES, ids=IDS)
def test_a_message_that_was_cut_is_malformed(union: str, message: Message) -> None:
    data = codec_of(union).encode(message)
    for length in range(len(data)):
        with pytest.raises(MalformedMessage):
            codec_of(union).decode(data[:length])


@pytest.mark.parametrize(
    "data",
    [
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
    ],
    ids=["empty", "reserved", "unknown", "bare", "typed", "array", "long", "huge", "deep", "utf8"],
)
def test_what_is_no_message_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        codec_of("ToRouter").decode(data)


def test_a_message_of_another_channel_is_malformed() -> None:
    with pytest.raises(MalformedMessage):
        codec_of("ToRouter").decode(codec_of("ToNode").encode(Cancel((KEY,))))


def test_a_message_that_is_too_long_is_malformed_before_it_is_read() -> None:
    with pytest.raises(MalformedMessage, match="exceeds"):
        codec_of("ToRouter").decode(bytes(MAX_MESSAGE_BYTES + 1))


def with_one_changed(value: object, number: int) -> Iterator[object]:
    """`value` as often as it holds an integer, each time with another one replaced by `number`."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield number
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from ({**value, key: changed} for changed in with_one_changed(part, number))
    elif isinstance(value, list):
        for at, part in enumerate(value):
            for changed in with_one_changed(part, number):
                yield [*value[:at], changed, *value[at + 1 :]]


@pytest.mark.parametrize("number", [1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize(("union", "message"), CASES, ids=IDS)
def test_no_integer_of_a_message_can_be_out_of_range(
    union: str, message: Message, number: int
) -> None:
    plain = msgspec.msgpack.decode(codec_of(union).encode(message))
    for changed in with_one_changed(plain, number):
        with pytest.raises(MalformedMessage):
            codec_of(union).decode(msgspec.msgpack.encode(changed))


@pytest.mark.parametrize("kind", ["Prefill", "Decode"])
def test_a_request_that_cannot_be_read_can_be_refused_by_its_key(kind: str) -> None:
    (message,) = [m for m in EXAMPLES["ToNode"] if type(m).__name__ == kind]
    inbox, plain = NodeInbox(), msgspec.to_builtins(message)
    assert inbox.decode(msgspec.msgpack.encode(plain)) == message
    plain["sampling"]["max_tokens"] = 2.5
    refused = inbox.decode(msgspec.msgpack.encode(plain))
    assert isinstance(refused, Unreadable)
    assert (refused.key, refused.failure.code) == (KEY, "malformed_message")
    assert "max_tokens" in refused.failure.message
    for wrong in ({**plain, "key": ["r"] * 3}, {**plain, "type": "Cancel"}):
        with pytest.raises(MalformedMessage):
            inbox.decode(msgspec.msgpack.encode(wrong))


def test_defaults_are_not_sent() -> None:
    empty = codec_of("ToRouter").encode(Tokens([]))
    assert len(empty) < len("type Tokens entries") + 6


def test_what_a_node_says_of_its_bits_travels_beside_what_it_always_said() -> None:
    codec, plain = codec_of("ToRouter"), Ready(INFO)
    told = Ready(msgspec.structs.replace(INFO, batch_invariant=True, compute="torch-1f"))
    assert codec.decode(codec.encode(told)) == told
    fields = msgspec.msgpack.decode(codec.encode(told))["info"]
    assert (fields.pop("batch_invariant"), fields.pop("compute")) == (True, "torch-1f")
    assert fields == msgspec.msgpack.decode(codec.encode(plain))["info"]


def test_the_tag_is_the_name_of_the_class() -> None:
    example = EXAMPLES["ToRouter"][0]
    assert isinstance(example, Hello)
    assert msgspec.to_builtins(example)["type"] == "Hello"
