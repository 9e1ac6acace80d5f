"""Requests whose router is gone, and the tokens of ended ones, kept for clients that come back.

A detached sequence runs like any other, but its tokens are not sent until a router attaches. That
router gets the whole output so far, and all that follows. Ended sequences keep their tokens but
no KV blocks, bounded in time, number and bytes; the oldest are dropped first. A router that was
away may come back to a stream that another router has taken over: its attempts have lower numbers,
so `Owners` refuses them and that router stops.
"""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.decode_node.stream import Stream
from baton.decode_node.waiting_queue import PendingPrompt, WaitingQueue
from baton.node.scheduling.requests import NO_ROUTER, ByRequest, Origin, Outputs
from baton.node.scheduling.sequence import Sequence
from baton.protocol.errors import Failure, NodeError, taken_over
from baton.protocol.ids import ATTEMPTS_PER_ROUTER, Key, RequestId
from baton.protocol.messages import (
    Attach,
    Attached,
    Decode,
    Failed,
    FinishReason,
    FirstToken,
    HeldChoice,
    Keep,
    NotAttached,
    ResumeState,
)
from baton.protocol.sampling import Sampling

MAX_ENDED = 8_192
MAX_BYTES = 32 << 20
# About the memory that CPython takes for a sequence besides its tokens and its form.
OVERHEAD_BYTES = 1_024


@dataclass(slots=True)
class Ended:
    """One choice of a request. Without a finish reason, it can be continued from its tokens."""

    key: Key
    kept: ResumeState
    tokens: "array[int]"  # prompt and output
    num_prompt_tokens: int
    sampling: Sampling
    reason: FinishReason | None = None
    until_s: float = 0.0
    is_unseen: bool = False  # it ended while no router had it

    @classmethod
    def of(cls, sequence: Sequence, kept: ResumeState, reason: FinishReason | None) -> "Ended":
        """Return the record of a sequence that ran."""
        tokens = array("i", sequence.token_ids)
        num_prompt = sequence.num_prompt_tokens
        return cls(sequence.key, kept, tokens, num_prompt, sequence.sampling, reason)

    @classmethod
    def before_it_ran(cls, message: Decode, choice: int, first: FirstToken | None) -> "Ended":
        """Return the record of a choice that ends with `first`, or that has yet to begin."""
        assert message.kept is not None
        token_ids = message.token_ids if first is None else [*message.token_ids, first.token_id]
        return cls(
            message.key.of_choice(choice),
            message.kept,
            array("i", token_ids),
            message.num_prompt_tokens,
            message.sampling,
            None if first is None else first.finish_reason,
        )

    @property
    def num_bytes(self) -> int:
        return OVERHEAD_BYTES + len(self.kept.form) + self.tokens.itemsize * len(self.tokens)

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(self.tokens[: self.num_prompt_tokens])

    @property
    def held(self) -> HeldChoice:
        return HeldChoice(self.key, list(self.tokens[self.num_prompt_tokens :]), self.reason)


class EndedChoices:
    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._all: dict[Key, Ended] = {}  # in order of their ends
        self._by_request: ByRequest[Ended] = ByRequest()  # the same
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._all)

    def add(self, now_s: float, ended: Ended) -> None:
        """Keep the tokens of a choice, which replace those of its lower attempts."""
        key = ended.key
        for older in self._by_request.of(key.request_id):
            if older.key.choice == key.choice:
                self._drop(older)
        ended.until_s = now_s + self._keep_s
        self._all[key] = ended
        self._by_request.add(key, ended)
        self.num_bytes += ended.num_bytes
        while len(self._all) > MAX_ENDED or self.num_bytes > MAX_BYTES:
            self._drop(next(iter(self._all.values())))

    @property
    def has_unseen(self) -> bool:
        """Return whether a client may come for a choice whose end no router has heard of."""
        return any(ended.is_unseen for ended in self._all.values())

    def of(self, request_id: RequestId) -> list[Ended]:
        return self._by_request.of(request_id)

    def expire(self, now_s: float) -> None:
        while self._all and (oldest := next(iter(self._all.values()))).until_s <= now_s:
            self._drop(oldest)

    def _drop(self, ended: Ended) -> None:
        del self._all[ended.key]
        self._by_request.remove(ended.key)
        self.num_bytes -= ended.num_bytes


MAX_KNOWN = 16_384


class Owners:
    def __init__(self) -> None:
        # The first attempt of the last router, for requests that were taken over; the oldest first.
        self._first: dict[RequestId, int] = {}

    def pass_on(self, request_id: RequestId, attempts: Iterable[int]) -> int:
        """Give a request with these attempts to another router; return its first attempt."""
        latest = max([self._first.get(request_id, 0), *attempts])
        first = latest - latest % ATTEMPTS_PER_ROUTER + ATTEMPTS_PER_ROUTER
        self._note(request_id, first)
        return first

    def accepts(self, key: Key) -> bool:
        """Return whether this attempt counts, because no later router has the request."""
        known = self._first.get(key.request_id, 0)
        # Its router took the request over at another node.
        if key.attempt >= known + ATTEMPTS_PER_ROUTER:
            self._note(key.request_id, key.attempt - key.nth_attempt)
        return key.attempt >= known

    def _note(self, request_id: RequestId, first: int) -> None:
        self._first.pop(request_id, None)
        self._first[request_id] = first
        if len(self._first) > MAX_KNOWN:
            del self._first[next(iter(self._first))]


class Detached:
    def __init__(
        self,
        keep_s: float,
        queue: WaitingQueue,
        streams: ByRequest[Stream],
        leave: Callable[[Stream], None],
    ) -> None:
        """`streams` are the running streams; `leave` ends one of them."""
        self.ended = EndedChoices(keep_s)
        self.owners = Owners()
        self._keep_s = keep_s
        self._queue = queue
        self._streams = streams
        self._leave = leave
        self._until_s: dict[RequestId, float] = {}
        self._now_s = 0.0  # the time of the last `expire`

    @property
    def _outputs(self) -> Outputs:
        return self._queue.outputs

    def forget(self, origin: Origin, streams: list[Stream]) -> None:
        """Detach the requests of a lost router that may be taken over, and end the others."""
        for prompt in list(self._queue.pending.values()):
            if prompt.origin == origin and not prompt.is_ended:
                if self._detaches(prompt.key.request_id, prompt.message.kept):
                    prompt.detach()
                else:
                    self._queue.end(prompt, _lost_router())
        for stream in streams:
            if stream.origin == origin:
                if self._detaches(stream.sequence.key.request_id, stream.kept):
                    stream.detach()
                else:
                    self._leave(stream)

    def attach(self, now_s: float, origin: Origin, message: Attach) -> None:
        """Give a router the request that it asks for, or tell it why not."""
        request_id = message.request_id
        prompts = [one for one in self._queue.of(request_id) if not one.is_ended]
        streams = self._streams.of(request_id)
        kept = self._kept(request_id, prompts, streams)
        if kept is None or kept.owner != message.owner:
            self._outputs.send(origin, NotAttached(request_id))
            return
        # The owner who comes back wins, and the router of its old connection is told.
        held: list[PendingPrompt | Stream] = [*prompts, *streams]
        for one in held:
            if one.origin not in (origin, NO_ROUTER):
                for key in one.keys:
                    self._outputs.send(one.origin, Failed(key, taken_over()))
                one.detach()
        self._until_s.pop(request_id, None)
        for prompt in [one for one in prompts if one.reserved_s is None]:
            # The client has no token of this prompt, and prefill may have given it up. So the new
            # router begins it again on nodes of its choice.
            self.keep_prompt(prompt, prompt.choices.live)
            self._queue.end(prompt, _lost_router())
            prompts.remove(prompt)
        self._outputs.send(origin, self._give(request_id, kept, origin, prompts, streams))

    def keep_stream(self, stream: Stream, reason: FinishReason | None) -> None:
        """Keep the tokens of a sequence that ends, with the finish reason if there is one."""
        if stream.kept is not None:
            self._keep(Ended.of(stream.sequence, stream.kept, reason), stream.origin)

    def keep_first(self, prompt: PendingPrompt, choice: int, token: FirstToken) -> None:
        """Keep the only token of a choice that ended with its first token and so never ran here."""
        if prompt.message.kept is not None and choice in prompt.choices.live:
            self._keep(Ended.before_it_ran(prompt.message, choice, token), prompt.origin)

    def keep_prompt(self, prompt: PendingPrompt, choices: set[int]) -> None:
        """Keep the tokens with which these choices came here, because they end before they run."""
        if prompt.message.kept is not None and not prompt.is_ended:
            for choice in sorted(choices & prompt.choices.live):
                self._keep(Ended.before_it_ran(prompt.message, choice, None), prompt.origin)

    def keep(self, message: Keep) -> None:
        """Keep choices that waited for a node when their router ended."""
        for held in message.choices:
            tokens = array("i", [*message.prompt_token_ids, *held.token_ids])
            num_prompt = len(message.prompt_token_ids)
            ended = Ended(held.key, message.kept, tokens, num_prompt, message.sampling)
            self._keep(ended, NO_ROUTER)

    def expire(self, now_s: float) -> None:
        """End the requests that have waited too long for a router."""
        self._now_s = now_s
        self.ended.expire(now_s)
        due = [rid for rid, until_s in self._until_s.items() if until_s <= now_s]
        for request_id in due:
            del self._until_s[request_id]
            for prompt in self._queue.of(request_id):
                if prompt.origin == NO_ROUTER and not prompt.is_ended:
                    self._queue.end(prompt, _lost_router())
            for stream in self._streams.of(request_id):
                if stream.origin == NO_ROUTER:
                    stream.kept = None
                    self._leave(stream)

    # --- inside --------------------------------------------------------------------------------

    def _keep(self, ended: Ended, origin: Origin) -> None:
        ended.is_unseen = origin == NO_ROUTER
        self.ended.add(self._now_s, ended)

    def _detaches(self, request_id: RequestId, kept: ResumeState | None) -> bool:
        """Note that a request goes on without a router, and return whether it may."""
        if kept is None or not self._keep_s:
            return False
        self._until_s[request_id] = self._now_s + self._keep_s
        return True

    def _kept(
        self, request_id: RequestId, prompts: list[PendingPrompt], streams: list[Stream]
    ) -> ResumeState | None:
        found = [one.message.kept for one in prompts] + [one.kept for one in streams]
        found += [one.kept for one in self.ended.of(request_id)]
        return found[0] if found else None

    def _give(
        self,
        request_id: RequestId,
        kept: ResumeState,
        origin: Origin,
        prompts: list[PendingPrompt],
        streams: list[Stream],
    ) -> Attached:
        ended = self.ended.of(request_id)
        held: dict[int, HeldChoice] = {}
        for record in ended:
            record.is_unseen = False
            held[record.key.choice] = record.held
        landing: list[int] = []
        for one in prompts:
            given = {choice.key.choice: choice for choice in one.attach(origin)}
            held.update(given)
            landing += () if one.is_local else given
        held.update({one.sequence.key.choice: one.attach(origin) for one in streams})
        if streams or prompts:
            sequence = streams[0].sequence if streams else prompts[0].sequence
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            sampling = sequence.sampling
        else:
            prompt = ended[0].prompt_token_ids
            sampling = ended[0].sampling
        choices = tuple(held.values())
        attempts = [choice.key.attempt for choice in choices]
        return Attached(
            request_id,
            kept.form,
            kept.num_choices,
            prompt,
            sampling,
            choices,
            self.owners.pass_on(request_id, attempts),
            tuple(landing),
        )


def _lost_router() -> Failure:
    # To the router, which prefill may still reach, this must look like a lost node and not like a
    # cancel.
    return NodeError("the decode node lost the channel to its router").to_failure()
