"""Silence is measured against whoever was heard last."""

from common.policies.silence import silences


def test_one_of_three_is_silent() -> None:
    assert silences({"a": 10.0, "b": 9.9, "c": 7.0}, 0.0) == {"a": 0.0, "b": 10.0 - 9.9, "c": 3.0}


def test_all_silent_at_once_is_us() -> None:
    """However long ago it was."""
    assert max(silences({"a": 5.0, "b": 4.9, "c": 4.8}, 0.0).values()) < 0.3


def test_one_alone_is_never_silent() -> None:
    assert silences({"a": 1.0}, 0.0) == {"a": 0.0}
    assert silences({}, 0.0) == {}


def test_after_a_sleep_of_our_own_all_begin_anew() -> None:
    """Only one of their messages has been read since."""
    assert silences({"a": 20.1, "b": 10.0, "c": 9.0}, 20.0) == {"a": 0.0, "b": 20.1 - 20.0, "c": 20.1 - 20.0}
