"""The fixed questions of the demo model's exam, with held-out names, numbers and sums only."""

import random
from typing import NamedTuple

from tokenizers import Tokenizer

from tools.demo_model import text

NUM_FACTS = 64
_QUESTION_TOKENS = 24  # the longest question with its answer


class Question(NamedTuple):
    prompt: str
    answer: str


class Memory(NamedTuple):
    """A text full of facts, and the questions about it. A whole prompt is `told + question`."""

    told: str
    questions: list[Question]


def recall(
    tokenizer: Tokenizer, *, num_tokens: int, seed: int, num_facts: int = NUM_FACTS
) -> Memory:
    """Return `num_facts` facts in prose that, with a question, has just under `num_tokens`."""
    rng = random.Random(f"recall {num_tokens} {seed}")
    facts = text.facts(rng, num_facts, held_out=True)
    sentences = [_plain(text.statement(fact)) for fact in facts]
    room = (
        num_tokens
        - _QUESTION_TOKENS
        - sum(_length(tokenizer, told) for told in sentences)
    )
    while True:
        prose = _plain(text.filler(rng))
        room -= _length(tokenizer, prose)
        if room < 0:
            break
        sentences.append(prose)
    rng.shuffle(sentences)
    questions = [
        Question(_plain(text.question(fact)), f" {fact.value}.") for fact in facts
    ]
    return Memory("".join(sentences).lstrip(), questions)


def chats(*, count: int, seed: int) -> list[Question]:
    """Return questions with five facts in a chat's first turn, answered in a whole sentence."""
    rng = random.Random(f"chat {seed}")
    asked = []
    for _ in range(count):
        facts = text.facts(rng, 5, held_out=True)
        told = "".join(_plain(text.statement(fact)) for fact in facts).lstrip()
        fact = rng.choice(facts)
        prompt = told + _plain(text.question(fact))
        answer = _plain(text.statement(fact)).lstrip()
        asked.append(Question(_as_turn(prompt), answer))
    return asked


def sums() -> list[Question]:
    """Return every sum of two numbers below 100 that training left out."""
    return [
        Question(f"What is {a} + {b}?", f" {a + b}.")
        for a in range(100)
        for b in range(100)
        if text.is_held_out_sum(a, b)
    ]


def _as_turn(words: str) -> str:
    return (
        f"{text.TURN_START}user\n{words}{text.TURN_END}\n{text.TURN_START}assistant\n"
    )


def _plain(document: text.Document) -> str:
    return "".join(piece.text for piece in document)


def _length(tokenizer: Tokenizer, words: str) -> int:
    return len(tokenizer.encode(words).ids)
