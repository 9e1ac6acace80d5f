"""`AsyncLLM`, the router as a library: it takes prompts and returns streams of outputs.

The HTTP handlers and `LLM` call it on one event loop. It tokenizes a prompt once and hands the ids
to `core`, which sees no text. It never computes anything itself and never loads torch.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Protocol, TypedDict

from baton.protocol.config import ClusterConfig
from baton.protocol.errors import Cancelled, ConfigError, NodeError, RequestError
from baton.protocol.sampling import SamplingParams
from baton.router.admission import check_prompt
from baton.router.core import RouterCore
from baton.router.outputs import Merged, RequestOutput
from baton.router.registry import Health, ServedModel
from baton.router.stream import RequestStream
from baton.router.text.text import Text, too_long
from baton.runtime.channels.endpoint import MAX_IPC_PATH_BYTES
from baton.runtime.local_cluster import LocalCluster
from baton.runtime.log import logger
from baton.runtime.process import Exit

WATCH_S = 0.2

log = logger("router")


class LocalNodes(Protocol):
    """Node processes on this host, which `deploy` starts and restarts."""

    def start(self) -> None: ...

    def poll(self) -> Sequence[Exit]:
        """Return the processes that have ended since the last call, without blocking."""
        ...

    def stop(self) -> None: ...


Launcher = Callable[[ClusterConfig, str], LocalNodes]


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


Prompt = str | list[int] | TextPrompt | TokensPrompt


class AsyncLLM:
    """One router. It lives on the event loop that called `start`."""

    def __init__(
        self, config: ClusterConfig, core: RouterCore, text: Text, launcher: Launcher | None = None
    ) -> None:
        """`launcher` makes the nodes that `start` starts. Without it, nodes come on their own."""
        self._config = config
        self._core = core
        self._text = text
        self._launcher = launcher
        self._nodes: LocalNodes | None = None
        self._folder: str | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._live: dict[str, RequestStream | None] = {}  # None: not tokenized yet
        self._aborted: set[str] = set()  # requests that were aborted while being tokenized
        self._num_requests = 0
        self._model_name = config.model.name or Path(config.model.path).resolve().name
        self._is_started = self._is_closed = False

    @classmethod
    def from_config(
        cls,
        config: ClusterConfig,
        *,
        start_nodes: bool = True,
        launcher: Launcher | None = None,
    ) -> "AsyncLLM":
        """Make a router for the model that `config` names.

        With `start_nodes`, `start` starts the nodes here; without, nodes dial `router.control`.
        Raises `ConfigError` if the model's folder has no usable tokenizer.
        """
        if not config.model.path:
            raise ConfigError("model.path is empty: set it to a Hugging Face model folder")
        text = Text.load(config.model.path)
        chosen = (launcher or LocalCluster) if start_nodes else None
        return cls(config, RouterCore(config), text, chosen)

    async def start(self) -> None:
        """Open the control endpoint and start the nodes, without waiting for them."""
        assert not self._is_started, "an AsyncLLM can be started only once"
        self._is_started = True
        try:
            endpoint = self._core.start(self._control())
            if self._launcher is not None:
                self._nodes = self._launcher(self._config, endpoint)
                self._nodes.start()
                self._watch_nodes()
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
                await self._core.wait_for(num_prefill, self._config.decode)
        except TimeoutError:
            health = self.health()
            if not health.can_serve:
                text = f"no node was ready within {timeout_s:g} s: {health.message}"
                raise NodeError(text, code="not_ready") from None
            log.warning("serving without some of the nodes", reason=health.message)

    async def submit(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None
    ) -> RequestStream:
        """Check, tokenize and queue a request; raises `RequestError` or `Overloaded`.

        The caller must wait for the end of the stream or `close` it. `request_id` is the caller's
        own name for the request and must not be the name of another one that is live.
        """
        self._num_requests += 1
        name = request_id or f"request-{self._num_requests}"
        if name in self._live:
            raise RequestError(f"request id {name!r} is in use", param="request_id")
        self._live[name] = None
        try:
            text, token_ids = await self._tokens_of(prompt)
            if name in self._aborted:
                raise Cancelled("the request was cancelled (client)")
            check_prompt(token_ids, self._core.limits())
            detokenizers = [self._text.detokenizer(token_ids, params, i) for i in range(params.n)]
            stream = RequestStream(name, text, token_ids, params, detokenizers)
            stream.on_end(lambda: self._forget(name))
            self._live[name] = stream
            self._core.submit(stream)
        except BaseException:
            self._forget(name)
            raise
        return stream

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs as they come, in the form of `output_kind`. Leaving early aborts."""
        stream = await self.submit(prompt, sampling_params, request_id)
        kind = sampling_params.output_kind
        merged = Merged(0 if kind == "delta" else sampling_params.n)
        stream.send_to(merged.add)
        try:
            while await stream.changed():
                if kind == "delta":
                    yield stream.output(merged.take())
                elif kind == "cumulative":
                    yield stream.output(merged.outputs())
            if kind == "final":
                yield stream.output(merged.outputs())
        finally:
            stream.close()

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
        if self._watch is not None:
            self._watch.cancel()
        self._core.close()
        self._text.close()
        nodes, self._nodes = self._nodes, None
        if nodes is not None:
            try:
                await asyncio.to_thread(nodes.stop)
            except RuntimeError:  # the interpreter is ending and no longer starts threads
                nodes.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def health(self) -> Health:
        return self._core.health()

    @property
    def is_running(self) -> bool:
        return self._is_started and not self._is_closed and not self._core.has_failed

    @property
    def errored(self) -> bool:
        """Whether the router has ended for another reason than `shutdown`."""
        return self._core.has_failed and not self._is_closed

    def get_tokenizer(self) -> Text:
        return self._text

    def get_model_config(self) -> ServedModel:
        """Return what the nodes serve; raises `NodeError` until a node has been ready."""
        model = self._core.registry.model
        if model is None:
            raise NodeError("no node has been ready yet", code="not_ready")
        return ServedModel(
            name=self._model_name,
            path=self._config.model.path,
            fingerprint=model.model,
            layout_fingerprint=model.layout.fingerprint,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            block_size=model.layout.block_size,
            eos_token_ids=model.eos_token_ids,
        )

    def _forget(self, name: str) -> None:
        self._live.pop(name, None)
        self._aborted.discard(name)

    # --- inside ---------------------------------------------------------------------------------

    async def _tokens_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        max_tokens = self._core.limits().max_model_len - 1
        match prompt:
            case str():
                return prompt, await self._text.encode(prompt, max_tokens=max_tokens)
            case {"prompt_token_ids": list() as token_ids}:
                return None, _checked(token_ids, max_tokens)
            case {"prompt": str() as text}:
                return text, await self._text.encode(text, max_tokens=max_tokens)
            case list():
                return None, _checked(prompt, max_tokens)
        raise RequestError(
            "a prompt must be text, a list of token ids, or a dict with prompt or prompt_token_ids",
            param="prompt",
        )

    def _control(self) -> str:
        """Return where nodes dial: in a private folder, unless the settings name an endpoint."""
        if self._launcher is None or self._config.router.control is not None:
            return self._config.control
        # The folder has mode 0700, and its name is short enough for the path of a socket.
        is_long = len(tempfile.gettempdir()) > MAX_IPC_PATH_BYTES // 2
        self._folder = tempfile.mkdtemp(prefix="baton-", dir="/tmp" if is_long else None)
        return f"ipc://{os.path.join(self._folder, 'control')}"

    def _watch_nodes(self) -> None:
        """Look for nodes that ended. If none was ever ready, a restart will not help: give up."""
        self._watch = asyncio.get_running_loop().call_later(WATCH_S, self._watch_nodes)
        assert self._nodes is not None
        for exit_ in self._nodes.poll():
            log.warning("node process ended", node=exit_.name, code=exit_.code)
            if self._core.registry.model is None:
                tail = "\n".join(exit_.tail)
                text = f"{exit_.name} ended with code {exit_.code} while it started:\n{tail}"
                self._core.fail(NodeError(text, code="start_failed").to_failure())


def _checked(token_ids: list[int], max_tokens: int) -> list[int]:
    if len(token_ids) > max_tokens:  # this comes first, because it costs the same for any list
        raise too_long(max_tokens)
    if not all(type(token_id) is int for token_id in token_ids):
        raise RequestError("token ids must be integers", param="prompt")
    return token_ids
