"""One tool call's JSON object, read as its characters come."""

import json
from enum import Enum, auto

_BLANK = " \t\r\n"
_NAMES = ("name",)
_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("type", "id", "function")  # that models add; a "function" that holds a string is the name


class _At(Enum):
    START = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    NEXT = auto()


class CallScanner:
    """Attributes: name, once it is known; arguments, the JSON text that has come since the last `take`; done, at the
    object's end; failed: it is no call."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self.failed = False
        self._arguments: list[str] = []
        self._any_arguments = False
        self._at = _At.START
        self._text: list[str] = []  # of the key, or of the value unless it is the arguments'
        self._key = ""
        self._depth = 0
        self._string = False
        self._escaped = False

    def take(self) -> str:
        found, self._arguments = "".join(self._arguments), []
        return found

    def push(self, character: str) -> None:
        match self._at:
            case _At.START:
                self._expect(character, {"{": _At.KEY})
            case _At.KEY:
                if character == '"':
                    self._at, self._text, self._string, self._escaped = _At.IN_KEY, ['"'], True, False
                elif character == "}" and not self._key:
                    self._end()
                elif character not in _BLANK:
                    self.failed = True
            case _At.IN_KEY:
                self._text.append(character)
                if not self._in_string(character):
                    self._key = self._loads() or ""
                    self.failed |= self._key not in (*_NAMES, *_ARGUMENTS, *_OTHERS)
                    self._at = _At.COLON
            case _At.COLON:
                self._expect(character, {":": _At.VALUE})
            case _At.VALUE:
                if character not in _BLANK:
                    self._at, self._text, self._depth = _At.IN_VALUE, [], 0
                    self._value(character)
            case _At.IN_VALUE:
                self._value(character)
            case _At.NEXT:
                if character == "}":
                    self._end()
                else:
                    self._expect(character, {",": _At.KEY})

    def _expect(self, character: str, then: dict[str, _At]) -> None:
        if character in then:
            self._at = then[character]
        elif character not in _BLANK:
            self.failed = True

    def _value(self, character: str) -> None:
        """One of its characters, or the one behind it where only that tells its end."""
        if self._string:
            ended = not self._in_string(character) and self._depth == 0
        elif character == '"':
            self._string, self._escaped, ended = True, False, False
        elif character in "{[":
            self._depth, ended = self._depth + 1, False
        elif character in "}]" and self._depth:
            self._depth -= 1
            ended = self._depth == 0
        elif self._depth == 0 and (character in ",}" or character in _BLANK):
            self._value_ends()
            self._at = _At.NEXT
            self.push(character)
            return
        else:
            ended = False
        if self._key in _ARGUMENTS:
            self._arguments.append(character)
            self._any_arguments = True
        else:
            self._text.append(character)
        if ended:
            self._value_ends()
            self._at = _At.NEXT

    def _value_ends(self) -> None:
        if self._key in _NAMES or (self._key == "function" and self.name is None):
            name = self._loads()
            self.failed |= name is None
            self.name = name

    def _end(self) -> None:
        self.done = True
        self.failed |= self.name is None
        if not self._any_arguments:
            self._arguments = ["{}"]

    def _in_string(self, character: str) -> bool:
        """Whether the string that this character belongs to goes on."""
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._string = False
        return self._string

    def _loads(self) -> str | None:
        """The text as a JSON string; None when it is none, or empty."""
        try:
            found = json.loads("".join(self._text))
        except ValueError:
            return None
        return found if isinstance(found, str) and found else None
