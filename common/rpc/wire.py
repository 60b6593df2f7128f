"""protobuf messages from and to the dataclasses that the rest of the code uses."""

from collections.abc import Iterable

from common.cache.keys import EmbeddingLayout, KvLayout
from common.engine.messages import Media
from common.errors import InvalidArgument
from common.grammar.grammar import Grammar, choice
from common.sampling import ChoiceTokens, SamplingParams, TokenLogprob, TopLogprob
from common.transfer.key import Identity, TransferKey
from epd.v1 import types_pb2 as pb

REQUEST_ID_BYTES = 16
TICKET_BYTES = 16

_OPTIONAL_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "top_logprobs",
    "prompt_logprobs",
)
_REASON_TO_PROTO = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
}
_REASON_FROM_PROTO: dict[int, str | None] = {value: name for name, value in _REASON_TO_PROTO.items()}


def key_to_proto(key: TransferKey) -> pb.RequestKey:
    return pb.RequestKey(request_id=key.request_id, leg=key.leg, attempt=key.attempt, part=key.part)


def key_from_proto(message: pb.RequestKey) -> TransferKey:
    """Raises InvalidArgument when the id is not 16 bytes or the attempt is 0."""
    if len(message.request_id) != REQUEST_ID_BYTES:
        raise InvalidArgument(
            f"request_id must be {REQUEST_ID_BYTES} bytes, got {len(message.request_id)}", field="key"
        )
    if message.attempt < 1:
        raise InvalidArgument("attempt must be at least 1", field="key")
    return TransferKey(message.request_id, message.leg, message.attempt, message.part)


def ticket_from_proto(ticket: bytes) -> bytes:
    """Raises InvalidArgument when it is not 16 bytes."""
    if len(ticket) != TICKET_BYTES:
        raise InvalidArgument(f"ticket must be {TICKET_BYTES} bytes, got {len(ticket)}", field="ticket")
    return ticket


def identity_to_proto(identity: Identity) -> pb.WorkerIdentity:
    return pb.WorkerIdentity(worker_id=identity.worker_id, incarnation=identity.incarnation)


def identity_from_proto(message: pb.WorkerIdentity) -> Identity:
    return Identity(message.worker_id, message.incarnation)


def layout_to_proto(layout: KvLayout) -> pb.KvLayout:
    return pb.KvLayout(
        model=layout.model,
        revision=layout.revision,
        dtype=layout.dtype,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
    )


def layout_from_proto(message: pb.KvLayout) -> KvLayout:
    return KvLayout(
        model=message.model,
        revision=message.revision,
        dtype=message.dtype,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        block_size=message.block_size,
    )


def embedding_layout_to_proto(layout: EmbeddingLayout) -> pb.EmbeddingLayout:
    return pb.EmbeddingLayout(
        model=layout.model,
        revision=layout.revision,
        dtype=layout.dtype,
        levels=layout.levels,
        hidden_size=layout.hidden_size,
        block_rows=layout.block_rows,
    )


def embedding_layout_from_proto(message: pb.EmbeddingLayout) -> EmbeddingLayout:
    return EmbeddingLayout(
        model=message.model,
        revision=message.revision,
        dtype=message.dtype,
        levels=message.levels,
        hidden_size=message.hidden_size,
        block_rows=message.block_rows,
    )


def media_from_proto(message: pb.EmbeddingRef) -> Media:
    """Where an image is in its prompt."""
    return Media(
        key=message.media_key,
        start=message.position,
        length=message.length,
        rows=message.rows,
        grid=tuple(message.grid),
    )


def sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    """Every field is set, so that both ends agree whatever their defaults; None stays absent."""
    message = pb.SamplingParams(logit_bias=params.logit_bias, stop_token_ids=params.stop_token_ids)
    for name in _OPTIONAL_FIELDS:
        value = getattr(params, name)
        if value is not None:
            setattr(message, name, value)
    if params.grammar is not None:
        message.grammar.CopyFrom(grammar_to_proto(params.grammar))
    return message


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Absent fields take the defaults of SamplingParams; its validate() checks ranges. Floats are float32 values."""
    given = {name: getattr(message, name) for name in _OPTIONAL_FIELDS if message.HasField(name)}
    return SamplingParams(
        logit_bias=dict(message.logit_bias),
        stop_token_ids=tuple(message.stop_token_ids),
        grammar=grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
        **given,
    )


def grammar_to_proto(grammar: Grammar) -> pb.Grammar:
    message = pb.Grammar()
    if grammar.kind == "choice":
        message.choice.strings.extend(grammar.choices())
    else:
        setattr(message, grammar.kind, grammar.source)
    return message


def grammar_from_proto(message: pb.Grammar) -> Grammar:
    """Raises InvalidArgument for one of no kind."""
    match message.WhichOneof("kind"):
        case None:
            raise InvalidArgument("grammar: json_schema, regex, choice or lark is required", field="grammar")
        case "choice":
            return choice(message.choice.strings)
        case kind:
            return Grammar(kind, getattr(message, kind))


def logprob_to_proto(entry: TokenLogprob) -> pb.TokenLogprob:
    top = [pb.TopLogprob(token_id=item.token_id, logprob=item.logprob) for item in entry.top]
    return pb.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, top=top, rank=entry.rank)


def logprob_from_proto(message: pb.TokenLogprob) -> TokenLogprob:
    top = tuple(TopLogprob(item.token_id, item.logprob) for item in message.top)
    return TokenLogprob(message.token_id, message.logprob, top, message.rank)


def tokens_to_proto(tokens: ChoiceTokens) -> pb.ChoiceTokens:
    return pb.ChoiceTokens(
        choice=tokens.choice,
        token_ids=tokens.token_ids,
        logprobs=[logprob_to_proto(entry) for entry in tokens.logprobs or ()],
        finish_reason=_REASON_TO_PROTO[tokens.finish_reason],
        stop_token_id=tokens.stop_token_id,
        prompt_logprobs=[logprob_to_proto(entry) for entry in tokens.prompt_logprobs or ()],
    )


def tokens_from_proto(message: pb.ChoiceTokens) -> ChoiceTokens:
    """An unknown finish reason is refused with InvalidArgument: it must not pass for a running choice."""
    if message.finish_reason not in _REASON_FROM_PROTO:
        raise InvalidArgument(f"unknown finish reason {message.finish_reason}", field="finish_reason")
    return ChoiceTokens(
        choice=message.choice,
        token_ids=list(message.token_ids),
        logprobs=[logprob_from_proto(entry) for entry in message.logprobs] or None,
        finish_reason=_REASON_FROM_PROTO[message.finish_reason],
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        prompt_logprobs=[logprob_from_proto(entry) for entry in message.prompt_logprobs] or None,
    )


def all_to_proto(choices: Iterable[ChoiceTokens]) -> list[pb.ChoiceTokens]:
    return [tokens_to_proto(choice) for choice in choices]


def all_from_proto(messages: Iterable[pb.ChoiceTokens]) -> list[ChoiceTokens]:
    return [tokens_from_proto(message) for message in messages]


def finish_reason_to_proto(reason: str | None) -> pb.FinishReason:
    return _REASON_TO_PROTO[reason]


def hop_to_proto(name: str, seconds: float, where: str) -> pb.HopTiming:
    """name: a span or hop name of common/telemetry.py."""
    message = pb.HopTiming(name=name, where=where)
    message.duration.FromNanoseconds(round(seconds * 1e9))
    return message


def hop_seconds(message: pb.HopTiming) -> float:
    return float(message.duration.ToNanoseconds()) / 1e9
