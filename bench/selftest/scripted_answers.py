"""The bytes of a scripted answer, and when each is due: OpenAI's API, faults included.

`scripted_server` asks for the parts of an answer and writes them. Written apart from the client's
parser and from the router's answers, so that no mistake of theirs can hide here. Pure: no sockets,
no clock.
"""

import msgspec

from baton.bench.selftest.scripts import MODEL, PIECE_GAP_MS, Chunk, Ending, Script, answer_ids

COMMENT = b": still here"
ERROR = {"message": "scripted failure", "type": "server_error", "param": None, "code": "scripted"}
STATUS_TEXTS = {200: "OK", 400: "Bad Request", 404: "Not Found", 429: "Too Many Requests"}

_encode = msgspec.json.Encoder().encode


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class Question(msgspec.Struct, frozen=True):
    """What the server reads of a request body."""

    model: str = ""
    prompt: str | list[int] = ""
    messages: list[Message] = []
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    @property
    def num_tokens(self) -> int:
        """As many as are wanted."""
        return self.max_completion_tokens or self.max_tokens or 16

    @property
    def prompt_tokens(self) -> int:
        if isinstance(self.prompt, list):
            return len(self.prompt)
        texts = [self.prompt, *(message.content for message in self.messages)]
        return sum(len(text.split()) for text in texts)


class Part(msgspec.Struct, frozen=True):
    """Bytes of the body that are due together; no bytes are the headers alone."""

    at_ms: float
    data: bytes
    num_tokens: tuple[int, ...] = ()  # of each token-carrying event that ends in these bytes
    num_idle: int = 0  # so many bytes may come before the rest: no event ends in them


class Stream:
    """The parts of one streamed answer."""

    def __init__(self, script: Script, question: Question, number: int) -> None:
        self._script = script
        self._question = question
        self._is_chat = bool(question.messages)
        self._id = f"scripted-{number}"
        self._ids = answer_ids(number, script.num_tokens, script.damage)
        self._line_end = b"\r\n" if script.crlf else b"\n"

    def parts(self) -> list[Part]:
        """In the order of their moments; parts of one moment are one."""
        script = self._script
        found = [] if script.headers_ms is None else [Part(script.headers_ms, b"")]
        position = 0
        for chunk in script.chunks:
            event = self._event_of(chunk, position)
            position += chunk.num_tokens
            counted = (chunk.num_tokens,) if chunk.num_tokens else ()
            found += _pieces(event, chunk, counted)
        found += [Part(script.last_ms, data) for data in self._ending()]
        return _joined(found)

    def _event_of(self, chunk: Chunk, position: int) -> bytes:
        if chunk.comment:
            return COMMENT + 2 * self._line_end
        ids = self._ids[position : position + chunk.num_tokens]
        is_last = position + chunk.num_tokens == self._script.num_tokens
        finish = is_last and bool(ids) and self._script.ending is Ending.DONE
        return self._delta(ids, position + len(ids), finish and not self._script.own_finish)

    def _delta(self, ids: list[int], num_so_far: int, finish: bool) -> bytes:
        text = "".join(f" t{token}" for token in ids)
        choice: dict[str, object] = {"index": 0}
        if self._is_chat:
            opens = {"role": "assistant"} if num_so_far == 0 else {}
            choice["delta"] = {**opens, "content": text}
        else:
            choice["text"] = text
        choice["logprobs"] = None
        choice["finish_reason"] = "length" if finish else None
        if self._question.return_token_ids and self._script.token_ids:
            choice["token_ids"] = ids
        body = {**self._head(), "choices": [choice]}
        options = self._question.stream_options
        if options and options.continuous_usage_stats and self._script.usage == "continuous":
            body["usage"] = self._usage(num_so_far)
        return self._event(_encode(body))

    def _ending(self) -> list[bytes]:
        done = self._event(b"[DONE]")
        match self._script.ending:
            case Ending.DONE:
                return [*self._closing(), done]
            case Ending.NO_DONE:
                return self._closing()
            case Ending.HALF_EVENT:
                event = self._delta([], self._script.num_tokens, False)
                return [event[: len(event) // 2]]
            case Ending.ERROR:
                return [self._event(_encode({"error": ERROR}))]
            case Ending.ERROR_THEN_DONE:
                return [self._event(_encode({"error": ERROR})), done]
            case Ending.MALFORMED:
                return [self._event(b'{"choices":[{"index":0,'), done]
            case Ending.FOREIGN:
                return [self._event(_encode({"status": "busy"})), done]
            case Ending.CUT | Ending.RESET | Ending.SILENCE:
                return []

    def _closing(self) -> list[bytes]:
        """What a complete answer sends after its tokens."""
        found = []
        if self._script.own_finish:
            found.append(self._delta([], self._script.num_tokens, True))
        options = self._question.stream_options
        if options and options.include_usage and self._script.usage != "none":
            usage = self._usage(self._script.num_tokens + self._script.usage_error)
            found.append(self._event(_encode({**self._head(), "choices": [], "usage": usage})))
        return found

    def _head(self) -> dict[str, object]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {"id": self._id, "object": kind, "created": 1, "model": MODEL}

    def _usage(self, num_tokens: int) -> dict[str, object]:
        return usage_of(self._script, self._question, num_tokens)

    def _event(self, data: bytes) -> bytes:
        return b"data: " + data + 2 * self._line_end


def usage_of(script: Script, question: Question, num_tokens: int) -> dict[str, object]:
    return {
        "prompt_tokens": question.prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": question.prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": script.cached_tokens},
    }


def whole(script: Script, question: Question, number: int) -> bytes:
    """One JSON body, whether a stream was asked for or not."""
    ids = answer_ids(number, script.num_tokens, script.damage)
    text = "".join(f" t{token}" for token in ids)
    choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": "length"}
    if question.messages:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    if question.return_token_ids and script.token_ids:
        choice["token_ids"] = ids
    kind = "chat.completion" if question.messages else "text_completion"
    head = {"id": f"scripted-{number}", "object": kind, "created": 1, "model": MODEL}
    usage = usage_of(script, question, script.num_tokens + script.usage_error)
    return _encode({**head, "choices": [choice], "usage": usage})


def headers(status: int, fields: dict[str, str]) -> bytes:
    text = STATUS_TEXTS.get(status, "Scripted")
    lines = [f"HTTP/1.1 {status} {text}", "Server: scripted"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def _pieces(event: bytes, chunk: Chunk, counted: tuple[int, ...]) -> list[Part]:
    """Cut at even distances; the tokens count where the event is complete."""
    size = -(-len(event) // chunk.pieces)
    cuts = [event[begin : begin + size] for begin in range(0, len(event), size)]
    # The parser may take the first half of "\r\n" for a line end; when it came is then ambiguous.
    while len(cuts) > 1 and not cuts[-1].strip():
        cuts[-2:] = [cuts[-2] + cuts[-1]]
    last = len(cuts) - 1
    return [
        Part(
            at_ms=chunk.at_ms - PIECE_GAP_MS * (last - index),
            data=data,
            num_tokens=counted if index == last else (),
            num_idle=max(0, len(data) - 2),
        )
        for index, data in enumerate(cuts)
    ]


def _joined(parts: list[Part]) -> list[Part]:
    joined: list[Part] = []
    for part in parts:
        if joined and joined[-1].at_ms == part.at_ms and joined[-1].data:
            before = joined.pop()
            data, num_tokens = before.data + part.data, before.num_tokens + part.num_tokens
            joined.append(Part(part.at_ms, data, num_tokens, before.num_idle))
        else:
            joined.append(part)
    return joined
