"""Fields of a block's root do not run into each other."""

from itertools import combinations

import pytest

from common.cache.keys import media_key, root_key

NAMES = ("", "m", "r", "a", "mr", "a\0", "salt", "adapter")


def test_case_e1_an_adapter_named_like_a_salt_is_another_root() -> None:
    fields = [
        dict(model=model, revision=revision, salt=salt.encode(), adapter=adapter)
        for model in ("m", "mr")
        for revision in ("", "r")
        for salt in NAMES
        for adapter in NAMES
    ]
    assert len({root_key(**each) for each in fields}) == len(fields)


@pytest.mark.parametrize(
    ("one", "other"),
    list(combinations([(b"a", b"b", b"c"), (b"ab", b"", b"c"), (b"", b"ab", b"c"), (b"abc", b"", b"")], 2)),
)
def test_bytes_that_move_between_the_fields_of_a_media_key_change_it(one: tuple, other: tuple) -> None:
    assert media_key(*one) != media_key(*other)
