"""Clients that resume, leave, move, vanish and lie, and check every token that they get."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

from tests.sim.executor import VOCAB, Context, first_allowed, next_token, rank_of
from tests.sim.http import Exchange
from tests.sim.routers import SimRouter, is_waiting, key_header
from tests.sim.rules import EOS, RULES, word

if TYPE_CHECKING:
    from tests.sim.world import World

# The longest that a connected client waits for a token without faults, and where reads take longer
# than leases, so that most of them are made again.
SILENCE_S = 15.0
SLOW_SILENCE_S = 30.0
PATIENCE_S = 25.0  # for a whole response
SLOWEST_STEP_S = 0.15  # in which a token that it has is computed again
RETRIED = (
    "shutting_down",
    "queue_timeout",
    "no_nodes",
    "queue_full",
    "not_ready",
)
LONGEST_PROMPT = 90
BLAME_S = 5.0  # for so long after its end, a fault may still cost an attempt


class Client:
    """Asks once, and comes back until it has every token."""

    def __init__(self, world: "World", number: int) -> None:
        rng = world.rng
        self.world = world
        self.number = number
        self.prompt = [
            rng.randrange(VOCAB) for _ in range(rng.choice((3, 20, 50, LONGEST_PROMPT)))
        ]
        if rng.random() < 0.6:  # a prefix that others have, too
            num_shared = rng.choice((16, 80))
            document = 100 * rng.randrange(5)
            self.prompt[:num_shared] = range(
                document, document + min(num_shared, len(self.prompt))
            )
        self.n = rng.choice((1, 1, 1, 2, 3))
        self.seed = rng.randrange(1 << 40)
        lengths = (1, 2, 10, 40) if world.is_tiny else (1, 2, 10, 60, 150, 300)
        self.max_tokens, self.ignores_eos = rng.choice(lengths), rng.random() < 0.7
        # Its prompt has log probabilities, and it gets no stream.
        self.is_scored = number % 5 == 0
        if self.is_scored:  # it must have all of it within its patience
            self.max_tokens = min(self.max_tokens, 60)
        self.tenant = world.later_rng.choice(world.tenants) if world.tenants else None
        self.rule = RULES[world.later_rng.choice(("none", *RULES))]
        self.ignores_eos = self.ignores_eos and not self.rule.is_form
        self.priority = next(world.priorities)
        self.stops = rng.choice(([], [], [], [word(token) for token in range(4)]))
        self.ends = {*range(len(self.stops)), *(() if self.ignores_eos else EOS)}
        self.is_done = False
        self.router: SimRouter | None = None  # that has its connection
        self.last_s = 0.0
        self.queued_s = 0.0  # when it last waited in the queue of its router
        self.longest_gap_s = 0.0
        self._has_lied = False  # what it gets then is worth nothing
        self.asked_s = 0.0  # when it began the request
        self._root = world.root.extended(self.prompt)
        self._forget()

    async def go_on(self) -> None:
        """Wait for another client's response, and take it for the beginning of the prompt."""
        world = self.world
        rng = self.world.prefix_rng
        other = rng.choice([one for one in world.clients if one is not self])
        for _ in range(20):
            if other.is_done:
                own = self.prompt[: rng.choice((1, 6, 12))]
                history = [*other.prompt, *other.outputs[0]][
                    : LONGEST_PROMPT - len(own)
                ]
                self.prompt = [*history, *own]
                self._root = world.root.extended(self.prompt)
                self._forget()
                return
            await asyncio.sleep(1.0)

    def _forget(self) -> None:
        """Begin anew, with another request."""
        self.event_id = ""  # of the last event
        self.contexts: list[Context] = [self._root] * self.n
        self.outputs: list[list[int]] = [[] for _ in range(self.n)]
        self.texts = [""] * self.n
        self.has_ended = [False] * self.n
        self.is_whole = [False] * self.n  # it has its last token

    def num_tokens(self, choice: int) -> int:
        return self.contexts[choice].length - self._root.length

    @property
    def _gives_way(self) -> bool:
        """Return whether nodes serve others before it, whenever they come."""
        by_priority = self.world.engine.scheduling_policy == "priority"
        firsts = min(other.priority for other in self.world.clients)
        return by_priority and self.priority > firsts

    @property
    def _recomputed_s(self) -> float:
        """Return how long it may take to compute again what it has."""
        return SLOWEST_STEP_S * max(map(self.num_tokens, range(self.n)))

    async def run(self) -> None:
        world = self.world
        while not self.is_done:
            await self._connect()
            await asyncio.sleep(world.rng.uniform(0.05, 1.0))

    async def _connect(self) -> None:
        """Ask once, and read until the response ends, the connection breaks, or it leaves."""
        world = self.world
        rng = self.world.rng
        self._has_lied = False
        exchange = self._again() if self.event_id else self._first()
        if not exchange.begin():
            return
        self.router = next(
            one for one in world.routers if one.process is exchange.process
        )
        self.last_s = world.loop.time()
        self._has_dozed = rng.random() < 0.1
        if self._has_dozed:
            exchange.doze(rng.uniform(0.1, 4.0))
        leaves = rng.random() < world.p_leave
        timeout_s = PATIENCE_S + self._recomputed_s
        if leaves:
            timeout_s = rng.uniform(0.05, rng.choice((0.3, 3.0)))
        try:
            await asyncio.wait([exchange.ended], timeout=timeout_s)
            if exchange.is_whole:
                self._take_body(exchange)
            else:
                world.fates["broken" if exchange.ended.done() else "left"] += 1
        finally:
            exchange.leave(0.0 if exchange.is_whole else rng.choice((0.0, 0.0, 20.0)))
            self.router = None

    def _first(self) -> Exchange:
        self._forget()
        self.asked_s = self.world.loop.time()
        return self._exchange({})

    def _exchange(self, more: dict[str, str]) -> Exchange:
        body = {
            "model": "sim",
            "prompt": self.prompt,
            "n": self.n,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "ignore_eos": self.ignores_eos,
            "stop": self.stops,
            "return_token_ids": True,
            "temperature": 1.0,
            "priority": self.priority,
            "stream": not self.is_scored,
            **({"prompt_logprobs": 0} if self.is_scored else {}),
            **self.rule.fields,
        }
        headers = {
            "Accept": "text/event-stream",
            "Content-Type": "application/json",
            **key_header(self.tenant),
            **more,
        }
        return Exchange(
            self.world.port, "POST /v1/completions", self._take_event, body, headers
        )

    def _again(self) -> Exchange:
        self._has_lied = self.world.rng.random() < 0.02
        event_id = self.event_id
        if self._has_lied:
            response = event_id.rpartition(":")[0]
            event_id = f"{response}:{'.'.join(['999999999e@00000003'] * self.n)}"
            self.world.fates["lied"] += 1
        self.world.fates["resumed"] += 1
        return self._exchange({"Last-Event-ID": event_id})

    def _take_event(self, event_id: str, data: bytes) -> None:
        if self._has_lied:
            return
        if data == b"[DONE]":
            self._check_whole()
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self._failed(chunk["error"], 200)
            return
        for choice in chunk["choices"]:
            self._take(choice, is_first=not self.event_id)
        self.event_id = event_id

    def _take_body(self, exchange: Exchange) -> None:
        """Take the end of a response: an error's, or one that was no stream."""
        if exchange.status != 200:
            self._failed(json.loads(exchange.body)["error"], exchange.status)
        elif self._has_lied:
            self._forget()
        elif self.is_scored:
            choices = json.loads(exchange.body)["choices"]
            self._check_prompt(choices[0]["prompt_logprobs"])
            for choice in choices:
                self._take(choice, is_first=True)
            self._check_whole()

    def _take(self, chunk: dict[str, Any], *, is_first: bool) -> None:
        """Check that each token is what some node says after exactly the tokens before it."""
        choice = chunk["index"]
        world = self.world
        for token in chunk["token_ids"]:
            context = self.contexts[choice]
            if self.is_whole[choice]:
                self._complain(f"a token after the end of choice {choice}")
            if token not in {
                self._next_token(choice, node.salt) for node in world.nodes
            }:
                place = self.num_tokens(choice)
                self._complain(
                    f"token {place} of choice {choice} is what no node would say"
                )
            self.contexts[choice] = context.then(token)
            self.outputs[choice].append(token)
            is_last = self.num_tokens(choice) == self.max_tokens
            self.is_whole[choice] = is_last or token in self.ends
        now_s = world.loop.time()
        silent_s = now_s - max(self.last_s, self.queued_s, world.healed_s)
        are_reads_slow = max(world.landing_s) > world.lease_s
        longest_s = (
            SLOW_SILENCE_S if are_reads_slow else SILENCE_S
        ) + self._recomputed_s
        may_wait = is_first or self._gives_way  # its prompt, or all of it
        if silent_s > longest_s and not may_wait:
            self._complain(f"silent for {silent_s:.1f} s without a fault")
        if self.has_ended[choice]:
            self._complain(f"a second end of choice {choice}")
        self.has_ended[choice] = chunk["finish_reason"] is not None
        if self.has_ended[choice] != self.is_whole[choice]:
            self._complain(f"choice {choice} ended early, or too late")
        self.texts[choice] += chunk["text"]
        self.longest_gap_s = max(self.longest_gap_s, now_s - self.last_s)
        self.last_s = now_s

    def _next_token(self, choice: int, salt: int) -> int:
        """Return what a node says after the tokens of a choice, by the rule of this client."""
        context = self.contexts[choice]
        output = self.outputs[choice]
        return first_allowed(
            lambda i: next_token(context, self.seed + i, choice, salt),
            lambda token: self.rule.allows(self.prompt, output, token),
        )

    def _check_prompt(self, rows: list[dict[str, Any] | None]) -> None:
        """Check that one node has said of each token what it says after those before it."""
        ranks = [next(iter(row.values()))["rank"] for row in rows if row is not None]
        said = []
        for node in self.world.nodes:
            context = self.world.root.then(self.prompt[0])
            said.append([])
            for token in self.prompt[1:]:
                said[-1].append(rank_of(context, token, node.salt))
                context = context.then(token)
        if ranks not in said:
            self._complain("the scores of its prompt are wrong")

    def _check_whole(self) -> None:
        if not all(self.has_ended):
            self._complain("an outcome without the end of all choices")
        for choice, text in enumerate(self.texts):
            shown = [token for token in self.outputs[choice] if token not in self.ends]
            if text != "".join(map(word, shown)):
                self._complain(f"choice {choice} has not the text of its tokens")
        self.is_done = True

    def _complain(self, text: str) -> None:
        self.world.problem(f"client {self.number}: {text}")

    def _failed(self, error: dict[str, Any], status: int) -> None:
        code = error["code"]
        self.world.fates[code] += 1
        if code == "stream_changed":
            if self.world.lends and not self._has_lied:  # all nodes say the same
                self._complain("the tokens that it has are not computed again")
            self._forget()
        elif code not in RETRIED and not self._is_excused(code):
            self._complain(
                f"{code} (status {status}) without a cause: {error['message']}"
            )

    def _is_excused(self, code: str) -> bool:
        """Return whether a fault in the time of this request explains its end."""
        world = self.world
        if code == "lease_expired" and max(world.landing_s) > world.lease_s:
            return True  # most reads are made again until one is quick
        return world.nemesis.explains(code, self.asked_s - BLAME_S)

    def check_queued(self) -> None:
        """Note whether it waits in the queue for a node that has room."""
        own = [] if self.router is None else self.router.requests_of(self.seed)
        if any(map(is_waiting, own)):
            self.queued_s = self.world.loop.time()
