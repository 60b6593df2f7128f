"""Who has fallen silent: a stopped process, a hung engine or a way that swallows everything look alike from outside."""

from collections.abc import Mapping
from typing import TypeVar

import msgspec

Name = TypeVar("Name")


class SilencePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in seconds. A healthy worker tells something several times a second."""

    suspect_seconds: float = 1.5  # of silence: gets nothing new; attempts without a token are tried elsewhere, too
    stuck_seconds: float = 4.0  # of silence: its running streams go on elsewhere, if there is one
    late_seconds: float = 0.5  # a look of our own that is so late: it was us who slept


def silences(heard: Mapping[Name, float], awake_since: float) -> dict[Name, float]:
    """Seconds of silence by name, given when each was heard last and since when we have listened without a gap.

    Measured not against the clock but against whoever was heard last. When all are silent at once it is we, or the
    machine, that stand still; then, as with one worker alone, nobody is silent.
    """
    since = {name: max(at, awake_since) for name, at in heard.items()}
    latest = max(since.values(), default=0.0)
    return {name: latest - at for name, at in since.items()}
