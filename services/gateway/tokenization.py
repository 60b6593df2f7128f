"""Text to token ids and back for clients, without generating: vLLM's /tokenize and /detokenize, also in gRPC."""

import secrets
from typing import Any

import msgspec

from common.errors import InvalidArgument
from epd.v1 import generation_pb2
from services.gateway.fleet import Fleet
from services.gateway.generation import Generator
from services.gateway.openai_schema import Message, fill_chat, unicode

_MAX_UINT32 = 2**32 - 1


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None  # of a prompt; a chat template writes them itself
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


class Tokenization:
    """Counts among the requests in flight, so that a gateway takes no more of it than it can do."""

    def __init__(self, generator: Generator, fleet: Fleet) -> None:
        self._generator = generator
        self._fleet = fleet

    async def tokenize(self, request: generation_pb2.TokenizeRequest, tenant: str) -> generation_pb2.TokenizeResponse:
        """Raises InvalidArgument, ModelNotFound, Overloaded, Draining."""
        asked = generation_pb2.GenerateRequest(model=request.model, images=request.images)
        match request.WhichOneof("prompt"):
            case "text":
                asked.text = request.text
            case "chat":
                asked.chat.CopyFrom(request.chat)
            case _:
                raise InvalidArgument("prompt is required: text or chat", field="prompt")
        if request.HasField("add_special_tokens"):
            asked.add_special_tokens = request.add_special_tokens
        preprocessor = self._generator.preprocessor
        with self._generator.admission.admit(tenant, f"tokenize-{secrets.token_hex(12)}", request.ByteSize()):
            model, tokenizer, ids = await preprocessor.tokenize(asked)
        return generation_pb2.TokenizeResponse(
            model=model,
            token_ids=ids,
            tokens=[tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in ids],
            max_context_tokens=max((record.max_context for record in self._fleet.records(model)), default=0),
        )

    async def detokenize(
        self, request: generation_pb2.DetokenizeRequest, tenant: str
    ) -> generation_pb2.DetokenizeResponse:
        """Raises as tokenize does."""
        preprocessor = self._generator.preprocessor
        with self._generator.admission.admit(tenant, f"detokenize-{secrets.token_hex(12)}", request.ByteSize()):
            model, text = await preprocessor.detokenize(request.model, request.token_ids)
        return generation_pb2.DetokenizeResponse(model=model, text=text)


def tokenize_request(body: TokenizeBody) -> generation_pb2.TokenizeRequest:
    """Raises InvalidArgument."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidArgument("either prompt or messages is required", field="prompt")
    request = generation_pb2.TokenizeRequest(model=body.model or "")
    if body.messages is not None:
        if body.add_special_tokens:
            told = "add_special_tokens is for a prompt; a chat template writes them itself"
            raise InvalidArgument(told, field="add_special_tokens")
        fill_chat(request.chat, body.messages)
        if body.add_generation_prompt is not None:
            request.chat.add_generation_prompt = body.add_generation_prompt
        request.chat.continue_final_message = bool(body.continue_final_message)
        return request
    for name in ("add_generation_prompt", "continue_final_message"):
        if getattr(body, name) is not None:
            raise InvalidArgument(f"{name} is for messages", field=name)
    request.text = unicode(body.prompt or "", "prompt")
    if body.add_special_tokens is not None:
        request.add_special_tokens = body.add_special_tokens
    return request


def detokenize_request(body: DetokenizeBody) -> generation_pb2.DetokenizeRequest:
    """Raises InvalidArgument."""
    if not all(0 <= token <= _MAX_UINT32 for token in body.tokens):
        raise InvalidArgument(f"tokens must be at least 0 and at most {_MAX_UINT32}", field="tokens")
    return generation_pb2.DetokenizeRequest(model=body.model or "", token_ids=body.tokens)


def tokenized(response: generation_pb2.TokenizeResponse, *, strings: bool) -> dict[str, Any]:
    """vLLM's shape."""
    return {
        "count": len(response.token_ids),
        "max_model_len": response.max_context_tokens,
        "tokens": list(response.token_ids),
        "token_strs": list(response.tokens) if strings else None,
    }
