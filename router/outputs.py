"""What a caller of the router gets back: outputs per choice, and how the request went.

Made by `stream`, passed through by `async_llm`, `llm` and the HTTP handlers. Plain data: nothing
here knows nodes, sockets or how text comes about.
"""

from dataclasses import dataclass, field
from typing import Literal

from baton.protocol.messages import FinishReason, StageTimes

# Which way a request took: a pair of nodes, decode alone (it computed the prompt itself), or
# prefill alone (one token wanted).
Path = Literal["disaggregated", "local_prefill", "prefill_only"]
StopReason = str | int | None


@dataclass(slots=True)
class CompletionOutput:
    """One choice: all of it so far, or with output kind `delta` (and in streams) only the news.

    `stop_reason` is the stop string or stop token id that matched, None at an EOS token or at the
    length limit. `logprobs` is None in this version.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: None = None
    finish_reason: FinishReason | None = None
    stop_reason: StopReason = None


@dataclass(slots=True)
class RequestMetrics:
    """How a request went. Durations in seconds; each stage on the clock of who measured it."""

    arrival_time: float = 0.0  # seconds since the epoch of time.time()
    router_queue_s: float = 0.0  # until a pair of nodes was chosen
    queue_s: float = 0.0  # in prefill's queue
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    exposed_s: float = 0.0  # transfer after the last chunk was announced
    transfer_bytes: int = 0
    decode_queue_s: float = 0.0
    first_step_s: float = 0.0
    time_to_first_token_s: float | None = None  # from arrival to the first token handed out
    e2e_s: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # of all choices
    num_cached_tokens: int = 0
    path: Path | None = None
    local_fallback: bool = False  # local prefill only because no prefill node was ready
    num_attempts: int = 0
    resumed: bool = False  # some choice went on elsewhere after its first token
    max_tokens_clamped: int | None = None  # the room that was left, when less than max_tokens

    def add_stages(self, times: StageTimes, *, of_prompt: bool) -> None:
        """What one node measured. A resume adds to what was spent before."""
        if of_prompt:
            self.queue_s += times.queue_s
            self.prefill_s += times.prefill_s
            self.num_cached_tokens = max(self.num_cached_tokens, times.num_cached_tokens)
        self.transfer_s += times.transfer_s
        self.exposed_s += times.exposed_s
        self.transfer_bytes += times.transfer_bytes
        self.decode_queue_s += times.decode_queue_s
        self.first_step_s += times.first_step_s


@dataclass(slots=True)
class RequestOutput:
    """The state of a request, or with output kind `delta` what is new of it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
