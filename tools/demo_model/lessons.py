"""Make the lessons that the demo model is trained on: token ids of one length, on the fly.

There are three kinds. *Recall* holds facts among prose, then questions, or both mixed. *Echo* holds
a random string of names and numbers twice; it teaches copying within minutes, and recall grows out
of copying. *Exercises* hold everything that needs no memory.
"""

import random
from collections.abc import Callable, Mapping

from tokenizers import Tokenizer

from tools.demo_model import text, vocabulary
from tools.demo_model.text import ANSWER, NOISE, PROSE, Document, Piece

LONG = 1024  # from this length on, the number of facts does not grow with the lesson
# Rough sizes, to plan with.
FACT_TOKENS, PROSE_TOKENS, ASKED_TOKENS, TURN_TOKENS = 12, 9, 17, 36


class Lesson:
    """A row of token ids that grows piece by piece, each with its weight in the loss."""

    def __init__(self, encode: Callable[[str], list[int]], length: int) -> None:
        self.ids: list[int] = []
        self.weights: list[float] = []
        self.length = length
        self._encode = encode

    def add(self, document: Document) -> None:
        for piece in document:
            ids = self._encode(piece.text)
            self.ids += ids
            self.weights += [piece.weight] * len(ids)

    @property
    def is_full(self) -> bool:
        return len(self.ids) >= self.length

    def cut(self) -> tuple[list[int], list[float]]:
        return self.ids[: self.length], self.weights[: self.length]


class LessonMaker:
    """The maker of lessons of `length` tokens, whose kinds are drawn with the given `shares`."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self._known: dict[str, list[int]] = {}
        self._makers = {
            "recall": self._recall,
            "echo": self._echo,
            "exercise": self._exercises,
        }

    def draw(
        self, length: int, shares: Mapping[str, float]
    ) -> tuple[list[int], list[float]]:
        lesson = Lesson(self.encode, length)
        (kind,) = self._rng.choices(list(shares), list(shares.values()))
        self._makers[kind](lesson)
        return lesson.cut()

    def encode(self, words: str) -> list[int]:
        if words not in self._known:
            self._known[words] = self._tokenizer.encode(words).ids
        return self._known[words]

    def _echo(self, lesson: Lesson) -> None:
        rng = self._rng
        while not lesson.is_full:
            words = [
                " "
                + rng.choice((vocabulary.name, vocabulary.number))(rng, held_out=False)
                for _ in range(rng.randrange(4, max(5, lesson.length // 12)))
            ]
            lesson.add([Piece(word, NOISE) for word in words])
            # The start of the echo cannot be predicted; the words after it can.
            lesson.add(
                [Piece(words[0], NOISE), *(Piece(word, ANSWER) for word in words[1:])]
            )

    def _exercises(self, lesson: Lesson) -> None:
        while not lesson.is_full:
            lesson.add(text.exercise(self._rng))

    def _recall(self, lesson: Lesson) -> None:
        layout = self._rng.choice((self._mixed, self._facts_first, self._chat))
        layout(lesson, text.facts(self._rng, self._num_facts(lesson.length)))

    def _num_facts(self, length: int) -> int:
        if length <= LONG:
            return self._rng.randrange(max(3, length // 64), max(6, length // 28))
        return self._rng.randrange(32, min(100, length // 25))

    def _mixed(self, lesson: Lesson, facts: list[text.Fact]) -> None:
        """Add facts and questions in turn; a question may ask for any fact told so far."""
        rng = self._rng
        untold = list(facts)
        told = list[text.Fact]()
        while not lesson.is_full:
            drawn = rng.random()
            if untold and (not told or drawn < 0.35):
                told.append(untold.pop())
                lesson.add(text.statement(told[-1]))
            elif drawn < 0.85:
                lesson.add(text.asked(rng, rng.choice(told), chat=False))
            else:
                lesson.add(text.filler(rng))

    def _facts_first(self, lesson: Lesson, facts: list[text.Fact]) -> None:
        num_asked = min(len(facts), 24)
        self._tell(lesson, facts, lesson.length - num_asked * ASKED_TOKENS)
        while not lesson.is_full:
            lesson.add(text.asked(self._rng, self._rng.choice(facts), chat=False))

    def _chat(self, lesson: Lesson, facts: list[text.Fact]) -> None:
        """Add a chat with the facts in its first turn, and the first question at their end."""
        rng = self._rng
        lesson.add(text.chat_start(rng))
        lesson.add([Piece(f"{text.TURN_START}user\n", PROSE)])
        self._tell(lesson, facts, lesson.length - min(len(facts), 12) * TURN_TOKENS)
        first = rng.choice(facts)
        lesson.add(text.question(first))
        lesson.add(text.reply(text.stripped(text.statement(first, weight=ANSWER))))
        while not lesson.is_full:
            lesson.add(text.asked(rng, rng.choice(facts), chat=True))

    def _tell(self, lesson: Lesson, facts: list[text.Fact], num_tokens: int) -> None:
        """Add all facts, in any order, among enough prose to make about `num_tokens`."""
        rng = self._rng
        room = num_tokens - len(lesson.ids) - FACT_TOKENS * len(facts)
        told = [text.statement(fact) for fact in facts]
        told += [text.filler(rng) for _ in range(max(0, room // PROSE_TOKENS))]
        rng.shuffle(told)
        told[0] = text.stripped(told[0])
        for sentence in told:
            lesson.add(sentence)
