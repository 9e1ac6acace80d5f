"""A polite client beside a flood: the real queue, registry and policy before modelled nodes."""

import dataclasses
import itertools
import math
import statistics
from collections import deque
from heapq import heappop, heappush

import msgspec
import pytest

from baton.protocol.config import RouterConfig
from baton.protocol.errors import Overloaded
from baton.protocol.ids import Key, NodeId
from baton.protocol.messages import NodeFacts, NodeInfo, StepLimits
from baton.router.core.admission import Admission
from baton.router.core.policy import CheapestPair
from baton.router.core.request import Attempt, Tenant
from tests.support.choosing import cluster, place
from tests.support.depth import nightly
from tests.support.scripted_nodes import node_info

STEP = StepLimits(64, 512)
PROMPT, OUTPUT = 64, 24  # tokens
# What a step takes for its prompts, what a token takes to generate, and what a message takes.
STEP_S = 0.004
TOKEN_S = 0.0001
OUTPUT_S = 0.02
MESSAGE_S = 0.0005
PREFILL = NodeId("p0")
DECODE = NodeId("d0")
FLOOD = Tenant("flood")
POLITE = Tenant("polite")


def node(name: str, role: str) -> NodeInfo:
    return msgspec.structs.replace(
        node_info(name, role, num_blocks=4096), facts=NodeFacts(step=STEP)
    )


class Cluster:
    """One prefill node, which computes whole prompts in order of arrival, and one decode node."""

    def __init__(self, **settings: float) -> None:
        self.registry = cluster(node("p0", "prefill"), node("d0", "decode"))
        self.admission = Admission(
            RouterConfig(**settings), self.registry, CheapestPair("never", 0)
        )
        self.now_s = 0.0
        self.first_s: dict[Tenant, list[float]] = {FLOOD: [], POLITE: []}
        self.num_refused: dict[Tenant, int] = {FLOOD: 0, POLITE: 0}
        self._came_s: dict[Key, float] = {}
        self._attempts: dict[Key, Attempt] = {}
        self._prompts: deque[Attempt] = deque()
        self._is_computing = False
        self._free_slots = STEP.num_slots
        self._landed: deque[Attempt] = deque()
        self._events: list[tuple[float, int, str, object]] = []
        self._numbers = itertools.count()

    def at(self, at_s: float, what: str, of: object = None) -> None:
        heappush(self._events, (at_s, next(self._numbers), what, of))

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] < until_s:
            self.now_s, _, what, of = heappop(self._events)
            getattr(self, f"_{what}")(of)
            for selected in self.admission.take(self.now_s):
                self.admission.selected(selected.key)
                self.registry.reserve(selected)
                self.at(self.now_s + MESSAGE_S, "prompt", self._attempts[selected.key])

    def _sent(self, tenant: Tenant) -> None:
        attempt = place(f"r{next(self._numbers)}", PROMPT, tenant=tenant)
        attempt = dataclasses.replace(
            attempt, num_final_tokens=PROMPT + OUTPUT, block_keys=()
        )
        try:
            pushed_out = self.admission.check_room(
                self.now_s, PROMPT, tenant, could_serve=True
            )
        except Overloaded:
            self.num_refused[tenant] += 1
            return
        self.num_refused[FLOOD] += len(pushed_out)
        self._came_s[attempt.key] = self.now_s
        self._attempts[attempt.key] = attempt
        self.admission.wait(self.now_s, attempt)

    def _prompt(self, attempt: Attempt) -> None:
        self._prompts.append(attempt)
        self._step()

    def _step(self) -> None:
        if self._is_computing or not self._prompts:
            return
        num = min(len(self._prompts), STEP.num_tokens // PROMPT)
        batch = [self._prompts.popleft() for _ in range(num)]
        self._is_computing = True
        self.at(self.now_s + STEP_S + num * PROMPT * TOKEN_S, "computed", batch)

    def _computed(self, batch: list[Attempt]) -> None:
        self._is_computing = False
        for attempt in batch:
            self.first_s[attempt.tenant].append(self.now_s - self._came_s[attempt.key])
            self.at(self.now_s + MESSAGE_S, "handed_over", attempt)
        self._step()

    def _handed_over(self, attempt: Attempt) -> None:
        self.registry.release(PREFILL, attempt.key)
        self._landed.append(attempt)
        self._generate()

    def _generate(self) -> None:
        while self._free_slots and self._landed:
            self._free_slots -= 1
            self.at(self.now_s + OUTPUT * OUTPUT_S, "ended", self._landed.popleft())

    def _ended(self, attempt: Attempt) -> None:
        self._free_slots += 1
        self.registry.release(DECODE, attempt.key)
        self.admission.ended(attempt.key.request_id)
        self._generate()


SECONDS = 12.0


def sends(bench: Cluster, tenant: Tenant, first_s: float, every_s: float) -> None:
    for number in range(math.ceil((SECONDS - first_s) / every_s)):
        bench.at(first_s + number * every_s, "sent", tenant)


@pytest.mark.parametrize("rate", [60, 120, nightly(400)])
def test_a_polite_client_gets_its_first_token_within_twice_the_time_that_it_takes_alone(
    rate,
):
    """Prompts as short as these cost the flood a quarter, since steps are smaller."""
    alone = Cluster()
    beside = Cluster()
    flooded = Cluster()
    for bench in (alone, beside):
        sends(bench, POLITE, 2.0, 0.337)
    for bench in (beside, flooded):
        sends(bench, FLOOD, 0.0, 1 / rate)
    for bench in (alone, beside, flooded):
        bench.run(SECONDS)
    first_s, later_s = (
        statistics.median(bench.first_s[POLITE]) for bench in (alone, beside)
    )
    assert later_s <= 2 * first_s
    assert beside.num_refused[POLITE] == 0
    assert len(beside.first_s[FLOOD]) >= 0.7 * len(flooded.first_s[FLOOD])


def test_a_queue_that_a_flood_keeps_full_takes_a_polite_client():
    bench = Cluster(max_queued=20)
    sends(bench, FLOOD, 0.0, 0.0005)
    sends(bench, POLITE, 1.0, 0.1)
    bench.run(SECONDS)
    assert bench.num_refused[FLOOD] > 10_000
    assert bench.num_refused[POLITE] == 0
