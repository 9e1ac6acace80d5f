"""The lifecycle of one request: what its nodes are told and what its caller gets.

`step` turns each event into commands, which are carried out in order. The invariants: there is
exactly one `Outcome`, and nothing is delivered after it; tokens come in order of position, none
lost, none twice; every charge is released once; `Closed` comes last, and within a deadline.

A request that loses a leg before its caller has a token is tried again as a whole. After that each
unfinished choice resumes from its tokens. Only losses without progress use up attempts.
"""

from collections.abc import Sequence
from typing import assert_never

from baton.protocol.errors import Cancelled, Failure, NodeError
from baton.protocol.ids import Key, NodeId
from baton.protocol.messages import (
    NOT_CACHED,
    Accepted,
    Cancel,
    CancelDone,
    Crashed,
    Failed,
    FinishReason,
    FirstTokens,
    StageTimes,
    TokenEntry,
)
from baton.router.reattach import gone
from baton.router.request import (
    Adopted,
    Avoided,
    Begun,
    CallerGone,
    Choice,
    ChoiceStopped,
    Closed,
    Deliver,
    HandoffEnded,
    Leg,
    LegState,
    Loss,
    NodeLost,
    NotPlaced,
    Outcome,
    Placed,
    Release,
    Request,
    RequestCommand,
    RequestEvent,
    Send,
    Tick,
    Timed,
    TriedAgain,
    Unplace,
    kills_nodes,
)

# How long a cancelled leg stays charged to nodes that do not confirm the cancel.
CONFIRM_DEADLINE_S = 5.0
# This is only a backstop: beats show within seconds that a node is dead, stuck or cut off.
SILENCE_DEADLINE_S = 600.0
# A request is refused after this many processes died of an error in one of its steps.
MAX_CRASHES = 2
NO_NODE = NodeId("")  # stands for the router itself as the sender of an event

# The failure of a choice that no node has kept for a returning client.
NOT_KEPT = NodeError("no node holds this choice any more").to_failure()


class Lifecycle:
    """Turns the events of one request into commands."""

    __slots__ = (
        "_avoided", "_choices", "_has_delivered", "_has_outcome", "_is_closed", "_is_remote_only",
        "_legs", "_now_s", "_num_crashes", "_num_open", "_out", "request",
    )  # fmt: skip

    def __init__(self, request: Request) -> None:
        self.request = request
        self._choices = [Choice(index) for index in range(request.num_choices)]
        self._legs: list[Leg] = []
        self._num_open = request.num_choices
        self._has_delivered = False
        self._has_outcome = False
        self._is_closed = False
        self._avoided = Avoided()
        self._num_crashes = 0
        self._is_remote_only = False
        self._now_s = 0.0
        self._out: list[RequestCommand] = []

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
            case Failed(key=key, failure=failure):
                self._on_failed(node, key, failure)
            case CancelDone(keys=keys):
                self._on_cancel_done(node, keys)
            case Crashed(keys=keys):
                self._on_crashed(node, keys)
            case Begun():
                self._open_leg(self._choices)
            case Adopted():
                self._on_adopted(event)
            case Placed():
                self._on_placed(event)
            case NotPlaced(key=key, failure=failure):
                if (leg := self._leg_of(key, LegState.WAITING)) is not None:
                    self._leave_quietly(leg)
                    self._conclude(failure)
            case NodeLost(node=lost, failure=failure):
                self._on_node_lost(lost, failure)
            case ChoiceStopped(choice=index):
                if self._choices[index].leg is not None:
                    self._end_choice(self._choices[index], by_router=True)
            case CallerGone(reason=reason):
                if not self._has_outcome:
                    self._conclude(Cancelled(f"the request was cancelled ({reason})").to_failure())
            case Tick():
                self._on_tick()
            case _:
                assert_never(event)
        if self._has_outcome and not self._legs and not self._is_closed:
            self._is_closed = True
            self._out.append(Closed())
        return self._out

    @property
    def awaits_confirmation(self) -> bool:
        """Return whether a node has yet to confirm a cancel."""
        return any(leg.unconfirmed for leg in self._legs)

    def _on_adopted(self, adopted: Adopted) -> None:
        """Deliver the tokens that the caller lacks, and continue where the other router stopped."""
        self._has_delivered = True
        lost: list[tuple[Choice, Key]] = []
        for one in adopted.choices:
            choice = self._choices[one.key.choice]
            choice.attempt = max(one.key.attempt, adopted.first_attempt - 1)
            choice.output, choice.num_received = one.token_ids, one.num_received
            if one.process is not None and one.has_ended:
                self._out.append(Send(one.process[0], Cancel((one.key,), "ended")))
            elif one.process is not None:
                num_tokens = len(self.request.token_ids) + len(one.token_ids)
                choice.leg = Leg.running(self._now_s, one.key, num_tokens, one.process)
                self._legs.append(choice.leg)
            fresh, reason = one.token_ids[one.num_received :], one.finish_reason
            if not one.has_ended and (fresh or reason is not None):
                self._out.append(Deliver(choice.index, fresh, reason))
            if one.has_ended or reason is not None:
                self._num_open -= 1
            elif one.process is None:
                lost.append((choice, one.key))
        for choice, key in lost:
            choice.attempt += 1
            self._out.append(TriedAgain(key, NOT_KEPT, is_resume=True))
            self._open_leg([choice])
        if self._num_open == 0:
            self._conclude(None)

    # --- what nodes say -------------------------------------------------------------------------

    def _on_entry(self, node: NodeId, entry: TokenEntry) -> None:
        """Handle new tokens. This is the hot path: it runs once per sequence and step."""
        index = entry.key.choice
        if index >= len(self._choices):
            return
        leg = (choice := self._choices[index]).leg
        if leg is None or leg.decode != node or leg.key.attempt != entry.key.attempt:
            return
        leg.heard_s = self._now_s
        if not leg.streaming:
            leg.streaming = leg.accepted = True
            if leg.prefill is not None:
                self._out.extend(leg.releases({leg.prefill}))
                self._end_handoff(leg, None)
            self._forward_first_tokens(leg)
            if entry.times is not None:  # each choice repeats the times of the prompt
                self._out.append(Timed(leg.key, entry.times, of_prompt=leg.prefill is None))
        if choice.leg is leg:
            self._receive(leg, choice, entry.position, entry.token_ids, entry.finish_reason)

    def _on_accepted(self, node: NodeId, message: Accepted) -> None:
        leg = self._leg_of(message.key)
        if leg is None or leg.decode != node:
            return
        leg.accepted, leg.heard_s = True, self._now_s
        if leg.prefill is None:
            times = StageTimes(num_cached_tokens=message.num_cached_tokens)
            self._out.append(Timed(leg.key, times, of_prompt=True))
        self._forward_first_tokens(leg)

    def _on_first_tokens(self, node: NodeId, message: FirstTokens) -> None:
        leg = self._leg_of(message.key)
        if leg is None or leg.prefill is None or leg.prefill != node:
            return
        leg.heard_s = self._now_s
        self._out.extend(leg.releases({leg.prefill}))
        if len(message.tokens) != len(leg.choices) or message.position != leg.num_tokens:
            self._lose(
                leg,
                Loss.broken("prefill sent first tokens that do not match its request", node),
                node,
            )
            return
        self._out.append(Timed(leg.key, message.times, of_prompt=True))
        leg.first_tokens = message.tokens
        self._forward_first_tokens(leg)

    def _forward_first_tokens(self, leg: Leg) -> None:
        for index, token_id, reason in leg.assured_firsts():
            choice = self._choices[index]
            if choice.leg is leg:
                self._receive(leg, choice, leg.num_tokens, [token_id], reason)

    def _receive(
        self,
        leg: Leg,
        choice: Choice,
        position: int,
        token_ids: list[int],
        finish_reason: FinishReason | None,
    ) -> None:
        """Deliver the new ones of `token_ids`. A gap before them means that the leg is lost."""
        num_known = len(self.request.token_ids) + len(choice.output) - position
        if num_known < 0:
            assert leg.decode is not None
            self._lose(leg, Loss.broken("tokens are missing from the stream", leg.decode), None)
            return
        fresh = token_ids[num_known:] if num_known else token_ids
        if not fresh and finish_reason is None:
            return
        choice.output.extend(fresh)
        self._has_delivered = True
        self._out.append(Deliver(choice.index, fresh, finish_reason))
        if finish_reason is not None:
            self._end_choice(choice, by_router=False)

    def _on_failed(self, node: NodeId, key: Key, failure: Failure) -> None:
        leg = next((leg for leg in self._legs if leg.is_named(node, (key,))), None)
        if leg is None:
            return
        loss = leg.loss_of(node, failure)
        if loss.is_of_handoff:
            self._end_handoff(leg, failure)
        if node == leg.prefill:
            self._prefill_is_over(leg, loss)
        elif leg.streaming or key != leg.key:
            # Once decode streams, each of its sequences has a key of its own.
            self._lose_choices(leg, {key.choice} & leg.open, loss)
        else:
            self._cancel(leg, node, leg.keys[1:])  # it may already have forked them
            self._lose(leg, loss, node)

    def _end_handoff(self, leg: Leg, failure: Failure | None) -> None:
        if leg.pair is not None:
            self._out.append(HandoffEnded(*leg.pair, failure))

    def _prefill_is_over(self, leg: Leg, loss: Loss) -> None:
        """Continue without prefill, which failed or died, if decode and the router can."""
        assert leg.prefill is not None
        if not leg.streaming:
            self._lose(leg, loss, leg.prefill)
            return
        self._out.extend(leg.releases({leg.prefill}))
        if leg.first_tokens is None:
            # Decode would never report a choice that ended at its first token.
            unheard = {
                index
                for index in leg.open
                if len(self.request.token_ids) + len(self._choices[index].output) == leg.num_tokens
            }
            self._cancel(leg, leg.decode, tuple(map(leg.key.of_choice, sorted(unheard))))
            self._lose_choices(leg, unheard, loss)

    def _on_cancel_done(self, node: NodeId, keys: tuple[Key, ...]) -> None:
        for leg in list(self._legs):
            leg.confirm(node, keys)
            self._close_if_confirmed(leg)

    def _on_crashed(self, node: NodeId, keys: tuple[Key, ...]) -> None:
        """Count a process that died in a step of this request. `NodeLost` follows."""
        if not self._has_outcome and any(leg.is_named(node, keys) for leg in self._legs):
            self._num_crashes += 1
            if self._num_crashes >= MAX_CRASHES:
                self._conclude(kills_nodes(self._num_crashes))

    # --- loss and retry -------------------------------------------------------------------------

    def _on_node_lost(self, node: NodeId, failure: Failure) -> None:
        loss = Loss(failure, frozenset({node}), is_death=True)
        for leg in [leg for leg in self._legs if node in (leg.prefill, leg.decode)]:
            leg.unconfirmed.pop(node, None)
            # A node that only paused must not continue this leg. It may be unable to confirm that.
            self._out.append(Send(node, Cancel(leg.keys, "node lost")))
            if leg.state is LegState.LIVE and node == leg.prefill:
                self._prefill_is_over(leg, loss)
            elif leg.state is LegState.LIVE:
                self._lose(leg, loss, node)
            self._close_if_confirmed(leg)

    def _lose(self, leg: Leg, loss: Loss, done: NodeId | None) -> None:
        """Give up the whole leg. The node `done` has ended it and needs no cancel."""
        lost = [self._choices[index] for index in sorted(leg.open)]
        self._leave(leg, done)
        self._go_on(lost, leg, loss)

    def _lose_choices(self, leg: Leg, indices: set[int], loss: Loss) -> None:
        """Give up some sequences of a leg, which their node has already dropped."""
        if indices:
            leg.open -= indices
            if not leg.open:
                self._leave_quietly(leg)
            self._go_on([self._choices[index] for index in sorted(indices)], leg, loss)

    def _go_on(self, lost: Sequence[Choice], leg: Leg, loss: Loss) -> None:
        """Make another attempt at these choices, unless the failure or the budget rules it out."""
        if self._has_outcome:
            return
        self._is_remote_only = self._is_remote_only or loss.failure.code == NOT_CACHED
        for node in loss.blamed:
            self._avoided.add(self._now_s, leg.process(node))
        for choice in lost:
            choice.leg = None
            choice.attempt += 1
            num_new = len(self.request.token_ids) + len(choice.output) - leg.num_tokens
            choice.num_losses = 0 if loss.is_free(num_new) else choice.num_losses + 1
        if any(len(choice.output) < choice.num_received for choice in lost):
            self._conclude(gone())  # no node knows the first token, which the client has
            return
        exhausted = any(choice.num_losses >= self.request.max_attempts for choice in lost)
        if exhausted or not loss.failure.retryable:
            self._conclude(loss.failure)
        elif not self._has_delivered and len(lost) == len(self._choices):
            self._out.append(TriedAgain(leg.key, loss.failure, is_resume=False))
            self._open_leg(lost)
        else:
            for choice in lost:
                self._out.append(TriedAgain(leg.key, loss.failure, bool(choice.output)))
                self._open_leg([choice])

    # --- placing --------------------------------------------------------------------------------

    def _open_leg(self, choices: Sequence[Choice]) -> None:
        """Open a leg and ask for its nodes. Choices share a leg only while none has output."""
        first = choices[0]
        num_tokens = len(self.request.token_ids) + len(first.output)
        indices = tuple(choice.index for choice in choices)
        leg = Leg(Key(self.request.request_id, first.index, first.attempt), indices, num_tokens)
        leg.open = set(indices)
        for choice in choices:
            choice.leg = leg
        self._legs.append(leg)
        avoid, is_suspect = self._avoided.at(self._now_s), self._num_crashes > 0
        self._out.append(
            leg.wish(
                self.request,
                first.output,
                avoid,
                is_suspect=is_suspect,
                is_remote_only=self._is_remote_only,
            )
        )

    def _on_placed(self, placed: Placed) -> None:
        nodes = {node for node in (placed.prefill_node, placed.decode_node) if node is not None}
        leg = self._leg_of(placed.key, LegState.WAITING)
        if leg is None:  # the leg was given up while its nodes were being chosen
            self._out.extend(Release(node, placed.key) for node in sorted(nodes))
            return
        leg.state, leg.heard_s, leg.charged = LegState.LIVE, self._now_s, nodes
        leg.prefill, leg.decode = placed.prefill_node, placed.decode_node
        leg.epochs, leg.max_uncached_tokens = placed.epochs, placed.max_uncached_tokens
        output = self._choices[leg.choices[0]].output
        self._out.extend(leg.orders(self.request, output))

    # --- endings --------------------------------------------------------------------------------

    def _end_choice(self, choice: Choice, *, by_router: bool) -> None:
        leg, choice.leg = choice.leg, None
        assert leg is not None
        leg.open.discard(choice.index)
        self._num_open -= 1
        if leg.open and by_router:
            self._cancel(leg, leg.decode, (leg.key.of_choice(choice.index),))
        elif by_router:
            self._leave(leg, None)
        elif not leg.open:
            self._leave_quietly(leg)
        if self._num_open == 0:
            self._conclude(None)

    def _conclude(self, failure: Failure | None) -> None:
        self._has_outcome = True
        self._out.append(Outcome(failure))
        for leg in list(self._legs):
            self._leave(leg, None)

    def _leave(self, leg: Leg, done: NodeId | None) -> None:
        """Tell the nodes of a leg to stop, except `done`. The leg closes when they confirm."""
        if leg.state is LegState.WAITING:
            self._out.append(Unplace(leg.key))
        elif leg.state is LegState.LIVE:
            nodes = (leg.decode, None if leg.streaming else leg.prefill)
            for node in nodes:
                if node != done:
                    self._cancel(leg, node, leg.keys)
        self._leave_quietly(leg)

    def _leave_quietly(self, leg: Leg) -> None:
        if leg.state in (LegState.WAITING, LegState.LIVE):
            leg.state, leg.leave_by_s = LegState.LEAVING, self._now_s + CONFIRM_DEADLINE_S
            for index in leg.open:
                self._choices[index].leg = None
            leg.open.clear()
            self._close_if_confirmed(leg)

    def _cancel(self, leg: Leg, node: NodeId | None, keys: tuple[Key, ...]) -> None:
        if node is not None and keys:
            leg.unconfirmed.setdefault(node, set()).update(keys)
            self._out.append(Send(node, Cancel(keys)))

    def _close_if_confirmed(self, leg: Leg) -> None:
        if leg.state is LegState.LEAVING:
            self._out.extend(leg.releases(leg.charged - leg.unconfirmed.keys()))
            if not leg.unconfirmed:
                self._close(leg)

    def _close(self, leg: Leg) -> None:
        leg.state = LegState.CLOSED
        self._out.extend(leg.releases(leg.charged))
        self._legs.remove(leg)

    # --- time and tables ------------------------------------------------------------------------

    def _on_tick(self) -> None:
        for leg in list(self._legs):
            if leg.state is LegState.LEAVING and self._now_s >= leg.leave_by_s:
                self._close(leg)
            elif leg.state is LegState.LIVE and self._now_s - leg.heard_s >= SILENCE_DEADLINE_S:
                self._lose(leg, Loss.broken("no node has sent anything about this request"), None)

    def _leg_of(self, key: Key, state: LegState = LegState.LIVE) -> Leg | None:
        for leg in self._legs:
            if leg.key == key and leg.state is state:
                return leg
        return None
