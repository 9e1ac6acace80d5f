"""Clients that resume, leave, move, vanish and lie, and check every token that they get."""

import asyncio
from typing import TYPE_CHECKING

from baton.protocol.errors import BatonError
from baton.protocol.ids import Key, RequestId
from baton.protocol.messages import FinishReason, ResumeState
from baton.protocol.sampling import SamplingParams
from baton.router.outputs import CompletionOutput
from baton.router.reattach import Claim, ReceivedPart
from baton.router.stream import RequestStream, digest_of
from tests.sim.clock import Process
from tests.sim.executor import VOCAB, Context, next_token, score
from tests.sim.members import EOS, SimRouter

if TYPE_CHECKING:
    from tests.sim.world import World

SILENCE_S = 15.0  # the longest that a connected client waits for a token without faults
STOP_BELOW = 4  # tokens that hold a stop string
RETRIED = (
    "shutting_down", "stream_taken_over", "queue_timeout", "no_nodes", "queue_full", "not_ready",
    "stream_gone", "stream_unknown",
)  # fmt: skip


class _Silent:
    """Has the tokens of a choice, and no text. Tokens below `stop_below` are its stop strings."""

    num_reasoning_tokens = 0

    def __init__(self, index: int, stop_below: int) -> None:
        self._index, self._stop_below = index, stop_below

    def push(self, token_ids: list[int], final: FinishReason | None = None) -> CompletionOutput:
        for count, token in enumerate(token_ids, 1):
            if token < self._stop_below:
                return CompletionOutput(self._index, "", token_ids[:count], None, "stop")
        return CompletionOutput(self._index, "", list(token_ids), None, final)


class Client:
    """Asks once, and comes back until it has every token."""

    def __init__(self, world: "World", number: int) -> None:
        rng = world.rng
        self.world, self.number = world, number
        self.prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((3, 20, 50, 90)))]
        if rng.random() < 0.6:  # a prefix that others have, too
            num_shared, document = rng.choice((16, 80)), 100 * rng.randrange(5)
            self.prompt[:num_shared] = range(document, document + min(num_shared, len(self.prompt)))
        self.n = rng.choice((1, 1, 1, 2, 3))
        self.seed = rng.randrange(1 << 40)
        lengths = (1, 2, 10, 40) if world.is_tiny else (1, 2, 10, 60, 150, 300)
        self.params = SamplingParams(
            n=self.n, max_tokens=rng.choice(lengths), seed=self.seed,
            ignore_eos=rng.random() < 0.7, prompt_logprobs=None if number % 5 else 0,
        )  # fmt: skip
        self.stop_below = rng.choice((0, 0, 0, STOP_BELOW))
        self.ends = set(range(self.stop_below)) | set(() if self.params.ignore_eos else EOS)
        self.is_done = False
        self.router: SimRouter | None = None  # that has its connection
        self._stream_now: RequestStream | None = None
        self.served_by: Process | None = None  # the one router that it ever met
        self.last_s = 0.0
        self.queued_s = 0.0  # when it last waited in the queue of its router
        self.longest_gap_s = 0.0
        self._num_tries = 0
        self._has_lied = False  # what it gets then is worth nothing
        self._root = world.root.extended(self.prompt)
        self._forget()

    def _forget(self) -> None:
        """Begin anew, with a request of another id."""
        self._num_tries += 1
        self.request_id = RequestId(f"cmpl-{self.number}-{self._num_tries}-0")
        self.contexts: list[Context] = [self._root] * self.n
        self.digests = [0] * self.n
        self.has_begun, self.has_ended = [False] * self.n, [False] * self.n
        self.is_whole = [False] * self.n  # it has its last token

    def num_tokens(self, choice: int) -> int:
        return self.contexts[choice].length - self._root.length

    def deserter_of(self, key: Key) -> SimRouter | None:
        """Return the router that has no use for a sequence of this client any more.

        One that has adopted a stream does not know what earlier routers left on nodes that did
        not answer then: that goes on for `detached_s`, or to its end.
        """
        router = next((one for one in self.world.routers if one.process is self.served_by), None)
        if router is None or self.is_done:
            return router
        active = router.core._requests.get(key.request_id) if router is self.router else None
        if active is None:
            return None
        attempt = active.lifecycle.choices[key.choice].attempt
        is_old = attempt is None or attempt.key.attempt > key.attempt
        return router if is_old else None

    async def run(self) -> None:
        world = self.world
        while not self.is_done:
            up = [router for router in world.routers if router.is_up]
            if up:
                try:
                    await self._connected(router := world.rng.choice(up))
                except BatonError as error:
                    self._failed(error, router)
            await asyncio.sleep(world.rng.uniform(0.05, 1.0))

    async def _connected(self, router: SimRouter) -> None:
        """Ask a router, and read what it sends until one of them leaves."""
        world, loop = self.world, self.world.loop
        broke: asyncio.Future[None] = loop.create_future()
        break_off = lambda: None if broke.done() else broke.set_result(None)  # noqa: E731
        router.on_death.append(break_off)
        try:
            stream = await self._ask(router, broke)
            if stream is None:
                return
            self.router, self.last_s, self._stream_now = router, loop.time(), stream
            is_deaf = self._has_lied
            stream.send_to(lambda delta: None if broke.done() or is_deaf else self._take(delta))
            ended = router.start_task(stream.ended())
            ended.add_done_callback(_retrieved)
            leaves = world.rng.random() < world.p_leave
            timeout_s = world.rng.uniform(0.05, world.rng.choice((0.3, 3.0))) if leaves else None
            await asyncio.wait(
                [ended, broke], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if ended.done():
                ended.result()
                if is_deaf:
                    self._forget()
                else:
                    self._check_whole(router)
                return
            break_off()
            if not router.process.is_dead:  # a client that vanishes is noticed much later
                after_s = world.rng.choice((0.0, 0.0, 20.0))
                loop.call_later(after_s, router.process.call, stream.close)
                world.fates["vanished" if after_s else "left"] += 1
        finally:
            self.router = None
            if break_off in router.on_death:
                router.on_death.remove(break_off)

    async def _ask(self, router: SimRouter, broke: "asyncio.Future[None]") -> RequestStream | None:
        """Return the stream, or None if the router died before it was found."""
        is_scored = self.params.prompt_logprobs is not None  # such a stream cannot be resumed
        if is_scored or not any(self.has_begun):
            self._has_lied = False
            self.served_by = router.process
            self._forget()
            stream = self._stream()
            kept = None if is_scored else ResumeState(b"form", b"owner", self.n)
            self.request_id = router.process.run(router.core.submit, stream, kept)
            return stream
        self.served_by = None
        parts = tuple(
            ReceivedPart(self.num_tokens(index), begun, ended, self.digests[index])
            for index, (begun, ended) in enumerate(zip(self.has_begun, self.has_ended, strict=True))
        )
        self._has_lied = self.world.rng.random() < 0.02
        if self._has_lied:
            parts = (ReceivedPart(10**9, True, True, 3),) * self.n
            self.world.fates["lied"] += 1
        claim = Claim(self.request_id, b"owner", parts)
        found = router.start_task(router.core.reattach(claim, lambda _: self._stream()))
        await asyncio.wait([found, broke], return_when=asyncio.FIRST_COMPLETED)
        if not found.done():
            found.cancel()
            return None
        self.world.fates["resumed"] += 1
        return found.result()

    def _stream(self) -> RequestStream:
        silent = [_Silent(index, self.stop_below) for index in range(self.n)]
        return RequestStream(self.request_id, None, list(self.prompt), self.params, silent)  # type: ignore[arg-type]

    def _take(self, delta: CompletionOutput) -> None:
        """Check that each token is what some node says after exactly the tokens before it."""
        choice, world = delta.index, self.world
        if not any(self.has_begun):
            self._check_prompt()
        for token in delta.token_ids:
            context = self.contexts[choice]
            if self.is_whole[choice]:
                world.problem(f"client {self.number}: a token after the end of choice {choice}")
            said = {next_token(context, self.seed, choice, node.salt) for node in world.nodes}
            if token not in said:
                world.problem(
                    f"client {self.number}: token {self.num_tokens(choice)} of choice {choice} is "
                    "what no node would say"
                )
            self.contexts[choice] = context.then(token)
            is_last = self.num_tokens(choice) == self.params.max_tokens
            self.is_whole[choice] = is_last or token in self.ends
        now_s = world.loop.time()
        silent_s = now_s - max(self.last_s, self.queued_s, world.healed_s)
        if silent_s > SILENCE_S and self.has_begun[choice]:  # before, its prompt may wait
            world.problem(f"client {self.number} was silent for {silent_s:.1f} s without a fault")
        self.has_begun[choice] = True
        self.digests[choice] = digest_of(delta.token_ids, self.digests[choice])
        if self.has_ended[choice]:
            world.problem(f"client {self.number}: a second end of choice {choice}")
        self.has_ended[choice] = delta.finish_reason is not None
        if self.has_ended[choice] != self.is_whole[choice]:
            world.problem(f"client {self.number}: choice {choice} ended early, or too late")
        self.longest_gap_s = max(self.longest_gap_s, now_s - self.last_s)
        self.last_s = now_s

    def _check_prompt(self) -> None:
        """Check that one node has said of each token what it says after those before it."""
        assert self._stream_now is not None
        context, said = self.world.root, dict.fromkeys((one.salt for one in self.world.nodes), b"")
        for place, token in enumerate(self.prompt):
            for salt in said if place and self.params.prompt_logprobs is not None else ():
                said[salt] += score(context, token, salt)
            context = context.then(token)
        if self._stream_now.prompt_rows not in said.values():
            self.world.problem(f"client {self.number}: the scores of its prompt are wrong")

    def _check_whole(self, router: SimRouter) -> None:
        if all(self.has_ended):
            self.is_done = True
        else:
            self.world.problem(
                f"client {self.number}: an outcome of {router.name} without the end of all choices"
            )
            self.is_done = True

    def _failed(self, error: BatonError, router: SimRouter) -> None:
        self.world.fates[error.code] += 1
        if error.code == "stream_gone":
            self._check_gone(router)
            self._forget()
        elif error.code not in RETRIED:
            self.world.fates[f"unexpected {error.code}"] += 1
            if error.http_status < 500 and error.http_status not in (409, 429):
                self.world.problem(f"client {self.number}: {error.code}: {error.message}")

    def check_queued(self) -> None:
        """Note whether it waits in the queue for a node that has room."""
        if self.router is not None and not self.router.process.is_dead:
            lifecycles = [one.lifecycle for one in self.router.core._requests.values()]
            own = [one for one in lifecycles if one.request.request_id == self.request_id]
            if any(one.waiting_choices for one in own):
                self.queued_s = self.world.loop.time()

    def _check_gone(self, router: SimRouter) -> None:
        """A stream may be gone only if the nodes that are up do not hold all that it needs.

        A router that has long been up does not know of one that it has never met, and takes one
        process for another of the same name: once that has left, it knows of no other until the
        node has joined it again.
        """
        if self._has_lied:
            return
        joined = router.core.registry.joined("decode")
        twins = {
            twin.name
            for twin in self.world.twins
            if not twin.process.is_dead or twin.name not in joined
        }
        held = {
            one.key.choice
            for node in self.world.nodes
            if node.is_up
            and node.name not in twins
            and frozenset((node.process, router.process)) in self.world.network.have_met
            for one in node.held(self.request_id)
            if len(one.token_ids) >= (num_tokens := self.num_tokens(one.key.choice))
            and digest_of(one.token_ids[:num_tokens]) == self.digests[one.key.choice]
        }
        if {index for index in range(self.n) if not self.has_ended[index]} <= held:
            self.world.problem(f"client {self.number}: its stream is gone, but nodes hold it")


def _retrieved(ended: "asyncio.Task[None]") -> None:
    """Let nobody be told of the error of a stream that its client has left."""
    if not ended.cancelled():
        ended.exception()
