"""Requests whose router is gone. They go on for a while, and another router may take them over.

This file is pure; only the decode scheduler calls it. A detached sequence runs like any other, but
its tokens are not sent until a router attaches. That router gets the whole output so far, and all
that follows. Sequences that have ended by then are among the `EndedChoices`.
"""

from collections.abc import Callable

from baton.decode_node.ended import Ended, EndedChoices
from baton.decode_node.intake import Intake, PendingPrompt
from baton.decode_node.owners import Owners
from baton.decode_node.stream import Stream
from baton.engine.by_request import ByRequest
from baton.engine.outputs import NO_ROUTER, Origin, Outputs
from baton.protocol.errors import Failure, NodeError
from baton.protocol.ids import RequestId
from baton.protocol.messages import Attach, Attached, FinishReason, FirstToken, Kept, NotAttached


class Detached:
    def __init__(
        self,
        keep_s: float,
        intake: Intake,
        streams: ByRequest[Stream],
        leave: Callable[[Stream], None],
    ) -> None:
        """`streams` are the running streams; `leave` ends one of them."""
        self.ended = EndedChoices(keep_s)
        self.owners = Owners()
        self._keep_s = keep_s
        self._intake = intake
        self._streams = streams
        self._leave = leave
        self._until_s: dict[RequestId, float] = {}
        self._now_s = 0.0  # the time of the last `expire`

    @property
    def _outputs(self) -> Outputs:
        return self._intake.outputs

    def forget(self, origin: Origin, streams: list[Stream]) -> None:
        """Detach the requests of a lost router that may be taken over, and end the others."""
        for prompt in list(self._intake.pending.values()):
            if prompt.origin == origin and not prompt.is_ended:
                if self._detaches(prompt.key.request_id, prompt.message.kept):
                    prompt.detach()
                else:
                    self._intake.end(prompt, _lost_router())
        for stream in streams:
            if stream.origin == origin:
                if self._detaches(stream.sequence.key.request_id, stream.kept):
                    stream.detach()
                else:
                    self._leave(stream)

    def attach(self, now_s: float, origin: Origin, message: Attach) -> None:
        """Give a router the request that it asks for, or tell it why not."""
        request_id = message.request_id
        prompts = [one for one in self._intake.of(request_id) if not one.is_ended]
        streams = self._streams.of(request_id)
        kept = self._kept(request_id, prompts, streams)
        if kept is None or kept.owner != message.owner:
            self._outputs.say(origin, NotAttached(request_id))
            return
        origins = {one.origin for one in prompts} | {one.origin for one in streams}
        if origins - {NO_ROUTER}:
            self._outputs.say(origin, NotAttached(request_id, is_in_use=True))
            return
        self._until_s.pop(request_id, None)
        for prompt in [one for one in prompts if one.reserved_s is None]:
            # The client has no token of this prompt, and prefill may have given it up. So the new
            # router begins it again on nodes of its choice.
            self.keep_prompt(now_s, prompt)
            self._intake.end(prompt, _lost_router())
            prompts.remove(prompt)
        self._outputs.say(origin, self._give(request_id, kept, origin, prompts, streams))

    def keep_stream(self, stream: Stream, reason: FinishReason | None) -> None:
        """Keep the tokens of a sequence that ends, with the finish reason if there is one."""
        if stream.kept is not None:
            self.ended.add(self._now_s, Ended.of(stream.sequence, stream.kept, reason))

    def keep_first(self, now_s: float, prompt: PendingPrompt, choice: int, t: FirstToken) -> None:
        """Keep the only token of a choice that ended with its first token and so never ran here."""
        if prompt.message.kept is not None and choice in prompt.choices.live:
            self.ended.add(now_s, Ended.before_it_ran(prompt.message, choice, t))

    def keep_prompt(self, now_s: float, prompt: PendingPrompt) -> None:
        """Keep the tokens of a prompt that ends without its router."""
        if prompt.origin == NO_ROUTER and not prompt.is_ended:
            for choice in sorted(prompt.choices.live):
                self.ended.add(now_s, Ended.before_it_ran(prompt.message, choice, None))

    def expire(self, now_s: float) -> None:
        """End the requests that have waited too long for a router."""
        self._now_s = now_s
        self.ended.expire(now_s)
        due = [rid for rid, until_s in self._until_s.items() if until_s <= now_s]
        for request_id in due:
            del self._until_s[request_id]
            for prompt in self._intake.of(request_id):
                if prompt.origin == NO_ROUTER and not prompt.is_ended:
                    self._intake.end(prompt, _lost_router())
            for stream in self._streams.of(request_id):
                if stream.origin == NO_ROUTER:
                    stream.kept = None
                    self._leave(stream)

    # --- inside --------------------------------------------------------------------------------

    def _detaches(self, request_id: RequestId, kept: Kept | None) -> bool:
        """Note that a request goes on without a router, and return whether it may."""
        if kept is None or not self._keep_s:
            return False
        self._until_s[request_id] = self._now_s + self._keep_s
        return True

    def _kept(
        self, request_id: RequestId, prompts: list[PendingPrompt], streams: list[Stream]
    ) -> Kept | None:
        found = [one.message.kept for one in prompts] + [one.kept for one in streams]
        found += [one.kept for one in self.ended.of(request_id)]
        return found[0] if found else None

    def _give(
        self,
        request_id: RequestId,
        kept: Kept,
        origin: Origin,
        prompts: list[PendingPrompt],
        streams: list[Stream],
    ) -> Attached:
        ended = self.ended.of(request_id)
        held = {one.key.choice: one.held for one in ended}
        landing: list[int] = []
        for one in prompts:
            given = {choice.key.choice: choice for choice in one.attach(origin)}
            held.update(given)
            landing += () if one.is_local else given
        held.update({one.sequence.key.choice: one.attach(origin) for one in streams})
        if streams or prompts:
            sequence = streams[0].sequence if streams else prompts[0].sequence
            prompt, sampling = sequence.token_ids[: sequence.num_prompt_tokens], sequence.sampling
        else:
            prompt, sampling = ended[0].prompt_token_ids, ended[0].sampling
        choices = tuple(held.values())
        attempts = [choice.key.attempt for choice in choices]
        return Attached(
            request_id, kept.form, kept.num_choices, prompt, sampling, choices,
            self.owners.pass_on(request_id, attempts), tuple(landing),
        )  # fmt: skip


def _lost_router() -> Failure:
    # To the router, which prefill may still reach, this must look like a lost node and not like a
    # cancel.
    return NodeError("the decode node lost the channel to its router").to_failure()
