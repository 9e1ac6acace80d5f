"""Decide which requests are accepted, and in which order they wait for nodes.

A request that can never fit is refused at once, and so is one that would wait too long. The queue
is bounded in number, bytes and time, and every operation on it takes constant time. An attempt of a
request that had nodes before (a retry, a resume) goes first, because its caller has waited already
and its blocks may be cached somewhere.
"""

import math
from collections import deque
from collections.abc import Collection, Iterator
from functools import cached_property
from itertools import islice

import msgspec

from baton.protocol.blocks import tokens_held
from baton.protocol.config import RouterConfig
from baton.protocol.errors import Failure, Overloaded, RequestError
from baton.protocol.ids import Key, NodeId, RequestId
from baton.protocol.sampling import Sampling, SamplingParams
from baton.router.policy import CheapestPair, Decision
from baton.router.registry import Registry
from baton.router.request import Place

MAX_RETRY_AFTER_S = 60.0
# The service time is the mean time between the last placements while others wait. After few of
# them, a single pause, such as that of a node that was away, could look like slow service, so no
# request is refused because of it.
SERVICE_MOVES, LEAST_MOVES = 32, 8
FIRST_SERVICE_S = 1.0  # until it was measured
# The memory per prompt token of a waiting request: a slot of a list and an integer.
TOKEN_BYTES = 36
MAX_QUEUED_TOKENS = (256 << 20) // TOKEN_BYTES
# How long a stream that lost its node waits for another one. This is longer than a new request may
# wait, because its client has a part of the response.
MAX_RESUME_WAIT_S = 300.0


class Limits(msgspec.Struct, frozen=True, dict=True):
    """The limits that the nodes reported. A pool is None if there is no node of that role."""

    model_len: int  # the longest sequence of the model
    vocab_size: int
    block_size: int
    prefill_blocks: int | None  # blocks of the largest pool of a node that may compute prompts
    decode_blocks: int | None

    @cached_property
    def max_model_len(self) -> int:
        """Return the longest sequence, prompt and output, that the model and the nodes can take."""
        pools = (self.prefill_blocks, self.decode_blocks)
        held = [num_blocks * self.block_size for num_blocks in pools if num_blocks is not None]
        return min([self.model_len, *held])


class QueuedAttempt(msgspec.Struct, frozen=True):
    place: Place
    since_s: float


class AttemptQueue:
    """Attempts in order of arrival. Those that no node in service can take stand aside."""

    def __init__(self, max_wait_s: float) -> None:
        self.max_wait_s = max_wait_s
        self.next: dict[Key, QueuedAttempt] = {}
        self.aside: dict[Key, QueuedAttempt] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self.next) + len(self.aside)

    def add(self, now_s: float, place: Place) -> None:
        self.next[place.key] = QueuedAttempt(place, now_s)
        self.num_tokens += place.num_tokens

    def take(self, key: Key) -> bool:
        """Remove an attempt. Return whether it was in this queue."""
        waiting = self.next.pop(key, None) or self.aside.pop(key, None)
        if waiting is not None:
            self.num_tokens -= waiting.place.num_tokens
        return waiting is not None

    def set_aside(self, key: Key) -> None:
        self.aside[key] = self.next.pop(key)

    def bring_back(self) -> None:
        """Put the attempts that stand aside back at the front, because they came first."""
        if self.aside:
            self.next = {**self.aside, **self.next}
            self.aside = {}

    def overdue(self, now_s: float) -> Iterator[QueuedAttempt]:
        """Yield the attempts that have waited too long, in order of arrival in both parts."""
        for part in (self.aside, self.next):
            for waiting in part.values():
                if now_s - waiting.since_s < self.max_wait_s:
                    break
                yield waiting


class Admission:
    """The queues of attempts that wait for nodes, and the set of requests that have nodes.

    Resumes go first, then other retries, then new requests. Others pass an attempt that no node in
    service can take until `registry_version` changes.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._inflight: set[RequestId] = set()
        self._resumes = AttemptQueue(MAX_RESUME_WAIT_S)
        self._again = AttemptQueue(config.max_queued_s)
        self._new = AttemptQueue(config.max_queued_s)
        self._queues = (self._resumes, self._again, self._new)
        self._registry_version = 0
        self.num_changes = 0  # grows whenever another attempt may be the next one
        self._moved_s: float | None = None  # when the last attempt left; None if none waits
        self._gaps_s: deque[float] = deque(maxlen=SERVICE_MOVES)  # between placements
        self._service_s: float | None = None

    @property
    def num_inflight(self) -> int:
        return len(self._inflight)

    @property
    def num_queued(self) -> int:
        return sum(map(len, self._queues))

    def check_room(self, num_tokens: int, *, could_place: bool) -> None:
        """Raise `Overloaded` if a new request would have to wait in a full queue."""
        num_new, num_waiting_tokens = len(self._new), self._new.num_tokens
        wait_s = (self._service_s or 0.0) * (self.num_queued + 1)
        is_known = self._moved_s is not None and len(self._gaps_s) >= LEAST_MOVES
        must_wait = (
            not could_place
            or bool(self._new.next)
            or len(self._inflight) >= self._config.max_inflight
        )
        if must_wait and num_new >= self._config.max_queued:
            text = f"{num_new} requests are waiting already"
        elif must_wait and num_new and num_waiting_tokens + num_tokens > MAX_QUEUED_TOKENS:
            text = f"requests with {num_waiting_tokens} prompt tokens are waiting already"
        elif could_place and is_known and wait_s > self._config.max_queued_s:
            # It would only wait to be refused later.
            text = f"{self.num_queued} requests are waiting already, for {wait_s:.1f} s"
        else:
            return
        retry_s = self.retry_after_s()
        raise Overloaded(text, code="queue_full", http_status=429, retry_after_s=retry_s)

    def retry_after_s(self) -> float:
        """Return how long the queue will take at its service rate, in whole seconds."""
        seconds = math.ceil((self._service_s or FIRST_SERVICE_S) * (self.num_queued + 1))
        return float(min(max(seconds, 1), MAX_RETRY_AFTER_S))

    def wait(self, now_s: float, place: Place) -> None:
        """Put an attempt at the end of its queue."""
        is_new = place.key.request_id not in self._inflight
        queue = self._resumes if place.is_resume else self._new if is_new else self._again
        queue.add(now_s, place)
        self.num_changes += 1

    def leave(self, key: Key) -> None:
        """Take an attempt out of its queue. Its request may stay in flight."""
        self.num_changes += 1
        any(queue.take(key) for queue in self._queues)

    def head(self, registry_version: int, passed: Collection[Key] = ()) -> QueuedAttempt | None:
        """Return the next attempt that may get nodes, except those in `passed`."""
        if registry_version != self._registry_version:
            self._registry_version = registry_version
            for queue in self._queues:
                queue.bring_back()
        for queue in self._queues:
            if not queue.next:
                continue
            if queue is self._new and len(self._inflight) >= self._config.max_inflight:
                return None
            for key, waiting in islice(queue.next.items(), len(passed) + 1):
                if key not in passed:
                    return waiting
        return None

    def rests(self, now_s: float) -> None:
        """Note that no attempt can be placed now."""
        if not any(queue.next for queue in self._queues):
            self._moved_s = None
        elif self._moved_s is None:
            self._moved_s = now_s

    def set_aside(self, key: Key) -> Failure | None:
        """Let others pass an attempt that no node can take. Return why it may not even wait."""
        for queue in self._queues:
            if key in queue.next:
                num_aside = len(queue.aside)
                is_long = num_aside > 0 and queue.num_tokens > MAX_QUEUED_TOKENS
                if queue is self._new and (is_long or num_aside >= self._config.max_queued):
                    self.leave(key)
                    return self._late(is_aside=True)
                queue.set_aside(key)
        return None

    def placed(self, now_s: float, key: Key) -> None:
        """Note that an attempt has nodes now."""
        self._inflight.add(key.request_id)
        self.leave(key)
        if self._moved_s is not None:
            self._gaps_s.append(now_s - self._moved_s)
            self._moved_s = now_s
            self._service_s = sum(self._gaps_s) / len(self._gaps_s)

    def take_overdue(self, now_s: float) -> list[tuple[Key, Failure]]:
        """Remove the attempts that have waited too long, and return each with the reason."""
        keys = [one.place.key for queue in self._queues for one in queue.overdue(now_s)]
        failures: list[tuple[Key, Failure]] = []
        for key in keys:
            is_aside = any(key in queue.aside for queue in self._queues)
            failures.append((key, self._late(is_aside=is_aside)))
            self.leave(key)
        return failures

    def _late(self, *, is_aside: bool) -> Failure:
        """Return why an attempt waits no longer."""
        code, text = "no_nodes", "no node that is in service can take this request"
        if not is_aside:
            code = "queue_timeout"
            text = f"no node was free for this request within {self._config.max_queued_s:g} s"
        return Overloaded(text, code=code, retry_after_s=self.retry_after_s()).to_failure()

    def forget(self, request_id: RequestId) -> None:
        """Forget a request in any state."""
        self.num_changes += 1
        self._inflight.discard(request_id)
        for queue in self._queues:
            for key in [key for key in (*queue.next, *queue.aside) if key.request_id == request_id]:
                queue.take(key)

    def ended(self, request_id: RequestId) -> None:
        """Note that the nodes of a request have confirmed its end."""
        self.num_changes += 1
        self._inflight.discard(request_id)


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


def fit(num_prompt: int, params: SamplingParams, limits: Limits) -> tuple[int, int | None]:
    """Return how many tokens to generate at most, and that again if it is less than requested.

    A `max_tokens` beyond the model's length is cut to the room that is left. A `max_tokens` that no
    pool can hold raises `RequestError`.
    """
    room = limits.model_len - num_prompt
    wanted = room if params.max_tokens is None else min(params.max_tokens, room)
    if wanted < params.min_tokens:
        text = f"min_tokens is {params.min_tokens}, but only {wanted} tokens are left for output"
        raise RequestError(text, param="min_tokens")
    held = _held_by_pools(num_prompt, params.n, limits)
    if held < max(params.min_tokens, 1 if params.max_tokens is None else 0):
        raise RequestError("the prompt can never fit the KV pool of a node", param="prompt")
    if wanted > held:
        if params.max_tokens is not None:
            raise RequestError(
                f"prompt, max_tokens and n can never fit the KV pool of a node: at most {held} "
                f"tokens could be generated, and prompt and output together may have at most "
                f"{limits.max_model_len}",
                param="max_tokens",
            )
        wanted = held
    clamped = params.max_tokens is not None and wanted < params.max_tokens
    return wanted, wanted if clamped else None


def _held_by_pools(num_prompt: int, num_choices: int, limits: Limits) -> int:
    """Return how many tokens each choice could have in empty pools; at least 0."""
    room = max(limits.max_model_len - num_prompt, 0)
    if num_choices == 1 or limits.decode_blocks is None:
        return room
    held = tokens_held(limits.decode_blocks, limits.block_size, num_prompt, num_choices)
    return min(held, room)


def sampling_of(params: SamplingParams, seed: int, max_tokens: int) -> Sampling:
    """Return the part of `params` that engines need, with every default filled in."""
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


MAX_PASSED_S = 1.0
# The number of waiting attempts behind which later ones are considered.
MAX_PASSED = 8
# How often a stopped queue is tried although no node has got room and nothing has arrived.
LOOK_S = 0.2


class Placing:
    """Chooses nodes for queued attempts while some nodes are full.

    An attempt that waits for one node does not keep later ones from other nodes. For a while,
    smaller ones may even pass it on that node; after that the node is kept for it.
    """

    def __init__(self, registry: Registry, policy: CheapestPair, queue: Admission) -> None:
        self._registry, self._policy, self._queue = registry, policy, queue
        self._looked_s = 0.0
        self._looked_at = (0, 0, 0)

    def take(self, now_s: float) -> Iterator[tuple[Place, Decision | Failure]]:
        """Yield attempts with their nodes, or with the reason why they may not wait.

        The caller reserves the load of an attempt, or refuses it, before it takes the next.
        """
        if self._looked_at == self._news() and now_s - self._looked_s < LOOK_S:
            return
        passed: set[Key] = set()
        kept: set[NodeId] = set()
        while len(passed) <= MAX_PASSED:
            waiting = self._queue.head(self._registry.version, passed)
            if waiting is None:
                break
            place = waiting.place
            decision = self._policy.choose(now_s, self._registry, place, kept)
            if decision is None:
                if (failure := self._queue.set_aside(place.key)) is not None:
                    yield place, failure
            elif decision.full:
                passed.add(place.key)
                if now_s - waiting.since_s >= MAX_PASSED_S:
                    kept.update(decision.full)
            else:
                yield place, decision
        self._queue.rests(now_s)
        self._looked_at, self._looked_s = self._news(), now_s

    def _news(self) -> tuple[int, int, int]:
        """Return a value that changes whenever an attempt that found no nodes may find some."""
        return self._registry.version, self._registry.num_releases, self._queue.num_changes
