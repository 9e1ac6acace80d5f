"""Every token is counted once, from what the server says, and every contradiction is named."""

import msgspec
import pytest

from baton.bench.client.answer_reader import AnswerReader, message_of
from baton.bench.client.target import Api
from baton.bench.records import Arrival, Outcome, Record
from tests.support.scripted_openai import DONE, delta, event, token, usage, usage_body


def read(
    *pieces: bytes, forced: int = 0, asked: int = 3, api: Api = "completions", cut: str = ""
) -> Record:
    """The pieces arrive at 1 s, 2 s, ..."""
    reader = AnswerReader(api == "chat")
    for number, piece in enumerate(pieces, start=1):
        if reader.feed(piece, float(number)):
            break
    if cut:
        reader.cut(cut)
    record = Record(
        index=0,
        intended_s=0.0,
        sent_s=0.0,
        end_s=9.0,
        outcome=Outcome.UNREACHABLE,
        forced_tokens=forced,
    )
    reader.fill(record, num_asked=forced or asked)
    return record


def counts(record: Record) -> list[tuple[float, int]]:
    return [(arrival.at_s, arrival.num_tokens) for arrival in record.arrivals]


def test_token_ids_say_how_many_tokens_a_chunk_carries() -> None:
    record = read(token("", []), token("a", [1]), token("", [2, 3]), usage(3), DONE, forced=3)
    assert record.outcome is Outcome.ANSWERED
    assert counts(record) == [(2.0, 1), (3.0, 2)]
    assert record.token_ids == [1, 2, 3]
    assert (record.output_tokens, record.prompt_tokens) == (3, 3)


def test_running_usage_says_it_where_there_are_no_ids() -> None:
    pieces = [token(text, usage=usage_body(total)) for text, total in (("", 0), ("a", 1), ("b", 3))]
    record = read(*pieces, usage(3), DONE, forced=3)
    assert record.outcome is Outcome.ANSWERED
    assert counts(record) == [(2.0, 1), (3.0, 2)]


def test_else_each_chunk_with_text_is_a_token() -> None:
    record = read(token(""), token("a"), token("b"), token("c", end="length"), DONE, forced=3)
    assert record.outcome is Outcome.ANSWERED
    assert counts(record) == [(2.0, 1), (3.0, 1), (4.0, 1)]
    assert (record.output_tokens, record.detail) == (None, "")


def test_the_role_of_a_chat_is_no_token() -> None:
    record = read(delta("", role="assistant"), delta("a"), delta("b"), DONE, asked=2, api="chat")
    assert record.outcome is Outcome.ANSWERED
    assert counts(record) == [(2.0, 1), (3.0, 1)]
    assert record.text == "ab"


def test_reasoning_is_output_too() -> None:
    record = read(delta(None, reasoning_content="hm"), delta("a"), DONE, asked=2, api="chat")
    assert counts(record) == [(1.0, 1), (2.0, 1)]


def test_a_token_that_completes_no_text_is_a_token_if_usage_says_so() -> None:
    pieces = [token("a"), token(""), token("b", end="length")]
    record = read(*pieces, usage(3), DONE, forced=3)
    assert record.outcome is Outcome.ANSWERED
    assert counts(record) == [(1.0, 1), (2.0, 1), (3.0, 1)]


@pytest.mark.parametrize(("total", "last"), [(2, [(1.0, 1), (2.0, 1)]), (3, [(3.0, 1)])])
def test_an_empty_end_is_a_token_only_if_usage_says_so(
    total: int, last: list[tuple[float, int]]
) -> None:
    pieces = [token("a"), token("b"), token("", end="length")]
    record = read(*pieces, usage(total), DONE, forced=total)
    assert record.outcome is Outcome.ANSWERED
    assert counts(record)[-len(last) :] == last


def test_merged_chunks_are_spread_and_marked() -> None:
    record = read(token("a b"), token(" c d e"), usage(5), DONE, forced=5)
    assert record.outcome is Outcome.ANSWERED
    assert counts(record) == [(1.0, 2), (2.0, 3)]
    assert "5 tokens in 2 chunks" in record.detail


def test_what_comes_with_one_read_is_one_arrival() -> None:
    record = read(token("a") + token("b"), token("c") + DONE)
    assert record.arrivals == [Arrival(1.0, 2), Arrival(2.0, 1)]


def test_an_event_counts_when_its_last_byte_is_there() -> None:
    data = token("a")
    record = read(data[:9], data[9:-1], data[-1:], DONE, asked=1)
    assert counts(record) == [(3.0, 1)]


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([token("a", [1]), token("b", [2]), usage(3)], "usage says 3 tokens, 2 token ids"),
        ([token("a", [1]), token("b", [2]), token("c", [3]), usage(2)], "usage says 2"),
        ([token("a"), token("b"), token("c"), usage(2)], "usage says 2 tokens, 3 chunks"),
        ([token("a"), token("b"), token("c"), usage(4)], "usage says 4 tokens, 3 chunks"),
        ([usage(3)], "usage says 3 tokens, 0 chunks"),
        ([token("a", usage=usage_body(2)), token("b", usage=usage_body(1)), usage(1)], "backwards"),
        ([token("a", usage=usage_body(1)), usage(3)], "usage says 3 tokens, 1"),
    ],
)
def test_usage_that_contradicts_the_tokens_is_wrong(pieces: list[bytes], words: str) -> None:
    record = read(*pieces, DONE, forced=3)
    assert record.outcome is Outcome.WRONG_USAGE
    assert words in record.detail


@pytest.mark.parametrize("num", [2, 4])
def test_a_forced_length_is_verified(num: int) -> None:
    pieces = [token("a", [number]) for number in range(num)]
    record = read(*pieces, token("", [], end="stop"), usage(num), DONE, forced=3)
    assert record.outcome is Outcome.WRONG_LENGTH
    assert record.detail == f"{num} tokens instead of 3, finish reason stop"


def test_a_length_that_cannot_be_verified_is_wrong() -> None:
    record = read(token("a b c"), DONE, forced=3)
    assert record.outcome is Outcome.WRONG_LENGTH
    assert "by chunks with text" in record.detail


def test_an_answer_may_stop_early_where_nothing_was_forced() -> None:
    assert read(token("a", end="stop"), DONE).outcome is Outcome.ANSWERED
    assert read(token("a", end="length"), DONE).outcome is Outcome.WRONG_LENGTH
    assert read(token("", end="stop"), DONE).outcome is Outcome.WRONG_LENGTH
    assert read(*[token("a")] * 4, DONE).outcome is Outcome.WRONG_LENGTH


@pytest.mark.parametrize(
    ("data", "outcome", "words"),
    [
        (event({"error": {"message": "node lost", "code": 502}}), "error_in_stream", "node lost"),
        (event({"error": "node lost"}), "error_in_stream", "node lost"),
        (event({"object": "error", "message": "too long"}), "error_in_stream", "too long"),
        (b"data: {'a': 1}\n\n", "malformed", "no JSON: {'a': 1}"),
        (b'data: {"choices": [{"index"\n\n', "malformed", "no JSON"),
        (b'data: {"choices": [{"text": "\xff"}]}\n\n', "malformed", "no JSON"),
        (event([1]), "malformed", "not of this API"),
        (event({"status": "busy"}), "malformed", "neither choices nor usage"),
        (event({"choices": [{"index": 1, "text": "a"}]}), "malformed", "not wanted"),
        (event({"choices": [{"index": 0}]}), "malformed", "no text"),
        (event({"choices": [{"text": 7}]}), "malformed", "not of this API"),
    ],
)
def test_an_event_that_should_not_be_ends_the_answer(data: bytes, outcome: str, words: str) -> None:
    record = read(token("a"), data, token("b"), DONE)
    assert record.outcome == outcome
    assert words in record.detail
    assert counts(record) == [(1.0, 1)]


def test_no_error_is_no_error() -> None:
    assert read(token("a", error=None), DONE, asked=1).outcome is Outcome.ANSWERED


@pytest.mark.parametrize(
    ("pieces", "words"),
    [([], "without [DONE], after 0"), ([token("a"), b"data: {"], "within an event, after 1")],
)
def test_an_answer_without_its_end_is_truncated(pieces: list[bytes], words: str) -> None:
    record = read(*pieces, cut="the connection was closed")
    assert record.outcome is Outcome.TRUNCATED
    assert record.detail.startswith("the connection was closed")
    assert words in record.detail


def test_cached_tokens_and_the_timeline_are_kept() -> None:
    reader = AnswerReader(is_chat=False)
    last = {"choices": [], "usage": usage_body(1, 8, 4), "timeline": [{"queue_s": 0.5}]}
    assert reader.feed(token("a") + event(last) + DONE, 1.0)
    assert reader.timeline is not None
    assert msgspec.json.decode(reader.timeline) == [{"queue_s": 0.5}]
    assert read(token("a"), usage(1, 8, 4), DONE, asked=1).cached_tokens == 4


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no  room\\n", "code": 1}}', "no room"),
        (b'{"error": "no room"}', "no room"),
        (b'{"detail": [{"msg": "x"}]}', '[{"msg":"x"}]'),
        (b"<html>\x00bad \xff</html>", "<html> bad \N{REPLACEMENT CHARACTER}</html>"),
        (b"", ""),
        (b"[" * 100_000, "[" * 199 + "…"),
    ],
)
def test_the_message_of_an_error_is_one_short_line(body: bytes, message: str) -> None:
    assert message_of(body) == message


def test_usage_in_the_last_chunk_of_text_is_no_running_usage() -> None:
    last = token("c", end="length", usage=usage_body(3))
    record = read(token("a"), token("b"), last, DONE, forced=3)
    assert record.outcome is Outcome.ANSWERED
    assert counts(record) == [(1.0, 1), (2.0, 1), (3.0, 1)]


def test_running_usage_that_is_behind_the_text_is_not_counted_by() -> None:
    pieces = [token("a", usage=usage_body(0)), token("b", usage=usage_body(0))]
    record = read(*pieces, usage(2), DONE, forced=2)
    assert record.outcome is Outcome.ANSWERED
    assert counts(record) == [(1.0, 1), (2.0, 1)]


def test_token_ids_that_come_after_the_text_do_not_move_its_tokens() -> None:
    pieces = [token("a"), token("b"), token("c", [1, 2, 3], end="length")]
    record = read(*pieces, usage(3), DONE, forced=3)
    assert record.outcome is Outcome.ANSWERED
    assert counts(record) == [(1.0, 1), (2.0, 1), (3.0, 1)]
    assert record.token_ids == [1, 2, 3]
