"""The caller's view of one request: deltas of every choice, then exactly one end.

Each delta goes straight to the caller's sink, so a token costs no task switch.

A client may have a part of a response already, when it sends its request again to go on with it.
The tokens of a request follow from its prompt, its parameters and its seed. So a router that has
never seen the response computes it again, passes over what the client has, and compares a digest.
"""

import asyncio
import struct
import time
import zlib
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from copy import copy
from itertools import islice

import msgspec

from baton.protocol.errors import BatonError, Cancelled, RequestError
from baton.protocol.messages import FinishReason, TokenLogprobs
from baton.protocol.sampling import SamplingParams
from baton.router.outputs import (
    CompletionOutput,
    Logprob,
    Merged,
    PromptScores,
    RequestMetrics,
    RequestOutput,
    Spell,
)
from baton.router.text.detokenizer import Detokenizer

Sink = Callable[[CompletionOutput], None]


def digest_of(token_ids: Sequence[int], digest: int = 0) -> int:
    """Return the digest, of 32 bits, of the tokens that have `digest` and of these after them."""
    return zlib.crc32(array("I", token_ids), digest)


class ReceivedPart(msgspec.Struct, frozen=True):
    """What the client has of one choice, and how much of that has been computed again."""

    num_tokens: int = 0
    has_begun: bool = False  # it has the event that opens the choice
    has_ended: bool = False  # it has the event with the finish reason
    digest: int = 0  # of its tokens, by `digest_of`
    num_again: int = 0
    digest_again: int = 0

    @property
    def is_passed(self) -> bool:
        """Return whether the client has none of the tokens that follow."""
        return self.num_again == self.num_tokens

    def passing(self, token_ids: list[int], *, is_end: bool) -> "ReceivedPart":
        """Return the part once these tokens, too, have been computed again.

        Those behind its own are not counted. `is_end` says that no token follows. Raises
        `RequestError` if the client has other tokens.
        """
        again = token_ids[: self.num_tokens - self.num_again]
        num_again = self.num_again + len(again)
        digest = digest_of(again, self.digest_again)
        is_passed = num_again == self.num_tokens
        if (is_passed and digest != self.digest) or (is_end and not is_passed):
            raise changed()
        return msgspec.structs.replace(self, num_again=num_again, digest_again=digest)


def changed() -> RequestError:
    """Return the error of a client whose tokens were not computed again."""
    text = (
        "the response has other tokens now than its client has, as the request, the model or the "
        "kind of node has changed: send the request without Last-Event-ID"
    )
    return RequestError(text, code="stream_changed", http_status=409)


class RequestStream:
    """The caller's end of one request: read `outputs`, or give a sink and wait for the end.

    With a sink, call `send_to` once, then wait with `changed` or `ended`, which raise the
    `BatonError` with which the request failed, once all deltas were handed out. Who must not wait
    uses `call_at_end`, then `raise_error`.
    """

    __slots__ = (
        "_arrival_s",
        "_at_end",
        "_change",
        "_detokenizers",
        "_early",
        "_end",
        "_error",
        "_gathered",
        "_has_changed",
        "_interval",
        "_on_close",
        "_packed_prompt",
        "_prompt_logprobs",
        "_prompt_rows",
        "_prompt_token_ids",
        "_received",
        "_sink",
        "finished",
        "metrics",
        "params",
        "pooled",
        "request_id",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        detokenizers: Sequence[Detokenizer],
        on_close: Callable[[], None] = lambda: None,
        received: Sequence[ReceivedPart] = (),
    ) -> None:
        """`received` is what the caller has already.

        `on_close` is called once if the request is given up before its end.
        """
        self.request_id = request_id
        # The responses to 500 long prompts may end at once, and to free two million integers would
        # hold the event loop for a tenth of a second.
        self._packed_prompt = array("I", prompt_token_ids)
        self._prompt_token_ids: list[int] | None = None  # for `output`
        self.params = params
        self.metrics = RequestMetrics(
            arrival_time=time.time(), num_prompt_tokens=len(prompt_token_ids)
        )
        self.finished = False  # by tokens, by an error or by a cancel
        self._detokenizers = detokenizers
        self._prompt_logprobs: PromptScores | None = None
        self._prompt_rows = b""  # of `PromptLogprobs`, before the first delta
        self.pooled = b""  # of `Pooled`, at the end, if no tokens are wanted
        self._received = {
            choice: part
            for choice, part in enumerate(received)
            if part.num_tokens or part.has_ended
        }
        self._interval = params.stream_interval or 1
        # Of each choice that has begun, the deltas that are handed out together.
        self._gathered: dict[int, Merged] = {}
        self._arrival_s = time.monotonic()
        self._on_close = on_close
        self._early: list[CompletionOutput] = []
        self._sink: Sink = self._early.append
        self._has_changed = False
        # A copy is raised, because the frames that an exception has passed refer to this stream.
        self._error: BatonError | None = None
        self._change: asyncio.Future[None] | None = None
        self._end: asyncio.Future[None] | None = None
        self._at_end: Callable[[RequestStream], None] | None = None

    # --- the caller's side ------------------------------------------------------------------

    async def outputs(
        self, prompt: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs in the form of `output_kind`, which show the prompt as `prompt`.

        Leaving early gives up the request.
        """
        kind = self.params.output_kind
        merged = Merged(0 if kind == "delta" else self.params.n)
        self.send_to(merged.add)
        try:
            if kind == "final":
                await self.ended()
                yield self.output(merged.outputs(), prompt)
                return
            while await self.changed():
                deltas = merged.take() if kind == "delta" else merged.outputs()
                yield self.output(deltas, prompt)
        finally:
            self.close()

    def send_to(self, sink: Sink) -> None:
        """Pass every delta to `sink` when it arrives, beginning with those that already have.

        `sink` must neither block nor raise. An error in it ends this request alone.
        """
        for delta in self._early:
            sink(delta)
        self._early.clear()
        self._sink = sink

    async def changed(self) -> bool:
        """Wait for a delta since the last call. Return False at the end of the request."""
        while not self._has_changed:
            self.raise_error()
            if self.finished:
                return False
            self._change = asyncio.get_running_loop().create_future()
            try:
                await self._change
            finally:
                self._change = None
        self._has_changed = False
        return True

    async def ended(self) -> None:
        """Wait for the end of the request."""
        while not self.finished:
            # This wait needs no deadline of its own: the lifecycle ends every request within one.
            self._end = asyncio.get_running_loop().create_future()
            await self._end
        self._has_changed = False
        self.raise_error()

    def call_at_end(self, callback: "Callable[[RequestStream], None]") -> None:
        """Let the event loop call `callback` once the request has ended, or soon if it has."""
        if self.finished:
            asyncio.get_running_loop().call_soon(callback, self)
        else:
            self._at_end = callback

    @property
    def prompt_token_ids(self) -> list[int]:
        """Return the prompt in a list of the caller's own."""
        return self._packed_prompt.tolist()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def raise_error(self) -> None:
        """Raise the error with which the request failed, if it did."""
        if self._error is not None:
            raise copy(self._error)

    @property
    def num_prompt_logprobs(self) -> int:
        """Return how many the caller gets, those of likeliest tokens included."""
        num_top = self.params.prompt_logprobs
        return 0 if num_top is None else len(self._packed_prompt) * (1 + num_top)

    def prompt_logprobs(self) -> PromptScores | None:
        """Return those of each token, None for the first; None before the first delta.

        It takes a second for the largest prompts, and any thread may call it.
        """
        num_top = self.params.prompt_logprobs
        if num_top is None or not self.metrics.num_output_tokens:
            return None
        pairs = struct.iter_unpack("<if", self._prompt_rows)
        found: PromptScores = [None]
        for token_id in self._packed_prompt[1:]:
            rank, logprob = next(pairs)
            one = TokenLogprobs(logprob, rank, tuple(islice(pairs, num_top)))
            found.append(_shown(token_id, one, self._detokenizers[0].spell))
        return found

    def output(
        self, outputs: list[CompletionOutput], prompt: str | None = None
    ) -> RequestOutput:
        if self._prompt_logprobs is None:  # all outputs share them
            self._prompt_logprobs = self.prompt_logprobs()
        if self._prompt_token_ids is None:
            self._prompt_token_ids = self.prompt_token_ids
        return RequestOutput(
            request_id=self.request_id,
            prompt=prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=outputs,
            finished=self.finished and self._error is None and not self._has_changed,
            metrics=self.metrics,
            prompt_logprobs=self._prompt_logprobs,
        )

    def close(self) -> None:
        """Give up the request if it is not finished. It may be called at any time, and again."""
        # The sink may hold the whole response, which holds this stream.
        self._sink = _dropped
        if not self.finished:
            self._fail(Cancelled("the request was cancelled (client)"))

    # --- the router's side ------------------------------------------------------------------

    def push_prompt(self, rows: bytes) -> None:
        """Pass on the log probabilities of the prompt, as `PromptLogprobs` has them."""
        self._prompt_rows = rows

    def push_pooled(self, numbers: bytes) -> None:
        """Pass on what was made of a prompt of which no tokens are wanted."""
        self.pooled = numbers

    def push(
        self,
        choice: int,
        token_ids: list[int],
        finish_reason: FinishReason | None,
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> bool:
        """Pass on new tokens. Return True if a stop string ends the choice early."""
        if self.finished:
            return False
        if self._received and choice in self._received:
            num_passed = self._pass_over(
                choice, token_ids, is_end=finish_reason is not None
            )
            if num_passed is None:
                return finish_reason is None and not self.finished
            token_ids = token_ids[num_passed:]
            if not token_ids and finish_reason is None:
                return False
        delta = self._detokenizers[choice].push(token_ids, finish_reason)
        if delta is None:
            return False
        if logprobs:  # a stop string may have dropped the last tokens
            pairs = zip(delta.token_ids, logprobs, strict=False)
            spell = self._detokenizers[choice].spell
            delta.logprobs = [_shown(token_id, one, spell) for token_id, one in pairs]
        metrics = self.metrics
        if metrics.time_to_first_token_s is None:
            metrics.time_to_first_token_s = time.monotonic() - self._arrival_s
        metrics.num_output_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            metrics.finish_reasons.append(delta.finish_reason)
        is_stopped = finish_reason is None and delta.finish_reason is not None
        if self._interval > 1:
            gathered = self._gather(delta)
            if gathered is None:
                return False
            delta = gathered
        self._sink(delta)
        self._has_changed = True
        if self._change is not None:
            _wake(self._change)
        return is_stopped

    def _gather(self, delta: CompletionOutput) -> CompletionOutput | None:
        """Return a delta with those that waited for it; None if it waits for others itself.

        The first one of a choice waits for none. What still waits when the request fails is not
        handed out.
        """
        waiting = self._gathered.get(delta.index)
        if waiting is None:
            self._gathered[delta.index] = Merged()
            return delta
        waiting.add(delta)
        if delta.finish_reason is None and waiting.num_tokens < self._interval:
            return None
        (merged,) = waiting.take()
        return merged

    def _pass_over(
        self, choice: int, token_ids: list[int], *, is_end: bool
    ) -> int | None:
        """Take tokens that the caller may have already, and return how many of them it has.

        Return None if nothing of the choice is to follow: the caller has its end, or has begun with
        other tokens, which ends this request.
        """
        before = self._received[choice]
        try:
            part = before.passing(token_ids, is_end=is_end)
        except RequestError as error:
            self._fail(error)
            return None
        num_passed = part.num_again - before.num_again
        self._received[choice] = part
        if num_passed:
            delta = self._detokenizers[choice].push(token_ids[:num_passed])
            self.metrics.received(num_passed)
            is_stopped = delta is not None and delta.finish_reason is not None
            if is_stopped and not part.has_ended:
                self._fail(changed())
                return None
        if not part.is_passed:
            return num_passed
        if part.has_ended:
            return None
        del self._received[choice]
        return num_passed

    @property
    def tokens_per_choice(self) -> float:
        return self.metrics.num_output_tokens / self.params.n

    def _fail(self, error: BatonError) -> None:
        """End this request with an error that is found here, and let the router give it up."""
        self.finish(error)
        self._on_close()

    def finish(self, error: BatonError | None = None) -> None:
        """End this request. Only the first call counts."""
        if self.finished:
            return
        self.finished = True
        self._error = error
        self.metrics.e2e_s = time.monotonic() - self._arrival_s
        self.metrics.num_reasoning_tokens = sum(
            one.num_reasoning_tokens for one in self._detokenizers
        )
        _wake(self._change)
        _wake(self._end)
        if (callback := self._at_end) is not None:
            self._at_end = None
            asyncio.get_running_loop().call_soon(callback, self)


def _shown(token_id: int, one: TokenLogprobs, spell: Spell) -> dict[int, Logprob]:
    """Return the log probabilities of a token and of the likeliest, in that order."""
    shown = {token_id: Logprob(one.logprob, one.rank, *spell(token_id))}
    for rank, (other, logprob) in enumerate(one.top, 1):
        shown.setdefault(other, Logprob(logprob, rank, *spell(other)))
    return shown


def _dropped(delta: CompletionOutput) -> None:
    """Drop a delta that arrived after the caller left."""


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
