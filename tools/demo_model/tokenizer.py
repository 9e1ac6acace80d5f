"""The demo model's tokenizer: byte-level BPE over its own text, every digit a token of its own."""

import random
from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.demo_model import text

VOCAB_SIZE = 768
END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID = 0, 1, 2  # the trainer numbers them first


def train(seed: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(" ?[0-9]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[text.END_OF_TEXT, text.TURN_START, text.TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(random.Random(seed)), trainer)
    return tokenizer


def _lines(rng: random.Random) -> Iterator[str]:
    for fact in text.facts(rng, 4000):
        yield _plain(text.statement(fact) + text.question(fact))
    for _ in range(2000):
        yield _plain(text.exercise(rng) + text.filler(rng))


def _plain(document: text.Document) -> str:
    """Without the marks of turns, which have ids of their own."""
    return "".join(
        piece.text.replace(text.TURN_START, "").replace(text.TURN_END, "") for piece in document
    )
