"""What a client got, held against the known answer."""

from collections import Counter
from collections.abc import Sequence

from tests.chaos.pool import Known

ALIGNED = 4  # so many tokens in a row that fit again say that some were lost or doubled before them
COMPLETED, REFUSED, CANCELLED, LATE, GATEWAY, ERROR, HUNG, FALSE_END = (
    *("completed", "refused", "cancelled by us", "deadline of ours", "gateway lost", "error", "hung", "false end"),
)
OUTCOMES = (COMPLETED, REFUSED, CANCELLED, LATE, GATEWAY, ERROR, HUNG, FALSE_END)


class Seen:
    """One request as its client saw it. outcome: one of OUTCOMES; gateway: whom it was sent to."""

    def __init__(self, known: Known, gateway: str, way: str) -> None:
        self.known, self.gateway, self.way = known, gateway, way
        self.tokens: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.ended: set[int] = set()  # choices with a finish reason
        self.attempts = 0
        self.resumed = False  # in mid-stream, as the accounting has it
        self.outcome = ERROR
        self.detail = ""
        self.trace = ""
        self.started = self.finished = 0.0  # monotonic

    @property
    def started_stream(self) -> bool:
        return any(self.tokens.values()) or any(self.texts.values())

    def end(self) -> None:
        """The stream has ended well, says the server."""
        self.outcome = COMPLETED if self.ended == set(self.known.tokens) else FALSE_END

    def faults(self) -> Counter[str]:
        """wrong: tokens that differ; moved: lost or doubled ones; of texts in characters. Empty when all is right."""
        found: Counter[str] = Counter()
        whole = self.outcome in (COMPLETED, FALSE_END)
        for index in self.known.tokens:
            if self.way == "grpc":
                found += differences(self.tokens.get(index, []), self.known.tokens[index], whole=whole)
            text, right = self.texts.get(index, ""), self.known.texts[index]
            found += differences([*map(ord, text)], [*map(ord, right)], whole=whole)
        found["wrong"] += sum(index not in self.known.tokens for index in (*self.tokens, *self.texts))
        return +found


def differences(got: Sequence[int], right: Sequence[int], *, whole: bool) -> Counter[str]:
    """whole: got must be all of right; else its beginning."""
    if list(got) == list(right[: len(got)]):
        return Counter(moved=len(right) - len(got)) if whole and len(got) < len(right) else Counter()
    first = next((at for at, pair in enumerate(zip(got, right, strict=False)) if pair[0] != pair[1]), len(right))
    if first == len(right):  # all is there, and then more
        return Counter(moved=len(got) - len(right))
    rest = list(got[first : first + ALIGNED])
    for shift in range(1, len(right)):
        lost = list(right[first + shift : first + shift + len(rest)])
        doubled = list(right[max(0, first - shift) : max(0, first - shift) + len(rest)]) if shift <= first else []
        if len(rest) > 1 and rest in (lost, doubled):
            return Counter(moved=shift)
    return Counter(wrong=sum(a != b for a, b in zip(got, right, strict=False)))
