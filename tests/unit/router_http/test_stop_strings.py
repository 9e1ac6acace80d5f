"""Stop strings: where they cut, what is held back, what min_tokens does to them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.sampling import SamplingParams
from baton.router.outputs import CompletionOutput, Merged
from baton.router.text.detokenizer import StopStrings
from baton.router.text.response_parser import Parsing
from tests.support.small_tokenizers import END, small_text

LETTERS = "ab你"
TEXT = small_text()


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """The plain definition: the earliest end, then the earliest start."""
    ends = [
        (start + len(stop), start)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start)
    ]
    return min(ends, default=None)


@given(
    pieces=st.lists(st.text(LETTERS, max_size=4), max_size=12),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_text_is_cut_at_the_first_completed_stop_however_it_was_grouped(
    pieces, stops, include
):
    scan = StopStrings(stops)
    text = "".join(pieces)
    shown = ""
    for piece in pieces:
        shown += scan.push(piece, may_match=True, include_match=include)
        assert text.startswith(shown)
        if scan.matched is not None:
            break
    match first_match(text, stops):
        case None:
            assert scan.matched is None
            assert shown + scan.flush() == text
        case end, start:
            assert scan.matched == text[start:end]
            assert shown == text[: end if include else start]


def test_a_match_that_completed_before_min_tokens_stays_ignored_in_the_held_text():
    scan = StopStrings(["ab", "xabc"])
    assert scan.push("xab", may_match=False, include_match=False) == ""
    assert scan.push("c", may_match=True, include_match=False) == ""
    assert scan.matched == "xabc"


@given(
    text=st.text(LETTERS, max_size=20),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_only_what_could_become_a_stop_string_is_held_back(text, stops):
    scan = StopStrings(stops)
    shown = scan.push(text, may_match=False, include_match=False)
    held = text[len(shown) :]
    longest = max(
        (n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])),
        default=0,
    )
    assert len(held) == longest
    assert scan.flush() == held


def test_a_stop_string_across_token_borders_never_shows_its_beginning():
    detokenizer = TEXT.detokenizer([1], SamplingParams(stop="stop the"))
    pushes = [
        detokenizer.push([i]) for i in TEXT.encode_now("hello stop world stop the end")
    ]
    assert pushes[-1] is None
    deltas = [delta for delta in pushes if delta is not None]
    assert "".join(delta.text for delta in deltas) == "hello stop world "
    assert [delta.stop_reason for delta in deltas if delta.finish_reason] == [
        "stop the"
    ]


def test_the_tokens_of_a_stop_are_reported_and_those_after_it_are_not():
    token_ids = TEXT.encode_now("hello stop world")
    detokenizer = TEXT.detokenizer([1], SamplingParams(stop=["stop"]))
    delta = detokenizer.push(token_ids)
    assert list(delta.token_ids) == token_ids[:2]
    assert (delta.text, delta.stop_reason) == ("hello ", "stop")


def test_a_stop_string_can_be_kept_in_the_output():
    params = SamplingParams(stop=["stop"], include_stop_str_in_output=True)
    assert (
        TEXT.detokenizer([1], params).push(TEXT.encode_now("a stop b")).text == "a stop"
    )


@pytest.mark.parametrize(
    ("min_tokens", "shown", "reason"),
    [(1, "", "stop"), (2, "stop ", "stop"), (3, "stop stop", None)],
)
def test_stop_strings_do_not_end_a_sequence_before_min_tokens(
    min_tokens, shown, reason
):
    params = SamplingParams(stop="stop", min_tokens=min_tokens, max_tokens=None)
    delta = TEXT.detokenizer([1], params).push(TEXT.encode_now("stop stop"), "length")
    assert (delta.text, delta.stop_reason) == (shown, reason)


def test_held_text_is_shown_when_the_sequence_ends_without_a_stop():
    detokenizer = TEXT.detokenizer([1], SamplingParams(stop="the end of it"))
    assert detokenizer.push(TEXT.encode_now("hello the end")).text == "hello "
    assert detokenizer.push([], "length").text == "the end"


def test_a_stop_string_before_the_models_end_wins():
    (end,) = TEXT.encode_now(END)
    detokenizer = TEXT.detokenizer([1], SamplingParams(stop="hello"))
    delta = detokenizer.push([*TEXT.encode_now("hello"), end], "stop")
    assert (delta.text, delta.stop_reason, len(delta.token_ids)) == ("", "hello", 1)


def parsed_in_pieces(
    text: str, sizes: list[int], **options: object
) -> CompletionOutput:
    """Return the output for the tokens of a text, pushed in pieces of these sizes."""
    parsing = Parsing("hermes", reasoning="think")
    detokenizer = TEXT.detokenizer([1], SamplingParams(**options), 0, parsing)
    rest = TEXT.encode_now(text)
    merged = Merged()
    for size in [*sizes, len(rest)]:
        piece = rest[:size]
        rest = rest[size:]
        delta = detokenizer.push(piece, None if rest else "length")
        if delta is None:
            break
        merged.add(delta)
        if delta.finish_reason is not None or not rest:
            break
    assert detokenizer.push([1]) is None or delta.finish_reason == "length"
    return merged.take()[0]


SIZES = st.lists(st.integers(1, 30), max_size=20)
THOUGHT = "<think>hello stop the end</think>\n\n"
CALL = '<tool_call>{"name": "add", "arguments": {"to": "stop"}}</tool_call>'


@given(sizes=SIZES)
def test_a_stop_string_acts_in_the_content_of_a_chat_alone(sizes):
    for stop in ("stop", "think>", "\n\n", "</"):
        output = parsed_in_pieces(f"{THOUGHT}the world", sizes, stop=stop)
        assert (output.reasoning, output.text) == ("hello stop the end", "the world")
        assert (output.finish_reason, output.stop_reason) == ("length", None)
    output = parsed_in_pieces(
        f"{THOUGHT}the world stop the end", sizes, stop=["stop the", "hello"]
    )
    assert (output.reasoning, output.text) == ("hello stop the end", "the world ")
    assert (output.finish_reason, output.stop_reason) == ("stop", "stop the")
    assert output.token_ids == TEXT.encode_now(f"{THOUGHT}the world stop the")


@given(sizes=SIZES)
def test_a_stop_string_neither_cuts_a_call_nor_reaches_over_one(sizes):
    text = f"a st{CALL}op{CALL} the stop"
    output = parsed_in_pieces(text, sizes, stop="stop")
    assert output.text == "a stopthe "
    assert [call.arguments for call in output.tool_calls] == ['{"to": "stop"}'] * 2
    assert (output.finish_reason, output.stop_reason) == ("tool_calls", "stop")


@given(sizes=SIZES)
def test_reasoning_counts_for_min_tokens_of_a_stop_string(sizes):
    num_thought = len(TEXT.encode_now(f"{THOUGHT}the"))
    for min_tokens, shown in ((num_thought, ""), (num_thought + 1, "the the")):
        options = {"stop": "the", "min_tokens": min_tokens, "max_tokens": None}
        assert (
            parsed_in_pieces(f"{THOUGHT}the the", sizes, **options).text.strip()
            == shown[:3]
        )
