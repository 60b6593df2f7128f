"""data: URIs, good and bad; case D3."""

import base64

import pytest

from common.errors import InvalidArgument
from common.media.data_uri import is_data_uri, parse
from common.media.limits import MediaLimits

DATA = bytes(range(256))
BASE64 = base64.b64encode(DATA).decode()
URI = f"data:image/png;base64,{BASE64}"


@pytest.mark.parametrize(
    "uri",
    [
        URI,
        f"DATA:Image/PNG;BASE64,{BASE64}",
        f"data:image/jpeg;charset=utf-8;base64,{BASE64}",
        "data:image/png;base64,\n" + "\r\n".join(BASE64[i : i + 76] for i in range(0, len(BASE64), 76)) + "\n",
        f"data:image/png;base64, {BASE64[:10]}\t {BASE64[10:]} ",
        "data:image/png;base64," + BASE64.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D"),
        f"data:image/png;base64,{BASE64[:8]}%0A%20{BASE64[8:]}",
    ],
)
def test_case_d3_accepted(uri: str) -> None:
    assert is_data_uri(uri)
    assert parse(uri) == DATA


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("data:image/png;base64", "no comma"),
        (f"data:image/png,{BASE64}", ";base64"),
        (f"data:image/png;base64;charset=utf-8,{BASE64}", ";base64"),
        (f"data:image/png;base65,{BASE64}", ";base64"),
        (f"data:;base64,{BASE64}", "no media type"),
        (f"data:,{BASE64}", "no media type"),
        (f"data:text/html;base64,{BASE64}", "must be image/"),
        (f"data:application/pdf;base64,{BASE64}", "must be image/"),
        ("data:image/png;base64,", "no data"),
        ("data:image/png;base64, \n ", "no data"),
        ("data:image/png;base64,%%%%", "not base64"),
        ("data:image/png;base64,QUJ-", "not base64"),
        ("data:image/png;base64,QUJ日", "not base64"),
        ("data:image/png;base64,QUJD\0", "not base64"),
        (URI[:-1], "no multiple of 4"),
        (URI[:-5], "no multiple of 4"),
        ("data:image/png;base64,QU=D", "wrong place"),
        ("data:image/png;base64,QUJDQQ==QUJD", "wrong place"),
        ("data:image/png;base64,====", "wrong place"),
    ],
)
def test_case_d3_refused_by_what_is_wrong(uri: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        parse(uri, field="messages[0].content[2]")
    assert caught.value.field == "messages[0].content[2]"
    assert caught.value.message.startswith("messages[0].content[2]: ")
    assert BASE64[:8] not in caught.value.message


@pytest.mark.parametrize("size", [256, 255, 254])
def test_size_is_checked_before_it_is_decoded(size: int) -> None:
    uri = "data:image/png;base64," + base64.b64encode(DATA[:size]).decode()
    assert parse(uri, MediaLimits(max_file_bytes=size)) == DATA[:size]
    with pytest.raises(InvalidArgument, match=f"{size} bytes; at most {size - 1}"):
        parse(uri, MediaLimits(max_file_bytes=size - 1))
