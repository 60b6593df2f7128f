"""Any server with OpenAI's HTTP API as a target: this mesh, vLLM, SGLang, ... Nothing of ours is needed there."""

import asyncio
import base64
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any, Self

import httpcore

from common.errors import DeadlineExceeded, EpdError, InvalidArgument, ModelNotFound, Unavailable
from services.bench.clock import Clock
from services.bench.outcome import Outcome
from services.bench.target import QUESTION, picture
from services.bench.vocabulary import SAMPLE, Vocabulary
from services.bench.workload import Ask

_SETUP_SECONDS = 30.0
_CONTENT = ("content", "reasoning_content", "reasoning", "tool_calls")  # what makes a chat's delta new tokens


class Refused(EpdError):
    """The server's own error; its `reason` is told as it is."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class HttpTarget:
    """Use `find`, and `close` when done."""

    model, context = "", 0

    def __init__(
        self, url: str, *, key: str, timeout_seconds: float, ignore_eos: bool, chat: bool, ca_file: str = ""
    ) -> None:
        """url: with or without its /v1. chat: text goes to chat completions, too."""
        self._base = url.rstrip("/").removesuffix("/v1")
        if not self._base.startswith(("http://", "https://")):
            raise InvalidArgument(f"--http takes a URL such as http://127.0.0.1:8000, not {url!r}", field="http")
        self._timeout, self._ignore_eos, self._chat = timeout_seconds, ignore_eos, chat
        self._headers = [(b"content-type", b"application/json"), (b"accept", b"text/event-stream, application/json")]
        if key:
            self._headers.append((b"authorization", f"Bearer {key}".encode()))
        self._vocabulary = Vocabulary()
        context = ssl.create_default_context(cafile=ca_file) if ca_file else None
        self._pool = httpcore.AsyncConnectionPool(ssl_context=context, max_connections=None)

    async def find(self, model: str, *, images: bool) -> Self:
        """Choose the model: of this name, else the first (that says it takes images, if any does). The context and the
        tokenizer are used where the server tells of them, as vLLM and this mesh do."""
        listed = (await self._json("GET", "/v1/models"))["data"]
        named = [each for each in listed if each["id"] == model] if model else listed
        named = sorted(named, key=lambda each: images and not each.get("images"))
        if not named:
            raise ModelNotFound(f"no model {model!r} there; there are {', '.join(each['id'] for each in listed)}")
        self.model = named[0]["id"]
        self.context = int(named[0].get("max_model_len") or 0)
        asked = {"model": self.model, "prompt": SAMPLE, "add_special_tokens": False}
        with contextlib.suppress(Refused, LookupError, TypeError):
            self._vocabulary = Vocabulary((await self._json("POST", "/tokenize", asked))["tokens"])
        return self

    async def close(self) -> None:
        await self._pool.aclose()

    def request(self, ask: Ask) -> tuple[str, bytes]:
        """(path, body)."""
        words = ask.words()
        body: dict[str, Any] = {"model": self.model, "temperature": 0, "max_tokens": ask.output_tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self._ignore_eos:
            body["ignore_eos"] = True
        if ask.image:
            url = f"data:image/png;base64,{base64.b64encode(picture(ask)).decode()}"
            text = f"{QUESTION} {self._vocabulary.text(words)}"
            parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
            body["messages"] = [{"role": "user", "content": parts}]
        elif self._chat:
            body["messages"] = [{"role": "user", "content": self._vocabulary.text(words)}]
        else:
            body["prompt"] = self._vocabulary.ids(words) or self._vocabulary.text(words)
        return "/v1/chat/completions" if "messages" in body else "/v1/completions", json.dumps(body).encode()

    async def send(self, request: tuple[str, bytes], outcome: Outcome, clock: Clock) -> None:
        path, body = request
        ended = False
        try:
            async with asyncio.timeout(self._timeout), self._stream("POST", path, body) as response:
                async for data in _events(response):
                    now = clock()
                    if data == b"[DONE]":
                        ended = True
                        continue
                    self._take(json.loads(data), outcome, now)
        except TimeoutError:
            raise DeadlineExceeded(f"no whole answer within {self._timeout:g} s") from None
        if not ended:
            raise Unavailable("the stream broke off")
        outcome.output_tokens = outcome.output_tokens or len(outcome.arrivals)  # a server that tells no usage

    def _take(self, chunk: dict[str, Any], outcome: Outcome, now: float) -> None:
        if "error" in chunk:
            raise _refused(200, chunk)
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if choice.get("text") or any(delta.get(name) for name in _CONTENT):
                outcome.arrivals.append(now)
                break
        if usage := chunk.get("usage"):
            outcome.prompt_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    @contextlib.asynccontextmanager
    async def _stream(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[httpcore.Response]:
        """The response, if it is a good one."""
        headers = [*self._headers, (b"content-length", str(len(body)).encode())]
        try:
            async with self._pool.stream(method, self._base + path, headers=headers, content=body) as response:
                if response.status != 200:
                    raise _refused(response.status, _parsed(await response.aread()))
                yield response
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            said = str(error) or type(error).__name__
            raise Unavailable(f"{self._base} cannot be reached, or broke off: {said}") from None

    async def _json(self, method: str, path: str, body: object = None) -> Any:
        sent = b"" if body is None else json.dumps(body).encode()
        try:
            async with asyncio.timeout(_SETUP_SECONDS), self._stream(method, path, sent) as response:
                return _parsed(await response.aread())
        except TimeoutError:
            raise DeadlineExceeded(f"{self._base} did not answer in {_SETUP_SECONDS:g} s") from None


async def _events(response: httpcore.Response) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    rest = b""
    async for piece in response.aiter_stream():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return {}


def _refused(status: int, body: Any) -> Refused:
    """By OpenAI's form of an error. The reason is its code, which here is ours, else its type, else the status."""
    error = body.get("error", body) if isinstance(body, dict) else {}
    error = error if isinstance(error, dict) else {"message": str(error)}
    code = error.get("code") if isinstance(error.get("code"), str) else None
    reason = code or error.get("type") or f"HTTP {status}"
    return Refused(str(error.get("message") or f"HTTP status {status}"), str(reason).upper())
