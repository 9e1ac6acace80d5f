"""The text of single tokens, joined into whole characters.

The decoder of almost every model maps each token to bytes and joins them: byte-level BPE (Llama 3,
Qwen, DeepSeek) and SentencePiece with byte fallback (Llama 2, Mistral, Gemma). For these a table is
made once, and no tokenizer is called per token. Any other decoder goes through
`tokenizers.Tokenizer.decode` over a short window. Only `text` and `detokenizer` use this file.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
# A character has at most four bytes, and a token has at least one.
_TOKENS_OF_CONTEXT = 8


class TextStream(Protocol):
    """Turns the tokens of one sequence into text, in whole characters."""

    def feed(self, token_id: int) -> str:
        """Return the text that `token_id` completes; it is empty inside a character."""

    def flush(self) -> str:
        """Return U+FFFD for a character that was never completed, else an empty text."""


class PieceTable(msgspec.Struct, frozen=True):
    """The text of each token id, or its bytes where these are not whole characters.

    `strip_first` is the number of spaces to drop from the first visible text of a sequence.
    """

    pieces: list[str | bytes]
    pieces_without_special: list[str | bytes]
    strip_first: int = 0

    def stream(self, prompt_token_ids: Sequence[int], skip_special: bool) -> "TableStream":
        return TableStream(self, prompt_token_ids, skip_special)


class TableStream:
    """The fast way, which looks up each token in a list."""

    __slots__ = ("_borrowed", "_pending", "_pieces", "_plain", "_strip")

    def __init__(
        self, table: PieceTable, prompt_token_ids: Sequence[int], skip_special: bool
    ) -> None:
        self._pieces = table.pieces_without_special if skip_special else table.pieces
        self._strip = table.strip_first
        self._pending = self._open_character(prompt_token_ids)
        # A character that the prompt began is part of the output only if the output completes it.
        self._borrowed = bool(self._pending)
        if self._strip and any(self._piece(token_id) for token_id in prompt_token_ids):
            self._strip = 0
        self._plain = not (self._pending or self._strip)

    def feed(self, token_id: int) -> str:
        try:
            piece = self._pieces[token_id]
        except IndexError:  # a padding row of the model's vocabulary
            return ""
        if self._plain and type(piece) is str:
            return piece
        return self._join(piece if isinstance(piece, bytes) else piece.encode(), final=False)

    def flush(self) -> str:
        return self._join(b"", final=True)

    def _piece(self, token_id: int) -> str | bytes:
        return self._pieces[token_id] if token_id < len(self._pieces) else b""

    def _join(self, data: bytes, *, final: bool) -> str:
        data = self._pending + data
        text, length = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[length:]
        if text and self._borrowed:
            self._borrowed = False
            text = text.removeprefix(REPLACEMENT)
        if text and self._strip:
            spaces = len(text) - len(text.lstrip(" "))
            text, self._strip = text[min(spaces, self._strip) :], 0
        self._plain = not (self._pending or self._strip)
        return text

    def _open_character(self, prompt_token_ids: Sequence[int]) -> bytes:
        """Return the first bytes of a character that the prompt begins and does not complete."""
        last = self._piece(prompt_token_ids[-1]) if prompt_token_ids else ""
        if last and isinstance(last, str):
            return b""
        data = b""
        for token_id in prompt_token_ids[-_TOKENS_OF_CONTEXT:]:
            piece = self._piece(token_id)
            data += piece if isinstance(piece, bytes) else piece.encode()
        return data[codecs.utf_8_decode(data, "replace", False)[1] :]


class WindowDecoding(msgspec.Struct, frozen=True):
    """The slow way, for decoders that no table describes."""

    tokenizer: Tokenizer

    def stream(self, prompt_token_ids: Sequence[int], skip_special: bool) -> "WindowStream":
        return WindowStream(self.tokenizer, prompt_token_ids, skip_special)


class WindowStream:
    """Decodes a window of tokens with and without the new ones. The difference is new text."""

    __slots__ = ("_num_shown", "_shown", "_skip_special", "_tokenizer", "_window")

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._window = list(prompt_token_ids[-_TOKENS_OF_CONTEXT:])
        self._num_shown = len(self._window)
        self._shown = self._decode()

    def feed(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode()
        open_tokens = len(self._window) - self._num_shown
        if text.endswith(REPLACEMENT) and open_tokens < _TOKENS_OF_CONTEXT:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._decode())

    def _show(self, text: str) -> str:
        new_text = text[len(self._shown) :]
        if new_text:
            # The new tokens become the context of the next ones.
            del self._window[: self._num_shown]
            self._shown = self._decode()
        elif self._shown:  # tokens without text, mostly special ones, must not push out context
            del self._window[self._num_shown :]
        # Before the first text they are the context, because a leading space may have no text.
        else:
            del self._window[:-_TOKENS_OF_CONTEXT]
        self._num_shown = len(self._window)
        return new_text

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special)


Decoding = PieceTable | WindowDecoding


class _Step(msgspec.Struct):
    """One entry of `decoder` in tokenizer.json, with the fields that distinguish the families."""

    type: str
    decoders: list["_Step"] = []
    pattern: dict[str, str] = {}
    content: str = ""
    start: int = 0
    stop: int = 0


class _File(msgspec.Struct):
    decoder: _Step | None = None


def decoding_of(tokenizer: Tokenizer, tokenizer_json: bytes) -> Decoding:
    """Return a table if the decoder is known to be one, else a window."""
    try:
        decoder = msgspec.json.decode(tokenizer_json, type=_File).decoder
    except msgspec.ValidationError:
        return WindowDecoding(tokenizer)
    steps = (decoder.decoders or [decoder]) if decoder is not None else []
    match steps:
        case [_Step(type="ByteLevel")]:
            return _table(tokenizer, _byte_level_bytes, strip_first=0)
        case [
            _Step(type="Replace", pattern={"String": "\u2581"}, content=" "),
            _Step(type="ByteFallback"),
            _Step(type="Fuse"),
            *rest,
        ]:
            match rest:
                case []:
                    return _table(tokenizer, _sentencepiece_bytes, strip_first=0)
                case [_Step(type="Strip", content=" ", start=start, stop=0)]:
                    return _table(tokenizer, _sentencepiece_bytes, strip_first=start)
    return WindowDecoding(tokenizer)


def _table(tokenizer: Tokenizer, to_bytes: Callable[[str], bytes], strip_first: int) -> PieceTable:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    pieces: list[str | bytes] = [""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        pieces[token_id] = _whole(to_bytes(token))
    visible = pieces.copy()
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        if added.special:
            visible[token_id] = ""
    return PieceTable(pieces, visible, strip_first)


def _whole(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _byte_level_bytes(token: str) -> bytes:
    """Return a token's bytes. As in the decoder, a foreign character makes it plain text."""
    try:
        return bytes(_BYTE_OF_CHARACTER[char] for char in token)
    except KeyError:
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each of the 256 characters of byte-level BPE (GPT-2's mapping)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF_CHARACTER = _byte_alphabet()
