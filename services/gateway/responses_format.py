"""Our answers in the shapes of OpenAI's /v1/responses: a whole response, and the events of a stream. Plain dicts."""

import time
from collections.abc import Iterable, Iterator

from common.errors import EpdError
from common.models.tokenizer import Tokenizer
from common.rpc.errors import from_exception
from epd.v1 import generation_pb2, types_pb2
from services.gateway.openai_format import Json, token_json
from services.gateway.responses_schema import ResponsesBody

PREFIX = "resp"
_ECHOED = ("instructions", "max_output_tokens", "temperature", "top_p", "user", "safety_identifier", "prompt_cache_key")


class ResponseAnswer:
    """One response with its one message. `take` what the gateway answers, then `whole`; or pass it through `events`."""

    def __init__(self, body: ResponsesBody, request_id: str, model: str, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._logprobs = bool(body.include)
        self._item_id = f"msg_{request_id}"
        self._texts: list[str] = []
        self._entries: list[types_pb2.TokenLogprob] = []
        self._reason = types_pb2.FINISH_REASON_UNSPECIFIED
        self._usage: generation_pb2.Usage | None = None
        self._sequence = 0
        self._head: Json = {
            "id": f"{PREFIX}_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **{name: getattr(body, name) for name in _ECHOED},
            "metadata": body.metadata or {},
            "text": {"format": {"type": "text"}},
            "parallel_tool_calls": bool(body.parallel_tool_calls),
            "tool_choice": "none",
            "tools": [],
            "truncation": "disabled",
            "store": False,
            "background": False,
            "previous_response_id": None,
        }

    def take(self, response: generation_pb2.GenerateResponse) -> tuple[str, list[types_pb2.TokenLogprob]]:
        """Notes what has come; returns the new text and its log probabilities."""
        if response.HasField("usage"):
            self._usage = response.usage
        text, entries = "", []
        for choice in response.choices:
            text += choice.text
            entries += choice.logprobs
            self._reason = choice.finish_reason or self._reason
        self._texts.append(text)
        self._entries += entries
        return text, entries

    def whole(self) -> Json:
        return self._response("incomplete" if self._cut else "completed", [self._item(self._status)])

    @property
    def _cut(self) -> bool:
        return self._reason == types_pb2.FINISH_REASON_LENGTH

    @property
    def _status(self) -> str:
        return "incomplete" if self._cut else "completed"

    def _response(self, status: str, output: list[Json], error: Json | None = None) -> Json:
        return {
            **self._head,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": self._usage_json(),
        }

    def _usage_json(self) -> Json | None:
        usage = self._usage
        if usage is None:
            return None
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _item(self, status: str, content: list[Json] | None = None) -> Json:
        content = [self._part()] if content is None else content
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self) -> Json:
        logprobs = self._told(self._entries)
        return {"type": "output_text", "text": "".join(self._texts), "annotations": [], "logprobs": logprobs}

    def _told(self, entries: Iterable[types_pb2.TokenLogprob]) -> list[Json]:
        if not self._logprobs:
            return []
        tokenizer = self._tokenizer
        return [
            token_json(tokenizer, entry) | {"top_logprobs": [token_json(tokenizer, top) for top in entry.top]}
            for entry in entries
        ]

    # --- a stream's events ------------------------------------------------------------------------------------------

    def opening(self) -> Iterator[Json]:
        """Before any text."""
        yield self._event("response.created", response=self._response("in_progress", []))
        yield self._event("response.in_progress", response=self._response("in_progress", []))
        yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
        empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._of_part("response.content_part.added", part=empty)

    def delta(self, response: generation_pb2.GenerateResponse) -> Iterator[Json]:
        text, entries = self.take(response)
        if text or (self._logprobs and entries):
            yield self._of_part("response.output_text.delta", delta=text, logprobs=self._told(entries))

    def closing(self) -> Iterator[Json]:
        """After all text."""
        part = self._part()
        yield self._of_part("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
        yield self._of_part("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=0, item=self._item(self._status))
        yield self._event(f"response.{self._status}", response=self.whole())

    def failure(self, error: Exception) -> Json:
        """The status is long sent: an event tells what has ended the stream."""
        found = from_exception(error) or EpdError("internal error; see the log of the gateway")
        told = {"code": "rate_limit_exceeded" if found.http == 429 else "server_error", "message": found.message}
        return self._event("response.failed", response=self._response("failed", [], told))

    def _of_part(self, kind: str, **fields: object) -> Json:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: object) -> Json:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}
