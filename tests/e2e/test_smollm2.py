"""The default model, real weights in fp32, in separate processes: exact tokens, the real chat template, memory."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from common.models.catalog import DEFAULT_MODEL
from common.models.fetch import get_model
from tests import oracle
from tests.e2e.running import Running, at_stage
from tests.processes import ProcessMesh, Role, process_mesh

session = pytest.mark.asyncio(loop_scope="session")

MODEL = "smollm2"
MB = 1_000_000
NUM_BLOCKS = 256
MAX_TOKENS = 24
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old",
    "def fibonacci(n):\n    ",
)
QUESTIONS = ("What is the capital of Italy?", "Name three colours.", "How many legs has a spider?")


@pytest.fixture(scope="module")
def model() -> Path:
    """Fetched and converted once, into EPD_MODELS_DIR."""
    return get_model(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def weights(model: Path) -> int:
    """Bytes: bfloat16 on the disk, float32 in memory."""
    return 2 * sum(file.stat().st_size for file in model.glob("*.safetensors"))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProcessMesh]:
    async with process_mesh(
        model,
        tmp_path_factory.mktemp("smollm2"),
        model=MODEL,
        num_blocks=NUM_BLOCKS,
        gateway={"route_wait_seconds": 60.0},
    ) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    """transformers' own."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def clear(model: Path, prompts: list[list[int]], max_tokens: int = MAX_TOKENS) -> list[tuple[list[int], list[int]]]:
    """(prompt, `generate`'s tokens) of those prompts that are no near ties."""
    found = []
    for prompt in prompts:
        try:
            found.append((prompt, oracle.generate(model, prompt, max_tokens)))
        except oracle.NearTie:
            continue
    assert found, "no prompt without near ties"
    return found


@session
async def test_greedy_equals_generate(mesh: ProcessMesh, model: Path, tokenizer: Any) -> None:
    """Cold, then from the cache, then three choices."""
    asked = clear(model, [tokenizer(text).input_ids for text in (*PROMPTS, " ".join(PROMPTS))])
    assert len(asked) >= 3
    for prompt, tokens in asked:
        cold = await mesh.generate(prompt, model=MODEL, max_tokens=MAX_TOKENS, ignore_eos=True)
        assert cold.tokens == tokens
        warm = await mesh.generate(prompt, model=MODEL, max_tokens=MAX_TOKENS, ignore_eos=True, n=2)
        assert {index: choice.tokens for index, choice in warm.choices.items()} == {0: tokens, 1: tokens}
        assert warm.usage.cached_tokens == (len(prompt) - 1) // 16 * 16
        assert cold.choices[0].text == tokenizer.decode(tokens, skip_special_tokens=True)
    await mesh.settled()


@session
async def test_chat_over_http(mesh: ProcessMesh, model: Path, tokenizer: Any) -> None:
    """The prompt is the one that transformers renders, the answer the one that `generate` gives."""
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        try:
            tokens = oracle.generate(model, prompt, MAX_TOKENS, eos=tokenizer.eos_token_id)
            break
        except oracle.NearTie:
            continue
    else:
        raise AssertionError("no question without near ties")
    async with httpx.AsyncClient(base_url=mesh.http, timeout=60) as client:
        body = {"model": MODEL, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}
        answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == len(tokens)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == tokenizer.decode(tokens, skip_special_tokens=True)
    assert choice["finish_reason"] == ("stop" if tokens[-1] == tokenizer.eos_token_id else "length")
    await mesh.settled()


@session
async def test_memory(mesh: ProcessMesh, weights: int) -> None:
    """A worker: weights, pool and 600 MB. The gateway: 350 MB, and no torch."""
    for worker in mesh.workers.values():
        layout = (await mesh.status(worker)).layout
        pool = NUM_BLOCKS * 2 * layout.num_layers * layout.num_kv_heads * layout.block_size * layout.head_dim * 4
        assert worker.memory() <= weights + pool + 600 * MB
    assert mesh.gateway.memory() <= 350 * MB
    maps = psutil.Process(mesh.gateway.pid).memory_maps(grouped=True)
    assert maps
    assert not [file.path for file in maps if "torch" in file.path]


@session
async def test_decode_killed_in_mid_stream(mesh: ProcessMesh, model: Path, tokenizer: Any) -> None:
    """The only decode worker: its request goes on when it is back."""
    ((prompt, tokens), *_) = clear(model, [tokenizer(text).input_ids for text in reversed(PROMPTS)], 60)
    running = Running(mesh, prompt, {"model": MODEL}, max_tokens=60)
    victim = mesh.workers["decode-0"]

    async def in_mid_stream(worker: Role) -> bool:
        return running.tokens >= 8

    await at_stage([victim], in_mid_stream)
    await victim.kill()
    assert not running.answer.done()
    await victim.start()
    answer = await running.answer
    assert answer.tokens == tokens
    assert answer.accounting.attempts >= 2
    await mesh.settled()
