"""The lifecycle of one request: the messages to its nodes and the output for its caller.

`step` turns each event into commands, which are carried out in order. The invariants: there is
exactly one `Outcome`, and nothing is delivered after it; tokens come in order of position, none
lost, none twice; every load is released once; `Closed` comes last, and within a deadline.

A request that loses an attempt before its caller has a token is tried again as a whole. After that
each unfinished choice resumes from its tokens. Only losses without progress use up attempts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from baton.protocol.adapters import is_of_run_time
from baton.protocol.blocks import BlockKey
from baton.protocol.errors import Cancelled, Failure, NodeError
from baton.protocol.ids import Key, NodeId, RequestId
from baton.protocol.messages import (
    NOT_CACHED,
    Accepted,
    Cancel,
    CancelDone,
    Crashed,
    Failed,
    FinishReason,
    FirstTokens,
    InProgress,
    Pooled,
    PromptLogprobs,
    StageTimes,
    TokenEntry,
    TokenLogprobs,
)
from baton.protocol.sampling import Sampling
from baton.router.core.request import (
    ANYONE,
    AVOID_S,
    PAUSE_S,
    Attempt,
    AttemptState,
    Begun,
    CallerGone,
    CancelSelection,
    Choice,
    ChoiceStopped,
    Closed,
    Deliver,
    DeliverPooled,
    DeliverPrompt,
    HandoffEnded,
    Loss,
    NodeLost,
    NodeProcess,
    NodesNotSelected,
    NodesSelected,
    Outcome,
    Release,
    RequestCommand,
    RequestEvent,
    SelectNodes,
    Send,
    Tenant,
    Tick,
    kills_nodes,
)
from baton.router.outputs import RequestMetrics

# How long the load of a cancelled attempt stays reserved at nodes that do not confirm it.
CONFIRM_DEADLINE_S = 5.0
# Heartbeats show within seconds that a node is dead, stuck or cut off from the router. This is for
# an attempt that no node has in progress, for example because its handoff was lost between nodes.
SILENCE_DEADLINE_S = 30.0
# A request is refused after this many processes died of an error in one of its steps.
MAX_CRASHES = 2
NO_NODE = NodeId("")  # stands for the router itself as the sender of an event


@dataclass(slots=True, eq=False)
class Request:
    """One request, whose events it turns into commands.

    The seed is set, `max_tokens` fits, and choices count from 0. What becomes of the request is
    noted in `metrics`.
    """

    request_id: RequestId
    token_ids: list[int]  # the prompt
    sampling: Sampling
    num_choices: int = 1
    max_attempts: int = 3  # attempts in a row that bring no token
    # Keys of the prompt's blocks, if caches are watched.
    block_keys: tuple[BlockKey, ...] = ()
    tenant: Tenant = ANYONE
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    choices: list[Choice] = field(init=False)
    has_outcome: bool = field(default=False, init=False)
    _began_s: float = field(default=0.0, init=False)
    _attempts: list[Attempt] = field(default_factory=list, init=False)
    _num_open: int = field(init=False)  # choices
    _has_delivered: bool = field(default=False, init=False)
    # The length of the prompt's log probabilities; 0 once they are delivered.
    _num_prompt_bytes: int = field(init=False)
    _is_closed: bool = field(default=False, init=False)
    # The processes that failed the request, each until it may be given the request again.
    _avoided: dict[NodeProcess, float] = field(default_factory=dict, init=False)
    _num_crashes: int = field(default=0, init=False)
    _is_remote_only: bool = field(default=False, init=False)
    _now_s: float = field(default=0.0, init=False)
    _out: list[RequestCommand] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.choices = [Choice(index) for index in range(self.num_choices)]
        self._num_open = self.num_choices
        num_top = self.sampling.prompt_logprobs
        self._num_prompt_bytes = (
            0 if num_top is None else 8 * (1 + num_top) * (len(self.token_ids) - 1)
        )

    def step(
        self, now_s: float, event: RequestEvent, node: NodeId = NO_NODE
    ) -> list[RequestCommand]:
        """Return the commands that follow from `event`, which `node` sent if it is a message."""
        self._now_s, self._out = now_s, []
        match event:
            case TokenEntry():
                self._on_entry(node, event)
            case Accepted():
                self._on_accepted(node, event)
            case FirstTokens():
                self._on_first_tokens(node, event)
            case PromptLogprobs(key=key, rows=rows):
                attempt = self._attempt_of(key)
                if attempt is not None and node == (
                    attempt.prefill_node or attempt.decode_node
                ):
                    attempt.heard_s = now_s
                    attempt.prompt_rows += rows
            case Pooled():
                self._on_pooled(node, event)
            case Failed(key=key, failure=failure):
                self._on_failed(node, key, failure)
            case CancelDone(keys=keys):
                self._on_cancel_done(node, keys)
            case Crashed(keys=keys):
                self._on_crashed(node, keys)
            case InProgress(keys=keys):
                for one in self._attempts:
                    if one.is_named(node, keys):
                        one.heard_s = now_s
            case Begun():
                self._began_s = now_s
                self._open_attempt(self.choices)
            case NodesSelected(attempt=selected):
                self._on_selected(selected)
            case NodesNotSelected(key=key, failure=failure):
                if (attempt := self._attempt_of(key, AttemptState.WAITING)) is not None:
                    self._leave_quietly(attempt)
                    self._conclude(failure)
            case NodeLost(node=lost, failure=failure):
                self._on_node_lost(lost, failure)
            case ChoiceStopped(choice=index):
                if self.choices[index].attempt is not None:
                    self._end_choice(self.choices[index], by_router=True)
            case CallerGone(reason=reason):
                if not self.has_outcome:
                    self._conclude(
                        Cancelled(f"the request was cancelled ({reason})").to_failure()
                    )
            case Tick():
                self._on_tick()
            case _:
                assert_never(event)
        if self.has_outcome and not self._attempts and not self._is_closed:
            self._is_closed = True
            self._out.append(Closed())
        return self._out

    def continues(self, now_s: float, node: NodeId, entry: TokenEntry) -> bool:
        """Note tokens that `node` adds to a choice that streams, and return True.

        They are to be delivered as they are. Almost every entry is such a one, and needs no
        command. Any other changes nothing here and is an event for `step`.
        """
        key = entry.key
        if (
            entry.finish_reason is not None
            or entry.logprobs
            or not entry.token_ids
            or self._num_prompt_bytes
            or key.choice >= len(self.choices)
        ):
            return False
        choice = self.choices[key.choice]
        attempt = choice.attempt
        if (
            attempt is None
            or not attempt.streaming
            or attempt.decode_node != node
            or attempt.key.attempt != key.attempt
            or entry.position != len(self.token_ids) + len(choice.output)
        ):
            return False
        attempt.heard_s = now_s
        choice.output.extend(entry.token_ids)
        self._has_delivered = True
        if entry.num_draft_tokens:
            self._count_guesses(entry)
        return True

    @property
    def heard_s(self) -> float | None:
        """Return when nodes last made progress with the attempt that has waited the longest."""
        live = (one.heard_s for one in self._attempts if one.state is AttemptState.LIVE)
        return min(live, default=None)

    # --- messages of nodes ----------------------------------------------------------------------

    def _on_entry(self, node: NodeId, entry: TokenEntry) -> None:
        """Handle new tokens that do more than `continues` covers."""
        index = entry.key.choice
        if index >= len(self.choices):
            return
        attempt = (choice := self.choices[index]).attempt
        if (
            attempt is None
            or attempt.decode_node != node
            or attempt.key.attempt != entry.key.attempt
        ):
            return
        attempt.heard_s = self._now_s
        if (
            self._num_prompt_bytes
            and attempt.prefill_node is not None
            and not attempt.first_tokens
        ):
            attempt.early.append(entry)  # what prefill has sent may take longer
            return
        if not attempt.streaming:
            attempt.streaming = attempt.accepted = True
            if attempt.prefill_node is not None:
                self._out.extend(attempt.releases({attempt.prefill_node}))
                self._end_handoff(attempt, None, entry.times)
            self._forward_first_tokens(attempt)
            if entry.times is not None:  # each choice repeats the times of the prompt
                self._note_times(
                    attempt, entry.times, of_prompt=attempt.prefill_node is None
                )
        if choice.attempt is attempt:
            self._count_guesses(entry)
            self._receive(
                attempt,
                choice,
                entry.position,
                entry.token_ids,
                entry.finish_reason,
                entry.logprobs,
            )

    def _count_guesses(self, entry: TokenEntry) -> None:
        self.metrics.num_draft_tokens += entry.num_draft_tokens
        self.metrics.num_accepted_tokens += entry.num_accepted_tokens

    def _on_accepted(self, node: NodeId, message: Accepted) -> None:
        attempt = self._attempt_of(message.key)
        if attempt is None or attempt.decode_node != node:
            return
        attempt.accepted, attempt.heard_s = True, self._now_s
        if attempt.prefill_node is None:
            times = StageTimes(num_cached_tokens=message.num_cached_tokens)
            self._note_times(attempt, times, of_prompt=True)
        self._forward_first_tokens(attempt)

    def _on_first_tokens(self, node: NodeId, message: FirstTokens) -> None:
        attempt = self._attempt_of(message.key)
        if (
            attempt is None
            or attempt.prefill_node is None
            or attempt.prefill_node != node
        ):
            return
        attempt.heard_s = self._now_s
        self._out.extend(attempt.releases({attempt.prefill_node}))
        if (
            len(message.tokens) != len(attempt.choices)
            or message.position != attempt.num_tokens
        ):
            text = "prefill sent first tokens that do not match its request"
            self._lose(attempt, Loss.broken(text, node), node)
            return
        self._note_times(attempt, message.times, of_prompt=True)
        attempt.first_tokens = message.tokens
        self._forward_first_tokens(attempt)
        early, attempt.early = attempt.early, []
        for entry in early:
            self._on_entry(attempt.decode_node or NO_NODE, entry)

    def _on_pooled(self, node: NodeId, message: Pooled) -> None:
        attempt = self._attempt_of(message.key)
        if attempt is None or attempt.prefill_node != node:
            return
        self._out.extend(attempt.releases({node}))
        if self.sampling.pooling is None or not message.numbers:
            text = "prefill returned something other than what the prompt asked for"
            self._lose(attempt, Loss.broken(text, node), node)
            return
        self._note_times(attempt, message.times, of_prompt=True)
        self._out.append(DeliverPooled(message.numbers))
        self._end_choice(self.choices[attempt.key.choice], by_router=False)

    def _forward_first_tokens(self, attempt: Attempt) -> None:
        for index, first in attempt.assured_firsts():
            choice = self.choices[index]
            if choice.attempt is attempt:
                logprobs = () if first.logprobs is None else (first.logprobs,)
                ids, end = [first.token_id], first.finish_reason
                self._receive(attempt, choice, attempt.num_tokens, ids, end, logprobs)

    def _receive(
        self,
        attempt: Attempt,
        choice: Choice,
        position: int,
        token_ids: list[int],
        finish_reason: FinishReason | None,
        logprobs: tuple[TokenLogprobs, ...],
    ) -> None:
        """Deliver the new ones of `token_ids`. A gap before them means that the attempt is lost."""
        num_known = len(self.token_ids) + len(choice.output) - position
        if num_known < 0:
            assert attempt.decode_node is not None
            loss = Loss.broken(
                "tokens are missing from the stream", attempt.decode_node
            )
            self._lose(attempt, loss, None)
            return
        fresh = token_ids[num_known:] if num_known else token_ids
        if not fresh and finish_reason is None:
            return
        if self._num_prompt_bytes:
            if len(attempt.prompt_rows) != self._num_prompt_bytes:
                text = "log probabilities of the prompt are missing"
                loss = Loss.broken(
                    text, *filter(None, (attempt.prefill_node or attempt.decode_node,))
                )
                self._lose(attempt, loss, None)
                return
            self._num_prompt_bytes = 0
            self._out.append(DeliverPrompt(bytes(attempt.prompt_rows)))
        choice.output.extend(fresh)
        self._has_delivered = True
        self._out.append(
            Deliver(choice.index, fresh, finish_reason, logprobs[num_known:])
        )
        if finish_reason is not None:
            self._end_choice(choice, by_router=False)

    def _on_failed(self, node: NodeId, key: Key, failure: Failure) -> None:
        attempt = next(
            (one for one in self._attempts if one.is_named(node, (key,))), None
        )
        if attempt is None:
            return
        loss = attempt.loss_of(node, failure)
        if loss.is_of_handoff:
            self._end_handoff(attempt, failure)
        if node == attempt.prefill_node:
            self._prefill_is_over(attempt, loss)
        elif attempt.streaming or key != attempt.key:
            # Once decode streams, each of its sequences has a key of its own.
            self._lose_choices(attempt, {key.choice} & attempt.open, loss)
        else:
            # It may already have forked them.
            self._cancel(attempt, node, attempt.keys[1:])
            self._lose(attempt, loss, node)

    def _end_handoff(
        self, attempt: Attempt, failure: Failure | None, times: StageTimes | None = None
    ) -> None:
        if attempt.pair is not None:
            self._out.append(HandoffEnded(*attempt.pair, failure, times))

    def _note_times(
        self, attempt: Attempt, times: StageTimes, *, of_prompt: bool
    ) -> None:
        """Note what a node measured. `of_prompt` marks the node that computed the prompt."""
        self.metrics.timed(times, of_prompt=of_prompt)
        attempt.timed(self._now_s - self._began_s, times, of_prompt=of_prompt)

    def _prefill_is_over(self, attempt: Attempt, loss: Loss) -> None:
        """Continue without prefill, which failed or died, if decode and the router can."""
        assert attempt.prefill_node is not None
        if not attempt.streaming:
            self._lose(attempt, loss, attempt.prefill_node)
            return
        self._out.extend(attempt.releases({attempt.prefill_node}))
        if attempt.first_tokens is None:
            # Decode would never report a choice that ended at its first token.
            unheard = {
                index
                for index in attempt.open
                if self._num_tokens(self.choices[index]) == attempt.num_tokens
            }
            keys = tuple(map(attempt.key.of_choice, sorted(unheard)))
            self._cancel(attempt, attempt.decode_node, keys)
            self._lose_choices(attempt, unheard, loss)

    def _on_cancel_done(self, node: NodeId, keys: tuple[Key, ...]) -> None:
        for attempt in list(self._attempts):
            unasked = set(keys) - attempt.unconfirmed.get(node, set())
            attempt.confirm(node, keys)
            self._close_if_confirmed(attempt)
            if (
                attempt.streaming
                and node == attempt.decode_node
                and attempt.is_named(node, unasked)
            ):
                # The node ended sequences that are still wanted, for example by a stale cancel.
                ended = {
                    key.choice for key in unasked if key in attempt.keys
                } & attempt.open
                self._lose_choices(
                    attempt, ended, Loss.broken("the node ended this stream", node)
                )

    def _on_crashed(self, node: NodeId, keys: tuple[Key, ...]) -> None:
        """Count a process that died in a step of this request. `NodeLost` follows."""
        if not self.has_outcome and any(
            one.is_named(node, keys) for one in self._attempts
        ):
            self._num_crashes += 1
            if self._num_crashes >= MAX_CRASHES:
                self._conclude(kills_nodes(self._num_crashes))

    # --- loss and retry -------------------------------------------------------------------------

    def _on_node_lost(self, node: NodeId, failure: Failure) -> None:
        loss = Loss(failure, frozenset({node}), is_death=True)
        for attempt in [
            one for one in self._attempts if node in (one.prefill_node, one.decode_node)
        ]:
            attempt.unconfirmed.pop(node, None)
            # A node that only paused must not go on with it, and may be unable to confirm that.
            self._out.append(Send(node, Cancel(attempt.keys, "node lost")))
            if attempt.state is AttemptState.LIVE and node == attempt.prefill_node:
                self._prefill_is_over(attempt, loss)
            elif attempt.state is AttemptState.LIVE:
                self._lose(attempt, loss, node)
            self._close_if_confirmed(attempt)

    def _lose(self, attempt: Attempt, loss: Loss, done: NodeId | None) -> None:
        """Give up the whole attempt. The node `done` has ended it and needs no cancel."""
        lost = [self.choices[index] for index in sorted(attempt.open)]
        self._leave(attempt, done)
        self._go_on(lost, attempt, loss)

    def _lose_choices(self, attempt: Attempt, indices: set[int], loss: Loss) -> None:
        """Give up some sequences of an attempt, which their node has already dropped."""
        if indices:
            attempt.open -= indices
            if not attempt.open:
                self._leave_quietly(attempt)
            self._go_on(
                [self.choices[index] for index in sorted(indices)], attempt, loss
            )

    def _go_on(self, lost: Sequence[Choice], attempt: Attempt, loss: Loss) -> None:
        """Make another attempt at these choices, unless the failure or the budget rules it out."""
        if self.has_outcome:
            return
        self._is_remote_only = self._is_remote_only or loss.failure.code == NOT_CACHED
        for node in loss.blamed:
            self._avoided[attempt.process(node)] = self._now_s + AVOID_S
        for choice in lost:
            choice.attempt = None
            choice.number += 1
            num_new = self._num_tokens(choice) - attempt.num_tokens
            choice.num_losses = 0 if loss.is_free(num_new) else choice.num_losses + 1
        exhausted = any(choice.num_losses >= self.max_attempts for choice in lost)
        if exhausted or not loss.failure.retryable:
            self._conclude(loss.failure)
        elif not self._has_delivered and len(lost) == len(self.choices):
            self._try_again(lost, attempt, loss.failure)
        else:
            for choice in lost:
                self._try_again([choice], attempt, loss.failure)

    def _try_again(
        self, choices: Sequence[Choice], lost: Attempt, failure: Failure
    ) -> None:
        lost.lost_at_s = self._now_s - self._began_s
        lost.failure = failure.code
        self.metrics.try_again(failure, is_resume=bool(choices[0].output))
        self._open_attempt(choices)

    # --- placing --------------------------------------------------------------------------------

    def _open_attempt(self, choices: Sequence[Choice]) -> None:
        """Open an attempt and ask for its nodes. Choices share one only while none has output."""
        first = choices[0]
        max_tokens = self.sampling.max_tokens
        lora = self.sampling.lora
        attempt = Attempt(
            Key(self.request_id, first.index, first.number),
            tuple(choice.index for choice in choices),
            self._num_tokens(first),
            wants_decode=max_tokens - len(first.output) > 1,
            num_final_tokens=len(self.token_ids) + max_tokens,
            avoid=frozenset(
                one for one, at_s in self._avoided.items() if self._now_s < at_s
            ),
            avoid_until_s=self._now_s + PAUSE_S if first.num_losses > 1 else 0.0,
            is_resume=bool(first.output),
            is_suspect=self._num_crashes > 0,
            is_remote_only=self._is_remote_only,
            is_pooled=self.sampling.pooling is not None,
            lora=lora if is_of_run_time(lora) else "",
            block_keys=self.block_keys,
            tenant=self.tenant,
        )
        attempt.open = set(attempt.choices)
        attempt.asked_at_s = self._now_s - self._began_s
        self.metrics.begin(attempt)
        for choice in choices:
            choice.attempt = attempt
        self._attempts.append(attempt)
        self._out.append(SelectNodes(attempt))

    def _on_selected(self, attempt: Attempt) -> None:
        nodes = set(attempt.epochs)
        # The attempt was given up while its nodes were being chosen.
        if attempt.state is not AttemptState.WAITING:
            self._out.extend(Release(node, attempt.key) for node in sorted(nodes))
            return
        attempt.state = AttemptState.LIVE
        attempt.heard_s = self._now_s
        attempt.reserved = nodes
        attempt.placed_at_s = self._now_s - self._began_s
        self.metrics.placed(attempt)
        output = self.choices[attempt.choices[0]].output
        sampling = self.sampling
        if sampling.prompt_logprobs is not None and not self._num_prompt_bytes:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        self._out.extend(attempt.start_commands(self.token_ids, output, sampling))

    # --- endings --------------------------------------------------------------------------------

    def _end_choice(self, choice: Choice, *, by_router: bool) -> None:
        attempt, choice.attempt = choice.attempt, None
        assert attempt is not None
        attempt.open.discard(choice.index)
        self._num_open -= 1
        if attempt.open and by_router:
            self._cancel(
                attempt, attempt.decode_node, (attempt.key.of_choice(choice.index),)
            )
        elif by_router:
            self._leave(attempt, None)
        elif not attempt.open:
            # Prefill tells decode of the end, unless they are cut off.
            if not attempt.streaming:
                self._cancel(attempt, attempt.decode_node, attempt.keys)
            self._leave_quietly(attempt)
        if self._num_open == 0:
            self._conclude(None)

    def _conclude(self, failure: Failure | None) -> None:
        self.has_outcome = True
        self._out.append(Outcome(failure))
        for attempt in list(self._attempts):
            self._leave(attempt, None)

    def _leave(self, attempt: Attempt, done: NodeId | None) -> None:
        """Tell the nodes of an attempt to stop, except `done`. It closes when they confirm."""
        if attempt.state is AttemptState.WAITING:
            self._out.append(CancelSelection(attempt.key))
        elif attempt.state is AttemptState.LIVE:
            nodes = (
                attempt.decode_node,
                None if attempt.streaming else attempt.prefill_node,
            )
            for node in nodes:
                if node != done:
                    self._cancel(attempt, node, attempt.keys)
        self._leave_quietly(attempt)

    def _leave_quietly(self, attempt: Attempt) -> None:
        if attempt.state in (AttemptState.WAITING, AttemptState.LIVE):
            attempt.state, attempt.leave_by_s = (
                AttemptState.LEAVING,
                self._now_s + CONFIRM_DEADLINE_S,
            )
            for index in attempt.open:
                self.choices[index].attempt = None
            attempt.open.clear()
            self._close_if_confirmed(attempt)

    def _cancel(
        self, attempt: Attempt, node: NodeId | None, keys: tuple[Key, ...]
    ) -> None:
        if node is not None and keys:
            attempt.unconfirmed.setdefault(node, set()).update(keys)
            self._out.append(Send(node, Cancel(keys)))

    def _close_if_confirmed(self, attempt: Attempt) -> None:
        if attempt.state is AttemptState.LEAVING:
            self._out.extend(
                attempt.releases(attempt.reserved - attempt.unconfirmed.keys())
            )
            if not attempt.unconfirmed:
                self._close(attempt)

    def _close(self, attempt: Attempt) -> None:
        attempt.state = AttemptState.CLOSED
        attempt.early.clear()
        attempt.prompt_rows.clear()
        attempt.block_keys = ()  # metrics keep the attempt for longer
        self._out.extend(attempt.releases(attempt.reserved))
        self._attempts.remove(attempt)

    # --- time and tables ------------------------------------------------------------------------

    def _on_tick(self) -> None:
        for attempt in list(self._attempts):
            if (
                attempt.state is AttemptState.LEAVING
                and self._now_s >= attempt.leave_by_s
            ):
                self._close(attempt)
            elif (
                attempt.state is AttemptState.LIVE
                and self._now_s - attempt.heard_s >= SILENCE_DEADLINE_S
            ):
                text = f"no node has had this request in progress for {SILENCE_DEADLINE_S:g} s"
                loss = attempt.loss_of_handoff(
                    NodeError(text, code="stream_broken").to_failure()
                )
                if loss.is_of_handoff:
                    self._end_handoff(attempt, loss.failure)
                self._lose(attempt, loss, None)

    def _num_tokens(self, choice: Choice) -> int:
        return len(self.token_ids) + len(choice.output)

    def _attempt_of(
        self, key: Key, state: AttemptState = AttemptState.LIVE
    ) -> Attempt | None:
        for attempt in self._attempts:
            if attempt.key == key and attempt.state is state:
                return attempt
        return None
