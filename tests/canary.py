"""Secrets of one client, and the search for them in whatever a mesh says or writes."""

import base64
import io
import json
import urllib.parse
from collections.abc import Iterable

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from epd.v1 import types_pb2
from tests.mesh import Answer

PROMPT = "the canary Quetzalcoatlus-7731 sings of brown foxes and nobody may hear it"
SECRET = "salt-Xylophagous-9d2e41c7"
CHUNK = 24  # bytes of a file that are as good as all of it
IDS = 6  # token ids in a row that are as good as all of them


def _base64s(data: bytes) -> Iterable[bytes]:
    """Whatever stands before it: the letters that it makes in each of the three places."""
    for before in range(3):
        whole = base64.b64encode(bytes(before) + data)
        yield whole[4 if before else 0 : len(whole) - 4]


def _of_bytes(data: bytes) -> set[bytes]:
    escaped = repr(data)[2:-1].encode()
    return {data, data.hex().encode(), data.hex().upper().encode(), escaped, *_base64s(data)}


def _of_text(text: str) -> set[bytes]:
    """Parts of it too: half a prompt is a leak."""
    found: set[bytes] = set()
    for start in range(0, len(text) - 11, 12):
        part = text[start : start + 12]
        found |= _of_bytes(part.encode())
        found |= {urllib.parse.quote(part).encode(), json.dumps(part)[1:-1].encode()}
    return found


def _of_ids(ids: list[int]) -> set[bytes]:
    """As numbers in text, and as messages carry them."""
    found: set[bytes] = set()
    for start in range(0, len(ids) - IDS + 1, IDS):
        some = ids[start : start + IDS]
        found |= {separator.join(map(str, some)).encode() for separator in (", ", ",", " ", "\n")}
        found.add(np.array(some, "<u4").tobytes())
        found.add(types_pb2.ChoiceTokens(token_ids=some).SerializeToString()[2:])
    return found


class Canary:
    """One client's secrets, and all forms they could be found in."""

    def __init__(self, tokenizer: Tokenizer, key: str) -> None:
        self.key = key
        rng = np.random.default_rng(7731)
        picture = Image.fromarray(rng.integers(0, 256, (56, 84, 3), dtype=np.uint8))
        self.files = {kind: self._file(picture, kind) for kind in ("PNG", "TIFF", "JPEG")}
        ids = tokenizer.encode(PROMPT, add_special_tokens=False).ids
        self.needles: dict[str, set[bytes]] = {
            "prompt": _of_text(PROMPT),
            "prompt's tokens": _of_ids(ids),
            "key": _of_text(key),
            "secret": _of_text(SECRET),
        }
        for kind, data in self.files.items():
            middle = data[len(data) // 2 : len(data) // 2 + CHUNK]
            self.needles[f"{kind} file"] = _of_bytes(middle)

    @staticmethod
    def _file(picture: Image.Image, kind: str) -> bytes:
        """With the canary among its tags."""
        exif = Image.Exif()
        exif[0x010E] = PROMPT  # ImageDescription
        out = io.BytesIO()
        picture.save(out, kind, exif=exif)
        return out.getvalue()

    def uri(self, kind: str) -> str:
        return f"data:image/{kind.lower()};base64,{base64.b64encode(self.files[kind]).decode()}"

    def answered(self, answer: Answer) -> None:
        """What came is a secret too."""
        for choice in answer.choices.values():
            self.needles.setdefault("answer", set()).update(_of_text(choice.text))
            self.needles.setdefault("answer's tokens", set()).update(_of_ids(choice.tokens))

    def told_in(self, told: bytes) -> list[str]:
        """Which of them can be read there."""
        return [name for name, forms in self.needles.items() if any(form in told for form in forms)]
