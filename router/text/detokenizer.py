"""The text of one choice, token by token, cut at its first stop string.

The deltas join to the text of all tokens up to the first stop, for any grouping of tokens into
pushes. The decoder of almost every model maps each token to bytes and joins them: byte-level BPE
(Llama 3, Qwen, DeepSeek) and SentencePiece with byte fallback (Llama 2, Mistral, Gemma). For these
a table is made once, and a token costs a look-up. Decoders of whole characters use the library's
own stream, and any other decodes a short window of tokens per token.
"""

import codecs
import json
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from baton.protocol.messages import FinishReason
from baton.protocol.sampling import SamplingParams
from baton.router.outputs import CompletionOutput, StopReason

REPLACEMENT = "\ufffd"
# A character has at most four bytes, and a token has at least one.
_TOKENS_OF_CONTEXT = 8


class Detokenizer:
    """The state of the text of the choice with number `index`."""

    __slots__ = ("_index", "_is_stopped", "_num_tokens", "_params", "_stops", "_stream")

    def __init__(
        self, index: int, stream: "TextStream", params: SamplingParams
    ) -> None:
        self._index = index
        self._stream = stream
        self._params = params
        stops = params.stop_strings
        self._stops = StopStrings(stops) if stops else None
        self._num_tokens = 0
        self._is_stopped = False

    def spell(self, token_id: int) -> tuple[str, bytes]:
        """Return the text of a token, and the bytes that it adds to a response."""
        return self._stream.spell(token_id)

    @property
    def num_reasoning_tokens(self) -> int:
        """Return how many of the tokens so far are reasoning, which only a parser knows."""
        return 0

    def push(
        self, token_ids: list[int], final: FinishReason | None = None
    ) -> CompletionOutput | None:
        """Return the text of `token_ids`, or None after a stop string. `final` says why they end.

        "stop" means that the last token is the model's end or one of `stop_token_ids`. That token
        is counted and reported, but has no text unless the request asks to include stops.
        """
        if final is None and self._stops is None and len(token_ids) == 1:
            return CompletionOutput(
                self._index, self._stream.feed(token_ids[0]), token_ids
            )
        if self._is_stopped:
            return None
        num_visible = len(token_ids)
        stop_reason: StopReason = (
            "repetition_detected" if final == "repetition" else None
        )
        if final == "stop" and token_ids:
            if token_ids[-1] in (self._params.stop_token_ids or ()):
                stop_reason = token_ids[-1]
            if not self._params.include_stop_str_in_output:
                num_visible -= 1
        if self._stops is not None:
            return self._find_stop(
                self._stops, token_ids, num_visible, final, stop_reason
            )
        text = "".join(
            [self._stream.feed(token_id) for token_id in token_ids[:num_visible]]
        )
        if final is not None:
            text += self._stream.flush()
        return CompletionOutput(self._index, text, token_ids, None, final, stop_reason)

    def _find_stop(
        self,
        stops: "StopStrings",
        token_ids: list[int],
        num_visible: int,
        final: FinishReason | None,
        stop_reason: StopReason,
    ) -> CompletionOutput:
        """Do the same token by token: tokens after a stop string are neither kept nor counted."""
        shown = []
        for index in range(num_visible):
            self._num_tokens += 1
            shown.append(self._show(stops, self._stream.feed(token_ids[index])))
            if stops.matched is not None:
                token_ids = token_ids[: index + 1]
                break
        else:
            if final is not None:
                shown.append(self._show(stops, self._stream.flush()))
                if stops.matched is None:
                    shown.append(stops.flush())
        if stops.matched is not None:
            self._is_stopped = True
            final = "stop"
            stop_reason = stops.matched
        return CompletionOutput(
            self._index, "".join(shown), token_ids, None, final, stop_reason
        )

    def _show(self, stops: "StopStrings", text: str) -> str:
        return stops.push(
            text,
            # min_tokens delays stop strings just as it delays the model's own end.
            may_match=self._num_tokens >= self._params.min_tokens,
            include_match=self._params.include_stop_str_in_output,
        )


class StopStrings:
    """The stop strings of one choice, and the text that is held back because it may become one.

    The match that completes first wins, and of several that complete together the longest, so the
    result does not depend on how the text was cut into tokens.
    """

    __slots__ = ("_first_chars", "_held", "_stops", "matched")

    def __init__(self, stops: list[str]) -> None:
        self._stops = stops
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_match: bool, include_match: bool) -> str:
        """Return the text that may be shown now. A match sets `matched` and ends the text.

        Matches that complete while `may_match` is False do not count.
        """
        if not self._held and self._first_chars.isdisjoint(text):
            return text
        buffer = self._held + text
        if may_match and (match := self._first_match(buffer)) is not None:
            start, self.matched = match
            return buffer[: start + len(self.matched) if include_match else start]
        num_shown = len(buffer) - max(num_begun(buffer, stop) for stop in self._stops)
        self._held = buffer[num_shown:]
        return buffer[:num_shown]

    def flush(self) -> str:
        """Return the held-back text when the choice ends without a stop string."""
        held = self._held
        self._held = ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        """Return the start of the first match that ends in new text, and the match."""
        num_held = len(self._held)
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := buffer.find(stop, max(0, num_held - len(stop) + 1))) >= 0
        ]
        return min(found)[1:] if found else None


def num_begun(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) - start if start >= 0 else 0


class TokenTable(msgspec.Struct, frozen=True):
    """The text of each token id, or its bytes where these are not whole characters.

    `strip_first` is the number of spaces to drop from the first visible text of a sequence.
    """

    texts: list[str | bytes]
    visible_texts: list[str | bytes]
    strip_first: int = 0

    def spell(self, skip_special: bool, token_id: int) -> tuple[str, bytes]:
        """Return the text of a token, and the bytes that it adds to a response."""
        if token_id >= len(self.texts):
            return "", b""
        text = self.texts[token_id]
        visible = self.visible_texts[token_id] if skip_special else text
        return (
            text.decode(errors="replace") if isinstance(text, bytes) else text,
            visible if isinstance(visible, bytes) else visible.encode(),
        )

    def stream(
        self, prompt_token_ids: Sequence[int], skip_special: bool
    ) -> "TableStream":
        return TableStream(self, prompt_token_ids, skip_special)


class TableStream:
    """The fast way, which looks up each token in a list."""

    __slots__ = ("_borrowed", "_pending", "_plain", "_strip", "_texts", "spell")

    def __init__(
        self, table: TokenTable, prompt_token_ids: Sequence[int], skip_special: bool
    ) -> None:
        self.spell = partial(table.spell, skip_special)
        self._texts = table.visible_texts if skip_special else table.texts
        self._strip = table.strip_first
        self._pending = self._open_character(prompt_token_ids)
        # A character that the prompt began is part of the output only if the output completes it.
        self._borrowed = bool(self._pending)
        if self._strip and any(
            self._text_of(token_id) for token_id in prompt_token_ids
        ):
            self._strip = 0
        self._plain = not (self._pending or self._strip)

    def feed(self, token_id: int) -> str:
        try:
            text = self._texts[token_id]
        except IndexError:  # a padding row of the model's vocabulary
            return ""
        if self._plain and type(text) is str:
            return text
        return self._join(
            text if isinstance(text, bytes) else text.encode(), final=False
        )

    def flush(self) -> str:
        return self._join(b"", final=True)

    def _text_of(self, token_id: int) -> str | bytes:
        return self._texts[token_id] if token_id < len(self._texts) else b""

    def _join(self, data: bytes, *, final: bool) -> str:
        data = self._pending + data
        text, length = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[length:]
        if text and self._borrowed:
            self._borrowed = False
            text = text.removeprefix(REPLACEMENT)
        if text and self._strip:
            spaces = len(text) - len(text.lstrip(" "))
            text = text[min(spaces, self._strip) :]
            self._strip = 0
        self._plain = not (self._pending or self._strip)
        return text

    def _open_character(self, prompt_token_ids: Sequence[int]) -> bytes:
        """Return the first bytes of a character that the prompt begins and does not complete."""
        last = self._text_of(prompt_token_ids[-1]) if prompt_token_ids else ""
        if last and isinstance(last, str):
            return b""
        data = b""
        for token_id in prompt_token_ids[-_TOKENS_OF_CONTEXT:]:
            text = self._text_of(token_id)
            data += text if isinstance(text, bytes) else text.encode()
        return data[codecs.utf_8_decode(data, "replace", False)[1] :]


class WindowDecoding(msgspec.Struct, frozen=True):
    """The slow way, for decoders that no table describes."""

    tokenizer: Tokenizer
    has_whole_characters: bool  # in each token

    def spell(self, skip_special: bool, token_id: int) -> tuple[str, bytes]:
        """Return the text of a token, and the bytes that it adds to a response."""
        text = self.tokenizer.decode([token_id], skip_special_tokens=False)
        visible = self.tokenizer.decode([token_id], skip_special_tokens=skip_special)
        if visible == REPLACEMENT:
            byte = _byte_fallback(self.tokenizer.id_to_token(token_id) or "")
            return text, byte or visible.encode()
        return text, visible.encode()

    def stream(
        self, prompt_token_ids: Sequence[int], skip_special: bool
    ) -> "TextStream":
        if self.has_whole_characters:
            return LibraryStream(self, prompt_token_ids, skip_special)
        return WindowStream(self, prompt_token_ids, skip_special)


class LibraryStream:
    """The stream of the tokenizers library, which may lose text where characters are broken."""

    __slots__ = ("_stream", "_tokenizer", "spell")

    def __init__(
        self,
        decoding: WindowDecoding,
        prompt_token_ids: Sequence[int],
        skip_special: bool,
    ) -> None:
        self.spell = partial(decoding.spell, skip_special)
        self._tokenizer = decoding.tokenizer
        context = list(prompt_token_ids[-_TOKENS_OF_CONTEXT:])
        self._stream = DecodeStream(context, skip_special)

    def feed(self, token_id: int) -> str:
        return self._stream.step(self._tokenizer, token_id) or ""

    def flush(self) -> str:
        return ""  # no token waits for the rest of a character


class WindowStream:
    """Decodes a window of tokens with and without the new ones. The difference is new text."""

    __slots__ = (
        "_num_shown",
        "_shown",
        "_skip_special",
        "_tokenizer",
        "_window",
        "spell",
    )

    def __init__(
        self,
        decoding: WindowDecoding,
        prompt_token_ids: Sequence[int],
        skip_special: bool,
    ) -> None:
        self.spell = partial(decoding.spell, skip_special)
        self._tokenizer = decoding.tokenizer
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
        # Tokens without text, mostly special ones, must not push out context.
        elif self._shown:
            del self._window[self._num_shown :]
        # Before the first text they are the context, because a leading space may have no text.
        else:
            del self._window[:-_TOKENS_OF_CONTEXT]
        self._num_shown = len(self._window)
        return new_text

    def _decode(self) -> str:
        return self._tokenizer.decode(
            self._window, skip_special_tokens=self._skip_special
        )


Decoding = TokenTable | WindowDecoding
TextStream = TableStream | LibraryStream | WindowStream


def decoding_of(tokenizer: Tokenizer) -> Decoding:
    """Return a table if the decoder is known to be one."""
    decoder = tokenizer.decoder
    state = {} if decoder is None else json.loads(decoder.__getstate__())
    match state.get("decoders") or [state]:
        case [{"type": "ByteLevel"}]:
            return _table(tokenizer, _byte_level_bytes, strip_first=0)
        case [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *rest,
        ]:
            match rest:
                case []:
                    return _table(tokenizer, _sentencepiece_bytes, strip_first=0)
                case [
                    {"type": "Strip", "content": " ", "start": int(start), "stop": 0}
                ]:
                    return _table(tokenizer, _sentencepiece_bytes, strip_first=start)
    return WindowDecoding(
        tokenizer, _has_whole_characters(tokenizer, state.get("type"))
    )


def _has_whole_characters(tokenizer: Tokenizer, kind: str | None) -> bool:
    """Return whether no token of this kind of decoder looks like a part of a character."""
    tokens = tokenizer.get_vocab(with_added_tokens=True)
    return kind in ("Metaspace", "WordPiece") and not any(
        REPLACEMENT in token for token in tokens
    )


def _table(
    tokenizer: Tokenizer, to_bytes: Callable[[str], bytes], strip_first: int
) -> TokenTable:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    texts: list[str | bytes] = [""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        texts[token_id] = _whole(to_bytes(token))
    visible = texts.copy()
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        if added.special:
            visible[token_id] = ""
    return TokenTable(texts, visible, strip_first)


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
    return _byte_fallback(token) or token.replace("\u2581", " ").encode()


def _byte_fallback(token: str) -> bytes:
    """Return the byte that a token like `<0xE6>` stands for; empty for any other token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return b""


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each of the 256 characters of byte-level BPE (GPT-2's mapping)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF_CHARACTER = _byte_alphabet()
