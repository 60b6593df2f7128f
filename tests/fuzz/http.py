"""The gateway's HTTP: bodies wrong in form and content, odd headers and paths, clients that break off."""

import asyncio
import contextlib
import copy
import json
from random import Random
from typing import Any

import httpx

from tests.fuzz.messages import damaged
from tests.fuzz.oracle import Fault, check_words, http_statuses
from tests.fuzz.surface import Surface
from tests.fuzz.world import World
from tests.mesh import MODEL
from tests.unit.media.files import data_uri, encoded

SECONDS = 30.0  # a bound for broken code
_STATUSES = http_statuses()
_ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        "",
        "é🙂\u0000",
        "x" * 20_000,
        0,
        -1,
        1,
        17,
        0.5,
        -0.0,
        1e300,
        2**31,
        2**63,
        2**64,
        10**40,
        [],
        {},
        [[]],
    ),
    *(
        {"": 0},
        {"1": 1e300},
        {"-1": 0},
        [None],
        ["a"] * 1000,
        [2**32],
        {"type": "text"},
        {"type": "image_url", "image_url": {}},
    ),
)
_TOKENS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "-",
    "0x1",
    "01",
    "'a'",
    '"\\ud800"',
    '"\\u0000"',
    "[" * 20_000,
    "{",
)
_PATHS = (
    *("/v1/models", "/v1/models/x", f"/v1/models/{MODEL}", "/v1/models/%00", "/v1/models/%ff%fe", "/health", "/live"),
    *("/ready", "/metrics", "/openapi.json", "/debug/trace/x", "/debug/trace/" + "0" * 32, "/debug/trace/%0a", "/docs"),
    *(
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/tokenize",
        "/detokenize",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/../health",
        "//",
        "/v1/completions/",
        "/" + "a" * 5000,
    ),
)
_HEADERS = (
    *(("x-request-id", value) for value in (b"", "é".encode(), b"\x7f", b"a" * 257, b"a" * 5000, b"same")),
    *(("x-epd-tenant", value) for value in (b"a", b"a" * 65, b"\x80\xff")),
    *(
        ("content-type", value)
        for value in (b"", b"text/plain", b"application/xml", b"multipart/form-data; boundary=x")
    ),
    *(
        ("traceparent", value)
        for value in (b"00-zz-1-1", b"00-" + b"1" * 32 + b"-" + b"1" * 16 + b"-01", b"\xff" * 100)
    ),
    *(("authorization", value) for value in (b"Bearer", b"Bearer " + b"k" * 9000, b"Basic YTpi", b"Bearer \xff")),
    ("content-encoding", b"gzip"),
    ("expect", b"100-continue"),
    ("x-epd-timing", b"1"),
)


def valid(rng: Random) -> tuple[str, dict[str, Any]]:
    """A path and a good body."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": rng.choice((1, 2, 4)), "temperature": rng.choice((0, 0.8))}
    if rng.random() < 0.3:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if rng.random() < 0.3:
        body |= {"n": 2, "stop": ["~", "@"], "seed": 5, "logit_bias": {"7": 1}, "top_p": 0.9, "presence_penalty": 0.1}
    other = rng.random()
    if other < 0.1:
        prompts: list[dict[str, Any]] = [{"prompt": "the quick"}, {"messages": [{"role": "user", "content": "hi"}]}]
        return "/tokenize", rng.choice(prompts) | {"return_token_strs": True}
    if other < 0.15:
        return "/detokenize", {"tokens": [30, 31, 32]}
    if other < 0.18:
        return "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "of/x", "load_inplace": True}
    if other < 0.2:
        return "/v1/unload_lora_adapter", {"lora_name": "x"}
    if other < 0.33:
        text = rng.choice(("hi", [{"role": "user", "content": [{"type": "input_text", "text": "see"}]}]))
        return "/v1/responses", {"input": text, "max_output_tokens": 2, "stream": body.get("stream"), "metadata": {}}
    if rng.random() < 0.5:
        prompt = rng.choice(("the quick", ["a", "b"], [30, 31, 32], [[30, 31], [32]]))
        told = rng.choice(({}, {"echo": True, "logprobs": 1, "max_tokens": 0}, {"prompt_logprobs": 1, "stream": None}))
        body |= {"prompt": prompt, "logprobs": rng.choice((None, 2))} | told
        return "/v1/completions", body if body.get("stream") else body | {"stream_options": None}
    parts: Any = "hello"
    if rng.random() < 0.4:
        parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": data_uri(encoded())}}]
    messages = [{"role": "user", "content": parts}]
    return "/v1/chat/completions", body | {"messages": messages, "logprobs": True, "top_logprobs": 1}


def _odd(rng: Random) -> Any:
    return copy.deepcopy(rng.choice(_ODD))


def _places(value: Any) -> list[Any]:
    """Every list and table inside."""
    found = [value] if isinstance(value, dict | list) and value else []
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        found += _places(inner)
    return found


def mutated(rng: Random, body: dict[str, Any]) -> bytes:
    """A body with a few values, names or characters wrong."""
    body = json.loads(json.dumps(body))
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        place = rng.choice(_places(body) or [body])
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place))) if place else "extra"
        match rng.randrange(5):
            case 0 if isinstance(place, dict):
                place.pop(key, None)
            case 1 if isinstance(place, dict):
                place[rng.choice(("extra", "", "e\u0301" * 100, "max_tokens", "x" * 3000))] = _odd(rng)
            case 2 if isinstance(place, list):
                place *= rng.choice((0, 2, 100))
            case _:
                place[key] = _odd(rng)
    text = json.dumps(body)
    if rng.random() < 0.15:
        at = rng.choice([i for i, character in enumerate(text) if character in ":,"] or [0]) + 1
        text = text[:at] + rng.choice(_TOKENS) + text[rng.choice((at, at + 2)) :]
    if rng.random() < 0.05:  # names twice
        text = text.replace("{", '{"max_tokens": 1, "max_tokens": "x", ', 1)
    data = text.encode(errors="replace")
    return damaged(rng, data) if rng.random() < 0.1 else data


class Http(Surface):
    name = "HTTP"

    def __init__(self, world: World) -> None:
        self._world = world
        self._address = world.mesh.gateway.http_address
        limits = httpx.Limits(max_connections=64)
        self._client = httpx.AsyncClient(base_url=f"http://{self._address}", timeout=SECONDS, limits=limits)

    async def one(self, rng: Random) -> str:
        kind = rng.random()
        if kind < 0.08:
            return await self._raw(rng)
        headers = [(name.encode(), value) for name, value in rng.choices(_HEADERS, k=rng.choice((0, 0, 1, 2)))]
        if kind < 0.2:
            method = rng.choice(("GET", "GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW"))
            request = self._client.build_request(method, rng.choice(_PATHS), headers=headers)
        else:
            path, body = valid(rng)
            headers.append((b"content-type", b"application/json"))
            request = self._client.build_request("POST", path, content=mutated(rng, body), headers=headers)
        leave = rng.random() < 0.1
        try:
            response = await self._client.send(request, stream=True)
            try:
                if leave:  # in mid-stream
                    async for _ in response.aiter_raw():
                        return "left"
                    return "left"
                await response.aread()
            finally:
                await response.aclose()
        except httpx.RemoteProtocolError as error:
            raise Fault(f"the connection was dropped: {error}") from error
        return self._check(request.method, response)

    def _check(self, method: str, response: httpx.Response) -> str:
        kind = response.headers.get("content-type", "")
        if response.status_code not in _STATUSES:
            # An "Invalid HTTP request" is the server's own, and plain text.
            raise Fault(f"HTTP {response.status_code}: {response.text[:300]!r}")
        if response.status_code != 200 and method != "HEAD":
            found = response.json()
            if "status" not in found:  # of /ready and /health
                self._check_error(found)
        elif kind.startswith("text/event-stream"):
            for line in response.text.splitlines():
                if line.startswith("data: {"):
                    found = json.loads(line.removeprefix("data: "))
                    if "error" in found:
                        self._check_error(found)
        return str(response.status_code)

    def _check_error(self, body: Any) -> None:
        error = body["error"]
        if set(error) != {"message", "type", "param", "code"} or not error["message"]:
            raise Fault(f"an error's body: {body}")
        if error["code"] == "internal":
            raise Fault(f"internal error: {error}")
        check_words(error["message"])
        check_words(error["param"] or "")

    async def _raw(self, rng: Random) -> str:
        """Bytes on the socket: no HTTP at all, wrong lengths, bodies and streams broken off."""
        host, _, port = self._address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        path, body = valid(rng)
        data = json.dumps(body | ({"stream": True} if rng.random() < 0.5 else {})).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode()
        match rng.randrange(6):
            case 0:
                sent = rng.randbytes(rng.choice((1, 10, 1000)))
            case 1:
                sent = head + b"content-length: 999999\r\n\r\n" + data
            case 2:
                sent = head + b"transfer-encoding: chunked\r\n\r\nzz\r\n" + data
            case 3:
                sent = head + b"content-length: %d\r\n\r\n" % len(data) + data
            case 4:
                sent = head + rng.choice(
                    (b"content-length: -1\r\n\r\n", b"content-length: 9" + b"9" * 30 + b"\r\n\r\n", b"a" * 70_000)
                )
            case _:
                sent = head[: rng.randrange(len(head))]
        try:
            with contextlib.suppress(ConnectionError):
                writer.write(sent)
                await writer.drain()
                if rng.random() < 0.5:
                    async with asyncio.timeout(rng.choice((0.01, 0.3))):
                        check_words((await reader.read(2000)).decode(errors="replace"))
        except TimeoutError:
            pass
        finally:
            writer.close()
        return "broken off"

    async def alive(self) -> None:
        await self._world.alive()
        response = await self._client.get("/ready")
        if response.status_code != 200:
            raise Fault(f"not ready: {response.text}")

    async def close(self) -> None:
        await self._client.aclose()
