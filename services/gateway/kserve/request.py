"""From ModelInferRequest to the request that every public entry makes of what its client sent."""

import math
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

import msgspec

from common.errors import InvalidArgument, ModelNotFound
from epd.inference import inference_pb2 as pb
from epd.v1 import generation_pb2
from services.gateway.kserve.tensors import BYTES, INTEGERS, Tensor, read_inputs
from services.gateway.openai_schema import CompletionBody, completion_requests, parse

VERSION = "1"  # of every model
TEXT, TOKENS, IMAGE, SAMPLING = "text_input", "input_ids", "image", "sampling_parameters"
STREAMING = ("streaming", "stream")
TIMEOUT = "timeout"  # in microseconds, as Triton has it
EMPTY_FINAL = "triton_enable_empty_final_response"  # taken; the last answer is marked in any case

# Parameters are those of /v1/completions, but what is a tensor here or has no sense.
_NOT_HERE = {"model", "prompt", "stream", "stream_options", "suffix", "best_of", "echo", "user"}
_HINTS = {name: hint for name, hint in get_type_hints(CompletionBody).items() if name not in _NOT_HERE}
_ALIASES = {"random_seed": "seed", "stop_words": "stop"}  # TensorRT-LLM's names
_MAX_OUTPUTS = 64

OUTPUTS: dict[str, tuple[str, int]] = {  # datatype and shape
    "text_output": (BYTES, -1),
    "finish_reason": (BYTES, -1),
    "output_ids": ("INT32", -1),
    "sequence_length": ("INT32", -1),
    "output_log_probs": ("FP32", -1),
    "num_input_tokens": ("UINT32", 1),
    "num_output_tokens": ("UINT32", 1),
}
DEFAULT_OUTPUTS = ("text_output", "finish_reason")


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the adapter needs it. timeout_seconds: the request's own; the call has another."""

    request: generation_pb2.GenerateRequest
    id: str
    outputs: tuple[str, ...]
    raw: bool
    streaming: bool
    timeout_seconds: float | None


def check_version(version: str) -> None:
    """Raises ModelNotFound."""
    if version not in ("", VERSION):
        raise ModelNotFound(f"models have version {VERSION!r} only", field="model_version")


def read(message: pb.ModelInferRequest) -> Asked:
    """Raises InvalidArgument naming the tensor or parameter, ModelNotFound for a version. Ranges, limits and the model
    are checked where all requests are."""
    check_version(message.model_version)
    settings = {name: _parameter(name, value) for name, value in message.parameters.items()}
    prompt = generation_pb2.GenerateRequest()
    for tensor in read_inputs(message):
        if tensor.name in (TEXT, TOKENS, IMAGE):
            _add_prompt(prompt, tensor)
        elif tensor.name == SAMPLING:
            _merge(settings, _table(_text(_one(tensor), SAMPLING)))
        else:
            _merge(settings, {tensor.name: _setting(tensor)})
    if prompt.WhichOneof("prompt") is None:
        raise InvalidArgument(f"an input {TEXT} or {TOKENS} is needed", field=TEXT)

    streaming = [_bool(settings.pop(name), name) for name in STREAMING if name in settings]
    _bool(settings.pop(EMPTY_FINAL, False), EMPTY_FINAL)
    timeout = settings.pop(TIMEOUT, None)
    if timeout is not None and (type(timeout) is not int or not 0 <= timeout < 2**63):
        raise InvalidArgument(f"{TIMEOUT} must be microseconds, a whole number", field=TIMEOUT)
    asked = _outputs(message)
    if "output_log_probs" in asked:
        settings.setdefault("logprobs", 0)

    request = _request(settings)
    if prompt.WhichOneof("prompt") == "text":
        request.text = prompt.text
    else:
        request.token_ids.CopyFrom(prompt.token_ids)
    request.images.extend(prompt.images)
    request.model, request.request_id = message.model_name, message.id
    return Asked(
        request=request,
        id=message.id,
        outputs=asked,
        raw=bool(message.raw_input_contents),
        streaming=any(streaming),
        timeout_seconds=timeout / 1e6 if timeout else None,
    )


def input_tensors(*, images: bool) -> dict[str, tuple[str, int]]:
    """Those that ModelMetadata tells of: datatype and shape."""
    found = {TEXT: (BYTES, 1), TOKENS: ("INT32", -1), STREAMING[0]: ("BOOL", 1), SAMPLING: (BYTES, 1)}
    return found | ({IMAGE: (BYTES, -1)} if images else {})


def _request(settings: Mapping[str, Any]) -> generation_pb2.GenerateRequest:
    for name, value in settings.items():
        if _ALIASES.get(name, name) not in _HINTS:
            raise InvalidArgument(f"unknown input or parameter {name!r}", field=name)
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidArgument(f"{name} must be finite", field=name)
    plain = {_ALIASES.get(name, name): value for name, value in settings.items()}
    try:
        encoded = msgspec.json.encode({"prompt": "", **plain})
    except (OverflowError, RecursionError):
        raise InvalidArgument("a parameter is too large or nested too deeply", field=SAMPLING) from None
    return completion_requests(parse(encoded, CompletionBody))[0]


def _add_prompt(prompt: generation_pb2.GenerateRequest, tensor: Tensor) -> None:
    if tensor.name != TOKENS and tensor.datatype != BYTES:
        raise InvalidArgument(f"{tensor.name} must be {BYTES}", field=tensor.name)
    if tensor.name == IMAGE:
        for data in tensor.values:
            # A URL is told by its beginning: no image file has that one.
            is_url = data[:8].lower().startswith((b"data:", b"http:", b"https:"))
            prompt.images.add(**{"url": _text(data, IMAGE)} if is_url else {"data": data})
        return
    if prompt.WhichOneof("prompt") is not None:
        raise InvalidArgument(f"{TEXT} and {TOKENS} exclude each other", field=tensor.name)
    if tensor.name == TEXT:
        prompt.text = _text(_one(tensor), TEXT)
        return
    if tensor.datatype not in INTEGERS:
        raise InvalidArgument(f"{TOKENS} must be integers", field=TOKENS)
    if not all(0 <= token_id < 2**32 for token_id in tensor.values):
        raise InvalidArgument(f"{TOKENS} must be at least 0 and fit 32 bits", field=TOKENS)
    prompt.token_ids.SetInParent()
    prompt.token_ids.ids.extend(tensor.values)


def _outputs(message: pb.ModelInferRequest) -> tuple[str, ...]:
    if len(message.outputs) > _MAX_OUTPUTS:
        raise InvalidArgument(f"outputs has {len(message.outputs)} entries; at most {_MAX_OUTPUTS}", field="outputs")
    for output in message.outputs:
        if output.name not in OUTPUTS:
            raise InvalidArgument(f"outputs are {', '.join(OUTPUTS)}", field="outputs")
    return tuple(dict.fromkeys(output.name for output in message.outputs)) or DEFAULT_OUTPUTS


def _setting(tensor: Tensor) -> Any:
    """A parameter that came as a tensor: one element, or a list where the parameter is one."""
    name = tensor.name
    values = [_text(each, name) if isinstance(each, bytes) else each for each in tensor.values]
    if _is_list(name):
        return values
    value = _one(msgspec.structs.replace(tensor, values=values))
    return _from_text(name, value) if isinstance(value, str) else value


def _parameter(name: str, value: pb.InferParameter) -> Any:
    kind = value.WhichOneof("parameter_choice")
    if kind is None:
        raise InvalidArgument(f"parameter {name!r} has no value", field=name)
    found = getattr(value, kind)
    return _from_text(name, found) if isinstance(found, str) else found


def _from_text(name: str, text: str) -> Any:
    """As it is where the parameter is text; else as JSON, for clients whose parameters have no fractions or lists."""
    if _takes_text(name):
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise InvalidArgument(f"{name} must be JSON where it is given as text", field=name) from None


def _table(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise InvalidArgument(f"{SAMPLING} must be a JSON object", field=SAMPLING) from None


def _merge(settings: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if name in settings:
            raise InvalidArgument(f"{name!r} is given twice", field=name)
        settings[name] = value


def _hint_parts(name: str) -> tuple[Any, ...]:
    return get_args(_HINTS.get(_ALIASES.get(name, name)))


def _takes_text(name: str) -> bool:
    return str in _hint_parts(name) or _ALIASES.get(name, name) not in _HINTS


def _is_list(name: str) -> bool:
    return any(getattr(part, "__origin__", None) is list for part in _hint_parts(name))


def _one(tensor: Tensor) -> Any:
    if len(tensor.values) != 1:
        raise InvalidArgument(f"{tensor.name} must have one element, got {len(tensor.values)}", field=tensor.name)
    return tensor.values[0]


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(f"{name} must be UTF-8", field=name) from None


def _bool(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} must be true or false", field=name)
    return value
