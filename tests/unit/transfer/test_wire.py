"""protobuf and back gives the same values; what cannot be trusted is refused."""

import pytest

from common.cache.keys import KvLayout
from common.errors import InvalidArgument
from common.rpc import wire
from common.sampling import ChoiceTokens, SamplingParams, TokenLogprob, TopLogprob
from common.transfer.key import Identity, TransferKey
from epd.v1 import types_pb2 as pb


def test_key_and_identity_round_trip() -> None:
    key = TransferKey(b"k" * 16, 3, 2)
    assert wire.key_from_proto(wire.key_to_proto(key)) == key
    who = Identity("prefill-0", "a1")
    assert wire.identity_from_proto(wire.identity_to_proto(who)) == who


@pytest.mark.parametrize(
    "message", [pb.RequestKey(request_id=b"short", attempt=1), pb.RequestKey(request_id=b"k" * 16)]
)
def test_bad_key_is_refused(message: pb.RequestKey) -> None:
    with pytest.raises(InvalidArgument):
        wire.key_from_proto(message)


def test_bad_ticket_is_refused() -> None:
    assert wire.ticket_from_proto(b"t" * 16) == b"t" * 16
    with pytest.raises(InvalidArgument):
        wire.ticket_from_proto(b"")


def test_absent_sampling_fields_take_defaults() -> None:
    assert wire.sampling_from_proto(pb.SamplingParams()) == SamplingParams()


def test_sampling_round_trip_keeps_explicit_zeros() -> None:
    params = SamplingParams(
        temperature=0.0, top_p=0.5, top_k=7, min_p=0.25, repetition_penalty=1.5, presence_penalty=-1.0,
        frequency_penalty=2.0, logit_bias={5: -100.0}, seed=2**64 - 1, max_tokens=9, min_tokens=2, ignore_eos=True,
        stop_token_ids=(1, 2), top_logprobs=0,
    )  # fmt: skip
    assert wire.sampling_from_proto(wire.sampling_to_proto(params)) == params


def test_tokens_round_trip() -> None:
    running = ChoiceTokens(choice=1, token_ids=[4, 5])
    ended = ChoiceTokens(
        choice=0,
        token_ids=[7],
        logprobs=[TokenLogprob(7, -0.5, (TopLogprob(7, -0.5), TopLogprob(9, -2.0)))],
        finish_reason="stop",
        stop_token_id=0,
    )
    assert wire.all_from_proto(wire.all_to_proto([running, ended])) == [running, ended]


def test_unknown_finish_reason_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        wire.tokens_from_proto(pb.ChoiceTokens(choice=0, finish_reason=9))  # type: ignore[arg-type]


def test_layout_and_hop_round_trip() -> None:
    layout = KvLayout(model="m", revision="r", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=8, block_size=16)
    back = wire.layout_from_proto(wire.layout_to_proto(layout))
    assert back == layout
    assert back.compat_id == layout.compat_id
    assert wire.hop_seconds(wire.hop_to_proto("prefill.queue", 1.25, "prefill-0")) == 1.25
