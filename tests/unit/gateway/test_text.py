"""Tokens to text: detokenizing (C1) and stop strings (C2, C3)."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.models.tokenizer import Tokenizer
from services.gateway.detokenize import ByteDetokenizer, WindowDetokenizer, detokenizer
from services.gateway.stops import StopMatcher
from tests.tokenizer_files import byte_tokenizer, fallback_tokenizer

TEXTS = [
    "안녕하세요, 세계!",
    "👩‍👩‍👧 family 🙂🙂",
    "é ü ñ — “quotes”",
    "  leading and trailing  ",
    "日本語のテキスト",
    "plain",
    "",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
]


@pytest.fixture(scope="module", params=["byte", "fallback"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    make = {"byte": byte_tokenizer, "fallback": fallback_tokenizer}[request.param]
    return Tokenizer(make(tmp_path_factory.mktemp(request.param)))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    if tokenizer.byte_level:
        return list(text.encode())
    ids: list[int] = []
    for word in text.replace(" ", "▁"):
        known = tokenizer._tokenizer.token_to_id(word)
        ids += [known] if known is not None else [3 + byte for byte in word.encode()]
    return ids


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_c1_pieces_add_up(tokenizer: Tokenizer, text: str, size: int) -> None:
    ids = ids_of(tokenizer, text)
    found = detokenizer(tokenizer)
    pieces = [found.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    pieces.append(found.flush())
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "".join(pieces) == (text if tokenizer.byte_level else text.removeprefix(" "))
    assert not any("\ufffd" in piece for piece in pieces)


def test_c1_right_kind(tokenizer: Tokenizer) -> None:
    kind = ByteDetokenizer if tokenizer.byte_level else WindowDetokenizer
    assert isinstance(detokenizer(tokenizer), kind)


def test_c1_a_text_that_is_cut_in_a_character_is_flushed(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "ab🙂")[:-1]
    found = detokenizer(tokenizer)
    streamed = "".join(found.push([i]) for i in ids)
    assert streamed == "ab"
    assert streamed + found.flush() == tokenizer.decode(ids)


@settings(deadline=None)
@given(data=st.data())
def test_c1_any_bytes(model_dir: Path, data: st.DataObject) -> None:
    tokenizer = Tokenizer(model_dir)
    ids = data.draw(st.lists(st.integers(0, 257), max_size=30))
    for made in (detokenizer(tokenizer), WindowDetokenizer(tokenizer, tokenizer.special_ids)):
        assert "".join(made.push([i]) for i in ids) + made.flush() == tokenizer.decode(ids)


def test_special_tokens_are_cut_or_shown(tokenizer: Tokenizer) -> None:
    special = min(tokenizer.special_ids)
    ids = [*ids_of(tokenizer, "a"), special, *ids_of(tokenizer, "b")]
    hidden, shown = detokenizer(tokenizer), detokenizer(tokenizer, skip_special_tokens=False)
    assert hidden.push(ids) + hidden.flush() == "ab"
    name = tokenizer._tokenizer.id_to_token(special)
    assert shown.push(ids) + shown.flush() == f"a{name}b"


def test_window_stays_short(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_tokenizer(tmp_path))
    found = WindowDetokenizer(tokenizer, frozenset())
    for i in range(2000):
        found.push([200 + i % 50])  # never a valid character
        assert len(found._ids) <= 8


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None, list[str]]:
    matcher = StopMatcher(stops)
    shown = [matcher.push(piece) for piece in pieces]
    shown.append(matcher.flush())
    return "".join(shown), matcher.matched, shown


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "matched"),
    [
        (["END"], ["abc E", "ND def"], "abc ", "END"),
        (["END"], ["abc E", "N", "D"], "abc ", "END"),
        (["END"], ["abc EN", "X END"], "abc ENX ", "END"),
        (["END"], ["abc EN"], "abc EN", None),
        (["END"], ["EEND"], "E", "END"),
        (["aab"], ["aaab"], "a", "aab"),
        (["b", "abc"], ["xab", "c"], "x", "abc"),  # earlier position wins over earlier completion
        (["b", "abc"], ["xab", "d"], "xa", "b"),  # and what it hid counts when it does not complete
        (["b", "abc"], ["xab"], "xa", "b"),
        (["ab", "abc"], ["xabc"], "x", "ab"),
        (["1", "2", "3", "4", "5"], ["abc4"], "abc", "4"),
        (["세계"], ["안녕 세", "계"], "안녕 ", "세계"),
        (["\n\n"], ["a\n", "b\n", "\n"], "a\nb", "\n\n"),
    ],
)
def test_c2_c3_stops(stops: list[str], pieces: list[str], text: str, matched: str | None) -> None:
    found, stop, _ = run(stops, pieces)
    assert (found, stop) == (text, matched)


def test_c2_as_little_as_possible_is_held_back() -> None:
    _, _, shown = run(["END"], ["abcE", "N", "x", "yz"])
    assert shown == ["abc", "", "ENx", "yz", ""]


alphabet = st.text("abc", max_size=12)


@settings(deadline=None)
@given(st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4), st.lists(alphabet, max_size=8))
def test_stops_do_not_depend_on_the_cuts(stops: list[str], pieces: list[str]) -> None:
    text, matched, _ = run(stops, pieces)
    whole = "".join(pieces)
    positions = [whole.find(stop) for stop in stops if stop in whole]
    assert text == (whole[: min(positions)] if positions else whole)
    assert (matched is not None) == bool(positions)
    assert run(stops, list(whole))[:2] == run(stops, [whole])[:2] == (text, matched)
