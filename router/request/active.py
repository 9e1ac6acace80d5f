"""One request of the router: its lifecycle, its caller's stream and a record of its attempts.

`active_requests` holds it and reports every attempt here.
"""

from dataclasses import dataclass

from baton.protocol.ids import Key, RequestId
from baton.router.pairs import Pairs
from baton.router.policy import Decision
from baton.router.request.events import Place, Timed, TriedAgain
from baton.router.request.lifecycle import Lifecycle
from baton.router.stream import RequestStream


@dataclass(slots=True, eq=False)
class Active:
    """A request from `submit` until no node has work left or a confirmation to send for it."""

    request_id: RequestId
    lifecycle: Lifecycle
    stream: RequestStream
    began_s: float
    is_broken: bool = False

    def asks(self, now_s: float, place: Place) -> None:
        """Record that an attempt began to wait for nodes."""
        self.stream.metrics.begin_attempt(place.key, place.num_choices, now_s - self.began_s)

    def placed(self, now_s: float, key: Key, decision: Decision) -> None:
        """Record the nodes of an attempt."""
        metrics, waited_s = self.stream.metrics, now_s - self.began_s
        if (attempt := metrics.attempt_of(key)) is not None:
            attempt.placed_at_s = waited_s
            attempt.prefill_node = decision.placed.prefill_node
            attempt.decode_node = decision.placed.decode_node
        if metrics.num_attempts == 0:
            metrics.router_queue_s = waited_s
        metrics.num_attempts = max(metrics.num_attempts, key.nth_attempt + 1)
        metrics.num_predicted_tokens = decision.num_cached_tokens
        metrics.path = decision.path
        metrics.local_fallback = decision.is_fallback

    def timed(self, now_s: float, timed: Timed, pairs: Pairs) -> None:
        """Record what a node measured and, for its pair, what a handoff moved."""
        times, metrics = timed.times, self.stream.metrics
        metrics.add_stages(times, of_prompt=timed.of_prompt)
        if (attempt := metrics.attempt_of(timed.key)) is None:
            return
        attempt.timed(now_s - self.began_s, times, of_prompt=timed.of_prompt)
        if times.transfer_bytes and attempt.prefill_node and attempt.decode_node:
            pairs.moved(
                attempt.prefill_node, attempt.decode_node, times.transfer_bytes, times.transfer_s
            )

    def tries_again(self, now_s: float, again: TriedAgain) -> None:
        """Record that an attempt was lost and another follows."""
        metrics = self.stream.metrics
        metrics.try_again(again.failure, is_resume=again.is_resume)
        if (attempt := metrics.attempt_of(again.key)) is not None:
            attempt.lost_at_s, attempt.failure = now_s - self.began_s, again.failure.code
