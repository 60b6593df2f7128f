"""Images as data: URIs (RFC 2397), the way OpenAI's clients send them."""

import binascii
import re
from urllib.parse import unquote_to_bytes

from common.errors import InvalidArgument
from common.media.limits import MediaLimits

_WHITESPACE = b" \t\r\n\f\v"
_NOT_BASE64 = re.compile(rb"[^A-Za-z0-9+/=]")


def is_data_uri(url: str) -> bool:
    return url[:5].lower() == "data:"


def parse(url: str, limits: MediaLimits | None = None, field: str = "url") -> bytes:
    """The file in data:image/…;base64,…. Whitespace in the base64 is skipped, percent-encoding undone.

    Raises InvalidArgument saying what is wrong with it, and never quoting it. Which image it is, its own bytes say.
    """
    head, comma, payload = url[5:].partition(",")
    if not is_data_uri(url) or not comma:
        raise _wrong(field, "a data: URI must be data:image/…;base64,… and this one has no comma")
    media_type, *parameters = (part.strip().lower() for part in head.split(";"))
    if not media_type:
        raise _wrong(field, "the data: URI names no media type; it must be image/…")
    if not media_type.startswith("image/"):
        raise _wrong(field, "the data: URI's media type must be image/…")
    if "base64" not in parameters[-1:]:
        raise _wrong(field, "the data: URI must have ;base64 before its comma")
    try:
        encoded = payload.encode("ascii")
    except UnicodeEncodeError:
        raise _wrong(field, "the data: URI has characters that are not base64") from None
    if b"%" in encoded:
        encoded = unquote_to_bytes(encoded)
    encoded = encoded.translate(None, _WHITESPACE)
    if not encoded:
        raise _wrong(field, "the data: URI holds no data")
    size = len(encoded) * 3 // 4 - len(encoded[-2:]) + len(encoded[-2:].rstrip(b"="))
    (limits or MediaLimits()).check_file(size, field)
    if _NOT_BASE64.search(encoded):
        raise _wrong(field, "the data: URI has characters that are not base64")
    if len(encoded) % 4:
        raise _wrong(field, f"the data: URI has {len(encoded)} base64 characters, no multiple of 4: it may be cut off")
    try:
        return binascii.a2b_base64(encoded, strict_mode=True)
    except binascii.Error:
        raise _wrong(field, "the data: URI's base64 is padded in the wrong place") from None


def _wrong(field: str, what: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {what}", field=field)
