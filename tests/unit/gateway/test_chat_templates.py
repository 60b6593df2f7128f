"""Chats as transformers' apply_chat_template renders them: thirty cases over templates in six models' manners."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from transformers import AutoTokenizer

from common.errors import InvalidArgument
from common.models.tokenizer import Tokenizer
from epd.v1 import generation_pb2
from services.gateway.prompt import chat_messages
from tests.tokenizer_files import byte_tokenizer
from tests.unit.gateway.chat_templates import TEMPLATES

Messages = list[dict[str, Any]]


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def parts(*items: str) -> list[dict[str, str]]:
    """Texts, and "@" for an image."""
    return [{"type": "image"} if item == "@" else {"type": "text", "text": item} for item in items]


ODD = "it's \"odd\" & <b>5 > 3</b> \\n {{ 'x' }} {% if %} 안녕 🙂\n\ttab"
TURNS = [said("user", "one"), said("assistant", "two"), said("user", "three")]
# Neither in the order of the alphabet; a template that sorts keys, or escapes, is found out.
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'The weather\'s "state" at <place> & time',
            "parameters": {
                "type": "object",
                "properties": {
                    "unit": {"type": "string", "enum": ["°C", "°F"]},
                    "city": {"type": "string", "description": "e.g. Zürich"},
                    "at": {"type": "integer"},
                },
                "required": ["city", "at"],
            },
        },
    },
    {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, "name": "a_first"}},
]
CALL = said(
    "assistant", "", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {"z": "it's", "a": 1}}}]
)
RESULT = said("tool", '{"state": "sunny"}')


class Case(NamedTuple):
    template: str
    messages: Messages
    tools: Any = None
    generation: bool = True
    goes_on: bool = False


CASES = {
    # ChatML
    "chatml user": Case("chatml", [said("user", "hi")]),
    "chatml system": Case("chatml", [said("system", "be brief"), said("user", "hi")]),
    "chatml odd characters": Case("chatml", [said("system", ODD), said("user", ODD)]),
    "chatml turns": Case("chatml", TURNS, generation=False),
    "chatml empty": Case("chatml", [said("user", "")]),
    "chatml goes on": Case("chatml", [*TURNS, said("assistant", "four, ")], goes_on=True),
    # Llama
    "llama user": Case("llama", [said("user", "  hi\n")]),
    "llama system": Case("llama", [said("system", " be brief "), said("user", ODD)]),
    "llama turns": Case("llama", TURNS),
    "llama tools": Case("llama", [said("system", "x"), said("user", "weather?")], tools=TOOLS),
    "llama call and result": Case("llama", [said("user", "weather?"), CALL, RESULT], tools=TOOLS),
    "llama result as a list": Case("llama", [said("user", "w"), CALL, said("tool", [{"text": "it's"}])]),
    "llama goes on, trimmed": Case("llama", [*TURNS, said("assistant", " four,  ")], goes_on=True),
    # Mistral
    "mistral user": Case("mistral", [said("user", "hi")]),
    "mistral system": Case("mistral", [said("system", "s's"), *TURNS]),
    "mistral odd characters": Case("mistral", [said("user", ODD), said("assistant", f" {ODD} "), said("user", ODD)]),
    "mistral tools": Case("mistral", TURNS, tools=TOOLS),
    "mistral call and result": Case("mistral", [said("user", "weather?"), CALL, RESULT], tools=TOOLS),
    "mistral goes on": Case("mistral", [said("user", "a"), said("assistant", "b c")], goes_on=True),
    # Gemma
    "gemma user": Case("gemma", [said("user", " hi ")]),
    "gemma system": Case("gemma", [said("system", "brief"), *TURNS]),
    "gemma parts": Case("gemma", [said("system", parts("brief")), said("user", parts("a ", "b's"))]),
    "gemma images": Case("gemma", [said("user", parts("@", "see", "@", ODD)), said("assistant", parts("ok"))]),
    "gemma no generation prompt": Case("gemma", TURNS, generation=False),
    # Qwen
    "qwen system": Case("qwen", [said("system", ODD), said("user", "hi")]),
    "qwen tools": Case("qwen", [said("user", "weather?")], tools=TOOLS),
    "qwen tools and system": Case("qwen", [said("system", "s"), said("user", "weather?")], tools=TOOLS),
    "qwen two results": Case("qwen", [said("user", "w"), CALL, RESULT, RESULT, said("user", "and?")], tools=TOOLS),
    "qwen call after text": Case("qwen", [said("user", "w"), {**CALL, "content": "let's see"}, RESULT], tools=TOOLS),
    "qwen goes on": Case("qwen", [said("user", "w"), said("assistant", "tail ")], tools=TOOLS, goes_on=True),
    # Qwen-VL
    "qwen-vl string": Case("qwen-vl", [said("user", ODD)]),
    "qwen-vl image": Case("qwen-vl", [said("user", parts("@", "what's this?"))]),
    "qwen-vl images and turns": Case(
        "qwen-vl",
        [
            said("system", "s"),
            said("user", parts("a", "@", "@")),
            said("assistant", "b"),
            said("user", parts("c", "@")),
        ],
    ),
    "qwen-vl goes on": Case(
        "qwen-vl", [said("user", parts("@")), said("assistant", parts("x", "it is a "))], goes_on=True
    ),
}


class Pair(NamedTuple):
    ours: Tokenizer
    theirs: Any


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            directory = byte_tokenizer(tmp_path_factory.mktemp(name) / "m", TEMPLATES[name])
            made[name] = Pair(Tokenizer(directory), AutoTokenizer.from_pretrained(directory))
        return made[name]

    return get


def expected(theirs: Any, case: Case) -> str:
    text: str = theirs.apply_chat_template(
        case.messages,
        tools=case.tools,
        tokenize=False,
        add_generation_prompt=case.generation and not case.goes_on,
        continue_final_message=case.goes_on,
    )
    return text


@pytest.mark.parametrize("name", CASES)
def test_as_transformers_renders_it(name: str, tokenizers: Callable[[str], Pair]) -> None:
    case = CASES[name]
    ours, theirs = tokenizers(case.template)
    text = ours.render_chat(
        case.messages,
        tools=case.tools,
        add_generation_prompt=case.generation,
        continue_final_message=case.goes_on,
    )
    assert text == expected(theirs, case)
    assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
    assert len(CASES) >= 30


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.tools is None and "llama re" not in name]
)
def test_as_the_gateway_takes_it(name: str, tokenizers: Callable[[str], Pair]) -> None:
    """From the message of a client: strings for text models, parts where images are taken."""
    case = CASES[name]
    ours, theirs = tokenizers(case.template)
    chat = generation_pb2.Chat()
    for message in case.messages:
        added = chat.messages.add(role=message["role"])
        content = message["content"]
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "image":
                added.content.add().image.data = b"x"
            else:
                added.content.add(text=part["text"])
    vision: Any = SimpleNamespace(marker="?") if case.template in ("gemma", "qwen-vl") else None
    messages = chat_messages(chat, ours, vision)
    text = ours.render_chat(messages, add_generation_prompt=case.generation, continue_final_message=case.goes_on)
    assert text == expected(theirs, case)


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        ("mistral", [said("user", "a"), said("user", "b")]),
        ("gemma", [said("assistant", "a")]),
        ("mistral", [said("robot", "a")]),
        ("llama", [said("user", "a"), {**CALL, "tool_calls": CALL["tool_calls"] * 2}]),
    ],
)
def test_what_both_refuse(template: str, messages: Messages, tokenizers: Callable[[str], Pair]) -> None:
    ours, theirs = tokenizers(template)
    with pytest.raises(Exception) as caught:  # noqa: PT011, of jinja
        theirs.apply_chat_template(messages, tokenize=False)
    with pytest.raises(InvalidArgument) as refused:
        ours.render_chat(messages)
    assert str(caught.value) in refused.value.message
    assert refused.value.field == "messages"


@pytest.mark.parametrize(
    "messages",
    [
        [said("user", "w"), said("assistant", parts("@"))],  # no text to go on from
        [said("user", "w"), {"role": "assistant"}],
    ],
)
def test_nothing_to_go_on_from(messages: Messages, tokenizers: Callable[[str], Pair]) -> None:
    ours, theirs = tokenizers("qwen-vl")
    with pytest.raises(ValueError, match="continue_final_message"):
        theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    with pytest.raises(InvalidArgument) as refused:
        ours.render_chat(messages, continue_final_message=True)
    assert refused.value.field == "continue_final_message"


def test_a_template_that_drops_the_last_message(tmp_path: Path) -> None:
    ours = Tokenizer(byte_tokenizer(tmp_path / "m", "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}"))
    with pytest.raises(InvalidArgument, match="changes the final message") as refused:
        ours.render_chat([said("user", "a"), said("assistant", "b")], continue_final_message=True)
    assert refused.value.field == "continue_final_message"
