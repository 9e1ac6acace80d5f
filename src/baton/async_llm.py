"""`AsyncLLM`, the class for event loops, which takes prompts and yields outputs as they arrive.

It joins a `TextRouter` with the nodes that it starts on this host, or lets nodes dial in. It never
computes anything itself and never loads torch.
"""

import asyncio
import contextlib
import random
import shutil
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import msgspec

from baton.llm_settings import Model, config_of
from baton.model.checkpoint.lora_files import folders_of
from baton.pooling import (
    EmbeddingRequestOutput,
    Pooler,
    PoolingParams,
    ScoringRequestOutput,
)
from baton.prompts import LoRARequest, Prompt, given_prompt
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import BatonError, ConfigError, NodeError, RequestError
from baton.protocol.sampling import SEED_BITS, SamplingParams, Scope
from baton.router.core.health import Health, ServedModel
from baton.router.core.node_link import ProfileState
from baton.router.core.request import NO_CALLER, Caller
from baton.router.core.stream import RequestStream
from baton.router.outputs import RequestOutput
from baton.router.text_router import TextRouter, default_params
from baton.runtime.clock import Standstill
from baton.runtime.local_cluster import LocalCluster, fitted_to_gpus, private_folder
from baton.runtime.log import logger
from baton.tokenizer import ModelTokenizer

WATCH_S = 0.2

# Starts the nodes of a config, which dial the endpoint.
Launcher = Callable[[ClusterConfig, str], LocalCluster]

log = logger("router")


class AsyncLLM:
    """A model behind a router on one event loop, from its first use to `shutdown`.

    As an async context manager it is ready inside and shut down afterwards. Without one, the first
    `generate` starts it.
    """

    def __init__(
        self,
        model: Model = "",
        *,
        config: ClusterConfig | None = None,
        seed: int | None = None,
        start_nodes: bool = True,
        launcher: Launcher | None = None,
        **settings: object,
    ) -> None:
        """Start nothing yet. Raises `ConfigError`.

        `model` is a Hugging Face model folder; empty is the demo model. `settings` are fields of
        `ClusterConfig`, where a section may be a struct or a dict, or keywords of vLLM that have a
        counterpart. A whole `config` replaces both. With a `seed`, the same requests in the same
        order draw the same tokens. Without `start_nodes`, nodes dial `router.control`.
        """
        if seed is not None and type(seed) is not int:
            raise ConfigError(f"seed must be an integer, not {seed!r}")
        self._launcher = (launcher or LocalCluster) if start_nodes else None
        self._open(config_of(model, settings, config))
        self._seeds = None if seed is None else random.Random(seed)
        self._defaults = default_params(self.config.model.path)
        # None while it is being tokenized.
        self._live: dict[str, RequestStream | None] = {}
        # Requests that were aborted while being tokenized.
        self._aborted: set[str] = set()
        self._num_requests = 0
        self._begins = asyncio.Lock()
        self._is_started = self._is_closed = False
        # Whether `begin` has started nodes that are not yet in service.
        self._is_awaited = False

    def _open(self, config: ClusterConfig) -> None:
        self.config = config = (
            fitted_to_gpus(config) if self._launcher is not None else config
        )
        self._router = TextRouter.from_config(config)
        self._tokenizer = ModelTokenizer(self._router.get_tokenizer(), config.model)
        self._pooler = Pooler(self._router, config.model)
        self._nodes: StartedNodes | None = None
        if self._launcher is not None:
            self._nodes = StartedNodes(config, self._router, self._launcher)

    async def begin(self) -> None:
        """Start, and wait until the nodes are in service, unless `start` was called before."""
        async with self._begins:
            await self._begin()

    async def _begin(self) -> None:
        if not self._is_started:
            await self.start()
            self._is_awaited = True
        if self._is_awaited:
            await self.ready(self.config.node.start_timeout_s)
            self._is_awaited = False

    async def start(self) -> None:
        """Open the control endpoint and start the nodes, without waiting for them."""
        assert not self._is_started, "an AsyncLLM can be started only once"
        if self._is_closed:
            raise BatonError("this LLM has been shut down", code="shutting_down")
        self._is_started = True
        try:
            if self._nodes is None:
                self._router.start(self.config.control)
            else:
                self._nodes.start()
        except BaseException:
            await self.shutdown()
            raise

    async def ready(self, timeout_s: float) -> None:
        """Wait until the nodes of `config` are in service.

        After `timeout_s` without progress, it suffices that requests can be served. Raises
        `NodeError` otherwise.
        """
        num_prefill = self.config.prefill
        if self.config.router.local_prefill == "always" and self.config.decode:
            num_prefill = 0
        standstill = Standstill(timeout_s)
        waiting = asyncio.create_task(
            self._router.core.wait_for(num_prefill, self.config.decode)
        )
        try:
            while not (await asyncio.wait((waiting,), timeout=min(timeout_s, WATCH_S)))[
                0
            ]:
                health = self.health()
                if not standstill.lasts(
                    [(one.phase, one.done) for one in health.nodes]
                ):
                    continue
                if health.can_serve:
                    text = "serving although some of the nodes are not ready"
                    log.warning(text, reason=health.message)
                    return
                text = f"no progress of the nodes for {timeout_s:g} s: {health.message}"
                raise NodeError(text, code="not_ready")
            await waiting
        finally:
            waiting.cancel()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs as they arrive, in the form of `output_kind`. Leaving early aborts.

        `get_default_sampling_params` replaces missing `sampling_params`. `request_id` is the
        caller's own name for the request and must not be the name of another live request.
        `lora_request` chooses an adapter of `model.lora_modules`, or one that `add_lora` has added.
        Raises `RequestError`, `Overloaded` or the error that ended the request.
        """
        name = request_id or self._next_name()
        if name in self._live:
            raise RequestError(f"request id {name!r} is in use", param="request_id")
        self._live[name] = None
        try:
            given = given_prompt(prompt)
            params = self._complete(sampling_params)
            await self.begin()
            caller = Caller(Scope(self._lora_of(lora_request), given.cache_salt))
            stream = await self._router.submit(
                given.content, params, name, caller=caller
            )
            self._live[name] = stream
            if name in self._aborted:
                stream.close()
            async with contextlib.aclosing(stream.outputs(given.text)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            del self._live[name]
            self._aborted.discard(name)

    async def embed(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> EmbeddingRequestOutput:
        """Return the embedding of a text or of token ids. Cancelling the call ends the request.

        Raises `RequestError` if the model makes no embeddings, or the error of the request.
        """
        given = given_prompt(prompt)
        await self.begin()
        caller = Caller(Scope(self._lora_of(lora_request), given.cache_salt))
        params, name = pooling_params or PoolingParams(), self._next_name()
        return await self._pooler.embed(given.content, params, name, caller)

    async def score(
        self, query: str, document: str, pooling_params: PoolingParams | None = None
    ) -> ScoringRequestOutput:
        """Return how well two texts fit: a reranker's score, or the cosine of two embeddings."""
        await self.begin()
        params, name = pooling_params or PoolingParams(), self._next_name()
        return await self._pooler.score((query, document), params, name, NO_CALLER)

    def _next_name(self) -> str:
        self._num_requests += 1
        return f"request-{self._num_requests}"

    async def reset_prefix_cache(self) -> bool:
        """Forget the prefix caches of all nodes. Requests that run keep what they use."""
        await self.begin()
        self._router.core.notifier.reset_prefix_caches()
        return True

    async def start_profile(self) -> ProfileState:
        """Let every node record its steps with torch's profiler, until `stop_profile`."""
        await self.begin()
        return self._router.core.notifier.start_profile()

    async def stop_profile(self) -> ProfileState:
        """End the profile. Its nodes write their traces and log the files' names meanwhile."""
        return self._router.core.notifier.stop_profile()

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Start the nodes again with another adapter, unless they have it. No request may run.

        Raises `ConfigError` for an adapter that does not fit, which changes nothing. An error of
        the start ends the LLM.
        """
        async with self._begins:  # where a request that begins now waits
            if self._is_loaded(lora_request):
                return True
            name, modules = lora_request.lora_name, self.config.model.lora_modules
            module = f"{name}={lora_request.lora_path}"
            model = msgspec.structs.replace(
                self.config.model, lora_modules=(*modules, module)
            )
            config = config_of(
                "", {}, msgspec.structs.replace(self.config, model=model)
            )
            if self._live or self._nodes is None or self._is_closed:
                text = (
                    "an adapter is added to the nodes of an LLM while no request runs"
                )
                raise RequestError(text, param="lora_request")
            try:
                self._router.close()
                await self._nodes.stop()
                self._open(config)
                self._is_started = False
                await self._begin()
            except BaseException:
                await self.shutdown()
                raise
        return True

    async def abort(self, request_id: str) -> None:
        """End a live request, whose reader gets `Cancelled`. An unknown id is ignored."""
        stream = self._live.get(request_id)
        if stream is not None:
            stream.close()
        elif request_id in self._live:
            self._aborted.add(request_id)

    async def shutdown(self) -> None:
        """End every request, then the nodes that were started here. It may be called again."""
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
        """Return whether the router has ended for a reason other than `shutdown`."""
        return self._router.errored

    def get_tokenizer(self) -> ModelTokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the defaults of the model's generation_config.json, else the usual ones."""
        return self._defaults

    def get_model_config(self) -> ServedModel:
        """Return the model that the nodes serve. Raises `Overloaded` until a node is ready."""
        return self._router.get_model_config()

    async def __aenter__(self) -> "AsyncLLM":
        try:
            await self.begin()
        except BaseException:
            await self.shutdown()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    def _lora_of(self, request: LoRARequest | None) -> str:
        """Return the name of the adapter. Raises `RequestError` for one that is not loaded."""
        if request is None:
            return ""
        if self._is_loaded(request):
            return request.lora_name
        text = f"the adapter {request.lora_name!r} is not loaded: await llm.add_lora(...) first"
        raise RequestError(
            text, code="model_not_found", param="lora_request", http_status=404
        )

    def _is_loaded(self, request: LoRARequest) -> bool:
        folder = folders_of(self.config.model.lora_modules).get(request.lora_name)
        path = Path(request.lora_path).expanduser()
        return folder is not None and (
            not request.lora_path or path.resolve() == folder.resolve()
        )

    def _complete(self, params: SamplingParams | None) -> SamplingParams:
        """Return `params` with the defaults and the seed that the callers left open."""
        if params is None:
            params = self._defaults
        if not isinstance(params, SamplingParams):
            raise RequestError(
                "sampling_params must be SamplingParams", param="sampling_params"
            )
        if self._seeds is None or params.seed is not None:
            return params
        return params.clone(seed=self._seeds.getrandbits(SEED_BITS))


class StartedNodes:
    """The nodes of an `AsyncLLM` on its own host.

    Call `start` on the event loop of their router, and `stop` at the end. If a node ends before any
    node was ever ready, the router fails too, because a restart would not help. Later, the launcher
    restarts a node that has ended.
    """

    def __init__(
        self, config: ClusterConfig, router: TextRouter, launcher: Launcher
    ) -> None:
        self._config = config
        self._router = router
        self._launcher = launcher
        self._nodes: LocalCluster | None = None
        self._folder: Path | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Open the router's endpoint and start the nodes, without waiting for them."""
        endpoint = self._router.start(
            self._config.router.control or self._private_endpoint()
        )
        self._nodes = self._launcher(self._config, endpoint)
        self._nodes.start()
        self._watch()

    async def stop(self) -> None:
        """End the nodes. It may be called again."""
        if self._timer is not None:
            self._timer.cancel()
        nodes, self._nodes = self._nodes, None
        if nodes is not None:
            try:
                await asyncio.to_thread(nodes.stop)
            # The interpreter is ending and no longer starts threads.
            except RuntimeError:
                nodes.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _private_endpoint(self) -> str:
        self._folder = private_folder()
        return f"ipc://{self._folder}/control"

    def _watch(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(WATCH_S, self._watch)
        assert self._nodes is not None
        for exit_ in self._nodes.poll():
            log.warning("node process ended", node=exit_.name, code=exit_.code)
            if self._router.core.registry.model is None:
                tail = "\n".join(exit_.tail)
                text = f"{exit_.name} ended with code {exit_.code} while it started:\n{tail}"
                self._router.core.fail(
                    NodeError(text, code="start_failed").to_failure()
                )
