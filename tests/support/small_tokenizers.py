"""Tokenizers of every decoder family, small enough to make inside a test.

None of them is trained: the vocabulary is given, so that ids never change between runs.
"""

from pathlib import Path
from typing import Literal

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from baton.router.text.detokenizer import decoding_of
from baton.router.text.grammars import problem_of_tokenizer
from baton.router.text.tokenizer import Text

Family = Literal[
    "byte_level", "byte_fallback", "byte_fallback_strip", "metaspace", "word_piece"
]
FAMILIES: tuple[Family, ...] = (
    "byte_level",
    "byte_fallback",
    "byte_fallback_strip",
    "metaspace",
    "word_piece",
)
END = "<|end|>"
SPACE = "\u2581"
WORDS = ["hello", "world", "stop", "the", "end", "你好"]


def small_tokenizer(family: Family) -> Tokenizer:
    match family:
        case "byte_level":
            tokenizer = _byte_level()
        case "byte_fallback":
            tokenizer = _sentencepiece([])
        case "byte_fallback_strip":
            tokenizer = _sentencepiece([decoders.Strip(" ", 1, 0)])
        case "metaspace":
            tokenizer = _sentencepiece([])
            tokenizer.decoder = decoders.Metaspace(SPACE, prepend_scheme="first")
        case "word_piece":
            tokenizer = _word_piece()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken("a tag", special=False)])
    return tokenizer


def small_text(family: Family = "byte_level") -> Text:
    tokenizer = small_tokenizer(family)
    problem = problem_of_tokenizer(tokenizer.to_str().encode())
    return Text(tokenizer, decoding_of(tokenizer), problem)


def write_tokenizer(folder: Path, family: Family = "byte_level") -> str:
    """A folder that `Text.load` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    small_tokenizer(family).save(str(folder / "tokenizer.json"))
    return str(folder)


def _byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = [
        split.pre_tokenize_str(word)[0][0]
        for word in [*(" " + w for w in WORDS), *WORDS]
    ]
    vocabulary, merges = _vocabulary(alphabet, words)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(more: list[decoders.Decoder]) -> Tokenizer:
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    alphabet += [SPACE, *(chr(code) for code in range(0x21, 0x7F)), "你", "好"]
    vocabulary, merges = _vocabulary(
        alphabet, [*(SPACE + word for word in WORDS), *WORDS]
    )
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *more]
    )
    return tokenizer


def _word_piece() -> Tokenizer:
    pieces = ["[UNK]", *WORDS, *("##" + word for word in WORDS), ".", ",", "'", "s"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _vocabulary(
    alphabet: list[str], words: list[str]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """`words` become tokens by merging their prefixes a character at a time, first words first."""
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))
    return vocabulary, merges
