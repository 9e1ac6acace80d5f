"""The demo model's text: held out means held out, and encoding by pieces is encoding the whole."""

import random
import re
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from tools.demo_model import exam, names, text
from tools.demo_model import tokenizer as demo_tokenizer
from tools.demo_model.lessons import LessonMaker
from tools.demo_model.text import ANSWER, Document

KINDS = ("recall", "echo", "exercise")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return demo_tokenizer.train(0)


def whole(document: Document) -> str:
    return "".join(piece.text for piece in document)


def documents(count: int) -> Iterator[Document]:
    rng = random.Random(3)
    for index in range(count):
        yield text.exercise(rng)
        (fact,) = text.facts(rng, 1)
        yield text.statement(fact) + text.asked(rng, fact, chat=index % 2 == 0)


def test_training_never_shows_a_name_a_number_or_a_sum_that_is_held_out(
    tokenizer: Tokenizer,
) -> None:
    lessons = LessonMaker(tokenizer, random.Random(1))
    seen = " ".join(
        tokenizer.decode(lessons.draw(1024, {kind: 1.0})[0], skip_special_tokens=False)
        for kind in KINDS
        for _ in range(40)
    )
    # The last words of a lesson are cut anywhere.
    facts = re.findall(r"The \w+ of (\w+) is (\d{4})\.", seen)
    sums = re.findall(r"What is (\d+) \+ (\d+)\?", seen)
    assert len(facts) > 1000
    assert len(sums) > 500
    assert not [fact for fact in facts if any(names.is_held_out(word) for word in fact)]
    assert not [pair for pair in sums if text.is_held_out_sum(int(pair[0]), int(pair[1]))]


def test_the_exam_asks_only_for_what_is_held_out(tokenizer: Tokenizer) -> None:
    memory = exam.recall(tokenizer, num_tokens=2048, seed=0)
    told = re.findall(r"The \w+ of (\w+) is (\d{4})\.", memory.told)
    assert len(told) == exam.NUM_FACTS == len(memory.questions)
    assert all(names.is_held_out(name) and names.is_held_out(number) for name, number in told)
    assert len({name for name, _ in told}) == exam.NUM_FACTS
    assert 1000 < len(exam.sums(held_out=True)) < 1500
    assert len(exam.sums(held_out=False)) == 10_000


@pytest.mark.parametrize("num_tokens", [2048, 4096])
def test_an_exam_fills_its_length_and_spreads_its_facts(
    tokenizer: Tokenizer, num_tokens: int
) -> None:
    memory = exam.recall(tokenizer, num_tokens=num_tokens, seed=1)
    lengths = [len(tokenizer.encode(memory.told + asked.prompt).ids) for asked in memory.questions]
    assert num_tokens - 48 < max(lengths) <= num_tokens
    starts = [match.start() / len(memory.told) for match in re.finditer(r" of \w+ is", memory.told)]
    assert min(starts) < 0.1
    assert max(starts) > 0.9


def test_pieces_are_encoded_as_the_whole_is(tokenizer: Tokenizer) -> None:
    for document in documents(100):
        pieces = [one for piece in document for one in tokenizer.encode(piece.text).ids]
        assert pieces == tokenizer.encode(whole(document)).ids


@pytest.mark.parametrize("length", [128, 512, 2048])
@pytest.mark.parametrize("kind", KINDS)
def test_a_lesson_has_its_length_and_something_to_learn(
    tokenizer: Tokenizer, kind: str, length: int
) -> None:
    lessons = LessonMaker(tokenizer, random.Random(2))
    for _ in range(10):
        ids, weights = lessons.draw(length, {kind: 1.0})
        assert len(ids) == len(weights) == length
        assert sum(weight == ANSWER for weight in weights) > 10
