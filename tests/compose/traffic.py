"""Requests to a mesh in containers, and what came of them."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from common.models.catalog import DEFAULT_MODEL, DEFAULT_VISION_MODEL
from common.models.pictures import Question, heldout
from epd.v1 import generation_pb2
from tests.compose.project import Project, inside
from tests.mesh import Answer, MeshClient, collect
from tests.otlp import Received, edges

ANSWER_SECONDS = 300.0  # many containers start, and answer, on two cores
SPANS_SECONDS = 30.0
QUESTION = "What is the capital of France?"
_BEGUN = 3  # messages of a stream, and it is in the middle of its answer


class Client(MeshClient):
    """Of the gateway of a project. `connect` it first, with the address that is published."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self.http = f"http://{project.address('gateway', 8000)}"
        self._undisturbed: dict[tuple[str, int], list[int]] = {}

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with httpx.AsyncClient(timeout=ANSWER_SECONDS, trust_env=False) as client:
            answer = await client.post(self.http + path, json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def chat(self, question: str, max_tokens: int = 16) -> Answer:
        return await collect(self.stream(question, max_tokens))

    async def undisturbed(self, questions: Sequence[str], max_tokens: int) -> list[list[int]]:
        """The tokens of each one's answer when it is alone. They are asked for once."""
        for question in questions:
            if (question, max_tokens) not in self._undisturbed:
                answer = await self.chat(question, max_tokens)
                self._undisturbed[question, max_tokens] = answer.tokens
        return [self._undisturbed[question, max_tokens] for question in questions]

    def stream(self, question: str, max_tokens: int) -> Any:
        request = generation_pb2.GenerateRequest(model=DEFAULT_MODEL)
        request.chat.messages.add(role="user").content.add(text=question)
        request.sampling.temperature, request.sampling.max_tokens = 0, max_tokens
        return self.stub.Generate(request, timeout=ANSWER_SECONDS)

    async def see(self, png: bytes, question: Question) -> Answer:
        request = generation_pb2.GenerateRequest(model=DEFAULT_VISION_MODEL)
        message = request.chat.messages.add(role="user")
        message.content.add(image=generation_pb2.Image(data=png))
        message.content.add(text=question.text)
        request.sampling.temperature, request.sampling.max_tokens = 0, 8
        return await collect(self.stub.Generate(request, timeout=ANSWER_SECONDS))

    async def begin(self, questions: Sequence[str], max_tokens: int) -> list[asyncio.Task[Answer]]:
        """One request for each, all in the middle of their answers when this returns."""
        begun = [asyncio.Event() for _ in questions]
        tasks = [
            asyncio.create_task(collect(_telling(self.stream(question, max_tokens), event)))
            for question, event in zip(questions, begun, strict=True)
        ]
        async with asyncio.timeout(ANSWER_SECONDS):
            for event in begun:
                await event.wait()
        return tasks

    def spans(self) -> list[Received]:
        """All that the receiver was sent so far."""
        (receiver,) = self._project.containers("jaeger")
        return [Received(**json.loads(line)) for line in inside(receiver.id, "cat", "/tmp/spans").splitlines()]

    async def spans_of(self, name: str) -> list[Received]:
        """Spans with a name; waits for the first."""
        async with asyncio.timeout(SPANS_SECONDS):
            while True:
                named = [span for span in self.spans() if span.name == name]
                if named:
                    return named
                await asyncio.sleep(0.5)

    async def trace(self, trace_id: str, wanted: set[tuple[str, str]]) -> list[Received]:
        """The spans of a trace when they have the edges that are wanted: each service sends its own in its time."""
        missing = wanted
        try:
            async with asyncio.timeout(SPANS_SECONDS):
                while True:
                    spans = [span for span in self.spans() if span.trace_id == trace_id]
                    missing = wanted - edges(spans).keys()
                    if not missing:
                        return spans
                    await asyncio.sleep(0.5)
        except TimeoutError:
            raise AssertionError(f"missing in the trace: {sorted(missing)}") from None


async def _telling(stream: Any, begun: asyncio.Event) -> AsyncIterator[Any]:
    count = 0
    async for message in stream:
        count += 1
        if count == _BEGUN:
            begun.set()
        yield message
    begun.set()  # a short answer


def picture(number: int) -> tuple[bytes, Question]:
    """The same for the same number; one that was not asked about before is in no cache."""
    shown = heldout(number + 1, seed=7)[number]
    return shown.png(), next(question for question in shown.questions() if question.kind == "background")
