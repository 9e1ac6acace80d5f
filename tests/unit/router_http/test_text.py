"""Text is encoded, and detokenized for any grouping of the tokens."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer

from baton.protocol.errors import ConfigError, RequestError
from baton.protocol.sampling import SamplingParams
from baton.router.text.detokenizer import (
    LibraryStream,
    TokenTable,
    WindowStream,
    decoding_of,
)
from baton.router.text.tokenizer import Text
from tests.support.refusals import raises
from tests.support.small_tokenizers import (
    END,
    FAMILIES,
    small_text,
    small_tokenizer,
    write_tokenizer,
)

PARAMS = SamplingParams()
TEXTS = st.text(
    alphabet=st.one_of(
        st.sampled_from("helo wrdstopn 你好😀é\u2581\n"), st.characters(codec="utf-8")
    ),
    max_size=40,
)


ALL = {family: small_text(family) for family in FAMILIES}


def cuts(draw: st.DrawFn, token_ids: list[int]) -> list[list[int]]:
    """`token_ids` in pieces of any sizes."""
    pieces = []
    rest = token_ids
    while rest:
        size = draw(st.integers(1, len(rest)))
        pieces.append(rest[:size])
        rest = rest[size:]
    return pieces


def joined(
    text: Text, prompt: list[int], pushes: list[list[int]], params: SamplingParams
) -> str:
    detokenizer = text.detokenizer(prompt, params)
    deltas = [detokenizer.push(push) for push in pushes]
    return "".join(delta.text for delta in deltas) + detokenizer.push([], "length").text


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_deltas_join_to_the_decoded_text_however_tokens_are_grouped(family, data):
    text = ALL[family]
    token_ids = text.encode_now(data.draw(TEXTS))
    pushes = cuts(data.draw, token_ids)
    assert joined(text, [], pushes, PARAMS) == text.decode(token_ids)
    assert text.decode(token_ids) == small_tokenizer(family).decode(token_ids)


@pytest.mark.parametrize("prompt", [" ", "  ", "   b", " a"])
def test_leading_spaces_without_text_of_their_own_are_kept(prompt):
    text = ALL["metaspace"]
    token_ids = text.encode_now(prompt)
    assert (
        text.decode(token_ids)
        == small_tokenizer("metaspace").decode(token_ids)
        == prompt
    )


@given(data=st.data())
def test_any_byte_level_tokens_decode_as_the_tokenizer_does(data):
    """Random ids are mostly broken UTF-8: what is shown for it must agree as well."""
    tokenizer = small_tokenizer("byte_level")
    text = ALL["byte_level"]
    ids = st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=20)
    token_ids = data.draw(ids)
    for skip in (True, False):
        params = SamplingParams(skip_special_tokens=skip)
        expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
        assert joined(text, [], cuts(data.draw, token_ids), params) == expected
        assert text.decode(token_ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_output_continues_the_text_of_the_prompt(family, data):
    """What is pushed is what the whole decodes to beyond the prompt, leading space included."""
    text = ALL[family]
    token_ids = text.encode_now("hello " + data.draw(TEXTS) + " world")
    whole = text.decode(token_ids)
    cut = data.draw(st.integers(1, len(token_ids)))
    prompt = text.decode(token_ids[:cut])
    if prompt.endswith("\ufffd") or not whole.startswith(prompt):
        return  # cut inside a character
    output = joined(text, token_ids[:cut], [[i] for i in token_ids[cut:]], PARAMS)
    assert prompt + output == whole


def test_a_character_begun_in_the_prompt_is_shown_once_completed():
    text = ALL["byte_level"]
    token_ids = text.encode_now("😀!")
    detokenizer = text.detokenizer(token_ids[:2], PARAMS)
    assert detokenizer.push(token_ids[2:]).text == "😀!"
    broken = text.detokenizer(token_ids[:2], PARAMS)
    assert broken.push(text.encode_now("hello")).text == "hello"


def test_the_token_that_ends_a_sequence_has_no_text_unless_asked_for():
    text = ALL["byte_level"]
    hello = text.encode_now("hello")[0]
    world = text.encode_now(" world")[0]
    params = SamplingParams(stop_token_ids=[world])
    delta = text.detokenizer([1], params).push([hello, world], "stop")
    assert (delta.text, list(delta.token_ids)) == ("hello", [hello, world])
    assert delta.stop_reason == world
    included = SamplingParams(stop_token_ids=[world], include_stop_str_in_output=True)
    assert (
        text.detokenizer([1], included).push([hello, world], "stop").text
        == "hello world"
    )


@pytest.mark.parametrize("family", ["metaspace", "word_piece"])
@given(data=st.data())
def test_the_library_s_stream_says_what_a_window_of_tokens_says(family, data):
    """Also of ids that no text has in that order, and of rows without a token."""
    tokenizer = small_tokenizer(family)
    decoding = decoding_of(tokenizer)
    ids = st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=20)
    prompt = data.draw(ids)
    token_ids = data.draw(ids)
    for skip in (True, False):
        streams = [
            kind(decoding, prompt, skip) for kind in (LibraryStream, WindowStream)
        ]
        ours, theirs = (
            "".join([stream.feed(token_id) for token_id in token_ids]) + stream.flush()
            for stream in streams
        )
        assert ours == theirs


def test_a_token_that_looks_like_a_part_of_a_character_needs_a_window():
    tokenizer = small_tokenizer("metaspace")
    assert isinstance(decoding_of(tokenizer).stream((), True), LibraryStream)
    tokenizer.add_tokens(["\ufffd"])
    assert isinstance(decoding_of(tokenizer).stream((), True), WindowStream)


def test_known_decoders_need_no_tokenizer_per_token():
    tokenizers = {family: small_tokenizer(family) for family in FAMILIES}
    table = {
        family
        for family, tokenizer in tokenizers.items()
        if isinstance(decoding_of(tokenizer), TokenTable)
    }
    assert table == {"byte_level", "byte_fallback", "byte_fallback_strip"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", ["hello world, the end.", " ", "x", "你好😀", END])
def test_a_long_prompt_is_counted_in_pieces_and_refused_only_if_it_cannot_fit(
    family, part
):
    text = ALL[family]
    prompt = (part + "stop ") * (200_000 // len(part + "stop "))
    token_ids = text.encode_now(prompt)
    num = len(token_ids)
    assert text.encode_now(prompt, max_tokens=num) == token_ids
    with raises(RequestError, "context_length_exceeded", "prompt") as caught:
        text.encode_now(prompt, max_tokens=num // 8)
    assert f"{num // 8 + 1} tokens > {num // 8} " in caught.value.message


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
def test_bytes_of_tokens_join_to_the_text_where_tokens_are_parts_of_characters(family):
    text = ALL[family]
    token_ids = text.encode_now("你好😀é" + END)
    spellings = [text.spell(True, token_id) for token_id in token_ids]
    data = b"".join(token_bytes for _, token_bytes in spellings)
    assert data.decode().lstrip() == "你好😀é"
    assert [shown for shown, _ in spellings].count("\ufffd") >= 4
    assert spellings[-1] == (END, b"")
    assert text.spell(False, token_ids[-1]) == (END, END.encode())


def test_a_lone_surrogate_is_refused_by_name():
    with raises(RequestError, "invalid_request", "prompt"):
        ALL["byte_level"].encode_now("a\ud800b")


def test_a_folder_loads_and_forgets_the_limits_it_was_saved_with(tmp_path):
    tokenizer = small_tokenizer("byte_level")
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = Text.load(str(tmp_path))
    assert len(text.encode_now("hello world hello world")) == 4
    assert len(text.encode_now("hello")) == 1
    text.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_forms_are_refused_where_nodes_cannot_hold_them(family, tmp_path):
    folder = Path(write_tokenizer(tmp_path, family))
    reads = True
    try:
        LLTokenizer(
            (folder / "tokenizer.json").read_text(encoding="utf-8"), eos_token=0
        )
    except ValueError:
        reads = False
    assert reads is (family not in ("metaspace", "word_piece"))
    text = Text.load(str(folder))
    assert (text.problem_of_forms == "") is reads
    assert "\n" not in text.problem_of_forms
    text.close()


def test_missing_and_broken_folders_are_one_clear_line(tmp_path):
    with pytest.raises(
        ConfigError, match=r"has no tokenizer\.json, .*: fetch it"
    ) as caught:
        Text.load(str(tmp_path))
    assert "\n" not in caught.value.message
    Path(write_tokenizer(tmp_path), "tokenizer.json").write_text("{]")
    with pytest.raises(ConfigError, match="not a tokenizer") as caught:
        Text.load(str(tmp_path))
    assert "\n" not in caught.value.message
