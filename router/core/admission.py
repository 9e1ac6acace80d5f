"""Decide which requests are accepted, in which order they wait for nodes, and when they get them.

A request that can never fit is refused at once. The queue is bounded in number, bytes and time.
An attempt of a request that had nodes before (a retry, a resume) goes first, because its caller has
waited already and its blocks may be cached somewhere.
"""

import math
import operator
import secrets
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heapreplace
from itertools import chain

import msgspec

from baton.protocol.blocks import tokens_held
from baton.protocol.config import RouterConfig
from baton.protocol.errors import Failure, Overloaded, RequestError
from baton.protocol.ids import Key, NodeId, RequestId
from baton.protocol.messages import Role
from baton.protocol.sampling import (
    MAX_PROMPT_LOGPROBS,
    SEED_BITS,
    Penalties,
    Sampling,
    SamplingParams,
    Scope,
)
from baton.router.core.policy import CheapestPair
from baton.router.core.registry import Registry
from baton.router.core.request import ANYONE, Attempt, Tenant

ROLES: tuple[Role, ...] = ("prefill", "decode")
MAX_RETRY_AFTER_S = 60.0
# The memory per prompt token of a waiting request: a slot of a list and an integer.
TOKEN_BYTES = 36
MAX_QUEUED_TOKENS = (256 << 20) // TOKEN_BYTES
# How long a stream that lost its node waits for another one. This is longer than a new request may
# wait, because its client has a part of the response.
MAX_RESUME_WAIT_S = 300.0
# For how long smaller attempts may pass one that waits for a full node, and how many attempts
# may be passed at once.
MAX_PASSED_S = 1.0
MAX_PASSED = 8
# A tenant counts as present for this long after its last request.
PRESENT_S = 10.0
SWEEP_S = 1.0
# How often a stopped queue is tried although no node has got room and nothing has arrived.
LOOK_S = 0.2


class Limits(msgspec.Struct, frozen=True, dict=True):
    """The limits that the nodes reported. A pool is None if there is no node of that role."""

    model_len: int  # the longest sequence of the model
    vocab_size: int
    block_size: int
    # Blocks of the largest pool of a node that may compute prompts.
    prefill_blocks: int | None
    decode_blocks: int | None
    state_blocks: int = 0  # of each choice, beside those of its tokens

    @cached_property
    def max_model_len(self) -> int:
        """Return the longest sequence, prompt and output, that the model and the nodes can take."""
        pools = (self.prefill_blocks, self.decode_blocks)
        held = [
            max(num_blocks - self.state_blocks, 0) * self.block_size
            for num_blocks in pools
            if num_blocks is not None
        ]
        return min([self.model_len, *held])


@dataclass(slots=True, eq=False)
class Share:
    """The new attempts of one tenant in the order of their arrival."""

    tenant: Tenant
    due: float  # the virtual time of its next attempt
    attempts: dict[Key, Attempt] = field(default_factory=dict)
    num_tokens: int = 0  # of their prompts

    def fill(self, max_queued: int, num_more: int = 0, more_tokens: int = 0) -> float:
        """Return which part of the queue it takes, by number or by bytes, per weight.

        `num_more` attempts with `more_tokens` are counted as if they waited too.
        """
        number = (len(self.attempts) + num_more) / max(max_queued, 1)
        tokens = (self.num_tokens + more_tokens) / MAX_QUEUED_TOKENS
        return max(number, tokens) / self.tenant.weight


class FairQueue:
    """New attempts, in which tenants take turns by work per weight, while each waits in order.

    This is start-time fair queueing (Goyal, Vin and Cheng, 1996): an attempt is due when the one
    before it was, plus the work of that one, and a tenant that did not wait saves nothing up.
    """

    def __init__(self) -> None:
        # Of all, in the order of their arrival.
        self.attempts: dict[Key, Attempt] = {}
        self._shares: dict[str, Share] = {}
        self._virtual = 0.0  # when the last attempt that got nodes was due

    def add(self, attempt: Attempt) -> None:
        share = self._shares.get(attempt.tenant.name)
        if share is None:
            self._forget_idle()
            share = self._shares[attempt.tenant.name] = Share(
                attempt.tenant, self._virtual
            )
        if not share.attempts:
            share.due = max(share.due, self._virtual)
        share.attempts[attempt.key] = self.attempts[attempt.key] = attempt
        share.num_tokens += attempt.num_tokens

    def pop(self, key: Key, default: None = None) -> Attempt | None:
        waiting = self.attempts.pop(key, default)
        if waiting is not None:
            share = self._shares[waiting.tenant.name]
            del share.attempts[key]
            share.num_tokens -= waiting.num_tokens
            if not self.attempts:  # whoever comes next finds nobody to be fair to
                self._shares.clear()
        return waiting

    def _forget_idle(self) -> None:
        """Drop the tenants that are due no later than one that comes for the first time."""
        busy = {
            name: share
            for name, share in self._shares.items()
            if share.attempts or share.due > self._virtual
        }
        self._shares = busy

    def charge(self, key: Key) -> None:
        """Note that an attempt gets nodes."""
        if (waiting := self.attempts.get(key)) is not None:
            share = self._shares[waiting.tenant.name]
            self._virtual = max(self._virtual, share.due)
            share.due += waiting.work

    def in_turn(self, blocked: Container[str]) -> Iterator[Attempt]:
        """Yield the attempts as they are due, without those of `blocked` tenants.

        Attempts may leave, and tenants may be blocked meanwhile.
        """
        turns = [
            (share.due, number, iter(tuple(share.attempts.values())))
            for number, share in enumerate(self._shares.values())
            if share.attempts
        ]
        heapify(turns)
        while turns:
            due, number, attempts = turns[0]
            waiting = next(attempts, None)
            if waiting is None or waiting.tenant.name in blocked:
                heappop(turns)
                continue
            yield waiting
            heapreplace(turns, (due + waiting.work, number, attempts))

    def largest(self, max_queued: int) -> Share | None:
        """Return the tenant that takes most of the queue; None if nothing waits."""
        shares = [share for share in self._shares.values() if share.attempts]
        return max(shares, key=lambda share: share.fill(max_queued), default=None)

    def share_of(self, tenant: Tenant) -> Share:
        return self._shares.get(tenant.name) or Share(tenant, self._virtual)


@dataclass(slots=True)
class _Present:
    tenant: Tenant
    came_s: float = -math.inf  # when it sent its last request
    num_inflight: int = 0  # requests


class Presence:
    """The tenants that have requests in flight or sent one lately, and how many each has.

    Requests of nobody in particular, such as resumed streams, are not counted.
    """

    def __init__(self) -> None:
        self._present: dict[str, _Present] = {}
        self._num_inflight = 0
        self._weight = 0.0  # of all
        self._swept_s = -math.inf

    def came(self, now_s: float, tenant: Tenant) -> None:
        if tenant != ANYONE:
            self._of(tenant).came_s = now_s

    def began(self, tenant: Tenant) -> None:
        if tenant != ANYONE:
            self._of(tenant).num_inflight += 1
            self._num_inflight += 1

    def ended(self, tenant: Tenant) -> None:
        if tenant != ANYONE:
            self._of(tenant).num_inflight -= 1
            self._num_inflight -= 1

    def has_much(self, now_s: float, tenant: Tenant) -> bool:
        """Return whether a tenant has more than its share of what is in flight, beside others."""
        if now_s - self._swept_s >= SWEEP_S:
            self._swept_s = now_s
            self._forget_absent(now_s - PRESENT_S)
        present = self._present.get(tenant.name)
        if present is None or len(self._present) < 2:
            return False
        return present.num_inflight * self._weight > self._num_inflight * tenant.weight

    def _of(self, tenant: Tenant) -> _Present:
        present = self._present.get(tenant.name)
        if present is None:
            present = self._present[tenant.name] = _Present(tenant)
            self._weight += tenant.weight
        return present

    def _forget_absent(self, since_s: float) -> None:
        for name, present in list(self._present.items()):
            if not present.num_inflight and present.came_s < since_s:
                del self._present[name]
        self._weight = sum(present.tenant.weight for present in self._present.values())


class Admission:
    """The queues of attempts that wait for nodes, and the set of requests that have nodes.

    Resumes go first, then other retries, then new requests. An attempt that no node in service can
    take, or that waits for a full node, does not keep later ones from other nodes. For a while,
    smaller ones may even pass it on the full node; after that the node is kept for it.
    """

    def __init__(
        self, config: RouterConfig, registry: Registry, policy: CheapestPair
    ) -> None:
        self._config = config
        self._registry = registry
        self._policy = policy
        self._inflight: dict[RequestId, Tenant] = {}
        self._presence = Presence()
        self._resumes: dict[Key, Attempt] = {}
        self._again: dict[Key, Attempt] = {}
        self._fair = FairQueue()
        self._new = self._fair.attempts
        self._queues = (self._resumes, self._again, self._new)
        self._num_tokens = 0  # of the prompts of all waiting attempts
        self._num_changes = 0  # grows whenever another attempt may be the next one
        self._looked_s = 0.0
        self._looked_at = (0, 0, 0)

    @property
    def num_inflight(self) -> int:
        return len(self._inflight)

    @property
    def num_queued(self) -> int:
        return sum(map(len, self._queues))

    def num_waiting_for(self) -> dict[Role, int]:
        """Return how many attempts wait for nodes of each role; some wait for both.

        Those behind the last one that was looked at wait for what it waits for. An attempt that no
        node can take waits for the needed roles that have no node.
        """
        counts: dict[Role, int] = dict.fromkeys(ROLES, 0)
        last: frozenset[Role] = frozenset()
        for waiting in chain.from_iterable(queue.values() for queue in self._queues):
            if waiting.waits_for is not None:
                last = waiting.waits_for
            for role in last:
                counts[role] += 1
        return counts

    def check_room(
        self,
        now_s: float,
        num_tokens: int,
        tenant: Tenant = ANYONE,
        *,
        could_serve: bool,
    ) -> list[tuple[Key, Failure]]:
        """Raise `Overloaded` if a new request would have to wait in a full queue.

        In a queue that others fill, a tenant gets its place from the one that has most: attempts of
        that one are removed and returned, each with the reason.
        """
        num_new = len(self._new)
        is_busy = num_new > 0 or len(self._inflight) >= self._config.max_inflight
        if could_serve and not is_busy:
            return []
        max_queued = self._config.max_queued
        too_many = num_new + 1 - max_queued
        too_long = self._num_tokens + num_tokens - MAX_QUEUED_TOKENS if num_new else 0
        if too_many <= 0 and too_long <= 0:
            return []
        text = f"{num_new} requests are waiting already"
        if too_many <= 0:
            text = f"requests with {self._num_tokens} prompt tokens are waiting already"
        retry_s = self._retry_after_s(now_s)
        full = Overloaded(
            text, code="queue_full", http_status=429, retry_after_s=retry_s
        )
        largest = self._fair.largest(max_queued)
        own = self._fair.share_of(tenant)
        if largest is None:
            raise full
        if own.fill(max_queued, 1, num_tokens) >= largest.fill(max_queued):
            raise full
        pushed_out: list[tuple[Key, Failure]] = []
        for key, waiting in reversed(largest.attempts.items()):
            if too_many <= 0 and too_long <= 0:
                break
            pushed_out.append((key, full.to_failure()))
            too_many -= 1
            too_long -= waiting.num_tokens
        # Streams of other routers may overfill the queue.
        if too_many > 0 or too_long > 0:
            raise full
        for key, _ in pushed_out:
            self.leave(key)
        return pushed_out

    def _retry_after_s(self, now_s: float) -> float:
        """Return how long the first new request has waited, in whole seconds."""
        waited_s = now_s - next(iter(self._new.values())).since_s if self._new else 0.0
        return float(min(max(round(waited_s), 1), MAX_RETRY_AFTER_S))

    def wait(self, now_s: float, attempt: Attempt) -> None:
        """Put an attempt at the end of its queue."""
        attempt.since_s = now_s
        if attempt.is_resume:
            self._resumes[attempt.key] = attempt
        elif attempt.key.request_id in self._inflight:
            self._again[attempt.key] = attempt
        else:
            attempt.work = self._policy.work_of(attempt) / attempt.tenant.weight
            self._fair.add(attempt)
            self._presence.came(now_s, attempt.tenant)
        self._num_tokens += attempt.num_tokens
        self._num_changes += 1

    def leave(self, key: Key) -> None:
        """Take an attempt out of its queue. Its request may stay in flight."""
        self._num_changes += 1
        for pop in (self._resumes.pop, self._again.pop, self._fair.pop):
            if (waiting := pop(key, None)) is not None:
                self._num_tokens -= waiting.num_tokens

    def take(self, now_s: float) -> Iterator[Attempt]:
        """Yield the nodes of attempts.

        The caller calls `selected` and reserves the load of an attempt before it takes the next.
        """
        if self._looked_at == self._news() and now_s - self._looked_s < LOOK_S:
            return
        num_passed = 0
        kept = set[NodeId]()
        blocked = set[str]()
        for waiting in self._in_order(blocked):
            is_new = waiting.key in self._new
            leaves_room = is_new and self._presence.has_much(now_s, waiting.tenant)
            selected = self._policy.choose(
                now_s, self._registry, waiting, kept, leaves_room=leaves_room
            )
            avoids = now_s < waiting.avoid_until_s and waiting.goes_to(waiting.avoid)
            if selected is not None and not selected.full and not avoids:
                yield selected
                continue
            waiting.forget_nodes()
            if selected is None:
                waiting.unplaceable_at = self._registry.version
                waiting.waits_for = self._absent(waiting)
                continue
            if avoids:
                waiting.waits_for = frozenset()  # the next look finds it again
                continue
            nodes = map(self._registry.node, selected.full)
            waiting.waits_for = frozenset(
                node.role for node in nodes if node is not None
            )
            if leaves_room:
                blocked.add(waiting.tenant.name)
                continue
            num_passed += 1
            if now_s - waiting.since_s >= MAX_PASSED_S:
                kept.update(selected.full)
            if num_passed > MAX_PASSED:
                break
        self._looked_at = self._news()
        self._looked_s = now_s

    def _absent(self, attempt: Attempt) -> frozenset[Role]:
        """Return the roles that have no node in service and are needed."""
        needed: tuple[Role, ...] = (
            ROLES if self._config.local_prefill == "never" else ("decode",)
        )
        if attempt.is_pooled:
            needed = ("prefill",)
        return frozenset(role for role in needed if not self._registry.in_service(role))

    def _in_order(self, blocked: Container[str]) -> Iterator[Attempt]:
        """Yield the attempts that may get nodes. They may leave meanwhile."""
        for queue in (self._resumes, self._again):
            for key in tuple(queue):
                waiting = queue.get(key)
                if waiting and waiting.unplaceable_at != self._registry.version:
                    yield waiting
        for waiting in self._fair.in_turn(blocked):
            if len(self._inflight) >= self._config.max_inflight:
                return
            is_there = self._new.get(waiting.key) is waiting
            if is_there and waiting.unplaceable_at != self._registry.version:
                yield waiting

    def _news(self) -> tuple[int, int, int]:
        """Return a value that changes whenever an attempt that found no nodes may find some."""
        return self._registry.version, self._registry.num_releases, self._num_changes

    def selected(self, key: Key) -> None:
        """Note that an attempt has nodes now."""
        waiting = self._new.get(key)
        if key.request_id not in self._inflight:
            tenant = ANYONE if waiting is None else waiting.tenant
            self._inflight[key.request_id] = tenant
            self._presence.began(tenant)
        self._fair.charge(key)
        self.leave(key)

    def take_overdue(self, now_s: float) -> list[tuple[Key, Failure]]:
        """Remove the attempts that have waited too long, and return each with the reason."""
        late: list[Attempt] = []
        for queue in self._queues:
            max_wait_s = self._config.max_queued_s
            if queue is self._resumes:
                max_wait_s = MAX_RESUME_WAIT_S
            for waiting in queue.values():
                if now_s - waiting.since_s < max_wait_s:
                    break
                late.append(waiting)
        failures = [(one.key, self._late(now_s, one)) for one in late]
        for key, _ in failures:
            self.leave(key)
        return failures

    def _late(self, now_s: float, waiting: Attempt) -> Failure:
        """Return why an attempt waits no longer."""
        code = "no_nodes"
        text = "no node that is in service can take this request"
        if absent := self._absent(waiting):
            text += f": there is no {' and no '.join(sorted(absent))} node"
        if waiting.unplaceable_at != self._registry.version:
            code = "queue_timeout"
            text = f"no node was free for this request within {now_s - waiting.since_s:.0f} s"
        retry_s = self._retry_after_s(now_s)
        return Overloaded(text, code=code, retry_after_s=retry_s).to_failure()

    def forget(self, request_id: RequestId) -> None:
        """Forget a request in any state."""
        for queue in self._queues:
            for key in [key for key in queue if key.request_id == request_id]:
                self.leave(key)
        self.ended(request_id)

    def ended(self, request_id: RequestId) -> None:
        """Note that the nodes of a request have confirmed its end."""
        self._num_changes += 1
        tenant = self._inflight.pop(request_id, None)
        if tenant is not None:
            self._presence.ended(tenant)


def check_vocabulary(token_ids: list[int], vocab_size: int) -> None:
    """Raise `RequestError` for a prompt without tokens, or with some that the model has not."""
    if not token_ids:
        raise RequestError("the prompt is empty", param="prompt")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        text = f"token ids must be at least 0 and below {vocab_size}"
        raise RequestError(text, param="prompt")


def check_prompt(token_ids: list[int], vocab_size: int, max_model_len: int) -> None:
    """Raise `RequestError` for a prompt that no node could compute."""
    check_vocabulary(token_ids, vocab_size)
    if len(token_ids) >= max_model_len:
        raise RequestError(
            f"the prompt is too long: {len(token_ids)} tokens > {max_model_len - 1} maximum, which "
            "leaves room for one token of output; shorten it",
            code="context_length_exceeded",
            param="prompt",
        )


def check_pooled(num_tokens: int, limits: Limits) -> None:
    """Raise `RequestError` for a prompt to pool that no prefill node could hold."""
    held = limits.model_len
    if limits.prefill_blocks is not None:
        num_blocks = max(limits.prefill_blocks - limits.state_blocks, 0)
        held = min(held, num_blocks * limits.block_size)
    if num_tokens > held:
        text = f"the text is too long: {num_tokens} tokens > {held} maximum; shorten it"
        raise RequestError(text, code="context_length_exceeded", param="prompt")


def check_num_logprobs(number: int) -> None:
    """Raise `RequestError` if prompts have more log probabilities than one response takes."""
    if number > MAX_PROMPT_LOGPROBS:
        text = (
            f"the prompt's log probabilities, those of likeliest tokens included, would be "
            f"{number}, and at most {MAX_PROMPT_LOGPROBS} fit one response: shorten the prompt, or "
            f"ask for fewer of the likeliest tokens"
        )
        raise RequestError(text, param="prompt_logprobs")


def fit(
    num_prompt: int, params: SamplingParams, limits: Limits
) -> tuple[int, int | None]:
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
        raise RequestError(
            "the prompt can never fit the KV pool of a node", param="prompt"
        )
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
    held = tokens_held(
        limits.decode_blocks,
        limits.block_size,
        num_prompt,
        num_choices,
        limits.state_blocks,
    )
    return min(held, room)


def sampling_of(
    params: SamplingParams,
    max_tokens: int,
    scope: Scope,
    grammar: str = "",
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> Sampling:
    """Return the part of `params` that engines need, with every default filled in.

    `bad_words` are those of `params` as token ids.
    """
    penalties = Penalties(
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
        tuple((params.logit_bias or {}).items()),
    )
    return Sampling(
        **dict(zip(_SAME_FIELDS, _same_values(params), strict=True)),
        seed=secrets.randbits(SEED_BITS) if params.seed is None else params.seed,
        max_tokens=max_tokens,
        top_k=max(params.top_k, 0),
        stop_token_ids=tuple(params.stop_token_ids or ()),
        grammar=grammar,
        allowed_token_ids=tuple(params.allowed_token_ids or ()),
        bad_words=bad_words,
        penalties=None if penalties == Penalties() else penalties,
        cache_root=scope.root,
        lora=scope.lora,
    )


# Those of `SamplingParams` that engines get as they are.
_CHANGED = (
    "seed",
    "max_tokens",
    "top_k",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
)
_SAME_FIELDS = [
    name
    for name in Sampling.__struct_fields__
    if name in SamplingParams.__struct_fields__ and name not in _CHANGED
]
_same_values = operator.attrgetter(*_SAME_FIELDS)
