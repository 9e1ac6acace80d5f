"""Events come out whole, wherever the bytes were cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.client import sse
from baton.bench.client.sse import EventParser, OversizedEvent

STREAM = (
    b": a comment\n\n"
    b'id: 7\nevent: chunk\ndata: {"a": 1}\n\n'
    b"data:no space\r\n\r\n"
    b"data: first\ndata:  second\r\ndata\n\n"
    b"retry: 3\n\n"
    b"\n\n"
    b"data: [DONE]\n\n"
)
EVENTS = [b'{"a": 1}', b"no space", b"first\n second\n", b"[DONE]"]


def parse(*pieces: bytes) -> list[bytes]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def test_lines_comments_and_fields_are_told_apart() -> None:
    assert parse(STREAM) == EVENTS


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_a_cut_anywhere_changes_nothing(cut: int) -> None:
    assert parse(STREAM[:cut], STREAM[cut:]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM))))
def test_many_cuts_change_nothing(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    assert parse(*(STREAM[a:b] for a, b in pairwise(places))) == EVENTS


def test_an_event_is_out_with_the_bytes_that_complete_it() -> None:
    parser = EventParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\n") == [b"a"]
    assert parser.feed(b"data: b\n\ndata: c\n\ndata: d") == [b"b", b"c"]


def test_an_event_without_its_empty_line_is_not_complete() -> None:
    parser = EventParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.in_event
    assert parser.feed(b"\n") == [b"a"]
    assert not parser.in_event


@pytest.mark.parametrize("cut", range(5))
def test_a_byte_order_mark_may_open_a_stream(cut: int) -> None:
    data = b"\xef\xbb\xbfdata: a\n\n"
    assert parse(data[:cut], data[cut:]) == [b"a"]
    assert parse(b"data: \xef\xbb\xbf\n\n") == [b"\xef\xbb\xbf"]


@pytest.mark.parametrize("line", [b"x", b"data: 1234567\n"])
def test_an_event_without_end_is_refused(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    with pytest.raises(OversizedEvent):
        parse(*[line] * 1000)
