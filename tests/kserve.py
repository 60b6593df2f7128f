"""A hand-made client of the open inference protocol: requests in, plain values out."""

import struct
from typing import Any

from epd.inference import inference_pb2 as pb

FIELDS = {"BYTES": "bytes_contents", "INT32": "int_contents", "INT64": "int64_contents", "BOOL": "bool_contents"}
FIELDS |= {"FP32": "fp32_contents", "UINT32": "uint_contents"}
CODES = {"INT32": "i", "INT64": "q", "BOOL": "?", "FP32": "f", "UINT32": "I"}


def infer(text: str | None = "hello", *, raw: bool = False, **options: Any) -> pb.ModelInferRequest:
    """options: `tensors` of name to (datatype, values), `outputs`, `id`; everything else becomes a parameter."""
    made = pb.ModelInferRequest(model_name=options.pop("model", "fake"), id=options.pop("id", ""))
    tensors = dict(options.pop("tensors", {}))
    for name in options.pop("outputs", ()):
        made.outputs.add(name=name)
    if text is not None:
        tensors["text_input"] = ("BYTES", [text.encode()])
    for name, (datatype, values) in tensors.items():
        added = made.inputs.add(name=name, datatype=datatype, shape=[len(values)])
        if not raw:
            getattr(added.contents, FIELDS[datatype]).extend(values)
        elif datatype == "BYTES":
            made.raw_input_contents.append(b"".join(struct.pack("<I", len(each)) + each for each in values))
        else:
            made.raw_input_contents.append(struct.pack(f"<{len(values)}{CODES[datatype]}", *values))
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for name, value in options.items():
        setattr(made.parameters[name], kinds[type(value)], value)
    return made


def read(response: pb.ModelInferResponse) -> dict[str, list[Any]]:
    """Outputs by name, raw or typed."""
    found: dict[str, list[Any]] = {}
    for i, output in enumerate(response.outputs):
        if not response.raw_output_contents:
            values = list(getattr(output.contents, FIELDS[output.datatype]))
        elif output.datatype == "BYTES":
            raw, values = response.raw_output_contents[i], []
            while raw:
                (size,) = struct.unpack_from("<I", raw)
                values.append(raw[4 : 4 + size])
                raw = raw[4 + size :]
        else:
            raw = response.raw_output_contents[i]
            values = list(struct.unpack(f"<{len(raw) // 4}{CODES[output.datatype]}", raw))
        assert list(output.shape) == [len(values)]
        found[output.name] = values
    return found


def parameters(response: pb.ModelInferResponse) -> dict[str, Any]:
    return {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in response.parameters.items()}
