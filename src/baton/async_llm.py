"""`AsyncLLM`, the class for event loops: it takes prompts and yields outputs as they come.

`baton.LLM` and users call it. It joins a `TextRouter` with the nodes that it starts on this host,
or lets nodes dial in. It never computes anything itself and never loads torch.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TypedDict

from baton.protocol.config import ClusterConfig
from baton.protocol.errors import NodeError, RequestError
from baton.protocol.sampling import SamplingParams
from baton.router.outputs import RequestOutput
from baton.router.registry import Health, ServedModel
from baton.router.stream import RequestStream
from baton.router.text.text import Text
from baton.router.text_router import TextRouter
from baton.runtime.local_cluster import LocalCluster
from baton.runtime.log import logger
from baton.started_nodes import Launcher, StartedNodes

log = logger("router")


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


Prompt = str | list[int] | TextPrompt | TokensPrompt


class AsyncLLM:
    """A model behind a router on the event loop that called `start`."""

    def __init__(
        self, config: ClusterConfig, *, start_nodes: bool = True, launcher: Launcher | None = None
    ) -> None:
        """Make a router for the model that `config` names.

        With `start_nodes`, `start` starts the nodes here; without, nodes dial `router.control`.
        Raises `ConfigError` if the model's folder has no usable tokenizer.
        """
        self._config = config
        self._router = TextRouter.from_config(config)
        self._nodes: StartedNodes | None = None
        if start_nodes:
            self._nodes = StartedNodes(config, self._router, launcher or LocalCluster)
        self._live: dict[str, RequestStream | None] = {}  # None: not tokenized yet
        self._aborted: set[str] = set()  # requests that were aborted while being tokenized
        self._num_requests = 0
        self._is_started = self._is_closed = False

    @classmethod
    def from_config(
        cls,
        config: ClusterConfig,
        *,
        start_nodes: bool = True,
        launcher: Launcher | None = None,
    ) -> "AsyncLLM":
        return cls(config, start_nodes=start_nodes, launcher=launcher)

    async def start(self) -> None:
        """Open the control endpoint and start the nodes, without waiting for them."""
        assert not self._is_started, "an AsyncLLM can be started only once"
        self._is_started = True
        try:
            if self._nodes is None:
                self._router.start(self._config.control)
            else:
                self._nodes.start()
        except BaseException:
            await self.shutdown()
            raise

    async def ready(self, timeout_s: float) -> None:
        """Wait until the nodes of `config` are in service.

        After `timeout_s` it is enough that requests can be served; if not, raises `NodeError`.
        """
        num_prefill = self._config.prefill
        if self._config.router.local_prefill == "always":
            num_prefill = 0
        try:
            async with asyncio.timeout(timeout_s):
                await self._router.wait_for_nodes(num_prefill, self._config.decode)
        except TimeoutError:
            health = self.health()
            if not health.can_serve:
                text = f"no node was ready within {timeout_s:g} s: {health.message}"
                raise NodeError(text, code="not_ready") from None
            log.warning("serving without some of the nodes", reason=health.message)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs as they come, in the form of `output_kind`. Leaving early aborts.

        `request_id` is the caller's own name for the request and must not be the name of another
        one that is live. Raises `RequestError`, `Overloaded` or the error that ended the request.
        """
        self._num_requests += 1
        name = request_id or f"request-{self._num_requests}"
        if name in self._live:
            raise RequestError(f"request id {name!r} is in use", param="request_id")
        self._live[name] = None
        try:
            stream = await self._router.submit(_plain(prompt), sampling_params, name)
            self._live[name] = stream
            if name in self._aborted:
                stream.close()
            async with contextlib.aclosing(stream.outputs()) as outputs:
                async for output in outputs:
                    yield output
        finally:
            del self._live[name]
            self._aborted.discard(name)

    async def abort(self, request_id: str) -> None:
        """End a live request: its reader gets `Cancelled`. An unknown id is ignored."""
        stream = self._live.get(request_id)
        if stream is not None:
            stream.close()
        elif request_id in self._live:
            self._aborted.add(request_id)

    async def shutdown(self) -> None:
        """End every request, then the nodes that were started here. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._router.close()
        if self._nodes is not None:
            await self._nodes.stop()

    def health(self) -> Health:
        return self._router.health()

    @property
    def is_running(self) -> bool:
        return self._is_started and not self._is_closed and not self._router.errored

    @property
    def errored(self) -> bool:
        """Whether the router has ended for another reason than `shutdown`."""
        return self._router.errored

    def get_tokenizer(self) -> Text:
        return self._router.get_tokenizer()

    def get_model_config(self) -> ServedModel:
        """Return what the nodes serve; raises `NodeError` until a node has been ready."""
        return self._router.get_model_config()


def _plain(prompt: Prompt) -> str | list[int]:
    match prompt:
        case {"prompt_token_ids": list() as token_ids}:
            return _checked(token_ids)
        case {"prompt": str() as text}:
            return text
        case str():
            return prompt
        case list():
            return _checked(prompt)
    raise RequestError(
        "a prompt must be text, a list of token ids, or a dict with prompt or prompt_token_ids",
        param="prompt",
    )


def _checked(token_ids: list[int]) -> list[int]:
    if not all(type(token_id) is int for token_id in token_ids):
        raise RequestError("token ids must be integers", param="prompt")
    return token_ids
