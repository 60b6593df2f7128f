"""One choice of a request: tokens come in, text goes out."""

from collections.abc import Callable, Sequence

from common.errors import EngineFailed
from common.models.tokenizer import Tokenizer
from common.sampling import SamplingParams
from epd.v1 import generation_pb2, types_pb2
from services.gateway.accounting import AttemptRecord
from services.gateway.detokenize import detokenizer
from services.gateway.stops import StopMatcher
from services.gateway.tools.plan import ToolPlan

_RUNNING = types_pb2.FINISH_REASON_UNSPECIFIED
_REASONS = (_RUNNING, types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH)


class Choice:
    """Pending output collects until `take`.

    Attributes: output_token_ids, every token received (a resume sends them along); finished; records, the attempts that
    worked on it; on_tokens, told how many have come; prompt_logprobs, where they were asked for: of the first choice.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        stops: Sequence[str],
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        mute: bool = False,
        tools: ToolPlan | None = None,
    ) -> None:
        """include_stop: the text ends with what ended it. mute: only the prompt is wanted; the token that it takes to
        have it computed is shown to nobody."""
        self.prompt_logprobs: Sequence[types_pb2.TokenLogprob] | None = None
        self._mute = mute
        self.index = index
        self.output_token_ids: list[int] = []
        self.finish_reason: types_pb2.FinishReason = _RUNNING
        self.records: list[AttemptRecord] = []
        self.on_tokens: Callable[[int], None] = lambda tokens: None
        shown = tools.shown if tools is not None else frozenset[int]()
        self._detokenizer = detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, shown=shown)
        self._parser = tools.parser() if tools is not None else None
        self._calls: list[generation_pb2.ToolCall] = []
        self._show_stop_token = include_stop or not skip_special_tokens
        self._matcher = StopMatcher(stops, include=include_stop) if stops else None
        self._min_tokens = sampling.min_tokens
        self._stop_token_id: int | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[types_pb2.TokenLogprob] = []
        self._first = True
        self._told_end = False

    @property
    def finished(self) -> bool:
        return self.finish_reason != _RUNNING

    @property
    def pending_tokens(self) -> int:
        return len(self._token_ids)

    def ready(self, interval: int) -> bool:
        """Whether a message is due: the first tokens, `interval` more, or the end."""
        if self.finished:
            return not self._told_end
        return bool(self._token_ids) and (self._first or len(self._token_ids) >= interval)

    def receive(self, tokens: types_pb2.ChoiceTokens) -> bool:
        """Takes new tokens, each once and in order. True when a stop string ended the choice, unknown to its worker.

        Raises EngineFailed for an end of an unknown kind.
        """
        if self.finished:
            return False
        if tokens.finish_reason not in _REASONS:
            raise EngineFailed("a choice ended for a reason that is not known here")
        if tokens.prompt_logprobs and self.prompt_logprobs is None:
            self.prompt_logprobs = tokens.prompt_logprobs
        if self._mute:
            self.on_tokens(len(tokens.token_ids))
            self.finish_reason = types_pb2.FINISH_REASON_LENGTH
            return False
        ids = tokens.token_ids
        shown = ids
        if tokens.HasField("stop_token_id"):
            self._stop_token_id = tokens.stop_token_id
            if not self._show_stop_token and ids and ids[-1] == tokens.stop_token_id:
                shown = ids[:-1]
        if self._matcher is None:
            self._keep(ids, tokens.logprobs)
            self._say(self._detokenizer.push(shown))
        else:
            for i, token_id in enumerate(ids):
                self._keep((token_id,), tokens.logprobs[i : i + 1])
                if i < len(shown):
                    self._say(self._match(self._detokenizer.push((token_id,))))
                if self._matcher.matched is not None:
                    self._stop_token_id = None
                    self._end(types_pb2.FINISH_REASON_STOP)
                    return True
        if tokens.finish_reason != _RUNNING:
            self._finish(tokens.finish_reason)
        elif self._parser is not None and self._parser.over:  # one call was asked for, and is there
            self._end(types_pb2.FINISH_REASON_STOP)
            return True
        return False

    def take(self) -> generation_pb2.ChoiceDelta:
        """Everything since the last call."""
        delta = generation_pb2.ChoiceDelta(
            index=self.index,
            text="".join(self._text),
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            tool_calls=self._calls,
        )
        self._calls = []
        self._text, self._token_ids, self._logprobs, self._first = [], [], [], False
        if self.finished:
            self._told_end = True
            delta.finish_reason = self.finish_reason
            if self._matcher is not None and self._matcher.matched is not None:
                delta.stop_string = self._matcher.matched
            elif self._stop_token_id is not None:
                delta.stop_token_id = self._stop_token_id
        return delta

    def _keep(self, ids: Sequence[int], logprobs: Sequence[types_pb2.TokenLogprob]) -> None:
        self.on_tokens(len(ids))
        self.output_token_ids.extend(ids)
        self._token_ids.extend(ids)
        self._logprobs.extend(logprobs)

    def _match(self, text: str) -> str:
        """Stop strings count only in text that comes after min_tokens tokens, as the end of text does."""
        assert self._matcher is not None
        return text if len(self.output_token_ids) <= self._min_tokens else self._matcher.push(text)

    def _finish(self, reason: types_pb2.FinishReason) -> None:
        rest = self._detokenizer.flush()
        if self._matcher is not None:
            rest = self._match(rest) + self._matcher.flush()
            if self._matcher.matched is not None:
                reason, self._stop_token_id = types_pb2.FINISH_REASON_STOP, None
        self._say(rest)
        self._end(reason)

    def _say(self, text: str) -> None:
        if self._parser is None:
            self._text.append(text)
        else:
            self._keep_parsed(*self._parser.push(text))

    def _keep_parsed(self, content: str, calls: Sequence[generation_pb2.ToolCall]) -> None:
        self._text.append(content)
        self._calls.extend(calls)

    def _end(self, reason: types_pb2.FinishReason) -> None:
        if self._parser is not None:
            self._keep_parsed(*self._parser.flush(cut=reason != types_pb2.FINISH_REASON_STOP))
            if self._parser.called and reason == types_pb2.FINISH_REASON_STOP:
                reason = types_pb2.FINISH_REASON_TOOL_CALLS
        self.finish_reason = reason
