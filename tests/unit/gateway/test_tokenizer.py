"""Our tokenizer against transformers' own, and what the gateway's process must not hold."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidArgument
from common.models.tokenizer import Tokenizer
from services.gateway.main import _load
from tests.tokenizer_files import byte_tokenizer
from tests.vlm_files import PARTS_TEMPLATE

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "be 'short' & <kind>"}, {"role": "user", "content": "안녕 🙂\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b <|end|>"},
        {"role": "user", "content": ""},
    ],
]
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}",
    "special names": "{{ bos_token }}{% for m in messages %}{{ m.content | trim }}{{ eos_token }}{% endfor %}",
    "whitespace": """
{%- for m in messages %}
    {%- if m['role'] == 'user' %}
        {{- '[' + m['content'] + ']' }}
    {% else %}
        {{ m.content }}
    {%- endif %}
{% endfor %}
""",
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "namespace": "{% set ns = namespace(seen=0) %}{% for m in messages %}{% set ns.seen = ns.seen + 1 %}{% endfor %}"
    "{{ ns.seen }}{{ dict(a=1) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "tools": "{% if tools %}T{% endif %}{% if documents is none %}N{% endif %}{% if unknown is defined %}D{% endif %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates_as_transformers_renders_them(tmp_path: Path, name: str) -> None:
    from transformers import AutoTokenizer

    directory = byte_tokenizer(tmp_path / "m", TEMPLATES[name])
    ours, theirs = Tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    for chat in CHATS:
        for prompt in (True, False):
            text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
            assert ours.render_chat(chat, add_generation_prompt=prompt) == text
        assert ours.encode_chat(chat) == theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]


def test_encode_and_decode_as_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = byte_tokenizer(tmp_path / "m")
    ours, theirs = Tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    for text in ("hello", "안녕 🙂", "<|start|>x<|end|>", "", " a  b "):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_template_in_the_config_and_none(tmp_path: Path) -> None:
    directory = byte_tokenizer(tmp_path / "m", None)
    with pytest.raises(InvalidArgument, match="no chat template"):
        Tokenizer(directory).render_chat(CHATS[0])
    config = directory / "tokenizer_config.json"
    kept = json.loads(config.read_text())
    several = [{"name": "other", "template": "o"}, {"name": "default", "template": "x1"}]
    for template in ("x{{ messages|length }}", several):
        config.write_text(json.dumps(kept | {"chat_template": template}))
        assert Tokenizer(directory).render_chat(CHATS[0]) == "x1"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'].secret() }}", "refused"),
        ("{{ messages.append(1) }}", "refused"),  # immutable
        ("{{ ''.__class__.__mro__ }}", "refused"),
        ("{{ messages[9].content + 1 }}", "refused"),
        ("{{ 1 + 'a' }}", "cannot render"),
    ],
)
def test_templates_that_fail_are_the_clients_fault_and_run_in_a_sandbox(
    tmp_path: Path, template: str, message: str
) -> None:
    tokenizer = Tokenizer(byte_tokenizer(tmp_path / "m", template))
    with pytest.raises(InvalidArgument, match=message) as caught:
        tokenizer.render_chat([{"role": "user", "content": "canary-7391"}])
    assert "canary" not in caught.value.message
    assert caught.value.field == "messages"


def test_token_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_tokenizer(tmp_path / "m"))
    assert b"".join(tokenizer.token_bytes(i) for i in "세 계".encode()) == "세 계".encode()
    assert tokenizer.token_bytes(256) == b"<|end|>"
    assert tokenizer.token_bytes(99999) == b""


_SCRIPT = """
import asyncio, sys
import psutil
from services.gateway.main import Gateway
from services.gateway.settings import GatewaySettings

async def main():
    settings = GatewaySettings(models={"m": sys.argv[1]}, grpc_bind="127.0.0.1:0", http_bind="127.0.0.1:0", etcd=None)
    gateway = Gateway(settings)
    await gateway.start()
    gateway.generator.preprocessor.tokenizers["m"].encode_chat([{"role": "user", "content": "hi"}])
    heavy = [name for name in ("torch", "transformers", "tensorflow") if name in sys.modules]
    print(heavy, psutil.Process().memory_info().rss // 2**20)
    await gateway.stop()

asyncio.run(main())
"""


def test_the_gateway_process_holds_no_torch_and_stays_small(model_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(model_dir)], capture_output=True, text=True, timeout=60, check=True
    )
    heavy, megabytes = done.stdout.strip().rsplit(" ", 1)
    assert heavy == "[]"
    assert int(megabytes) <= 350


PARTS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "'b'"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
]


def test_content_parts_as_transformers_renders_them(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = byte_tokenizer(tmp_path / "m", PARTS_TEMPLATE)
    ours, theirs = Tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    assert ours.render_chat(PARTS) == theirs.apply_chat_template(PARTS, tokenize=False, add_generation_prompt=True)
    assert ours.encode_chat(PARTS) == theirs.apply_chat_template(PARTS, add_generation_prompt=True)["input_ids"]


@pytest.mark.parametrize(
    ("template", "takes_parts"),
    [
        (PARTS_TEMPLATE, True),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}", True),
        ("{% set c = messages[0].content %}{% if c is string %}{{ c }}{% else %}[{{ c[0].text }}]{% endif %}", True),
        (None, False),
        *((template, False) for template in TEMPLATES.values()),
    ],
)
def test_templates_that_take_parts(tmp_path: Path, template: str | None, takes_parts: bool) -> None:
    assert Tokenizer(byte_tokenizer(tmp_path / "m", template)).takes_parts is takes_parts


def test_a_gateway_makes_the_table_of_bytes_before_it_serves(model_dir: Path) -> None:
    assert "byte_table" in vars(_load("model", str(model_dir)))
