"""Divide the time of a request into consecutive stages from its arrival to its end.

Answers with `timeline` and traces show the stages. The router's clock measures when a request was
placed and when each node's first tokens came; the nodes measure the durations of their own stages.
A node's stages are laid out so that they end when its tokens came, and the time before them is that
of the messages. So no two clocks are compared, and the stages add up to the whole. This file is
pure.
"""

from collections.abc import Sequence

import msgspec

from baton.router.outputs import Attempt, RequestMetrics


class StageSpan(msgspec.Struct, frozen=True):
    """One stage of a request; `start_s` counts from its arrival."""

    stage: str
    start_s: float
    duration_s: float
    node: str = ""  # that did the work
    failure: str = ""  # the code of the attempt's loss


def waterfall(metrics: RequestMetrics) -> list[StageSpan]:
    """Return the stages of a request that has ended.

    If its choices were continued separately after a loss, they are those of the last one.
    """
    end_s = metrics.e2e_s or 0.0
    laid = _Layout(end_s)
    chain = _chain(metrics.attempts)
    ends_s = [*(following.asked_at_s for following in chain[1:]), end_s]
    # Without attempts, only one end is left.
    for attempt, until_s in zip(chain, ends_s, strict=False):
        _lay_out(laid, attempt, until_s)
    laid.until("finish", end_s)
    return laid.stages


class _Layout:
    """Consecutive stages. Each begins where the last one ended, and none exceeds the whole."""

    def __init__(self, end_s: float) -> None:
        self.stages: list[StageSpan] = []
        self._now_s, self._end_s = 0.0, end_s

    def until(self, stage: str, at_s: float, node: str | None = None, failure: str = "") -> None:
        """Add a stage that ends at `at_s`, unless that has passed."""
        at_s = min(at_s, self._end_s)
        if at_s > self._now_s:
            took_s = at_s - self._now_s
            self.stages.append(StageSpan(stage, self._now_s, took_s, node or "", failure))
            self._now_s = at_s


def _chain(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts at the choice that was tried last, oldest first."""
    if not attempts:
        return []
    choice = attempts[-1].choice
    return [one for one in attempts if one.choice <= choice < one.choice + one.num_choices]


def _lay_out(laid: _Layout, one: Attempt, end_s: float) -> None:
    laid.until("router_queue", end_s if one.placed_at_s is None else one.placed_at_s)
    computes = one.prefill_node or one.decode_node
    prompt_at_s = one.prefilled_at_s if one.prefill_node else one.decoding_at_s
    if prompt_at_s is not None:
        laid.until("dispatch", prompt_at_s - one.prefill_s - one.queue_s)
        laid.until("queue", prompt_at_s - one.prefill_s, computes)
        laid.until("prefill", prompt_at_s, computes)
    if one.prefill_node and one.decoding_at_s is not None:
        step_at_s = one.decoding_at_s - one.first_step_s
        landed_at_s = step_at_s - one.decode_queue_s
        laid.until("handoff", landed_at_s - one.exposed_s)
        laid.until("transfer", landed_at_s, one.decode_node)
        laid.until("decode_queue", step_at_s, one.decode_node)
        laid.until("first_step", one.decoding_at_s, one.decode_node)
    if one.decoding_at_s is not None:
        laid.until("decode", one.lost_at_s or end_s, one.decode_node)
    if one.lost_at_s is not None:
        laid.until("lost", end_s, failure=one.failure)
