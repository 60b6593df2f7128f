"""The HTTP edge as the `openai` package sees it, down to real engines."""

import asyncio
import json
import uuid
from typing import Any

import grpc
import httpx
import openai
import pytest
import pytest_asyncio

from common.engine.settings import TimedModel
from common.metrics import Metrics
from common.models.tokenizer import Tokenizer
from tests.e2e.conftest import Meshes
from tests.mesh import MODEL, PATIENCE_SECONDS, LocalMesh, collect, request

session = pytest.mark.asyncio(loop_scope="session")

MESSAGES: Any = [{"role": "system", "content": "the mesh"}, {"role": "user", "content": "one two three"}]
FLAT = {"logit_width": 0.01}  # a model that prefers no token: what comes is what logit_bias says
IDS = [3]  # a prompt that shares no token with what is spelled


@pytest_asyncio.fixture(loop_scope="session")
async def mesh(meshes: Meshes) -> LocalMesh:
    return await meshes.get(config=FLAT)


@pytest_asyncio.fixture(loop_scope="session")
async def client(mesh: LocalMesh) -> Any:
    url = f"http://{mesh.gateway.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_SECONDS) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def http(mesh: LocalMesh) -> Any:
    url = f"http://{mesh.gateway.http_address}"
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as made:
        yield made


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Any) -> Tokenizer:
    return Tokenizer(checkpoint("llama", **FLAT))


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text as tokens of one byte each; no byte twice."""
    of_byte = {
        data: i for i, data in enumerate(tokenizer.byte_table) if len(data) == 1 and i not in tokenizer.special_ids
    }
    ids = [of_byte[bytes([byte])] for byte in text.encode()]
    assert len(set(ids)) == len(ids)
    return ids


def spell(ids: list[int], **options: Any) -> dict[str, Any]:
    """Parameters that make a flat model answer these ids in order, and only them: each is best until it was said."""
    bias = {str(token): 100 - i for i, token in enumerate(ids)}
    extra = {"repetition_penalty": 10.0, "ignore_eos": True, **options.pop("extra", {})}
    return {"logit_bias": bias, "temperature": 0, "max_tokens": len(ids), "extra_body": extra, **options}


async def streamed(made: Any) -> tuple[str, list[Any]]:
    """(text of the first choice, chunks) of a stream of either kind, whose chunks have one choice each."""
    chunks = [chunk async for chunk in made]
    ended: list[int] = []
    for chunk in chunks[:-1] if chunks[-1].usage else chunks:
        (choice,) = chunk.choices
        assert choice.index not in ended
        if choice.finish_reason is not None:
            ended.append(choice.index)
            assert not getattr(choice, "delta", None) or not choice.delta.model_dump(exclude_none=True)
    assert sorted(ended) == sorted({choice.index for chunk in chunks for choice in chunk.choices})
    text = ""
    for chunk in chunks:
        for choice in chunk.choices:
            text += (choice.delta.content or "") if hasattr(choice, "delta") else choice.text
    return text, chunks


@session
@pytest.mark.parametrize("text", ["한글🙂é", "🙂한é", "a👩b", "語!"])
async def test_c01_characters_of_several_tokens(text: str, client: Any, tokenizer: Tokenizer) -> None:
    """One byte a token: every piece is whole characters, and the pieces are the text."""
    options = spell(byte_ids(tokenizer, text))
    whole = await client.completions.create(model=MODEL, prompt=IDS, **options)
    assert whole.choices[0].text == text
    said, chunks = await streamed(await client.completions.create(model=MODEL, prompt=IDS, stream=True, **options))
    assert said == text
    pieces = [choice.text for chunk in chunks for choice in chunk.choices if choice.text]
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert len(pieces) > 1  # as they are completed, not all at the end
    chat = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": ""}], **options)
    assert chat.choices[0].message.content == text


@session
async def test_c01_a_cut_character_is_flushed_at_the_end(client: Any, tokenizer: Tokenizer) -> None:
    options = spell(byte_ids(tokenizer, "a한")[:-1])
    whole = await client.completions.create(model=MODEL, prompt=IDS, **options)
    said, _ = await streamed(await client.completions.create(model=MODEL, prompt=IDS, stream=True, **options))
    assert whole.choices[0].text == said == "a\N{REPLACEMENT CHARACTER}"


@session
@pytest.mark.parametrize(
    ("said", "stop", "shown", "reason"),
    [
        ("xyENDz", "END", "xy", "stop"),
        ("xyENDz", ["END"], "xy", "stop"),
        ("xyENz", "END", "xyENz", "length"),  # held back, then released
        ("xyEN", "END", "xyEN", "length"),  # released by the end
        ("xyENDz", ["zzz", "y", "ND", "END", "D"], "x", "stop"),  # five; the earliest counts
        ("xyENDz", ["ND", "END"], "xy", "stop"),
        ("한글", "글", "한", "stop"),
    ],
)
async def test_c02_c03_stop_strings_split_over_tokens(
    said: str, stop: str | list[str], shown: str, reason: str, client: Any, tokenizer: Tokenizer
) -> None:
    options = spell(byte_ids(tokenizer, said), stop=stop)
    whole = await client.completions.create(model=MODEL, prompt=IDS, **options)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (shown, reason)
    text, chunks = await streamed(await client.completions.create(model=MODEL, prompt=IDS, stream=True, **options))
    assert text == shown
    assert chunks[-1].choices[0].finish_reason == reason
    # Never a moment in which the client saw more.
    seen = ""
    for chunk in chunks:
        seen += chunk.choices[0].text
        assert shown.startswith(seen)


@session
async def test_chat_streamed_equals_whole_equals_grpc(client: Any, meshes: Meshes) -> None:
    mesh = await meshes.get()
    client = client.with_options(base_url=f"http://{mesh.gateway.http_address}/v1")
    options: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "temperature": 0.8, "seed": 5, "n": 2}
    whole = await client.chat.completions.create(**options)
    texts = [choice.message.content for choice in whole.choices]
    _, chunks = await streamed(await client.chat.completions.create(stream=True, **options))
    parts = {0: "", 1: ""}
    roles: list[int] = []
    for chunk in chunks:
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
            roles += [choice.index] if choice.delta.role == "assistant" else []
    assert [parts[0], parts[1]] == texts
    assert sorted(roles) == [0, 1]
    assert len({chunk.id for chunk in chunks}) == 1

    asked = request([], n=2, max_tokens=16, temperature=0.8, seed=5)
    asked.chat.SetInParent()
    for message in MESSAGES:
        asked.chat.messages.add(role=message["role"]).content.add(text=message["content"])
    answer = await collect(mesh.stub.Generate(asked))
    assert [answer.choices[i].text for i in (0, 1)] == texts
    assert whole.usage.prompt_tokens == answer.usage.prompt_tokens
    assert whole.usage.completion_tokens == answer.usage.completion_tokens


@session
async def test_completion_of_several_prompts(client: Any, tokenizer: Tokenizer) -> None:
    options = spell(byte_ids(tokenizer, "ok!"), n=2)
    for prompt, count in ((["ab", "cd", "ef"], 3), ([[7, 8], [9]], 2)):
        whole = await client.completions.create(model=MODEL, prompt=prompt, **options)
        assert [choice.index for choice in whole.choices] == list(range(2 * count))
        assert {choice.text for choice in whole.choices} == {"ok!"}
        assert whole.usage.completion_tokens == 3 * 2 * count


@session
async def test_c07_usage_as_openai_gives_it(client: Any, tokenizer: Tokenizer) -> None:
    options: Any = {"model": MODEL, "messages": MESSAGES, **spell(byte_ids(tokenizer, "abc"))}
    create = client.chat.completions.create
    whole = await create(**options)
    assert whole.usage.completion_tokens == 3
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 3
    for stream_options in (openai.NOT_GIVEN, {}, {"include_usage": False}):
        _, chunks = await streamed(await create(stream=True, stream_options=stream_options, **options))
        assert not any(chunk.usage for chunk in chunks)
        assert all(chunk.choices for chunk in chunks)
    _, chunks = await streamed(await create(stream=True, stream_options={"include_usage": True}, **options))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    last = chunks[-1].usage
    counts = (last.prompt_tokens, last.completion_tokens)
    assert counts == (whole.usage.prompt_tokens, 3)


@session
async def test_c13_cached_tokens_in_usage(client: Any) -> None:
    prompt = [30 + i % 200 for i in range(50)]
    options: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
    counts = [(await client.completions.create(**options)).usage.prompt_tokens_details.cached_tokens for _ in range(2)]
    assert counts == [0, 48]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"extra_body": {"min_p": 1.5}}, "min_p"),
    ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
    ({"extra_body": {"min_tokens": 9}, "max_tokens": 4}, "min_tokens"),
    ({"extra_body": {"wibble": 1}}, "wibble"),
    ({"messages": []}, "messages"),
]


@session
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("options", "field"), BAD, ids=[str(bad) for bad, _ in BAD])
async def test_c14_bad_parameters_are_named(options: dict[str, Any], field: str, stream: bool, client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "stream": stream, **options})
    assert refused.value.param == field
    assert field in refused.value.message


@session
async def test_errors_have_openais_classes(client: Any, http: httpx.AsyncClient) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="no-such", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model=MODEL, prompt=[5] * 600)
    assert long.value.code == "context_too_long"
    assert "600" in long.value.message
    assert "512" in long.value.message
    assert (
        await http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    ).status_code == 400
    assert (await http.get("/v1/nothing")).status_code == 404


@session
async def test_models_are_listed(client: Any, http: httpx.AsyncClient) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] == 512
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("no-such")


@session
async def test_request_ids(client: Any, http: httpx.AsyncClient) -> None:
    label = f"mine-{uuid.uuid4()}"
    body = {"model": MODEL, "prompt": "ab", "max_tokens": 2, "ignore_eos": True}
    named = await http.post("/v1/completions", json=body, headers={"x-request-id": label})
    assert named.headers["x-request-id"] == label
    assert label in named.json()["id"]
    drawn = [(await http.post("/v1/completions", json=body)).headers["x-request-id"] for _ in range(2)]
    assert len(set(drawn)) == 2
    refused = await http.post("/v1/completions", json=body | {"n": 0}, headers={"x-request-id": label})
    assert refused.status_code == 400
    # The trace of a request is found by the id that its answer came with.
    shown = (await http.get(f"/debug/trace/{label}")).json()["spans"]
    assert {"gateway.generate", "prefill.run", "decode.run"} <= {span["name"] for span in shown}


@session
async def test_health(http: httpx.AsyncClient) -> None:
    for path in ("/health", "/live", "/ready"):
        assert (await http.get(path)).status_code == 200, path


@session
async def test_not_ready_without_workers(meshes: Meshes) -> None:
    async with meshes.make() as mesh, httpx.AsyncClient(base_url=f"http://{mesh.gateway.http_address}") as http:
        await mesh.workers[1].stop()
        mesh.workers.pop()
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/live")).status_code == 200
        assert (await http.get("/v1/models")).json()["data"] == []


@session
async def test_metrics_after_a_request(client: Any, http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    async def values() -> dict[str, float]:
        lines = (await http.get("/metrics")).text.splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    before = await values()
    await client.completions.create(model=MODEL, prompt=IDS, **spell(byte_ids(tokenizer, "abcd")))
    after = await values()
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()}
    labels = f'{{model="{MODEL}",tenant="default"}}'
    assert gained[f"epd_output_tokens_total{labels}"] == 4
    assert gained[f"epd_input_tokens_total{labels}"] == 1
    met = gained.get(f"epd_slo_met_total{labels}", 0.0)
    missed = sum(value for name, value in gained.items() if name.startswith("epd_slo_missed_total{"))
    assert met + missed == 1  # attainment is met / (met + missed)
    assert gained.get(f"epd_goodput_tokens_total{labels}", 0.0) == 4 * met
    assert gained[f"gen_ai_server_time_to_first_token_seconds_count{labels}"] == 1
    assert gained[f"gen_ai_server_time_per_output_token_seconds_count{labels}"] == 1
    assert gained[f"gen_ai_server_request_duration_seconds_count{labels}"] == 1
    assert gained[f'epd_route_decisions_total{{decision="disaggregated",model="{MODEL}"}}'] == 1
    assert after[f'epd_workers{{model="{MODEL}",role="prefill"}}'] == 1
    assert after[f'epd_requests_in_flight{{model="{MODEL}"}}'] == 0
    text = (await http.get("/metrics")).text
    for metric in vars(Metrics()).values():
        if name := getattr(metric, "_name", ""):
            assert f"# TYPE {name}" in text


@session
async def test_c11_an_answer_that_breaks_off_has_no_good_end(meshes: Meshes) -> None:
    """The only decode worker goes in mid-stream: one event and no [DONE]; a status; an error, not a half."""
    slow = TimedModel(base_seconds=0.03, num_layers=3, vocab_size=512, max_context=4096)
    options: dict[str, Any] = {
        "executor": "timed",
        "timed": slow,
        "gateway": {"route_wait_seconds": 0.2, "recovery_seconds": 0.2},
    }
    async with (
        meshes.make(**options) as mesh,
        httpx.AsyncClient(base_url=f"http://{mesh.gateway.http_address}", timeout=PATIENCE_SECONDS) as http,
    ):
        body = {"model": MODEL, "prompt": IDS, "max_tokens": 1000, "ignore_eos": True}
        calls = [
            asyncio.create_task(http.post("/v1/completions", json=body | {"stream": True})),
            asyncio.create_task(http.post("/v1/completions", json=body)),
            asyncio.create_task(mesh.generate(IDS, max_tokens=1000, ignore_eos=True)),
        ]
        decode = mesh.workers.pop()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while decode.context.running_requests < 3 or decode.engine.load.running < 3:
                await asyncio.sleep(0.01)
        await decode.stop()
        stream, whole, answer = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(stream, httpx.Response)
        assert stream.status_code == 200
        *tokens, last = [json.loads(line.removeprefix("data: ")) for line in stream.text.split("\n\n") if line]
        assert tokens
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in tokens)
        assert last["error"]["type"] == "server_error"
        assert last["error"]["code"] == "no_workers"
        assert isinstance(whole, httpx.Response)
        assert whole.status_code == 503
        assert int(whole.headers["retry-after"]) >= 1
        assert isinstance(answer, grpc.aio.AioRpcError)
        assert answer.code() is grpc.StatusCode.UNAVAILABLE
        await mesh.settled()
