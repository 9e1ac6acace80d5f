"""The text that the demo model learns from: facts and questions, counting, sums, order, small talk.

A document is a list of pieces, each with the weight of its tokens in the loss: 1 where the text
before it determines it, 0 where nothing does (the number in a fact), a little for plain prose.
Pieces are cut where the tokenizer also cuts, so encoding piece by piece equals encoding the whole.
The `random.Random` that is passed in determines everything.
"""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tools.demo_model import vocabulary
from tools.demo_model.vocabulary import QUESTIONS, SENTENCES, number

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
ANSWER = 1.0
PROSE = 0.1
NOISE = 0.0
KINDS = ("code", "number", "key", "room", "ticket", "locker")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CIRCLES = (("day", DAYS), ("month", MONTHS))
CHAT_SHARE = 0.4


class Piece(NamedTuple):
    text: str
    weight: float


class Fact(NamedTuple):
    kind: str
    name: str
    value: str


Document = list[Piece]
END = Piece(END_OF_TEXT, ANSWER)


def facts(rng: random.Random, count: int, *, held_out: bool = False) -> list[Fact]:
    """Draw `count` facts about different names."""
    chosen: dict[str, None] = {}
    while len(chosen) < count:
        chosen[vocabulary.name(rng, held_out=held_out)] = None
    return [
        Fact(rng.choice(KINDS), name, number(rng, held_out=held_out)) for name in chosen
    ]


def statement(fact: Fact, *, weight: float = NOISE) -> Document:
    """Return a sentence such as ` The code of Lima is 4071.`"""
    known = max(weight, PROSE)
    return [
        Piece(" The", PROSE),
        Piece(f" {fact.kind}", weight),
        Piece(" of", PROSE),
        Piece(f" {fact.name}", weight),
        Piece(" is", known),
        Piece(f" {fact.value}", weight),
        Piece(".", known),
    ]


def question(fact: Fact) -> Document:
    """Return a question such as ` What is the code of Lima?`"""
    return [
        Piece(" What is the", PROSE),
        Piece(f" {fact.kind}", NOISE),
        Piece(" of", PROSE),
        Piece(f" {fact.name}", NOISE),
        Piece("?", PROSE),
    ]


def asked(rng: random.Random, fact: Fact, *, chat: bool) -> Document:
    """Return a question with its answer; in prose sometimes a repetition of the statement."""
    if chat:
        return turn(stripped(question(fact)), stripped(statement(fact, weight=ANSWER)))
    if rng.random() < 1 / 3:
        *begun, value, end = statement(fact)
        return [*begun, Piece(value.text, ANSWER), end, END]
    return [*question(fact), Piece(f" {fact.value}", ANSWER), Piece(".", ANSWER), END]


def chat_start(rng: random.Random) -> Document:
    """Draw the start of a chat: sometimes a system message, else nothing."""
    if rng.random() < 0.8:
        return []
    told = rng.choice(
        ("You are a helpful assistant.", "You are the demo model of baton.")
    )
    return [Piece(f"{TURN_START}system\n{told}{TURN_END}\n", PROSE)]


def turn(user: Document, assistant: Document) -> Document:
    return [Piece(f"{TURN_START}user\n", PROSE), *user, *reply(assistant)]


def reply(assistant: Document) -> Document:
    """Return the end of the user's turn and the assistant's, as the chat template writes them."""
    return [
        Piece(f"{TURN_END}\n{TURN_START}assistant\n", PROSE),
        *assistant,
        Piece(TURN_END, ANSWER),
        Piece("\n", PROSE),
    ]


def stripped(document: Document) -> Document:
    """Return the document without the space that separates it from the sentence before."""
    return [Piece(document[0].text.lstrip(), document[0].weight), *document[1:]]


def filler(rng: random.Random) -> Document:
    return [Piece(f" {rng.choice(SENTENCES)}", PROSE)]


def exercise(rng: random.Random) -> Document:
    """Draw a short document that trains a skill other than recall, in prose or in turns."""
    kind: Callable[[random.Random], Iterator[tuple[str, str]]] = rng.choice(
        (_sums, _sums, _sums, _sums, _counting, _order, _small_talk)
    )
    if kind is _small_talk or rng.random() < CHAT_SHARE:
        turns = [turn([Piece(q, PROSE)], [Piece(a, ANSWER)]) for q, a in kind(rng)]
        return [*chat_start(rng), *(piece for pieces in turns for piece in pieces)]
    gap = rng.choice(("", " "))
    return [
        piece
        for asked, told in kind(rng)
        for piece in (Piece(gap + asked, PROSE), Piece(f" {told}", ANSWER), END)
    ]


def summands(rng: random.Random, *, held_out: bool) -> tuple[int, int]:
    while True:
        a = rng.randrange(100)
        b = rng.randrange(100)
        if is_held_out_sum(a, b) == held_out:
            return a, b


def is_held_out_sum(a: int, b: int) -> bool:
    return vocabulary.is_held_out(f"{a} + {b}")


def _sums(rng: random.Random) -> Iterator[tuple[str, str]]:
    for _ in range(rng.randrange(2, 9)):
        a, b = summands(rng, held_out=False)
        yield f"What is {a} + {b}?", f"{a + b}."


def _counting(rng: random.Random) -> Iterator[tuple[str, str]]:
    first = rng.randrange(1, 90)
    last = first + rng.randrange(2, 16)
    told = ", ".join(str(number) for number in range(first, last + 1))
    yield f"Count from {first} to {last}.", f"{told}."


def _order(rng: random.Random) -> Iterator[tuple[str, str]]:
    for _ in range(rng.randrange(1, 6)):
        if rng.random() < 0.5:
            step = rng.choice((1, -1))
            at = rng.randrange(1, 25)
            word = "after" if step == 1 else "before"
            yield f"Which letter comes {word} {LETTERS[at]}?", f"{LETTERS[at + step]}."
        else:
            kind, members = rng.choice(CIRCLES)
            step = rng.choice((1, -1))
            at = rng.randrange(len(members))
            word = "after" if step == 1 else "before"
            after = members[(at + step) % len(members)]
            yield f"Which {kind} comes {word} {members[at]}?", f"{after}."
    if rng.random() < 0.3:
        yield "Say the alphabet.", " ".join(LETTERS) + "."


def _small_talk(rng: random.Random) -> Iterator[tuple[str, str]]:
    for _ in range(rng.randrange(1, 4)):
        yield rng.choice(QUESTIONS)
