"""Tool calls out of text: however it is cut into pieces, whatever is wrong with it, wherever it is cut off."""

import json
import random
from typing import Any

import pytest

from services.gateway.tools.formats import HERMES, LLAMA, MISTRAL, ToolFormat
from services.gateway.tools.parser import ToolCallParser

F = ("f", {"a": 'x"}\\ </tool_call> [1, {"b": null}]', "n": 1.5})
G = ("g_2", {})


def written(form: ToolFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    bodies = [json.dumps({"name": name, form.arguments: arguments}) for name, arguments in calls]
    if form.array:
        return f"{form.begin} [{', '.join(bodies)}]"
    return (form.glue or "; ").join(f"{form.begin}{form.before}{body}{form.before}{form.end}" for body in bodies)


def read(form: ToolFormat, pieces: list[str], *, cut: bool = False, parallel: bool = True) -> tuple[str, list[Any]]:
    """(content, [(name, arguments' text)]); the stream's own rules checked."""
    parser = ToolCallParser(form, parallel=parallel)
    content, calls = "", {}
    for text, parts in [*(parser.push(piece) for piece in pieces), parser.flush(cut=cut)]:
        content += text
        for part in parts:
            if part.id:
                assert part.index == len(calls)
                calls[part.index] = [part.name, part.arguments]
            else:
                assert not part.name
                assert part.arguments
                calls[part.index][1] += part.arguments
    assert parser.called == len(calls)
    return content, list(calls.values())


def pieces_of(text: str, seed: int) -> list[str]:
    rng, found = random.Random(seed), []
    while text:
        size = rng.randrange(1, 5)
        found.append(text[:size])
        text = text[size:]
    return found


@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA], ids=["hermes", "mistral", "llama"])
@pytest.mark.parametrize("calls", [(F,), (G,), (F, G), (G, F, F)], ids=len)
def test_calls_come_back_however_they_are_cut(form: ToolFormat, calls: Any) -> None:
    text = written(form, *calls)
    for seed in range(20):
        content, found = read(form, pieces_of(text, seed))
        assert content == ""
        assert [(name, json.loads(arguments)) for name, arguments in found] == [(n, a) for n, a in calls]
    assert read(form, [text]) == read(form, list(text))


@pytest.mark.parametrize("form", [HERMES, MISTRAL], ids=["hermes", "mistral"])
def test_text_beside_calls_is_content(form: ToolFormat) -> None:
    content, found = read(form, list("I look < it up.\n" + written(form, F)))
    assert (content, len(found)) == ("I look < it up.", 1)
    assert read(HERMES, list(written(HERMES, F) + "\n\nDone <b>")) == ("Done <b>", [[F[0], json.dumps(F[1])]])


@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA], ids=["hermes", "mistral", "llama"])
@pytest.mark.parametrize(
    "text", ["", "  plain\n", "a < b", "1 [T", 'say "<tool"', "[1, 2]", "{}", '{"answer": 3}', "{\n"]
)
def test_text_without_calls_is_all_content(form: ToolFormat, text: str) -> None:
    for seed in range(5):
        assert read(form, pieces_of(text, seed)) == (text, [])


@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA], ids=["hermes", "mistral", "llama"])
def test_a_cut_never_shows_markup(form: ToolFormat) -> None:
    """At every character of an answer: the content is a part of the real one, the arguments a part of the real ones."""
    before = "" if form is LLAMA else "look: "
    text = before + written(form, F, G)
    real = [json.dumps(F[1]), json.dumps(G[1])]
    for at in range(len(text)):
        content, found = read(form, pieces_of(text[:at], at), cut=True)
        assert "look: ".startswith(content), text[:at]
        for (name, arguments), (whole, call) in zip(found, zip(real, (F, G), strict=True), strict=False):
            assert name == call[0]
            assert whole.startswith(arguments)


def test_keys_in_another_order_and_calls_without_arguments() -> None:
    text = '<tool_call>{"type": "function", "arguments": {"a": [1]} , "name" : "f"}</tool_call><tool_call>{"name":"g"}'
    assert read(HERMES, list(text + "</tool_call>")) == ("", [["f", '{"a": [1]}'], ["g", "{}"]])
    assert read(LLAMA, list('<|python_tag|>{"name": "f", "parameters": {}}')) == ("", [["f", "{}"]])
    assert read(LLAMA, ["<|python_tag|>print(1)"]) == ("print(1)", [])


def test_what_is_no_call_is_shown_without_markers() -> None:
    assert read(HERMES, list("<tool_call>\nf(1)\n</tool_call>ok")) == ("\nf(1)\nok", [])
    assert read(HERMES, list('<tool_call>{"name": 3}</tool_call>')) == ('{"name": 3}', [])
    # After it was told it cannot be taken back; the rest of it is left out.
    broken = '<tool_call>{"name": "f", "arguments": {"a": 1}, oops}</tool_call>'
    assert read(HERMES, list(broken + written(HERMES, G))) == ("", [["f", '{"a": 1}'], ["g_2", "{}"]])


@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA], ids=["hermes", "mistral", "llama"])
def test_without_parallel_calls_the_first_is_the_last(form: ToolFormat) -> None:
    parser = ToolCallParser(form, parallel=False)
    text = written(form, G, F)
    parser.push(text[: len(text) // 2 + 5])
    assert parser.over
    assert parser.called == 1
    assert read(form, pieces_of(text, 1), parallel=False) == ("", [["g_2", "{}"]])


def test_ids_as_templates_want_them() -> None:
    assert len(MISTRAL.new_id()) == 9
    assert MISTRAL.new_id().isalnum()
    assert HERMES.new_id().startswith("call_")
    assert HERMES.new_id() != HERMES.new_id()
