"""Turn the tokens of one choice into text as they arrive, and cut it at the first stop string.

`Text.detokenizer` makes one per choice, and the request's stream pushes the choice's tokens. The
deltas join to the text of all tokens up to the first stop, for any grouping of tokens into pushes.
It never blocks, and costs about a microsecond per token.
"""

import codecs
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from tokenizers import Tokenizer

from baton.protocol.messages import FinishReason
from baton.protocol.sampling import SamplingParams
from baton.router.outputs import CompletionOutput, StopReason

# An automaton takes about 110 bytes per character, so all cached ones take 2 MB at most.
KEPT_CHARS = 16 * 1024
_CODE_POINTS = 0x110000


class StopAutomaton:
    """The automaton of a set of stop strings. It never changes, and node 0 is its root."""

    __slots__ = ("_following", "_is_inner", "depth", "fallback", "first_chars", "match_length")

    def __init__(self, stops: tuple[str, ...]) -> None:
        # One table serves all nodes, because a dict per node would take four times the memory.
        self._following: dict[int, int] = {}
        self._is_inner = bytearray(1)  # whether a node has children
        self.depth = array("I", [0])
        # The length of the longest stop string that ends at a node; 0 if none does.
        self.match_length = array("I", [0])
        self.first_chars = frozenset(stop[0] for stop in stops)
        for stop in stops:
            self._insert(stop)
        # The longest proper suffix of a node's text that is itself a prefix of a stop string.
        self.fallback = array("I", bytes(4 * len(self.depth)))
        self._link()

    def step(self, node: int, char: str) -> int:
        """Return the node of the longest suffix, with `char`, that can become a stop string."""
        code = ord(char)
        following = self._following
        while (child := following.get(node * _CODE_POINTS + code)) is None and node:
            node = self.fallback[node]
        return child or 0

    def unfinished(self, node: int) -> int:
        """Return `node`, or its longest suffix that can still grow into a stop string."""
        while node and not self._is_inner[node]:
            node = self.fallback[node]
        return node

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            edge = node * _CODE_POINTS + ord(char)
            child = self._following.get(edge)
            if child is None:
                child = self._following[edge] = len(self.depth)
                self._is_inner[node] = True
                self._is_inner.append(False)
                self.depth.append(self.depth[node] + 1)
                self.match_length.append(0)
            node = child
        self.match_length[node] = len(stop)

    def _link(self) -> None:
        edges: list[list[tuple[str, int]]] = [[] for _ in self.depth]
        for edge, child in self._following.items():
            node, code = divmod(edge, _CODE_POINTS)
            edges[node].append((chr(code), child))
        queue = deque(child for _, child in edges[0])
        while queue:
            node = queue.popleft()
            for char, child in edges[node]:
                self.fallback[child] = self.step(self.fallback[node], char)
                queue.append(child)
            if not self.match_length[node]:
                self.match_length[node] = self.match_length[self.fallback[node]]


class AutomatonCache:
    """The automata that were used last. Requests with the same stop strings share one.

    It is bounded by characters, because clients choose the length of stop strings.
    """

    def __init__(self, max_chars: int = KEPT_CHARS) -> None:
        self._max_chars = max_chars
        self._kept: OrderedDict[tuple[str, ...], StopAutomaton] = OrderedDict()
        self.num_chars = 0  # of the stop strings of all cached automata

    def of(self, stops: tuple[str, ...]) -> StopAutomaton:
        automaton = self._kept.get(stops)
        if automaton is not None:
            self._kept.move_to_end(stops)
            return automaton
        automaton = self._kept[stops] = StopAutomaton(stops)
        self.num_chars += _num_chars(stops)
        while self.num_chars > self._max_chars:
            dropped, _ = self._kept.popitem(last=False)
            self.num_chars -= _num_chars(dropped)
        return automaton


def _num_chars(stops: tuple[str, ...]) -> int:
    return sum(len(stop) for stop in stops)


class StopScanner:
    """The state of one choice: its place in the automaton, and its held-back text."""

    __slots__ = ("_automaton", "_held", "_node", "matched")

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._node = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_match: bool, include_match: bool) -> str:
        """Return the text that may be shown now. A match sets `matched` and ends the text.

        Matches that complete while `may_match` is False do not count.
        """
        automaton, node = self._automaton, self._node
        if not node and automaton.first_chars.isdisjoint(text):
            return text
        buffer = self._held + text
        for index, char in enumerate(text, start=len(self._held) + 1):
            node = automaton.step(node, char)
            length = automaton.match_length[node]
            if length and may_match:
                self.matched = buffer[index - length : index]
                return buffer[: index if include_match else index - length]
        self._node = automaton.unfinished(node)
        shown = len(buffer) - automaton.depth[self._node]
        self._held = buffer[shown:]
        return buffer[:shown]

    def flush(self) -> str:
        """Return the held-back text when the choice ends without a stop string."""
        held, self._held, self._node = self._held, "", 0
        return held


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


class Detokenizer:
    """The state of the text of the choice with number `index`."""

    __slots__ = ("_index", "_is_stopped", "_num_tokens", "_params", "_scanner", "_stream")

    def __init__(
        self, index: int, stream: TextStream, params: SamplingParams, stops: StopAutomaton | None
    ) -> None:
        self._index = index
        self._stream = stream
        self._params = params
        self._scanner = StopScanner(stops) if stops is not None else None
        self._num_tokens = 0
        self._is_stopped = False

    def push(
        self, token_ids: list[int], final: FinishReason | None = None
    ) -> CompletionOutput | None:
        """Return the text of `token_ids`, or None after a stop string. `final` says why they end.

        "stop" means that the last token is the model's end or one of `stop_token_ids`. That token
        is counted and reported, but has no text unless the request asks to include stops.
        """
        if final is None and self._scanner is None and len(token_ids) == 1:
            return CompletionOutput(self._index, self._stream.feed(token_ids[0]), token_ids)
        if self._is_stopped:
            return None
        num_visible, stop_reason = len(token_ids), None
        if final == "stop" and token_ids:
            if token_ids[-1] in (self._params.stop_token_ids or ()):
                stop_reason = token_ids[-1]
            if not self._params.include_stop_str_in_output:
                num_visible -= 1
        if self._scanner is not None:
            return self._scan(self._scanner, token_ids, num_visible, final, stop_reason)
        text = "".join([self._stream.feed(token_id) for token_id in token_ids[:num_visible]])
        if final is not None:
            text += self._stream.flush()
        return CompletionOutput(self._index, text, token_ids, None, final, stop_reason)

    def _scan(
        self,
        scanner: StopScanner,
        token_ids: list[int],
        num_visible: int,
        final: FinishReason | None,
        stop_reason: StopReason,
    ) -> CompletionOutput:
        """Do the same token by token: tokens after a stop string are neither kept nor counted."""
        shown = []
        for index in range(num_visible):
            self._num_tokens += 1
            shown.append(self._show(scanner, self._stream.feed(token_ids[index])))
            if scanner.matched is not None:
                token_ids = token_ids[: index + 1]
                break
        else:
            if final is not None:
                shown.append(self._show(scanner, self._stream.flush()))
                if scanner.matched is None:
                    shown.append(scanner.flush())
        if scanner.matched is not None:
            self._is_stopped = True
            final, stop_reason = "stop", scanner.matched
        return CompletionOutput(self._index, "".join(shown), token_ids, None, final, stop_reason)

    def _show(self, scanner: StopScanner, text: str) -> str:
        return scanner.push(
            text,
            # min_tokens delays stop strings just as it delays the model's own end.
            may_match=self._num_tokens >= self._params.min_tokens,
            include_match=self._params.include_stop_str_in_output,
        )
