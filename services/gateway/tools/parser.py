"""Tool calls out of a choice's text, as it comes."""

from enum import Enum, auto

from epd.v1 import generation_pb2
from services.gateway.tools.formats import ToolFormat
from services.gateway.tools.scanner import CallScanner

_BLANKS = " \t\r\n"
_BETWEEN = _BLANKS + ";"  # calls without markers


class _Mode(Enum):
    TEXT = auto()
    CALL = auto()
    AFTER = auto()  # a call: its end marker, or the next object of an array
    BROKEN = auto()  # what is left of a call that went wrong after it was told
    PLAIN = auto()  # text to the end, whatever is in it
    OVER = auto()  # nothing more is of interest


class ToolCallParser:
    """Splits text into content and calls; no marker is ever in the content, also not where the text is cut off.

    Text that may be the beginning of a marker is held back, and so are blanks before one. What stands between markers
    and is no call is shown as content, without them.

    Attributes: called, how many calls there are; over, nothing after this can matter.
    """

    def __init__(self, form: ToolFormat, *, parallel: bool = True) -> None:
        self._form = form
        self._most = 0 if parallel else 1  # 0: no bound
        self._mode = _Mode.TEXT
        self._held = ""
        self._raw: list[str] = []  # of a call that is not announced yet
        self._scanner = CallScanner()
        self._announced = False
        self._calls: list[generation_pb2.ToolCall] = []
        self._content: list[str] = []
        self._fresh = False  # nothing but blanks since a call
        self.called = 0
        self.over = False

    def push(self, text: str) -> tuple[str, list[generation_pb2.ToolCall]]:
        """New content and new parts of calls."""
        self._held += text
        while self._held and not self.over and self._advance():
            pass
        if self.over:
            self._held = ""
        return self._take()

    def flush(self, *, cut: bool) -> tuple[str, list[generation_pb2.ToolCall]]:
        """The rest, once no more comes. cut: the text goes on, but not here."""
        if self._mode is _Mode.TEXT and not (cut and self._partial(self._held)):
            text = self._held if self._form.begin or not self.called else self._held.strip(_BETWEEN)
            self._show(text.rstrip() if self.called else text)
        elif self._mode is _Mode.TEXT:
            self._show(self._held[: len(self._held) - self._partial(self._held)].rstrip())
        elif self._mode is _Mode.CALL and not self._form.begin and not cut and not self._announced:
            self._show("".join(self._raw))
        self._held, self._mode = "", _Mode.OVER
        return self._take()

    def _take(self) -> tuple[str, list[generation_pb2.ToolCall]]:
        content, calls = "".join(self._content), self._calls
        self._content, self._calls = [], []
        return content, calls

    def _advance(self) -> bool:
        """Consumes some of what is held; False when more has to come first."""
        match self._mode:
            case _Mode.TEXT:
                return self._read_text() if self._form.begin else self._read_start()
            case _Mode.CALL:
                return self._read_call()
            case _Mode.AFTER:
                return self._read_array() if self._form.array else self._read_end()
            case _Mode.BROKEN:
                return self._read_broken()
            case _Mode.PLAIN:
                self._show(self._held)
                self._held = ""
                return False
        return False

    def _read_text(self) -> bool:
        """Up to the next begin marker. End markers without a beginning vanish."""
        text = self._held
        found = [(at, marker) for marker in self._markers if (at := text.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            self._show(text[:at].rstrip() if marker == self._form.begin else text[:at])
            self._held = text[at + len(marker) :]
            if marker == self._form.begin:
                self._begin()
            return True
        keep = self._partial(text)
        shown = text[: len(text) - keep].rstrip()
        self._show(shown)
        self._held = text[len(shown) :]
        if self._fresh and not self._held.strip():
            self._held = ""  # blanks between calls
        return False

    @property
    def _markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self._form.begin, self._form.end)))

    def _partial(self, text: str) -> int:
        """Characters at the text's end that may be the beginning of a marker."""
        longest = 0
        for marker in self._form.markers:
            for size in range(min(len(marker) - 1, len(text)), longest, -1):
                if marker.startswith(text[len(text) - size :]):
                    longest = size
                    break
        return longest

    def _read_start(self) -> bool:
        """Of a format without markers: calls, or text, to the end."""
        text = self._held.lstrip(_BETWEEN if self.called else _BLANKS)
        skipped = self._form.skipped
        if skipped and text.startswith(skipped):
            self._held = text[len(skipped) :]
            return True
        if skipped.startswith(text):  # nothing yet, or the beginning of it
            return False
        if text.startswith("{"):
            self._held = text
            self._begin()
        elif self.called:
            self._held, self._mode = text, _Mode.PLAIN
        else:
            self._mode = _Mode.PLAIN
        return True

    def _begin(self) -> None:
        self._mode, self._raw, self._announced = _Mode.CALL, [], False
        self._scanner = CallScanner()

    def _read_call(self) -> bool:
        scanner, text = self._scanner, self._held
        for at, character in enumerate(text):
            if self._form.array and not self._raw and not self._announced and character in "[ \t\r\n":
                continue
            if not self._announced:
                self._raw.append(character)
            scanner.push(character)
            if scanner.failed or scanner.done:
                self._held = text[at + 1 :]
                self._call_ends(failed=scanner.failed)
                return True
        self._held = ""
        self._tell()
        return False

    def _call_ends(self, *, failed: bool) -> None:
        if not failed or self._announced:
            self._tell()
        if failed and not self._announced:  # no call: it is shown
            self._held = "".join(self._raw) + self._held
            self._mode = _Mode.TEXT if self._form.end else _Mode.PLAIN
        elif failed:
            self._mode = _Mode.BROKEN
        else:
            self._mode = _Mode.AFTER
        self._fresh = self._announced
        if self._announced and self._most and self.called >= self._most:
            self.over = True

    def _tell(self) -> None:
        scanner = self._scanner
        if scanner.name is None:
            return
        if not self._announced:
            self._announced, self._raw = True, []
            self._calls.append(generation_pb2.ToolCall(index=self.called, id=self._form.new_id(), name=scanner.name))
            self.called += 1
        if arguments := scanner.take():
            self._calls[-1:] = _joined(self._calls[-1:], self.called - 1, arguments)

    def _read_array(self) -> bool:
        text = self._held.lstrip(" \t\r\n,")
        if not text:
            self._held = ""
            return False
        if text.startswith("{"):
            self._held = text
            self._begin()
        else:  # the array's end, or what is no array
            self._held, self._mode = text[text.startswith("]") :], _Mode.TEXT
        return True

    def _read_end(self) -> bool:
        if not self._form.end:
            self._mode = _Mode.TEXT
            return True
        text = self._held.lstrip()
        if text.startswith(self._form.end):
            self._held, self._mode = text[len(self._form.end) :].lstrip(), _Mode.TEXT
            return True
        if self._form.end.startswith(text):
            return False
        self._held, self._mode = text, _Mode.TEXT
        return True

    def _read_broken(self) -> bool:
        end = self._form.end
        at = self._held.find(end) if end else -1
        if at < 0:
            self._held = self._held[len(self._held) - self._partial(self._held) :]
            return False
        self._held, self._mode = self._held[at + len(end) :], _Mode.TEXT
        return True

    def _show(self, text: str) -> None:
        if self._fresh:
            text = text.lstrip()
        if text:
            self._content.append(text)
            self._fresh = False


def _joined(last: list[generation_pb2.ToolCall], index: int, arguments: str) -> list[generation_pb2.ToolCall]:
    """The call's part with more arguments, or a part of its own."""
    if last and last[0].index == index:
        last[0].arguments += arguments
        return last
    return [*last, generation_pb2.ToolCall(index=index, arguments=arguments)]
