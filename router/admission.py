"""Which requests are accepted, and in which order they wait for nodes.

Pure; `core` is its only caller. A request that can never fit is refused at once, and the line of
waiting requests is bounded. A leg of a request that had nodes before (a retry, a resume) goes
first, because its caller has waited already and its blocks may be cached somewhere.
"""

import math

import msgspec

from baton.protocol.blocks import blocks_for, tokens_held
from baton.protocol.errors import Overloaded, RequestError
from baton.protocol.ids import Key, RequestId
from baton.protocol.sampling import Sampling, SamplingParams
from baton.router.request.events import Place

MAX_RETRY_AFTER_S = 60.0
# The weight of the newest gap between the ends of two requests.
PACE_WEIGHT = 0.1


class Limits(msgspec.Struct, frozen=True):
    """The limits that the nodes reported. A pool is None where there is no such node."""

    max_model_len: int
    vocab_size: int
    block_size: int
    prefill_blocks: int | None
    decode_blocks: int | None


class Admission:
    """The line of legs that wait for nodes, and the set of requests that have nodes."""

    def __init__(self, max_queued: int, max_inflight: int) -> None:
        self._max_queued = max_queued
        self._max_inflight = max_inflight
        self._inflight: set[RequestId] = set()
        self._again: dict[Key, Place] = {}
        self._new: dict[Key, Place] = {}
        self._stalled_since_s: float | None = None
        self._last_end_s: float | None = None
        self._pace_s = 1.0  # the usual time between the ends of two requests

    @property
    def num_inflight(self) -> int:
        return len(self._inflight)

    @property
    def num_queued(self) -> int:
        return len(self._new) + len(self._again)

    def check_room(self, *, could_place: bool) -> None:
        """Raise `Overloaded` when a new request would have to wait in a line that is full."""
        must_wait = not could_place or self._new or len(self._inflight) >= self._max_inflight
        if must_wait and len(self._new) >= self._max_queued:
            raise Overloaded(
                f"{len(self._new)} requests are waiting already",
                code="queue_full",
                http_status=429,
                retry_after_s=self.retry_after_s(),
            )

    def retry_after_s(self) -> float:
        """Return how long the line will take at the latest pace, in whole seconds."""
        seconds = math.ceil(self._pace_s * (self.num_queued + 1))
        return float(min(max(seconds, 1), MAX_RETRY_AFTER_S))

    def wait(self, place: Place) -> None:
        """Put a leg at the end of its line."""
        line = self._again if place.key.request_id in self._inflight else self._new
        line[place.key] = place

    def leave(self, key: Key) -> None:
        """Take a leg out of the line. Its request may stay in flight."""
        self._again.pop(key, None)
        self._new.pop(key, None)
        if not self.num_queued:
            self._stalled_since_s = None

    def head(self) -> Place | None:
        """Return the next leg that nodes may be chosen for."""
        for place in self._again.values():
            return place
        if len(self._inflight) < self._max_inflight:
            for place in self._new.values():
                return place
        return None

    def placed(self, key: Key) -> None:
        """Note that a leg has nodes now."""
        self._inflight.add(key.request_id)
        self._stalled_since_s = None
        self.leave(key)

    def stalled(self, now_s: float) -> None:
        """Note that no node was able to take the head of the line."""
        if self._stalled_since_s is None:
            self._stalled_since_s = now_s

    def overdue(self, now_s: float, patience_s: float) -> list[Key]:
        """Return all legs in the line if none was placed for `patience_s`, else none."""
        since_s = self._stalled_since_s
        if since_s is None or now_s - since_s < patience_s:
            return []
        return [*self._again, *self._new]

    def forget(self, request_id: RequestId) -> None:
        """Drop all that is known of a request, in whatever state it is."""
        self._inflight.discard(request_id)
        for key in [key for key in (*self._again, *self._new) if key.request_id == request_id]:
            self.leave(key)

    def ended(self, now_s: float, request_id: RequestId) -> None:
        """Note that the nodes of a request have confirmed its end."""
        if request_id in self._inflight:
            self._inflight.discard(request_id)
            if self._last_end_s is not None:
                gap_s = min(now_s - self._last_end_s, MAX_RETRY_AFTER_S)
                self._pace_s += PACE_WEIGHT * (gap_s - self._pace_s)
            self._last_end_s = now_s


def check_prompt(token_ids: list[int], limits: Limits) -> None:
    """Raise `RequestError` for a prompt that no node could compute."""
    if not token_ids:
        raise RequestError("the prompt is empty", param="prompt")
    if min(token_ids) < 0 or max(token_ids) >= limits.vocab_size:
        text = f"token ids must be at least 0 and below {limits.vocab_size}"
        raise RequestError(text, param="prompt")
    if len(token_ids) >= limits.max_model_len:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens, but prompt and output together may have "
            f"at most {limits.max_model_len}",
            code="context_length_exceeded",
            param="prompt",
        )
    blocks = limits.prefill_blocks
    if blocks is not None and blocks_for(len(token_ids), limits.block_size) > blocks:
        raise RequestError("the prompt can never fit the KV pool of a node", param="prompt")


def fit(num_prompt: int, params: SamplingParams, limits: Limits) -> tuple[int, int | None]:
    """Return the most tokens to generate, and the same again if that is less than was asked for.

    A `max_tokens` beyond the model's length is cut to the room that is left. One that no pool can
    hold raises `RequestError`.
    """
    room = limits.max_model_len - num_prompt
    wanted = room if params.max_tokens is None else min(params.max_tokens, room)
    if wanted < params.min_tokens:
        text = f"min_tokens is {params.min_tokens}, but only {wanted} tokens are left for output"
        raise RequestError(text, param="min_tokens")
    held = _held_by_pool(num_prompt, params.n, limits)
    if held is not None and held < max(params.min_tokens, 1 if params.max_tokens is None else 0):
        raise RequestError("the prompt can never fit the KV pool of a node", param="prompt")
    if held is not None and wanted > held:
        if params.max_tokens is not None:
            raise RequestError(
                f"prompt, max_tokens and n can never fit the KV pool of a node: at most {held} "
                f"tokens could be generated",
                param="max_tokens",
            )
        wanted = held
    clamped = params.max_tokens is not None and wanted < params.max_tokens
    return wanted, wanted if clamped else None


def _held_by_pool(num_prompt: int, num_choices: int, limits: Limits) -> int | None:
    """How many tokens each choice could have if decode's pool were empty; at least 0."""
    if limits.decode_blocks is None:
        return None
    return tokens_held(limits.decode_blocks, limits.block_size, num_prompt, num_choices)


def sampling_of(params: SamplingParams, seed: int, max_tokens: int) -> Sampling:
    """Return what engines need of `params`: all but the text, with every default filled in."""
    return Sampling(
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        stop_token_ids=tuple(params.stop_token_ids or ()),
        ignore_eos=params.ignore_eos,
    )
