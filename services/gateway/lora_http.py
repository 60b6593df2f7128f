"""/v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's bodies and words."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from epd.v1 import generation_pb2
from services.gateway.adapters import AdapterControl
from services.gateway.identity.identity import Identity
from services.gateway.openai_schema import parse, unicode
from services.gateway.sse import body_of

_MAX_BODY_BYTES = 1 << 16


class LoadBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lora_name: str
    lora_path: str  # below the workers' lora.directory, relative to it or absolute
    load_inplace: bool | None = None  # take the place of another adapter of this name
    base_model_name: str | None = None  # needed where there are several models


class UnloadBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None  # vLLM's own number; counts for nothing


class LoraEdge:
    def __init__(self, control: AdapterControl, identity: Identity) -> None:
        self._control, self._identity = control, identity

    async def load(self, request: Request) -> Response:
        self._identity.check_admin(request.headers)
        body = parse(await body_of(request, _MAX_BODY_BYTES), LoadBody)
        asked = generation_pb2.LoadAdapterRequest(
            name=unicode(body.lora_name, "lora_name"),
            path=unicode(body.lora_path, "lora_path"),
            model=unicode(body.base_model_name or "", "base_model_name"),
            replace=bool(body.load_inplace),
        )
        await self._control.load(asked)
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")

    async def unload(self, request: Request) -> Response:
        self._identity.check_admin(request.headers)
        body = parse(await body_of(request, _MAX_BODY_BYTES), UnloadBody)
        await self._control.unload(unicode(body.lora_name, "lora_name"))
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")
