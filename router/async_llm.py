"""`AsyncLLM`: the router as a library. Prompts in, streams of outputs out, on one event loop.

The HTTP handlers and `LLM` call it. It tokenizes once, checks what was asked, and hands the rest to
`core`; beyond it nobody sees text. It never computes anything itself and never loads torch.
"""

from collections.abc import AsyncIterator
from typing import TypedDict

from baton.protocol.config import ClusterConfig
from baton.protocol.errors import RequestError
from baton.protocol.sampling import SamplingParams
from baton.router.core import RouterCore
from baton.router.outputs import RequestOutput
from baton.router.registry import Health, ServedModel
from baton.router.stream import Cumulated, RequestStream
from baton.router.text import Text


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


Prompt = str | list[int] | TextPrompt | TokensPrompt


class AsyncLLM:
    """One router, on the event loop that called `start`."""

    def __init__(self, core: RouterCore, text: Text) -> None:
        self._core = core
        self._text = text
        self._live: dict[str, RequestStream] = {}

    @classmethod
    def from_config(cls, config: ClusterConfig, *, start_nodes: bool = True) -> "AsyncLLM":
        """`start_nodes` starts the nodes of `config` here; else they dial `router.control`."""
        ...

    async def start(self) -> None:
        """Open the control endpoint and start the nodes; does not wait for them."""

    async def ready(self, timeout_s: float) -> None:
        """Wait until requests can be served; raises `NodeError` when they will never be."""

    async def submit(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None
    ) -> RequestStream:
        """Check, tokenize and queue a request; raises `RequestError` or `Overloaded` at once.

        The caller must drain the stream or `close` it. `request_id` is for the caller's eyes; one
        that is live already is refused.
        """
        ...

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Outputs as they come, in the form of `output_kind`; leaving early aborts the request."""
        yield ...

    async def abort(self, request_id: str) -> None:
        """End a live request, whose reader gets `Cancelled`; unknown ids are ignored."""

    async def shutdown(self) -> None:
        """End every request, then the nodes that were started here."""

    def health(self) -> Health: ...

    @property
    def is_running(self) -> bool: ...

    @property
    def errored(self) -> bool: ...

    def get_tokenizer(self) -> Text:
        return self._text

    def get_model_config(self) -> ServedModel: ...
