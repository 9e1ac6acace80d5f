"""The routers of a simulated cluster with their HTTP side, as `baton router` has them."""

import asyncio
import os
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from baton.protocol.config import ClusterConfig, ModelConfig, RouterConfig
from baton.protocol.ids import Key, NodeId, RequestId
from baton.protocol.messages import ResetPrefixCache
from baton.router.core.lifecycle import Request
from baton.router.core.request import AttemptState
from baton.router.core.router_core import RouterCore
from baton.router.http.api.prepare import parse_body
from baton.router.http.api.schema import Endpoint
from baton.router.http.app import App
from baton.router.http.auth import PREFIX, digest_of
from baton.router.http.server import Server
from baton.router.text import grammars
from baton.router.text.detokenizer import decoding_of
from baton.router.text.grammars import Form
from baton.router.text.tokenizer import Text
from baton.router.text_router import TextRouter
from baton.router.worker import TooMuchWork
from tests.sim.clock import PROCESS
from tests.sim.members import DRAIN_S, Member, SimNode
from tests.sim.network import SimChannels, world_call_at
from tests.sim.rules import TOKENIZER

if TYPE_CHECKING:
    from tests.sim.world import World

# What it takes to decode a byte of a body and to fill a template with it, as measured.
PARSED_BYTE_S = 200e-9
WORK_S = 1.0
CHECK_S = 0.01
WEIGHTS = (0.5, 1.0, 4.0)  # of API keys


class SimRouter(Member):
    """A router with its HTTP side, as `baton router` has it."""

    def __init__(self, world: "World", name: str) -> None:
        super().__init__(world, name)
        self.endpoint = f"ipc://{name}"
        rng = world.later_rng
        # Routers of one cluster may have different settings, but only one set of keys.
        is_first = not world.routers
        self.config = RouterConfig(
            control=self.endpoint,
            local_prefill=world.local_prefill
            if is_first
            else rng.choice(("auto", "never")),
            max_queued=world.max_queued if is_first else rng.choice((3, 1024)),
            max_queued_s=rng.choice((8.0, 60.0)),
            max_attempts=rng.choice((3, 5)),
            heartbeat_timeout_s=rng.choice((3.5, 6.0)),
            api_key_file=key_file(tuple(rng.choice(WEIGHTS) for _ in world.tenants)),
            shares_port=True,
        )

    def _begin(self) -> None:
        super()._begin()
        self.world.dismiss_strangers()
        self.process.run(self._build)
        self.process.start(self.server.start())

    def _build(self) -> None:
        config = ClusterConfig(
            model=ModelConfig(served_model_name="sim"),
            router=self.config,
        )
        process = self.process
        network = self.world.network
        self.core = RouterCore(
            config,
            process.clock,
            lambda *_: SimChannels(network, process, lambda: None, self.keys),
        )
        self.router = TextRouter(config, self.core, Text(TOKENIZER, DECODING))
        self.app = App(self.router, config)
        self.server = Server(self.app, config.router)
        process.state_of = self._state_of
        self.router.start(self.endpoint)

    def kill(self) -> None:
        super().kill()
        self.world.port.died(self.process)

    def end(self) -> None:
        """End as after SIGTERM."""
        self.process.start(self._end())

    async def _end(self) -> None:
        await self.server.drain(DRAIN_S)
        self.router.close()
        await self.server.stop()
        world_call_at(self.world.loop, self.world.loop.time(), self.kill)

    @property
    def is_idle(self) -> bool:
        return not (self.app._num_open or self.server._connections._open)

    def _state_of(self, request_id: str) -> str:
        active = self.core._requests.get(RequestId(request_id))
        if active is None:
            return "unknown"
        if active.has_outcome:
            return "ended"
        return "waiting" if is_waiting(active) else "running"

    def queued(self) -> Iterator[tuple[Key, float]]:
        """Yield each new attempt that waits for nodes, and for how long it has.

        Those of later attempts are of requests that another router had let in.
        """
        now_s = self.process.clock()
        for key, waiting in self.core._queue._new.items():
            yield key, now_s - waiting.since_s

    def has_deserted(self, key: Key) -> bool:
        """Return whether this process had that attempt, and has no use for it any more."""
        if not key.request_id.startswith(f"{self.core.epoch}-"):
            return False
        active = self.core._requests.get(key.request_id)
        if active is None:
            return True
        attempt = active.choices[key.choice].attempt
        return attempt is None or attempt.key.attempt > key.attempt

    def requests_of(self, seed: int) -> list[Request]:
        """Return the requests of the client with this seed."""
        requests = self.core._requests.values()
        return [one for one in requests if one.sampling.seed == seed]

    def forget_prefixes(self, node: SimNode) -> None:
        """Let one node forget what it has cached."""
        self.core._link.send(NodeId(node.name), ResetPrefixCache())

    def knows(self, node: SimNode) -> bool:
        """Say whether this process has joined this router, not another one of its name."""
        joined = self.core.registry.node(NodeId(node.name))
        return joined is not None and joined.epoch == node.epoch

    def state_of(self, node: SimNode) -> str:
        """Return what this router makes of a node's process."""
        joined = self.core.registry.node(NodeId(node.name))
        return (
            joined.state
            if joined is not None and joined.epoch == node.epoch
            else "unknown"
        )

    def serves(self, node: SimNode) -> bool:
        return self.state_of(node) == "ready"


def is_waiting(request: Request) -> bool:
    """Return whether some choice of a request waits for nodes."""
    attempts = [choice.attempt for choice in request.choices]
    return any(
        one is not None and one.state is AttemptState.WAITING for one in attempts
    )


def api_key(tenant: int) -> str:
    return f"sk-{tenant}"


def key_header(tenant: int | None) -> dict[str, str]:
    return {} if tenant is None else {"Authorization": f"Bearer {api_key(tenant)}"}


@cache
def key_file(weights: tuple[float, ...]) -> str:
    """Return the path of a file, in memory, with the keys of the tenants and their weights."""
    lines = (
        f"{PREFIX}{digest_of(api_key(tenant).encode()).hex()} tenant weight={weight:g}\n"
        for tenant, weight in enumerate(weights)
    )
    descriptor = os.memfd_create("keys")
    os.write(descriptor, "".join(lines).encode())
    return f"/proc/self/fd/{descriptor}" if weights else ""


def parse_at_a_cost(endpoint: Endpoint, body: bytes, *rest: Any) -> Any:
    """Parse a body in the time of the process that does it."""
    process = PROCESS.get()
    assert process is not None
    process.spend(PARSED_BYTE_S * len(body))
    return parse_body(endpoint, body, *rest)


async def work(_worker: object, job: object, _lane: object, _client: str = "") -> Any:
    """Check forms and read large bodies, which are too large for the model."""
    if isinstance(job, Form):
        await asyncio.sleep(CHECK_S)
        return checked(job)
    await asyncio.sleep(WORK_S)
    raise TooMuchWork("the prompt is too long")


checked = cache(grammars._checked)


DECODING = decoding_of(TOKENIZER)
