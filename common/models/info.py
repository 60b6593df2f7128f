"""What a model directory says of itself to the mesh, beyond what Hugging Face's files say."""

from pathlib import Path

import msgspec

from common.errors import InvalidArgument

FILE = "epd.json"


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """text_model: the model whose language weights these are, bit for bit, so that one worker can serve both names;
    empty: none."""

    text_model: str = ""


def read_info(directory: Path) -> ModelInfo:
    """Of a directory without the file: the defaults. Raises InvalidArgument for a damaged one."""
    try:
        return msgspec.json.decode((directory / FILE).read_bytes(), type=ModelInfo)
    except FileNotFoundError:
        return ModelInfo()
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"{directory / FILE} is damaged: {error}", field="model") from None


def write_info(directory: Path, info: ModelInfo) -> None:
    (directory / FILE).write_bytes(msgspec.json.encode(info) + b"\n")
