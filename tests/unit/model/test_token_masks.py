"""Masks: what they allow, what begins anew, and what never can go on."""

import json
import time

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from baton.model.sampling import token_masks
from baton.model.sampling.token_masks import NoMask, TokenMasks, Words
from baton.node.scheduling.plan import Slice
from baton.protocol.ids import Key, RequestId
from baton.protocol.sampling import Sampling
from tests.support.checkpoints import model_folder

VOCAB = 1024
EOS = 2
GRAMMAR = LLMatcher.grammar_from_regex("[a-f]{2,40}-[0-9]{1,4}")


@pytest.fixture(scope="module")
def folder():
    return model_folder("llama", eos_token_id=EOS)


def part(
    sampling: Sampling, start: int, past: tuple[int, ...] | None, length: int = 1
) -> Slice:
    key = Key(RequestId("r"), 0, 1)
    return Slice(
        key, start, length, (), (), (0,), sampling, num_prompt_tokens=5, past=past
    )


def ids_of(words: Words | NoMask) -> set[int]:
    assert not isinstance(words, NoMask)
    return set(
        np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    )


def first(
    masks: TokenMasks, sampling: Sampling, past: tuple[int, ...] = ()
) -> Words | NoMask:
    """The mask after a prompt and `past`, once its grammar is compiled."""
    deadline_s = time.monotonic() + 60
    while True:
        masks.begin_step()
        length = 5 + len(past)
        mask = masks.mask(part(sampling, 0, (), length), (0,) * 5 + past, ())
        if (
            not isinstance(mask, NoMask)
            or mask.problem
            or time.monotonic() > deadline_s
        ):
            return mask


def test_masks_are_those_of_a_fresh_matcher_at_every_token(folder):
    rng = np.random.default_rng(5)
    sampling = Sampling(seed=1, max_tokens=99, grammar=GRAMMAR)
    text = (folder / "tokenizer.json").read_text()
    tokenizer = LLTokenizer(text, n_vocab=VOCAB, eos_token=[EOS])
    for _ in range(10):
        followed = TokenMasks(folder, VOCAB, (EOS,))
        output = list[int]()
        allowed = ids_of(first(followed, sampling))
        while True:
            output.append(int(rng.choice(sorted(allowed))))
            matcher = LLMatcher(tokenizer, GRAMMAR, log_level=0)
            assert matcher.consume_tokens(output)
            if output[-1] == EOS:
                break
            followed.begin_step()
            known = Sampling(seed=1, max_tokens=99, grammar=" ")
            mask = followed.mask(part(known, 4 + len(output), None), (output[-1],), ())
            allowed = ids_of(mask)
            expected = matcher.compute_bitmask()
            assert allowed == ids_of(np.frombuffer(expected, np.int32))
            resumed = TokenMasks(folder, VOCAB, (EOS,))
            assert ids_of(first(resumed, sampling, tuple(output))) == allowed


def test_allowed_ids_and_bad_words_limit_what_may_come(folder):
    masks = TokenMasks(folder, VOCAB, (EOS,))
    sampling = Sampling(
        seed=1,
        max_tokens=9,
        allowed_token_ids=(3, 31, 32, 700),
        bad_words=((31,), (3, 32)),
    )
    assert ids_of(first(masks, sampling)) == {3, 32, 700}
    assert ids_of(first(masks, sampling, (7, 3))) == {3, 700}
    everything = Sampling(seed=1, max_tokens=9, bad_words=((1023,), (5000,)))
    assert ids_of(first(masks, everything)) == set(range(1023))


def test_what_can_never_go_on_has_a_reason(folder):
    masks = TokenMasks(folder, VOCAB, (EOS,))
    wrong = Sampling(seed=1, max_tokens=9, grammar=LLMatcher.grammar_from_regex("(a"))
    mask = first(masks, wrong)
    assert isinstance(mask, NoMask)
    assert "regex" in mask.problem
    nothing = Sampling(seed=1, max_tokens=9, allowed_token_ids=(3,), bad_words=((3,),))
    assert first(masks, nothing) == NoMask("no token may follow")
    grammar = Sampling(seed=1, max_tokens=9, grammar=GRAMMAR)
    mask = first(TokenMasks(folder, VOCAB, ()), grammar)
    assert isinstance(mask, NoMask)
    assert "end-of-sequence" in mask.problem


def test_a_tokenizer_that_llguidance_cannot_read_ends_the_request_alone(tmp_path):
    grammar = Sampling(seed=1, max_tokens=9, grammar=GRAMMAR)
    for text in (None, "{}"):
        if text is not None:
            (tmp_path / "tokenizer.json").write_text(text)
        mask = first(TokenMasks(tmp_path, VOCAB, (EOS,)), grammar)
        assert isinstance(mask, NoMask)
        assert "tokenizer" in mask.problem


def test_a_slow_grammar_stops_no_step(folder, monkeypatch):
    monkeypatch.setattr(token_masks, "COMPILE_WAIT_S", 0)
    names = {f"name{i}": {"enum": [f"v{i}{j}" for j in range(40)]} for i in range(200)}
    schema = json.dumps(
        {"type": "object", "properties": names, "required": list(names)}
    )
    slow = Sampling(
        seed=1, max_tokens=9, grammar=LLMatcher.grammar_from_json_schema(schema)
    )
    masks = TokenMasks(folder, VOCAB, (EOS,))
    masks.begin_step()
    assert masks.mask(part(slow, 0, (), 5), (0,) * 5, ()) == NoMask()
    assert ids_of(first(masks, slow))
