"""docs/errors.md has every reason, with the status and the code that it has in the code, and no other."""

import re
from pathlib import Path

import pytest

from common import errors, metrics
from common.rpc.errors import FIELD_KEY, PEER_KEY, REASON_KEY, RETRY_AFTER_KEY

TEXT = (Path(__file__).parents[3] / "docs" / "errors.md").read_text()
ROWS = dict(re.findall(r"^\| `([A-Z_]+)` \| (.*) \|$", TEXT, re.MULTILINE))


def ours() -> dict[str, type[errors.EpdError]]:
    """Of common.errors alone: elsewhere an error may hold the reason of a foreign server."""
    return {reason: kind for reason, kind in errors.by_reason().items() if kind.__module__ == errors.__name__}


def test_every_reason_is_told_once() -> None:
    assert set(ROWS) == set(ours())
    assert len(re.findall(r"^\| `[A-Z_]+` \|", TEXT, re.MULTILINE)) == len(ROWS)


@pytest.mark.parametrize("reason", sorted(ours()))
def test_with_its_status_and_code(reason: str) -> None:
    kind = ours()[reason]
    status, http, again, meaning, advice = ROWS[reason].split(" | ")
    assert (status, http) == (kind.status.name, str(kind.http))
    assert again == ("yes" if kind.retryable else "no")
    assert meaning
    assert advice


def test_the_names_around_it_are_right() -> None:
    for key in (REASON_KEY, FIELD_KEY, PEER_KEY, RETRY_AFTER_KEY):
        assert f"`{key}`" in TEXT
    # A counter's own name lacks the `_total` that Prometheus shows.
    known = {getattr(each, "_name", "") for each in vars(metrics.Metrics()).values()}
    for name in re.findall(r"`(epd_\w+)", TEXT):
        assert name.removesuffix("_total") in known, name
