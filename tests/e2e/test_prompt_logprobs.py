"""Log probabilities of prompts through the whole mesh, against transformers' own logits; chats that go on."""

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from common.models.tokenizer import Tokenizer
from epd.v1 import generation_pb2, types_pb2
from tests import oracle
from tests.e2e.conftest import Meshes
from tests.mesh import MODEL, PATIENCE_SECONDS, LocalMesh, collect

session = pytest.mark.asyncio(loop_scope="session")

FORMS: dict[str, dict[str, Any]] = {
    "aggregated": {"roles": ("prefill,decode",)},
    "shm": {"roles": ("prefill", "decode")},
    "grpc": {"roles": ("prefill", "decode"), "channels": ("grpc",)},
    "chunk 7": {"roles": ("prefill", "decode"), "token_budget": 7},
}
TOLERANCE = 1e-4
PROMPT = [20 + 7 * i % 400 for i in range(61)]


def client(mesh: LocalMesh) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{mesh.gateway.http_address}", timeout=PATIENCE_SECONDS)


def expected(path: Path, ids: list[int]) -> torch.Tensor:
    """[len(ids), vocab_size]: row i is of what follows ids[: i + 1]."""
    return oracle.logits(path, ids).double().log_softmax(dim=-1)


@session
@pytest.mark.parametrize("form", FORMS)
async def test_cold_and_cached(form: str, meshes: Meshes, checkpoint: Any) -> None:
    mesh = await meshes.get(**FORMS[form])
    prompt = [*PROMPT, 30 + len(form)]
    logits = expected(checkpoint("llama"), prompt)
    plain = await mesh.generate(prompt, max_tokens=6, ignore_eos=True)
    assert (await mesh.generate(prompt, max_tokens=6, ignore_eos=True)).usage.cached_tokens == 48
    for n in (1, 3):
        answer = await mesh.generate(prompt, max_tokens=6, ignore_eos=True, n=n, prompt_logprobs=4, echo=True)
        assert answer.usage.cached_tokens == 0  # the logits of cached tokens are nowhere kept
        assert [choice.tokens for choice in answer.choices.values()] == [plain.tokens] * n
        assert answer.prompt is not None
        assert list(answer.prompt.token_ids) == prompt
        assert [entry.token_id for entry in answer.prompt.logprobs] == prompt[1:]
        for row, entry in zip(logits, answer.prompt.logprobs, strict=False):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=TOLERANCE)
            assert [top.logprob for top in entry.top] == pytest.approx(row.topk(4).values.tolist(), abs=TOLERANCE)
    assert (await mesh.generate(prompt, max_tokens=6, ignore_eos=True)).usage.cached_tokens == 48
    await mesh.settled()


@session
@pytest.mark.parametrize("architecture", ["gemma3", "qwen3"])
async def test_other_architectures(architecture: str, meshes: Meshes, checkpoint: Any) -> None:
    mesh = await meshes.get(architecture)
    logits = expected(checkpoint(architecture), PROMPT)
    answer = await mesh.generate(PROMPT, max_tokens=0, prompt_logprobs=0)
    assert answer.prompt is not None
    for i, entry in enumerate(answer.prompt.logprobs):
        assert entry.logprob == pytest.approx(float(logits[i, PROMPT[i + 1]]), abs=TOLERANCE)
    assert answer.tokens == []
    assert answer.usage.completion_tokens == 0
    await mesh.settled()


def loglikelihoods(answer: Any, contexts: list[int]) -> list[tuple[float, bool]]:
    """(sum of the continuation's log probabilities, whether greedy decoding gives it), as lm-eval-harness reads them
    from an answer that ends with one token more."""
    found = []
    for choice, context in zip(sorted(answer["choices"], key=lambda each: each["index"]), contexts, strict=True):
        told = choice["logprobs"]
        own, tops = told["token_logprobs"][context:-1], told["top_logprobs"][context:-1]
        found.append((sum(own), all(one == max(top.values()) for one, top in zip(own, tops, strict=True))))
    return found


@session
async def test_as_lm_eval_harness_scores_continuations(meshes: Meshes, checkpoint: Any) -> None:
    """Several contexts with a greedy continuation and another one; the second round finds all prompts in the cache."""
    mesh, path = await meshes.get(), checkpoint("llama")
    contexts = [PROMPT[i : i + 40] for i in (0, 3, 9)]
    pairs: list[tuple[list[int], list[int]]] = []
    for context in contexts:
        best = oracle.generate(path, context, 4)
        pairs += [(context, best), (context, [*best[:-1], 77])]
    body = {
        "model": MODEL,
        "prompt": [context + rest for context, rest in pairs],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    async with client(mesh) as http:
        for _ in range(2):
            answer = (await http.post("/v1/completions", json=body)).json()
            found = loglikelihoods(answer, [len(context) for context, _ in pairs])
            for (context, rest), (total, greedy) in zip(pairs, found, strict=True):
                logits = expected(path, context + rest)
                rows = logits[len(context) - 1 : -1]
                assert total == pytest.approx(float(rows.gather(1, torch.tensor(rest)[:, None]).sum()), abs=1e-3)
                assert greedy == (rows.argmax(dim=-1).tolist() == rest)
        assert [greedy for _, greedy in found] == [True, False] * 3
    await mesh.settled()


@session
async def test_the_openai_package_with_echo(meshes: Meshes, checkpoint: Any) -> None:
    mesh, tokenizer = await meshes.get(), Tokenizer(checkpoint("llama"))
    text = "the quick brown fox"
    url = f"http://{mesh.gateway.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_SECONDS) as made:
        answer = await made.completions.create(model=MODEL, prompt=text, max_tokens=0, echo=True, logprobs=2)
        (choice,) = answer.choices
        assert choice.text == text
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens) == text
        ids = tokenizer.encode(text)
        logits = expected(checkpoint("llama"), ids)
        told = choice.logprobs.token_logprobs or []
        assert told[1:] == pytest.approx([float(logits[i, ids[i + 1]]) for i in range(len(ids) - 1)], abs=TOLERANCE)
        response = await made.responses.create(model=MODEL, input=text, temperature=0, max_output_tokens=5)
        chat = await made.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], temperature=0, max_completion_tokens=5
        )
        assert response.output_text == chat.choices[0].message.content
        assert response.usage is not None
        assert chat.usage is not None
        assert response.usage.input_tokens == chat.usage.prompt_tokens


@session
async def test_going_on_with_the_last_message(meshes: Meshes, checkpoint: Any) -> None:
    """The answer to an open-ended chat is what follows its text."""
    mesh, path = await meshes.get(), checkpoint("llama")
    tokenizer = Tokenizer(path)
    chat = generation_pb2.Chat(continue_final_message=True)
    chat.messages.add(role="user").content.add(text="one two")
    chat.messages.add(role="assistant").content.add(text="three ")
    ids = tokenizer.encode("<|user|>one two<|assistant|>three ", add_special_tokens=False)
    sampling = types_pb2.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    request = generation_pb2.GenerateRequest(model=MODEL, chat=chat, sampling=sampling, echo=True)
    answer = await collect(mesh.stub.Generate(request, timeout=PATIENCE_SECONDS))
    assert answer.prompt is not None
    assert list(answer.prompt.token_ids) == ids
    assert answer.tokens == (await mesh.generate(ids, max_tokens=6, ignore_eos=True)).tokens
    told = await mesh.stub.Tokenize(generation_pb2.TokenizeRequest(model=MODEL, chat=chat))
    assert list(told.token_ids) == ids
    await mesh.settled()
