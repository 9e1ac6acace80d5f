"""The endpoints that load and unload LoRA adapters at run time, with the bodies of vLLM."""

from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from baton.protocol.errors import RequestError
from baton.router.http.api.decoding import decoded
from baton.router.http.auth import refuse_pages
from baton.router.http.connections import Bodies
from baton.router.text_router import TextRouter

MAX_BODY_BYTES = 64 * 1024


class LoadBody(msgspec.Struct, forbid_unknown_fields=True):
    """A folder of the nodes' hosts; the number means nothing."""

    lora_name: str | None = None
    lora_path: str | None = None
    lora_int_id: int | None = None
    load_inplace: bool | None = None
    is_3d_lora_weight: bool | None = None
    base_model_name: str | None = None


class UnloadBody(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str | None = None
    lora_int_id: int | None = None


B = TypeVar("B", LoadBody, UnloadBody)
_LOAD = msgspec.json.Decoder(LoadBody)
_UNLOAD = msgspec.json.Decoder(UnloadBody)


class AdapterHandlers:
    def __init__(self, engine: TextRouter, bodies: Bodies) -> None:
        self._engine = engine
        self._bodies = bodies

    async def load(self, request: web.Request) -> web.Response:
        body = await self._read(request, _LOAD)
        name = body.lora_name
        path = body.lora_path
        if not name or not path:
            text = "both lora_name and lora_path must be provided"
            raise RequestError(text, param="lora_path" if name else "lora_name")
        if body.is_3d_lora_weight:
            text = "is_3d_lora_weight is not supported: leave it out"
            raise RequestError(text, code="unsupported", param="is_3d_lora_weight")
        model = self._engine.get_model_config()
        others = (model.name, *model.other_names, *model.lora_modules)
        await self._engine.core.adapters.load(
            name, _absolute(path), in_place=body.load_inplace is True, others=others
        )
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: web.Request) -> web.Response:
        name = (await self._read(request, _UNLOAD)).lora_name
        if not name:
            raise RequestError("lora_name must be provided", param="lora_name")
        if name in self._engine.get_model_config().lora_modules:
            text = f"{name!r} is one of model.lora_modules, which stay loaded"
            raise RequestError(text, param="lora_name")
        await self._engine.core.adapters.unload(name)
        return web.Response(
            text=f"Success: LoRA adapter '{name}' removed successfully."
        )

    async def _read(self, request: web.Request, decoder: msgspec.json.Decoder[B]) -> B:
        refuse_pages(request)
        with self._bodies.room() as room:
            data = await self._bodies.read(request, room, MAX_BODY_BYTES)
        body, _ = decoded(decoder, data)
        return body


def _absolute(path: str) -> str:
    """Return a path that means the same in other processes of this host."""
    return str(Path(path).absolute())
