"""Nodes that a test plays over real sockets: `ScriptedNode` word by word, `ToyNode` on its own.

A toy node computes nothing; its "model" is a pure function of the tokens so far, so that a test
knows every answer, also that of a request that moved from one node to another.
"""

import asyncio
import zlib
from array import array
from typing import TypeVar

import msgspec
import zmq

from baton.protocol.codec import to_node_codec, to_router_codec
from baton.protocol.ids import Epoch, Key, NodeId
from baton.protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    CancelDone,
    Decode,
    FinishReason,
    FirstToken,
    FirstTokens,
    Heartbeat,
    Hello,
    KVLayout,
    Load,
    NodeInfo,
    Prefill,
    Ready,
    Role,
    StageTimes,
    TokenEntry,
    Tokens,
    ToNode,
    ToRouter,
)
from baton.runtime.channels.dialer import Dialer, Disconnected

VOCAB_SIZE = 250
BLOCK_SIZE = 4
HEAR_TIMEOUT_S = 20.0

M = TypeVar("M")


def toy_token(token_ids: list[int], choice: int = 0) -> int:
    """What follows `token_ids` in a choice; never token 0."""
    return _token_after(digest_of(token_ids), choice)


def digest_of(token_ids: list[int], digest: int = 0) -> int:
    """Return the digest of the tokens that have `digest` and of these after them."""
    return zlib.crc32(array("q", token_ids).tobytes(), digest)


def _token_after(digest: int, choice: int) -> int:
    return 1 + (digest + choice) % (VOCAB_SIZE - 1)


def toy_answer(prompt: list[int], num_tokens: int, choice: int = 0) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(toy_token(token_ids, choice))
    return token_ids[len(prompt) :]


def toy_layout(fingerprint: str = "layout") -> KVLayout:
    return KVLayout(BLOCK_SIZE, 1024, fingerprint)


def node_info(
    node_id: str,
    role: Role,
    epoch: str = "e0",
    *,
    num_blocks: int = 64,
    model: str = "model",
    layout: str = "layout",
) -> NodeInfo:
    return NodeInfo(
        NodeId(node_id),
        Epoch(epoch),
        role,
        f"ipc:///peers/{node_id}",
        num_blocks,
        toy_layout(layout),
        (),
        model,
        max_model_len=200,
        vocab_size=VOCAB_SIZE,
    )


def hello_of(info: NodeInfo) -> Hello:
    return Hello(PROTOCOL_VERSION, info.node_id, info.role, info.epoch)


def computing(info: NodeInfo, compute: str) -> NodeInfo:
    """`info` of a node that keeps the bits of a token and says how it computes."""
    return msgspec.structs.replace(info, batch_invariant=True, compute=compute)


class ScriptedNode:
    """One node's two channels to a router, on the running event loop."""

    def __init__(self, endpoint: str, info: NodeInfo) -> None:
        self.info = info
        self.heard: list[ToNode] = []  # what no `hear` has asked for yet
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._main = self._dial(endpoint, info.node_id)
        self._heartbeats = self._dial(endpoint, f"heartbeats:{info.node_id}")
        self._came = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._main.fileno(), self._read)
        loop.add_reader(self._heartbeats.fileno(), self._read)
        self.is_open = True

    def join(self) -> None:
        self.say(hello_of(self.info))
        self.say(Ready(self.info))
        self.heartbeat()

    def say(self, message: ToRouter) -> None:
        assert self._main.send(message)

    def heartbeat(self, step_age_s: float = 0.0, num_running: int = 0) -> None:
        load = Load(num_running=num_running, free_blocks=self.info.num_blocks)
        self._heartbeats.send(
            Heartbeat(self.info.node_id, self.info.epoch, load, step_age_s)
        )

    async def hear(self, kind: type[M]) -> M:
        """The oldest message of that type that was not asked for before."""
        async with asyncio.timeout(HEAR_TIMEOUT_S):
            while True:
                for index, message in enumerate(self.heard):
                    if isinstance(message, kind):
                        del self.heard[index]
                        return message
                self._came.clear()
                await self._came.wait()

    def die(self) -> None:
        """As a killed process would: both connections end."""
        if self.is_open:
            self.is_open = False
            loop = asyncio.get_running_loop()
            for dialer in (self._main, self._heartbeats):
                loop.remove_reader(dialer.fileno())
                dialer.close()
            self._context.term()

    def on_message(self, message: ToNode) -> None:
        self.heard.append(message)

    def _dial(self, endpoint: str, identity: str) -> Dialer[ToRouter, ToNode]:
        return Dialer(
            endpoint,
            identity.encode(),
            to_router_codec(),
            to_node_codec(),
            self._context,
        )

    def _read(self) -> None:
        while self.is_open and (message := self._main.receive()) is not None:
            if not isinstance(message, Disconnected):
                self.on_message(message)
                self._came.set()
        while self.is_open and self._heartbeats.receive() is not None:
            pass


class ToyNode(ScriptedNode):
    """Answers like a node, one token of every sequence per turn of the event loop.

    `max_steps` holds it still after so many tokens of a sequence. `pace_s` is the time of a step.
    """

    def __init__(
        self,
        endpoint: str,
        info: NodeInfo,
        max_steps: int | None = None,
        pace_s: float = 0.0,
    ) -> None:
        super().__init__(endpoint, info)
        self.max_steps = max_steps
        self._pace_s = pace_s
        self.orders: list[Prefill | Decode] = []
        self.cancelled: list[Key] = []
        self._streams: dict[Key, _Stream] = {}
        self._turn: asyncio.Handle | None = None

    def on_message(self, message: ToNode) -> None:
        match message:
            case Prefill():
                self.orders.append(message)
                firsts = tuple(
                    FirstToken(
                        toy_token(message.token_ids, choice), _finish(message, 1)
                    )
                    for choice in _choices(message)
                )
                self.say(FirstTokens(message.key, len(message.token_ids), firsts))
            case Decode():
                self.orders.append(message)
                self.say(Accepted(message.key))
                for choice in _choices(message):
                    key = message.key.of_choice(choice)
                    self._streams[key] = _Stream(message, list(message.token_ids))
                self._wake()
            case Cancel(keys=keys):
                self.cancelled += keys
                for key in keys:
                    self._streams.pop(key, None)
                self.say(CancelDone(keys))
            case _:
                super().on_message(message)

    def _wake(self) -> None:
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_later(self._pace_s, self._step)

    def _step(self) -> None:
        self._turn = None
        entries: list[TokenEntry] = []
        for key, stream in list(self._streams.items()):
            if self.max_steps is not None and stream.num_steps >= self.max_steps:
                continue
            entries.append(stream.step(key))
            if entries[-1].finish_reason is not None:
                del self._streams[key]
        if entries and self.is_open:
            self.say(Tokens(entries))
            self._wake()


class _Stream:
    def __init__(self, message: Decode, token_ids: list[int]) -> None:
        self.message = message
        self.num_tokens = len(token_ids)
        self.num_steps = 0
        self._digest = digest_of(token_ids)

    def step(self, key: Key) -> TokenEntry:
        self.num_steps += 1
        position = self.num_tokens
        token = _token_after(self._digest, key.choice)
        self.num_tokens += 1
        self._digest = digest_of([token], self._digest)
        reason = _finish(self.message, self.num_steps)
        times = StageTimes(first_step_s=0.25) if self.num_steps == 1 else None
        return TokenEntry(key, position, [token], reason, times)


def _choices(message: Prefill | Decode) -> range:
    return range(message.key.choice, message.key.choice + message.num_choices)


def _finish(message: Prefill | Decode, num_new: int) -> FinishReason | None:
    num_output = len(message.token_ids) + num_new - message.num_prompt_tokens
    return "length" if num_output >= message.sampling.max_tokens else None
