"""Sessions: what a frame means for the stream it claims to belong to."""

import pytest

from baton.runtime.channels.framing import (
    HEADER,
    HEADER_BYTES,
    RESET,
    Session,
    Verdict,
    reset_frame,
)


def test_frames_are_numbered_once_they_are_sent() -> None:
    session = Session(7)
    assert HEADER.unpack(session.frame(b"")) == (7, 0)
    assert HEADER.unpack(session.frame(b"")) == (7, 0), "the socket refused the first try"
    session.sent()
    frame = session.frame(b"payload")
    assert HEADER.unpack(frame[:HEADER_BYTES]) == (7, 1)
    assert frame[HEADER_BYTES:] == b"payload"


def test_frames_in_order_are_next() -> None:
    session = Session(7)
    assert [session.accept(7, number) for number in range(3)] == [Verdict.NEXT] * 3


@pytest.mark.parametrize(
    ("session_id", "sequence", "verdict"),
    [
        (7, 2, Verdict.NEXT),
        (7, 3, Verdict.GAP),
        (7, 1, Verdict.GAP),
        (7, 0, Verdict.GAP),
        (7, RESET, Verdict.RESET),
        (8, 0, Verdict.NEW_SESSION),
        (8, 2, Verdict.STALE),
        (6, RESET, Verdict.STALE),
    ],
)
def test_any_other_frame_is_no_continuation(
    session_id: int, sequence: int, verdict: Verdict
) -> None:
    session = Session(7)
    session.accept(7, 0)
    session.accept(7, 1)
    assert session.accept(session_id, sequence) is verdict
    if verdict is not Verdict.NEXT:
        assert session.accept(7, 2) is Verdict.NEXT, "what is refused is not counted"


def test_a_reset_names_the_session_that_is_over() -> None:
    assert Session(9).accept(*HEADER.unpack(reset_frame(9))) is Verdict.RESET
