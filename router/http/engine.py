"""The interface of the HTTP side to the router: the part of `TextRouter` that handlers need."""

from typing import Protocol

from baton.protocol.messages import Kept
from baton.protocol.sampling import SamplingParams
from baton.router.health import Health, ServedModel
from baton.router.reattach import Claim
from baton.router.stream import RequestStream
from baton.router.text import Text
from baton.router.text_router import ParamsOf


class Engine(Protocol):
    async def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        request_id: str | None = None,
        kept: Kept | None = None,
    ) -> RequestStream: ...

    async def reattach(self, claim: Claim, params_of: ParamsOf) -> RequestStream: ...

    def health(self) -> Health: ...

    def get_model_config(self) -> ServedModel: ...

    def get_tokenizer(self) -> Text: ...

    @property
    def errored(self) -> bool: ...
