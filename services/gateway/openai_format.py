"""Our answers in OpenAI's shapes: whole ones, and chunks of a stream. Plain dicts, ready for JSON."""

import codecs
import time
from collections.abc import Iterable
from typing import Any

from common.errors import EpdError
from common.models.tokenizer import Tokenizer
from common.rpc import wire
from epd.v1 import generation_pb2, types_pb2
from services.gateway.tools.openai import Calls, deltas

_REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
_LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON has not
Json = dict[str, Any]


class ChatFormat:
    """/v1/chat/completions"""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._opened: set[int] = set()

    def delta(self, choice: generation_pb2.ChoiceDelta, index: int, *, logprobs: bool) -> list[Json]:
        """The choice as of each of its chunks: the first names the role, the last has the finish reason and no text."""
        delta: Json = {}
        if index not in self._opened:
            self._opened.add(index)
            delta = {"role": "assistant", "content": ""}
        if choice.text:
            delta["content"] = choice.text
        if choice.tool_calls:
            delta["tool_calls"] = deltas(choice.tool_calls)
        entry = self.logprobs(choice.logprobs, index) if logprobs and choice.logprobs else None
        found = [_piece(index, {"delta": delta}, entry, None)] if delta or entry else []
        if choice.finish_reason in _REASONS:
            found.append(_piece(index, {"delta": {}}, None, _REASONS[choice.finish_reason]))
        return found

    def whole(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        return _piece(index, {"message": {"role": "assistant", "content": text, "refusal": None}}, logprobs, reason)

    def opening(self, prompt: generation_pb2.Prompt, index: int) -> Json:
        return {}  # a chat is never echoed

    def logprobs(self, entries: Iterable[types_pb2.TokenLogprob], index: int) -> Json:
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _entry(self, entry: types_pb2.TokenLogprob) -> Json:
        tops = [token_json(self._tokenizer, top) for top in entry.top]
        return token_json(self._tokenizer, entry) | {"top_logprobs": tops}


class CompletionFormat:
    """/v1/completions"""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, tokenizer: Tokenizer, *, top: int | None = None) -> None:
        """top: alternatives of a prompt's tokens."""
        self._tokenizer = tokenizer
        self._top = top or 0
        self._decoders: dict[int, Any] = {}
        self._offsets: dict[int, int] = {}

    def delta(self, choice: generation_pb2.ChoiceDelta, index: int, *, logprobs: bool) -> list[Json]:
        """The choice as of its chunk, if any; the last has the finish reason, and perhaps text."""
        reason = _REASONS.get(choice.finish_reason)
        entry = self.logprobs(choice.logprobs, index) if logprobs and choice.logprobs else None
        return [_piece(index, {"text": choice.text}, entry, reason)] if choice.text or entry or reason else []

    def whole(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        return _piece(index, {"text": text}, logprobs, reason)

    def logprobs(self, entries: Iterable[types_pb2.TokenLogprob], index: int) -> Json:
        """text_offset counts characters of the choice's text that were complete before the token."""
        found: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            self._add(found, index, entry.token_id, _finite(entry.logprob), self._tops(entry, len(entry.top)))
        return found

    def opening(self, prompt: generation_pb2.Prompt, index: int) -> Json:
        """The prompt's tokens, before those of the choice. The first has no log probability: nothing is before it."""
        found: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        special = self._tokenizer.special_ids
        for token_id, entry in zip(prompt.token_ids, (None, *prompt.logprobs), strict=True):
            offset = self._offsets.get(index, 0)
            # A special token that the tokenizer has added, or that was cut out, is not in the text.
            hidden = token_id in special and not prompt.text.startswith(self._text(token_id), offset)
            told = (None, None) if entry is None else (_finite(entry.logprob), self._tops(entry, self._top))
            self._add(found, index, token_id, *told, hidden=hidden)
        return found

    def _add(
        self, found: Json, index: int, token_id: int, logprob: float | None, tops: Json | None, *, hidden: bool = False
    ) -> None:
        if index not in self._decoders:
            self._decoders[index] = codecs.getincrementaldecoder("utf-8")("replace")
            self._offsets[index] = 0
        data = self._tokenizer.token_bytes(token_id)
        found["tokens"].append(data.decode(errors="replace"))
        found["token_logprobs"].append(logprob)
        found["top_logprobs"].append(tops)
        found["text_offset"].append(self._offsets[index])
        self._offsets[index] += len(self._decoders[index].decode(b"" if hidden else data))

    def _tops(self, entry: types_pb2.TokenLogprob, count: int) -> Json | None:
        """The best ones by their text, and the token's own, as OpenAI has it. Of equal texts the likeliest counts."""
        tops: Json = {}
        for top in entry.top[:count]:
            tops.setdefault(self._text(top.token_id), _finite(top.logprob))
        if tops:
            tops.setdefault(self._text(entry.token_id), _finite(entry.logprob))
        return tops or None

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")


Format = ChatFormat | CompletionFormat


class PromptScores:
    """Log probabilities of a prompt's tokens in vLLM's shape: a list with a null for the first token, then tables by
    token id."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top

    def of(self, prompt: generation_pb2.Prompt) -> list[Json | None]:
        return [None, *(self._table(entry) for entry in prompt.logprobs)]

    def _table(self, entry: types_pb2.TokenLogprob) -> Json:
        found = {str(entry.token_id): self._told(entry.token_id, entry.logprob, entry.rank)}
        for rank, top in enumerate(entry.top[: self._top], 1):
            found.setdefault(str(top.token_id), self._told(top.token_id, top.logprob, rank))
        return found

    def _told(self, token_id: int, logprob: float, rank: int) -> Json:
        text = self._tokenizer.token_bytes(token_id).decode(errors="replace")
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}


class Answer:
    """The envelope of one HTTP request: its id, its choices (of one prompt or of several), its usage."""

    def __init__(
        self,
        form: Format,
        request_id: str,
        model: str,
        *,
        logprobs: bool,
        n: int = 1,
        echo: bool = False,
        scores: PromptScores | None = None,
    ) -> None:
        """n: choices of each prompt. echo: the prompt comes before each of them. scores: log probabilities of the
        prompt's tokens, apart from the text."""
        self._form = form
        self._logprobs = logprobs
        self._n, self._echo, self._scores = n, echo, scores
        self._prompts: dict[int, generation_pb2.Prompt] = {}  # by the index of their first choice
        self._head: Json = {"id": f"{form.prefix}-{request_id}", "created": int(time.time()), "model": model}
        self._texts: dict[int, list[str]] = {}
        self._entries: dict[int, list[types_pb2.TokenLogprob]] = {}
        self._reasons: dict[int, str] = {}
        self._calls: dict[int, Calls] = {}
        self.usage = generation_pb2.Usage()
        self.accounts: list[generation_pb2.Accounting] = []

    def chunks(self, response: generation_pb2.GenerateResponse, first_index: int) -> list[Json]:
        """A stream's chunks for this message, each of one choice, as OpenAI has it: clients read `choices[0]`."""
        self._count(response)
        found = []
        if self._echo and response.HasField("prompt"):
            for index in range(first_index, first_index + self._n):
                entries = self._form.opening(response.prompt, index) if self._logprobs else None
                found.append(self._chunk([_piece(index, {"text": response.prompt.text}, entries, None)]))
        return found + [
            self._chunk([piece])
            for choice in response.choices
            for piece in self._form.delta(choice, first_index + choice.index, logprobs=self._logprobs)
        ]

    def last_chunk(self, *, usage: bool, timing: bool) -> Json:
        """After the last choice: no choices."""
        return self._chunk([]) | self._tail(usage=usage, timing=timing)

    def add(self, response: generation_pb2.GenerateResponse, first_index: int) -> None:
        """Collects for `whole`."""
        self._count(response)
        if response.HasField("prompt"):
            self._prompts[first_index] = response.prompt
        for choice in response.choices:
            index = first_index + choice.index
            self._texts.setdefault(index, []).append(choice.text)
            self._entries.setdefault(index, []).extend(choice.logprobs)
            self._calls.setdefault(index, Calls()).add(choice.tool_calls)
            if choice.finish_reason in _REASONS:
                self._reasons[index] = _REASONS[choice.finish_reason]

    def whole(self, *, timing: bool) -> Json:
        choices = [self._choice(index, "".join(texts)) for index, texts in sorted(self._texts.items())]
        found = self._head | {"object": self._form.kind, "choices": choices}
        for choice in choices:
            if "message" in choice:
                self._calls[choice["index"]].put_into(choice["message"])
        if self._scores is not None and isinstance(self._form, ChatFormat):
            found["prompt_logprobs"] = self._scores.of(self._prompts[0])
        return found | self._tail(usage=True, timing=timing)

    def _choice(self, index: int, text: str) -> Json:
        form, prompt = self._form, self._prompts.get(index - index % self._n)
        logprobs: Json | None = None
        if self._logprobs:
            logprobs = form.opening(prompt, index) if self._echo and prompt is not None else {}
            for name, entries in form.logprobs(self._entries[index], index).items():
                logprobs[name] = logprobs.get(name, []) + entries if entries is not None else None
        if self._echo and prompt is not None:
            text = prompt.text + text
        found = form.whole(index, text, logprobs, self._reasons.get(index))
        if self._scores is not None and isinstance(form, CompletionFormat):
            found["prompt_logprobs"] = self._scores.of(prompt) if prompt is not None else None
        return found

    def _chunk(self, choices: list[Json]) -> Json:
        return self._head | {"object": self._form.chunk_kind, "choices": choices}

    def _count(self, response: generation_pb2.GenerateResponse) -> None:
        if response.HasField("usage"):
            self.usage.prompt_tokens += response.usage.prompt_tokens
            self.usage.completion_tokens += response.usage.completion_tokens
            self.usage.cached_tokens += response.usage.cached_tokens
            self.usage.image_tokens += response.usage.image_tokens
        if response.HasField("accounting"):
            self.accounts.append(response.accounting)

    def _tail(self, *, usage: bool, timing: bool) -> Json:
        found: Json = {}
        if usage:
            found["usage"] = {
                "prompt_tokens": self.usage.prompt_tokens,
                "completion_tokens": self.usage.completion_tokens,
                "total_tokens": self.usage.prompt_tokens + self.usage.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": self.usage.cached_tokens}
                | ({"image_tokens": self.usage.image_tokens} if self.usage.image_tokens else {}),
            }
        if timing:
            timings = [timing_json(account) for account in self.accounts]
            found["epd"] = timings[0] if len(timings) == 1 else timings
        return found


def token_json(tokenizer: Tokenizer, entry: types_pb2.TokenLogprob | types_pb2.TopLogprob) -> Json:
    data = tokenizer.token_bytes(entry.token_id)
    return {"token": data.decode(errors="replace"), "logprob": _finite(entry.logprob), "bytes": list(data)}


def timing_json(account: generation_pb2.Accounting) -> Json:
    """Accounting with durations in seconds."""
    return {
        "trace_id": account.trace_id,
        "ttft_seconds": account.ttft_seconds,
        "total_seconds": account.total_seconds,
        "tpot_seconds": account.tpot_seconds,
        "ttft_hops": [_hop(hop) for hop in account.ttft_hops],
        "total_hops": [_hop(hop) for hop in account.total_hops],
        "attempts": account.attempts,
        "slo_met": account.slo_met,
        "slo_blame": account.slo_blame or None,
        "prefill_worker": account.prefill_worker or None,
        "decode_worker": account.decode_worker or None,
    }


def error_json(error: EpdError) -> Json:
    kind = "invalid_request_error" if error.http < 500 else "server_error"
    if error.http == 429:
        kind = "rate_limit_error"
    body = {"message": error.message, "type": kind, "param": error.field or None, "code": error.reason.lower()}
    return {"error": body}


def _piece(index: int, content: Json, logprobs: Json | None, reason: str | None) -> Json:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


def _hop(hop: types_pb2.HopTiming) -> Json:
    return {"name": hop.name, "seconds": wire.hop_seconds(hop), "where": hop.where}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
