"""The results for a caller of the router: each choice's output, and how the request went."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from baton.protocol.errors import Failure
from baton.protocol.ids import NodeId
from baton.protocol.messages import FinishReason, StageTimes
from baton.router.core.request import Attempt, ServedBy

StopReason = str | int | None
# As clients get it; nodes only know `FinishReason`.
EndReason = FinishReason | Literal["tool_calls"]
# A stream may move on any number of times; the first attempt and the last ones are kept.
MAX_ATTEMPTS_KEPT = 256


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the model made. `arguments` is the text of a JSON object.

    In a delta, a call that an earlier one began has no name, and more of its arguments.
    """

    name: str
    arguments: str
    index: int = 0  # among the calls of its choice


def merged_calls(calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    """Return calls, of which the pieces follow one another, with each call's pieces joined."""
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    for call in calls:
        names.setdefault(call.index, call.name)
        arguments.setdefault(call.index, []).append(call.arguments)
    return tuple(
        ToolCall(names[index], "".join(arguments[index]), index) for index in names
    )


class Logprob(msgspec.Struct, frozen=True):
    """The log probability of a token before penalties and temperature. Rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str
    # What the token adds to the text: part of a character, or nothing if it is left out.
    token_bytes: bytes = b""


# Returns the text and the bytes of one token.
Spell = Callable[[int], tuple[str, bytes]]
# Of each token of a prompt, as `CompletionOutput.logprobs`; None for the first.
PromptScores = list[dict[int, Logprob] | None]


class CompletionOutput(msgspec.Struct):
    """One choice: all of it so far, or only the new part (in streams and with output kind `delta`).

    `token_ids` ends with the token that completed a stop string, if there is one. `stop_reason` is
    the stop string or stop token id that matched; None at an EOS token or at the length limit.
    `logprobs` has, for each token, its log probability and those of the likeliest ones, by token
    id; it is None unless the request asks for it. `reasoning` and `tool_calls` are apart from the
    text only in chats over HTTP.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: EndReason | None = None
    stop_reason: StopReason = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def cumulative_logprob(self) -> float | None:
        """Return the sum over the tokens; None without `logprobs`."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(found[token_id].logprob for token_id, found in pairs)

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """How a request went. Each duration was measured on the clock of a single process."""

    arrival_time: float = 0.0  # seconds since the epoch of time.time()
    router_queue_s: float = 0.0  # from arrival until nodes were chosen
    queue_s: float = 0.0  # in the queue of the prefill node
    prefix_read_s: float = 0.0  # for cached blocks of a tier or another node
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    exposed_s: float = 0.0  # transfer after the last chunk was announced
    transfer_bytes: int = 0
    decode_queue_s: float = 0.0
    first_step_s: float = 0.0
    # From arrival to the first token handed out.
    time_to_first_token_s: float | None = None
    e2e_s: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # of all choices together
    num_received_tokens: int = 0  # those of them that another router had handed out
    num_cached_tokens: int = 0
    num_read_tokens: int = 0  # of those, tokens that a tier or another node had
    # Tokens that the router expected to be cached, at the last attempt.
    num_predicted_tokens: int = 0
    path: ServedBy | None = None
    local_fallback: bool = False  # local prefill only because no prefill node was ready
    num_attempts: int = 0
    num_retries: int = 0  # attempts after a loss before the first token
    num_resumes: int = 0  # attempts after a later loss, each of one choice
    resumed: bool = False  # some choice went on elsewhere after its first token
    max_tokens_clamped: int | None = None  # the limit to which max_tokens was cut
    # Retries by the code of the loss.
    retry_codes: dict[str, int] = field(default_factory=dict)
    resume_codes: dict[str, int] = field(default_factory=dict)
    num_reasoning_tokens: int = 0  # among the output tokens, once the request has ended
    num_draft_tokens: int = 0  # that nodes have guessed
    num_accepted_tokens: int = 0  # of them, those that were right
    # Reasons of the choices that ended.
    finish_reasons: list[EndReason] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def num_new_tokens(self) -> int:
        """Return the number of output tokens that this router has handed out."""
        return self.num_output_tokens - self.num_received_tokens

    def received(self, num_tokens: int) -> None:
        """Count tokens that the caller has from another router."""
        self.num_output_tokens += num_tokens
        self.num_received_tokens += num_tokens

    def begin(self, attempt: Attempt) -> None:
        """Record an attempt that begins to wait for nodes."""
        self.attempts.append(attempt)
        if len(self.attempts) > MAX_ATTEMPTS_KEPT:
            del self.attempts[1]

    def placed(self, attempt: Attempt) -> None:
        """Record the nodes of an attempt, which has got them."""
        if self.num_attempts == 0:
            self.router_queue_s = attempt.placed_at_s or 0.0
        self.num_attempts = max(self.num_attempts, attempt.key.attempt + 1)
        self.path = attempt.path
        self.local_fallback = attempt.is_fallback
        self.num_predicted_tokens = attempt.num_cached_tokens

    def timed(self, times: StageTimes, *, of_prompt: bool) -> None:
        """Add what one node measured. Over resumes, stages add up."""
        if of_prompt:
            self.queue_s += times.queue_s
            self.prefix_read_s += times.prefix_read_s
            self.num_read_tokens = max(self.num_read_tokens, times.num_read_tokens)
            self.prefill_s += times.prefill_s
        # Decode says it too, as a short answer may end before what prefill sent has come.
        self.num_cached_tokens = max(self.num_cached_tokens, times.num_cached_tokens)
        self.transfer_s += times.transfer_s
        self.exposed_s += times.exposed_s
        self.transfer_bytes += times.transfer_bytes
        self.decode_queue_s += times.decode_queue_s
        self.first_step_s += times.first_step_s

    def try_again(self, failure: Failure, *, is_resume: bool) -> None:
        """Count another attempt after a loss."""
        codes = self.resume_codes if is_resume else self.retry_codes
        codes[failure.code] = codes.get(failure.code, 0) + 1
        self.num_retries += not is_resume
        self.num_resumes += is_resume
        self.resumed = self.resumed or is_resume


@dataclass(slots=True)
class RequestOutput:
    """The output of a request so far, or only the new part (with output kind `delta`)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    prompt_logprobs: PromptScores | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Return how many of the prompt's tokens a prefix cache held, if that is known yet."""
        return self.metrics.num_cached_tokens


@dataclass(slots=True)
class _Pieces:
    """The deltas of one choice.

    Texts are joined only when an output is needed, because `+=` copies the whole text.
    """

    output: CompletionOutput
    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, delta: CompletionOutput) -> None:
        output = self.output
        self.texts.append(delta.text)
        if delta.reasoning:
            self.reasonings.append(delta.reasoning)
        if delta.tool_calls:
            self.calls += delta.tool_calls
        output.token_ids += delta.token_ids
        if delta.logprobs is not None:
            if output.logprobs is None:
                output.logprobs = []
            output.logprobs += delta.logprobs
        output.finish_reason = delta.finish_reason
        output.stop_reason = delta.stop_reason

    def snapshot(self) -> CompletionOutput:
        text = "".join(self.texts)
        reasoning = "".join(self.reasonings)
        self.texts = [text]
        self.reasonings = [reasoning]
        now = self.output
        return msgspec.structs.replace(
            now,
            text=text,
            token_ids=list(now.token_ids),
            logprobs=None if now.logprobs is None else list(now.logprobs),
            reasoning=reasoning,
            tool_calls=merged_calls(self.calls),
        )


class Merged:
    """Deltas merged per choice. The first `num_choices` choices are listed even without a delta."""

    __slots__ = ("_choices",)

    def __init__(self, num_choices: int = 0) -> None:
        # The first delta of a choice stays as it is, for many choices get no second before `take`.
        self._choices: dict[int, CompletionOutput | _Pieces] = {
            index: _Pieces(CompletionOutput(index, "", []))
            for index in range(num_choices)
        }

    def add(self, delta: CompletionOutput) -> None:
        """Take a delta, which its sender leaves alone from now on."""
        held = self._choices.get(delta.index)
        if isinstance(held, _Pieces):
            held.add(delta)
        elif held is None and not delta.tool_calls:
            self._choices[delta.index] = delta
        else:
            pieces = _Pieces(CompletionOutput(delta.index, "", []))
            if held is not None:
                pieces.add(held)
            pieces.add(delta)
            self._choices[delta.index] = pieces

    @property
    def num_tokens(self) -> int:
        return sum(
            len((held.output if isinstance(held, _Pieces) else held).token_ids)
            for held in self._choices.values()
        )

    def outputs(self) -> list[CompletionOutput]:
        """Return a snapshot of all choices in order, which later deltas do not change."""
        ordered = [self._choices[index] for index in sorted(self._choices)]
        return [
            held.snapshot() if isinstance(held, _Pieces) else held for held in ordered
        ]

    def take(self) -> list[CompletionOutput]:
        """Return all choices that had a delta, in order, and forget them."""
        outputs = self.outputs()
        self._choices.clear()
        return outputs


class StageSpan(msgspec.Struct, frozen=True):
    """One stage of a request; `start_s` counts from its arrival."""

    stage: str
    start_s: float
    duration_s: float
    node: str = ""  # that did the work
    failure: str = ""  # the code of the attempt's loss


def waterfall(metrics: RequestMetrics) -> list[StageSpan]:
    """Return the consecutive stages of a request that has ended, which add up to the whole.

    The router measured when a request was placed and when each node's first tokens came; the nodes
    measured the durations of their own stages. A node's stages are laid out so that they end when
    its tokens came, and the time before them is that of the messages. So no two clocks are
    compared. If choices were continued separately after a loss, the stages are those of the last.
    """
    end_s = metrics.e2e_s or 0.0
    last = metrics.attempts[-1].choices[0] if metrics.attempts else 0
    chain = [one for one in metrics.attempts if last in one.choices]
    stages: list[StageSpan] = []
    now_s = 0.0
    # Without attempts, only one end is left.
    ends_s = [*(following.asked_at_s for following in chain[1:]), end_s]
    for record, until_s in zip(chain, ends_s, strict=False):
        for stage, at_s, node, failure in _ends_of_stages(record, until_s):
            if min(at_s, end_s) > now_s:
                took_s = min(at_s, end_s) - now_s
                stages.append(StageSpan(stage, now_s, took_s, node or "", failure))
                now_s += took_s
    if end_s > now_s:
        stages.append(StageSpan("finish", now_s, end_s - now_s))
    return stages


def _ends_of_stages(
    one: Attempt, end_s: float
) -> Iterator[tuple[str, float, NodeId | None, str]]:
    """Yield the stages of an attempt in order: name, end, node, and the code of its loss."""
    yield (
        "router_queue",
        end_s if one.placed_at_s is None else one.placed_at_s,
        None,
        "",
    )
    computes = one.prefill_node or one.decode_node
    prompt_at_s = one.prefilled_at_s
    decoding_at_s = one.decoding_at_s
    if not one.prefill_node:
        prompt_at_s = decoding_at_s
    elif (
        prompt_at_s is not None
        and decoding_at_s is not None
        and decoding_at_s <= prompt_at_s
    ):
        # Decode's message was read first.
        prompt_at_s = decoding_at_s - one.first_step_s
    if prompt_at_s is not None:
        read_at_s = prompt_at_s - one.prefill_s
        queued_at_s = read_at_s - one.prefix_read_s
        yield "dispatch", queued_at_s - one.queue_s, None, ""
        yield "queue", queued_at_s, computes, ""
        yield "prefix_read", read_at_s, computes, ""
        yield "prefill", prompt_at_s, computes, ""
    if one.prefill_node and one.decoding_at_s is not None:
        step_at_s = one.decoding_at_s - one.first_step_s
        landed_at_s = step_at_s - one.decode_queue_s
        yield "handoff", landed_at_s - one.exposed_s, None, ""
        yield "transfer", landed_at_s, one.decode_node, ""
        yield "decode_queue", step_at_s, one.decode_node, ""
        yield "first_step", one.decoding_at_s, one.decode_node, ""
    if one.decoding_at_s is not None:
        yield "decode", one.lost_at_s or end_s, one.decode_node, ""
    if one.lost_at_s is not None:
        yield "lost", end_s, None, one.failure
