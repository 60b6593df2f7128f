"""Text to token ids and back, and chat templates, from a Hugging Face directory and without importing torch.

`transformers` would import torch with its tokenizers, so this uses the `tokenizers` library alone and renders chat
templates in a sandbox of our own, whose result equals `apply_chat_template` (a test compares the two).
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from common.errors import InvalidArgument

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 stands for itself, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class Tokenizer:
    """One model's tokenizer. Thread-safe after construction; `encode` releases the GIL for most of its time.

    Attributes: vocab_size (ids are below it, added tokens included); special_ids, cut out of the text by default;
    byte_level: every token is a fixed byte string, so that text is the plain concatenation of tokens.
    """

    def __init__(self, directory: str | Path) -> None:
        path = self.directory = Path(directory)
        source = (path / "tokenizer.json").read_text(encoding="utf-8")
        self._tokenizer = tokenizers.Tokenizer.from_str(source)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        decoder = json.loads(source).get("decoder") or {}
        config = _read_json(path / "tokenizer_config.json")
        self._special_names = _special_names(path, config)
        self._template = _template_source(path, config)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.byte_level: bool = decoder.get("type") == "ByteLevel"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Raises InvalidArgument for text that is not valid Unicode."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:  # lone surrogates reach the library as either
            raise InvalidArgument("text must be valid Unicode", field="prompt") from error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a rendered chat; the template writes the special tokens itself.

        Content is a string or, where `takes_parts`, a list of {"type": "text", "text": …} and {"type": "image"}.
        """
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt's text; with continue_final_message it ends where the last message's text does.

        Raises InvalidArgument when there is no template or it refuses the messages.
        """
        if self._compiled is None:
            raise InvalidArgument("this model has no chat template; send a text prompt instead", field="messages")
        plain = [{name: value for name, value in message.items() if value is not None} for message in messages]
        if continue_final_message:
            return self._open_ended(plain, tools)
        return self._render(plain, tools, add_generation_prompt=add_generation_prompt)

    def _open_ended(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """As transformers does it: a tag behind the last text says where to cut."""
        last, text = _tagged(messages[-1] if messages else {})
        rendered = self._render([*messages[:-1], last], tools, add_generation_prompt=False)
        end = rendered.rfind(_CONTINUE.strip())
        if end < 0 or text.strip() not in rendered:
            raise InvalidArgument("the chat template changes the final message", field="continue_final_message")
        # Some templates trim a message's text; then what it ended with is not there to go on from.
        return rendered[:end] if rendered.startswith(_CONTINUE, end) else rendered[:end].rstrip()

    def _render(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, add_generation_prompt: bool
    ) -> str:
        assert self._compiled is not None
        try:
            return self._compiled.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_names,
            )
        except jinja2.TemplateError as error:
            # The template's own words (such as "roles must alternate") hold no content of the messages' text.
            refusal = error.message if isinstance(error, _Refused) else "the messages do not suit it"
            raise InvalidArgument(f"the chat template refused: {refusal}", field="messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise InvalidArgument("the chat template cannot render these messages", field="messages") from error

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def end_token_id(self) -> int:
        """The end-of-text token that the files name; else some special token."""
        found = self._tokenizer.token_to_id(self._special_names.get("eos_token", ""))
        return max(self.special_ids, default=0) if found is None else int(found)

    @property
    def chat_template(self) -> str:
        """Its source; empty when there is none."""
        return self._template or ""

    @cached_property
    def takes_parts(self) -> bool:
        """The chat template renders content that is a list of parts, found out by trying."""
        probe = "c7f3"
        parts = [{"type": "text", "text": probe}]
        try:
            text = self.render_chat([{"role": "user", "content": parts}])
        except InvalidArgument:
            return False
        return probe in text and not re.search("['\"]type['\"]", text)  # else it has printed the list itself

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; of several tokens' bytes the concatenation may be a character."""
        if token_id in self.special_ids or (piece := self._tokenizer.id_to_token(token_id)) is None:
            return (self._tokenizer.id_to_token(token_id) or "").encode()
        if self.byte_level:
            return self.byte_table[token_id]
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("\u2581", " ").encode()

    @cached_property
    def byte_table(self) -> list[bytes]:
        """Bytes of every token id of a byte-level tokenizer."""
        alphabet = _byte_alphabet()
        table = [b""] * self.vocab_size
        for piece, token_id in self._tokenizer.get_vocab(with_added_tokens=True).items():
            try:
                table[token_id] = bytes(alphabet[character] for character in piece)
            except KeyError:  # an added token with other characters stands for itself
                table[token_id] = piece.encode()
            except IndexError:
                pass
        return table

    def warm_up(self) -> None:
        """Makes the table that the first request, and all that stream meanwhile, would wait a fifth of a second for."""
        if self.byte_level:
            _ = self.byte_table

    @cached_property
    def _compiled(self) -> jinja2.Template | None:
        return None if self._template is None else _environment().from_string(self._template)


class _Refused(jinja2.TemplateError):
    """Raised by a template's raise_exception."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training; for serving it is only its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Templates come with models, so they are run as untrusted code."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own escapes HTML characters, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _tagged(message: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """A message with a tag behind its last text, and that text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUE}, content
    parts = [dict(part) for part in content or ()]
    for part in reversed(parts):
        if "text" in part:
            text = part["text"]
            part["text"] += _CONTINUE
            return {**message, "content": parts}, text
    raise InvalidArgument("the final message has no text to continue", field="continue_final_message")


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes()) if path.is_file() else {}


def _special_names(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, … as templates read them."""
    found: dict[str, str] = {}
    for source in (_read_json(path / "special_tokens_map.json"), config):
        for name in _SPECIAL_NAMES:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _template_source(path: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the one in tokenizer_config.json (the one named "default" of several)."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        return next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None
