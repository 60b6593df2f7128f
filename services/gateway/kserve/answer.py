"""Answers as ModelInferResponse: whole ones, and the pieces of a stream."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from epd.inference import inference_pb2 as pb
from epd.v1 import generation_pb2, types_pb2
from services.gateway.kserve.request import OUTPUTS, VERSION, Asked
from services.gateway.kserve.tensors import Tensor, write_outputs

FINAL = "triton_final_response"
_REASONS = {types_pb2.FINISH_REASON_STOP: b"stop", types_pb2.FINISH_REASON_LENGTH: b"length"}
Responses = AsyncGenerator[generation_pb2.GenerateResponse, None]


class _Choice(msgspec.Struct):
    """What is known of one choice, or one piece of it."""

    text: list[str] = []
    token_ids: list[int] = []
    logprobs: list[float] = []
    reason: bytes = b""

    def add(self, delta: generation_pb2.ChoiceDelta) -> None:
        self.text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(entry.logprob for entry in delta.logprobs)
        self.reason = _REASONS.get(delta.finish_reason, self.reason)


async def whole(asked: Asked, responses: Responses) -> pb.ModelInferResponse:
    """Choices in order, all in one message."""
    choices: dict[int, _Choice] = {}
    last = generation_pb2.GenerateResponse()
    async with aclosing(responses):
        async for last in responses:
            for delta in last.choices:
                choices.setdefault(delta.index, _Choice()).add(delta)
    return _message(asked, last.model, [choice for _, choice in sorted(choices.items())], last)


async def pieces(asked: Asked, responses: Responses) -> AsyncGenerator[pb.ModelInferResponse, None]:
    """One choice a message; with several choices the parameter `index` says which. The last one, which ends the last
    choice, has the usage as well: it waits for it, which follows at once."""
    n = asked.request.n if asked.request.HasField("n") else 1
    ended = 0
    kept: pb.ModelInferResponse | None = None
    async with aclosing(responses):
        async for response in responses:
            for delta in response.choices:
                choice = _Choice()
                choice.add(delta)
                piece = _message(asked, response.model, [choice])
                if n > 1:
                    piece.parameters["index"].int64_param = delta.index
                ended += bool(choice.reason)
                if ended < n:
                    yield piece
                else:
                    kept = piece
            if response.HasField("usage"):
                kept = kept or _message(asked, response.model, [])
                _conclude(kept, asked, response)
                kept.parameters[FINAL].bool_param = True
    if kept is not None:
        yield kept


def _message(
    asked: Asked, model: str, choices: Sequence[_Choice], last: generation_pb2.GenerateResponse | None = None
) -> pb.ModelInferResponse:
    made = pb.ModelInferResponse(model_name=model, model_version=VERSION, id=asked.id)
    values: dict[str, list[Any]] = {
        "text_output": ["".join(choice.text).encode() for choice in choices],
        "finish_reason": [choice.reason for choice in choices],
        "output_ids": [token_id for choice in choices for token_id in choice.token_ids],
        "sequence_length": [len(choice.token_ids) for choice in choices],
        "output_log_probs": [logprob for choice in choices for logprob in choice.logprobs],
    }
    tensors = [Tensor(name, OUTPUTS[name][0], values[name]) for name in asked.outputs if name in values]
    write_outputs(made, tensors, raw=asked.raw)
    if last is not None:
        _conclude(made, asked, last)
    return made


def _conclude(made: pb.ModelInferResponse, asked: Asked, last: generation_pb2.GenerateResponse) -> None:
    """Usage and timing: as parameters, and as tensors where asked for."""
    usage, account = last.usage, last.accounting
    counts = {"num_input_tokens": usage.prompt_tokens, "num_output_tokens": usage.completion_tokens}
    tensors = [Tensor(name, OUTPUTS[name][0], [counts[name]]) for name in asked.outputs if name in counts]
    write_outputs(made, tensors, raw=asked.raw)
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "image_tokens"):
        made.parameters[name].int64_param = getattr(usage, name)
    for name in ("ttft_seconds", "total_seconds"):
        made.parameters[name].double_param = getattr(account, name)
    made.parameters["trace_id"].string_param = account.trace_id
