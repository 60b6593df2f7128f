"""Stop strings in a stream of text, wherever its pieces are cut."""

from collections.abc import Sequence


class StopMatcher:
    """Ends the text before the earliest stop string; at one position the shortest stop counts.

    Text that may be the beginning of a stop is held back until it is clear that it is not, so the result does not
    depend on how the text was cut into pieces. At most the longest stop's length, less one, is held. include: the text
    ends after the stop string instead.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._include = include
        self._stops = sorted(set(stops), key=len)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What can be shown now. After a match (`matched`) nothing more is."""
        if self.matched is not None:
            return ""
        text = self._held + text
        for start, character in enumerate(text):
            if character not in self._firsts:
                continue
            stop = self._complete(text, start)
            if stop is not None:
                return self._end(text, start, stop)
            if self._viable(text, start):
                self._held = text[start:]
                return text[:start]
        self._held = ""
        return text

    def flush(self) -> str:
        """The held text, once no more comes: what was viable did not complete, but a later stop inside it may have."""
        text, self._held = self._held, ""
        if self.matched is not None:
            return ""
        for start in range(len(text)):
            stop = self._complete(text, start)
            if stop is not None:
                return self._end(text, start, stop)
        return text

    def _complete(self, text: str, start: int) -> str | None:
        return next((stop for stop in self._stops if text.startswith(stop, start)), None)

    def _viable(self, text: str, start: int) -> bool:
        rest = text[start:] if len(text) - start < len(self._stops[-1]) else None
        return rest is not None and any(stop.startswith(rest) for stop in self._stops)

    def _end(self, text: str, start: int, stop: str) -> str:
        self.matched, self._held = stop, ""
        return text[: start + len(stop)] if self._include else text[:start]
