"""What clients get in OpenAI's form: completions, chunks, log probabilities and usage.

The fixed part of a chunk is encoded only once per choice, because every token is a chunk.
"""

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate

import msgspec

from baton.protocol import VERSION
from baton.protocol.errors import BatonError
from baton.router.http.api.event_ids import EventIds, ResponseHead
from baton.router.http.api.schema import ParsedRequest
from baton.router.http.errors import error_of
from baton.router.outputs import (
    CompletionOutput,
    Logprob,
    Merged,
    PromptScores,
    RequestMetrics,
    Spell,
    ToolCall,
)
from baton.router.text.detokenizer import REPLACEMENT

# Tells a client that the response is complete.
_DONE = b"[DONE]"
LEAST_LOGPROB = -9999.0  # JSON has no infinity
Found = dict[int, Logprob]


class Columns(msgspec.Struct):
    """The log probabilities of a completion: an entry of each for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]  # None for the first token of a prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    def followed_by(self, other: "Columns") -> "Columns":
        return Columns(
            self.tokens + other.tokens,
            self.token_logprobs + other.token_logprobs,
            self.top_logprobs + other.top_logprobs,
            self.text_offset + other.text_offset,
        )


class ShownPrompt(msgspec.Struct, frozen=True):
    """One prompt in its response."""

    text: str | None = None  # before each choice, if it is echoed
    logprobs: Columns | None = None  # of the same
    num_chars: int = 0  # of the tokens that have them
    scores: msgspec.Raw | None = None  # the field `prompt_logprobs`
    token_ids: list[int] | None = None  # the field `prompt_token_ids`


class LogprobForms(msgspec.Struct, frozen=True):
    """Writes those of up to `num_top` likeliest tokens, with a token's id if it `names_ids`."""

    num_top: int
    names_ids: bool = False

    def of_chat(self, rows: Iterable[tuple[int, Found]]) -> dict[str, object]:
        content = [
            {
                **self._shown(token_id, found[token_id]),
                "top_logprobs": [
                    self._shown(other, one)
                    for other, one in found.items()
                    if one.rank <= self.num_top
                ],
            }
            for token_id, found in rows
        ]
        return {"content": content, "refusal": None}

    def columns(self, rows: Iterable[tuple[int, Found]], offset: int = 0) -> Columns:
        """Return the columns of tokens whose text begins at `offset`."""
        rows = list(rows)
        lengths = [len(found[token_id].decoded_token) for token_id, found in rows]
        return Columns(
            [self._key(token_id, found[token_id]) for token_id, found in rows],
            [_finite(found[token_id]) for token_id, found in rows],
            [self._top(token_id, found) for token_id, found in rows],
            list(accumulate(lengths, initial=offset))[:-1],
        )

    def of_echo(
        self, text: str, token_ids: list[int], scores: PromptScores, spell: Spell
    ) -> ShownPrompt:
        """Return a prompt with the columns of its tokens."""
        first = Logprob(0.0, 0, *spell(token_ids[0]))
        rows = [
            (one, found) for one, found in zip(token_ids, scores, strict=True) if found
        ]
        num_first = len(first.decoded_token)
        rest = self.columns(rows, num_first)
        columns = Columns(
            [self._key(token_ids[0], first)], [None], [None], [0]
        ).followed_by(rest)
        num_chars = num_first + sum(
            len(found[one].decoded_token) for one, found in rows
        )
        return ShownPrompt(text, columns, num_chars)

    def of_prompt(self, token_ids: list[int], scores: PromptScores) -> msgspec.Raw:
        """Return the field `prompt_logprobs` of vLLM, encoded."""
        shown = [
            {other: _row(one) for other, one in self._kept(token_id, found)}
            if found
            else None
            for token_id, found in zip(token_ids, scores, strict=True)
        ]
        return msgspec.Raw(msgspec.json.encode(shown))

    def _top(self, token_id: int, found: Found) -> dict[str, float]:
        top: dict[str, float] = {}
        for other, one in self._kept(token_id, found):
            name = self._key(other, one)  # tokens may share their text
            top[name] = max(top.get(name, LEAST_LOGPROB), _finite(one))
        return top

    def _kept(self, token_id: int, found: Found) -> Iterator[tuple[int, Logprob]]:
        for other, one in found.items():
            if other == token_id or one.rank <= self.num_top:
                yield other, one

    def _shown(self, token_id: int, one: Logprob) -> dict[str, object]:
        token = f"token_id:{token_id}" if self.names_ids else one.decoded_token
        return {"token": token, "logprob": _finite(one), "bytes": list(one.token_bytes)}

    def _key(self, token_id: int, one: Logprob) -> str:
        """Return a token's name in a completion, where it is a key.

        Parts of characters would share the name U+FFFD, so OpenAI's API spells their bytes.
        """
        if self.names_ids:
            return f"token_id:{token_id}"
        token = one.decoded_token
        if (
            REPLACEMENT not in token
            or not one.token_bytes
            or token.encode() == one.token_bytes
        ):
            return token
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in one.token_bytes)


def _row(one: Logprob) -> dict[str, object]:
    return {
        "logprob": _finite(one),
        "rank": one.rank,
        "decoded_token": one.decoded_token,
    }


def _finite(one: Logprob) -> float:
    return max(one.logprob, LEAST_LOGPROB)


_encode = msgspec.json.Encoder().encode


class ChunkTemplate:
    """Makes the chunks of one choice, each as an event without an id."""

    __slots__ = (
        "_after",
        "_before",
        "_end",
        "_num_chars",
        "_num_output_tokens",
        "_num_prompt_tokens",
        "_parsed",
        "_prompt_token_ids",
        "_response_id",
        "_running_end",
    )

    def __init__(
        self,
        parsed: ParsedRequest,
        response_id: str,
        before: bytes,
        after: bytes,
        end: bytes,
    ) -> None:
        """Put the text of a delta between `before` and `after`, and `end` behind the rest."""
        self._parsed = parsed
        self._response_id = response_id
        self._num_chars = 0  # of the tokens so far, for log probabilities
        self._before = b"data: " + before
        self._after = after
        self._end = end + b"\n\n"
        # What follows the text of a delta that has nothing else; None if chunks have more.
        self._running_end = None if parsed.token_ids else after + b"null" + self._end
        self._num_prompt_tokens: int | None = None  # given if each chunk has its usage
        self._num_output_tokens = 0
        self._prompt_token_ids: list[int] | None = None  # for the next chunk

    def count_usage(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Put the usage into each chunk from now on."""
        self._num_prompt_tokens = num_prompt_tokens
        self._num_output_tokens = num_output_tokens
        self._running_end = None

    def show_prompt(self, token_ids: list[int]) -> None:
        """Put the prompt's token ids into the next chunk."""
        self._prompt_token_ids = token_ids

    def echo(self, index: int, prompt: ShownPrompt) -> bytes:
        """Return the chunk of the prompt before its choice."""
        self._num_chars = prompt.num_chars
        return self._chunk(
            CompletionOutput(index, prompt.text or "", []), prompt.logprobs
        )

    def fill(self, delta: CompletionOutput) -> bytes:
        """Return the chunk of a delta."""
        if (  # almost every token
            self._running_end is not None
            and delta.finish_reason is None
            and delta.logprobs is None
            and not (delta.reasoning or delta.tool_calls)
        ):
            return self._before + _encode(delta.text) + self._running_end
        logprobs = None
        if delta.logprobs is not None:
            logprobs = _logprobs_of(self._parsed, delta, self._num_chars)
            pairs = zip(delta.token_ids, delta.logprobs, strict=True)
            self._num_chars += sum(
                len(found[token_id].decoded_token) for token_id, found in pairs
            )
        return self._chunk(delta, logprobs)

    def _chunk(
        self,
        delta: CompletionOutput,
        logprobs: Mapping[str, object] | Columns | None,
    ) -> bytes:
        """Return the chunk of a delta with all that belongs into it."""
        text = _encode(delta.text)
        if delta.reasoning or delta.tool_calls:
            # They come behind the content, in the same object.
            parts = _encode(_parts_of(self._response_id, delta, is_delta=True))
            text = _encode(delta.text or None) + b"," + parts[1:-1]
        after = self._after
        if logprobs is not None:
            after = after.replace(
                b'"logprobs":null', b'"logprobs":' + _encode(logprobs)
            )
        data = self._before + text + after + _encode(delta.finish_reason)
        if delta.finish_reason is not None:
            data += b',"stop_reason":' + _encode(delta.stop_reason)
        if self._parsed.token_ids:
            data += b',"token_ids":' + _encode(delta.token_ids)
        if self._prompt_token_ids is not None:
            data += b',"prompt_token_ids":' + _encode(self._prompt_token_ids)
            self._prompt_token_ids = None
        if self._num_prompt_tokens is None:
            return data + self._end
        self._num_output_tokens += len(delta.token_ids)
        usage = _counts(self._num_prompt_tokens, self._num_output_tokens)
        return data + b'}],"usage":' + _encode(usage) + b"}\n\n"


class ChunkEvents:
    """The encoder of completions and chats, whose events are chunks, and an end."""

    __slots__ = (
        "_has_usage",
        "_ids",
        "_num_prompt_tokens",
        "_parsed",
        "_prompts",
        "_response",
        "_templates",
        "_whole",
    )

    def __init__(
        self,
        parsed: ParsedRequest,
        response: ResponseHead,
        prompts: Sequence[ShownPrompt],  # to echo, or with token ids
        num_prompt_tokens: Sequence[int],  # per prompt
        *,
        has_ids: bool = False,
    ) -> None:
        """Begin where the client stands that resumes a stream, whose events have ids then."""
        num_choices = parsed.params.n * len(num_prompt_tokens)
        self._whole = None if parsed.is_streamed else Merged(num_choices)
        self._parsed = parsed
        self._response = response
        self._prompts = prompts
        self._num_prompt_tokens = num_prompt_tokens
        self._has_usage = response.tail != ""
        self._ids = EventIds(response) if has_ids else None
        self._templates: list[ChunkTemplate | None] = [None] * num_choices
        for index, one in enumerate(response.received):
            if one.has_begun:
                self._templates[index] = self._template(
                    index, num_prompt_tokens[0], one.num_tokens
                )

    def show(self, prompts: Sequence[ShownPrompt]) -> None:
        """Show the prompts with what nodes have computed of them."""
        self._prompts = prompts

    def shown_prompt(
        self,
        text: str | None,
        token_ids: list[int],
        scores: PromptScores,
        spell: Spell,
    ) -> ShownPrompt:
        """Return a prompt with its log probabilities, which is echoed if it has a text."""
        shown = ShownPrompt(text)
        if text is not None and self._parsed.params.logprobs is not None:
            shown = _forms_of(self._parsed).of_echo(text, token_ids, scores, spell)
        if self._parsed.token_ids:
            shown = msgspec.structs.replace(shown, token_ids=token_ids)
        if self._parsed.num_prompt_logprobs is None:
            return shown
        found = LogprobForms(self._parsed.num_prompt_logprobs).of_prompt(
            token_ids, scores
        )
        return msgspec.structs.replace(shown, scores=found)

    def take(self, delta: CompletionOutput) -> bytes:
        if self._whole is not None:
            self._whole.add(delta)
            return b""
        opening = b""
        template = self._templates[delta.index]
        if template is None:
            opening, template = self._begin(delta.index)
        event = template.fill(delta)
        if self._ids is not None:
            has_ended = delta.finish_reason is not None
            self._ids.advance(delta.index, delta.token_ids, has_ended=has_ended)
            event = self._id() + event
        return opening + event if opening else event

    def ending(self, metrics: Sequence[RequestMetrics]) -> bytes:
        closing = None if self._has_usage else self._closing(metrics)
        usage = b"" if closing is None else self._event(closing, b"/u")
        return usage + self._event(_DONE, b"/d")

    def failed(self, error: BatonError) -> bytes:
        return self._event(error_of(error))

    def whole(self, metrics: Sequence[RequestMetrics]) -> bytes:
        assert self._whole is not None, "a stream has no body"
        return self._body(self._whole.outputs(), metrics)

    def _begin(self, index: int) -> tuple[bytes, ChunkTemplate]:
        """Return the first event of a choice and what makes the others."""
        prompt = index // self._parsed.params.n
        opening = b""
        num_prompt_tokens = self._num_prompt_tokens[prompt]
        template = self._templates[index] = self._template(index, num_prompt_tokens)
        shown = self._prompts[prompt] if self._prompts else ShownPrompt()
        if self._parsed.is_chat:
            if self._ids is not None:
                self._ids.begin(index)
            opening = self._event(self._opening(index, num_prompt_tokens, shown))
            return opening, template
        if shown.token_ids is not None:
            template.show_prompt(shown.token_ids)
        if shown.text is not None:
            opening = self._id() + template.echo(index, shown)
        return opening, template

    def _event(self, data: bytes, tail: bytes = b"") -> bytes:
        """Return one event of `data` without line breaks. Its id, if it has one, ends in `tail`."""
        return self._id(tail) + b"data: %b\n\n" % data

    def _id(self, tail: bytes = b"") -> bytes:
        """Return the line of an event's id; nothing if events have none."""
        return b"" if self._ids is None else b"id: %b\n" % self._ids.current(tail)

    def _template(
        self, index: int, num_prompt_tokens: int, num_output_tokens: int = 0
    ) -> ChunkTemplate:
        """Return what makes the chunks of a choice that has brought some tokens already."""
        head = self._head(True) + b'[{"index":%d,' % index
        if self._parsed.is_chat:
            before = b'"delta":{"content":'
            after = b'},"logprobs":null,"finish_reason":'
        else:
            before = b'"text":'
            after = b',"logprobs":null,"finish_reason":'
        end = b"}]" + self._tail()
        template = ChunkTemplate(
            self._parsed, self._response.id, head + before, after, end
        )
        if self._parsed.continuous_usage:
            template.count_usage(num_prompt_tokens, num_output_tokens)
        return template

    def _opening(
        self, index: int, num_prompt_tokens: int, prompt: ShownPrompt
    ) -> bytes:
        """Return the first chunk of a choice of a chat."""
        delta = {"role": "assistant", "content": ""}
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
        }
        data = self._head(True) + b"[" + _encode(choice) + b"]"
        if prompt.token_ids is not None:
            data += b',"prompt_token_ids":' + _encode(prompt.token_ids)
        if self._parsed.continuous_usage:
            return data + b',"usage":' + _encode(_counts(num_prompt_tokens, 0)) + b"}"
        return data + self._tail()

    def _closing(self, metrics: Sequence[RequestMetrics]) -> bytes | None:
        """Return the last chunk, without choices; None if the client did not ask for it."""
        if not self._parsed.include_usage:
            return None
        return self._head(True) + b'[],"usage":' + self._usage(metrics) + b"}"

    def _body(
        self, outputs: list[CompletionOutput], metrics: Sequence[RequestMetrics]
    ) -> bytes:
        prompts = self._prompts
        per_prompt = len(outputs) // len(prompts or outputs)
        shown = [
            one
            for one in prompts or [ShownPrompt()] * len(outputs)
            for _ in range(per_prompt)
        ]
        pairs = zip(outputs, shown, strict=True)
        choices = b",".join(_encode(self._choice(output, one)) for output, one in pairs)
        data = self._head(False) + b"[" + choices + b"]"
        if self._parsed.is_chat and prompts and prompts[0].scores is not None:
            data += b',"prompt_logprobs":' + bytes(prompts[0].scores)
        if self._parsed.is_chat and prompts and prompts[0].token_ids is not None:
            data += b',"prompt_token_ids":' + _encode(prompts[0].token_ids)
        return data + b',"usage":' + self._usage(metrics) + b"}"

    def _choice(
        self, output: CompletionOutput, prompt: ShownPrompt
    ) -> dict[str, object]:
        choice: dict[str, object] = {"index": output.index}
        if self._parsed.is_chat:
            parts = _parts_of(self._response.id, output, is_delta=False)
            content = output.text or (None if parts else "")
            message = {
                "role": "assistant",
                "content": content,
                "refusal": None,
                **parts,
            }
            choice["message"] = message
        else:
            choice["text"] = (prompt.text or "") + output.text
        choice["logprobs"] = None
        if self._parsed.params.logprobs is not None:
            found = _logprobs_of(self._parsed, output, prompt.num_chars)
            if prompt.logprobs is not None and isinstance(found, Columns):
                found = prompt.logprobs.followed_by(found)
            choice["logprobs"] = found
        if prompt.scores is not None and not self._parsed.is_chat:
            choice["prompt_logprobs"] = prompt.scores
        if prompt.token_ids is not None and not self._parsed.is_chat:
            choice["prompt_token_ids"] = prompt.token_ids
        choice["finish_reason"] = output.finish_reason
        choice["stop_reason"] = output.stop_reason
        if self._parsed.token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def _head(self, is_chunk: bool) -> bytes:
        kind = "text_completion"
        if self._parsed.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        head = {
            "id": self._response.id,
            "object": kind,
            "created": self._response.created,
            "model": self._response.model,
        }
        if self._response.system_fingerprint:
            head["system_fingerprint"] = self._response.system_fingerprint
        return _encode(head)[:-1] + b',"choices":'

    def _usage(self, metrics: Sequence[RequestMetrics]) -> bytes:
        return _encode(usage_of(metrics, is_chat=self._parsed.is_chat))

    def _tail(self) -> bytes:
        return b',"usage":null}' if self._parsed.include_usage else b"}"


def _forms_of(parsed: ParsedRequest) -> LogprobForms:
    return LogprobForms(parsed.params.logprobs or 0, parsed.names_ids)


def _logprobs_of(
    parsed: ParsedRequest, output: CompletionOutput, offset: int
) -> dict[str, object] | Columns:
    """Return the log probabilities of an output whose text begins at `offset`."""
    rows = zip(output.token_ids, output.logprobs or (), strict=False)
    forms = _forms_of(parsed)
    return forms.of_chat(rows) if parsed.is_chat else forms.columns(rows, offset)


def _parts_of(
    response_id: str, output: CompletionOutput, *, is_delta: bool
) -> dict[str, object]:
    """Return the fields of a message besides its content: reasoning by both names, and calls."""
    parts: dict[str, object] = {}
    if output.reasoning:
        parts["reasoning"] = parts["reasoning_content"] = output.reasoning
    if output.tool_calls:
        parts["tool_calls"] = [
            _call_of(response_id, output.index, call, is_delta=is_delta)
            for call in output.tool_calls
        ]
    return parts


def _call_of(
    response_id: str, choice: int, call: ToolCall, *, is_delta: bool
) -> dict[str, object]:
    """Return a call, or more of its arguments."""
    index: dict[str, object] = {"index": call.index} if is_delta else {}
    if not call.name:
        return {**index, "function": {"arguments": call.arguments}}
    return {
        **index,
        "id": call_id(response_id, choice, call.index),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def call_id(response_id: str, choice: int, index: int) -> str:
    """Return the id of a tool call, which is the same when its stream is resumed.

    It has the nine letters and digits that the templates of Mistral's models ask for.
    """
    digest = hashlib.sha256(f"{response_id} {choice} {index}".encode()).digest()
    return base64.b32encode(digest)[:9].decode()


def _counts(num_prompt_tokens: int, num_output_tokens: int) -> dict[str, object]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }


@cache
def system_fingerprint(model_fingerprint: str) -> str:
    """Return a name of the model's weights and baton's version."""
    return (
        "fp_"
        + hashlib.sha256(f"{model_fingerprint} {VERSION}".encode()).hexdigest()[:10]
    )


def usage_of(
    metrics: Sequence[RequestMetrics], *, is_chat: bool = False
) -> dict[str, object]:
    """Return the usage of all prompts of a request. Some fields appear only if they apply."""
    num_prompt = sum(one.num_prompt_tokens for one in metrics)
    num_output = sum(one.num_output_tokens for one in metrics)
    cached = {"cached_tokens": sum(one.num_cached_tokens for one in metrics)}
    usage = {**_counts(num_prompt, num_output), "prompt_tokens_details": cached}
    details = {}
    num_reasoning = sum(one.num_reasoning_tokens for one in metrics)
    if num_reasoning or is_chat:
        details["reasoning_tokens"] = num_reasoning
    if num_drafts := sum(one.num_draft_tokens for one in metrics):
        num_accepted = sum(one.num_accepted_tokens for one in metrics)
        details["accepted_prediction_tokens"] = num_accepted
        details["rejected_prediction_tokens"] = num_drafts - num_accepted
    if details:
        usage["completion_tokens_details"] = details
    if (clamped := clamped_to(metrics)) is not None:
        usage["max_tokens_clamped"] = clamped
    if any(one.resumed for one in metrics):
        usage["resumed"] = True
    return usage


def clamped_to(metrics: Sequence[RequestMetrics]) -> int | None:
    """Return the least to which `max_tokens` was cut; None if it was cut for no prompt."""
    limits = [
        one.max_tokens_clamped for one in metrics if one.max_tokens_clamped is not None
    ]
    return min(limits, default=None)
