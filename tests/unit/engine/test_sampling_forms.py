"""Seeded sampling gives the same tokens in every form of batching, chunking, caching, preemption and hand-off."""

import pytest

import common.engine.messages as msg
from tests.unit.engine.harness import Harness, disaggregated

SAMPLED = {"temperature": 1.5, "top_p": 0.95, "seed": 12345, "max_tokens": 20}


@pytest.fixture(scope="module")
def alone(references):
    """Tokens of each choice, computed alone, whole prompt, cold."""
    reference = references("llama")
    engine = Harness.modules(reference.model_dir)
    engine.submit("s", reference.prompt(37), choices=[0, 1, 2], **SAMPLED)
    engine.run()
    return dict(engine.tokens["s"])


def test_choices_and_seeds_differ(llama, alone):
    assert len({tuple(tokens) for tokens in alone.values()}) == 3
    engine = Harness.modules(llama.model_dir)
    assert engine.one(llama.prompt(37), **{**SAMPLED, "seed": 12346}) != alone[0]
    assert engine.one(llama.prompt(37), max_tokens=20) != alone[0]


def test_c9_alone_concurrently_and_in_a_batch(llama, alone):
    engine = Harness.modules(llama.model_dir, token_budget=16)
    for number in range(4):
        engine.submit(f"same{number}", llama.prompt(37), **SAMPLED)
        engine.submit(f"other{number}", llama.prompt(20, seed=number), temperature=1.0, seed=number)
    engine.run()
    for number in range(4):
        assert engine.tokens[f"same{number}"][0] == alone[0]


@pytest.mark.parametrize("chunk", [7, 256])
def test_chunked_and_cached(llama, alone, chunk):
    engine = Harness.modules(llama.model_dir, token_budget=chunk)
    for _ in range(2):
        assert engine.one(llama.prompt(37), **SAMPLED) == alone[0]


def test_a_leg_of_one_choice(llama, alone):
    """A resumed choice is a request of its own and keeps its index."""
    engine = Harness.modules(llama.model_dir)
    for index, tokens in alone.items():
        engine.submit(f"leg{index}", llama.prompt(37), choices=[index], output=tokens[:9], **SAMPLED)
    engine.run()
    assert {index: engine.tokens[f"leg{index}"][index] for index in alone} == {
        index: tokens[9:] for index, tokens in alone.items()
    }


def test_disaggregated(llama, alone):
    prefill, decode = (Harness.modules(llama.model_dir) for _ in range(2))
    assert disaggregated(prefill, decode, "s", llama.prompt(37), choices=[0, 1, 2], **SAMPLED) == alone


def test_preempted(llama, alone):
    engine = Harness.modules(llama.model_dir, num_blocks=7)
    engine.submit("first", llama.prompt(30), max_tokens=40, min_tokens=40)
    engine.submit("s", llama.prompt(37), **SAMPLED)
    engine.run()
    assert engine.tokens["s"][0] == alone[0]
    assert any(row.choice.preemptions for batch in engine.batches for row in batch.rows)


def test_penalties_survive_a_hand_off_and_a_resume(llama):
    options = {**SAMPLED, "repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": 0.5}
    prompt = llama.prompt(37)
    whole = Harness.modules(llama.model_dir).one(prompt, **options)
    assert whole != Harness.modules(llama.model_dir).one(prompt, **SAMPLED)
    prefill, decode = (Harness.modules(llama.model_dir) for _ in range(2))
    assert disaggregated(prefill, decode, "s", prompt, **options) == {0: whole}
    assert Harness.modules(llama.model_dir).one(prompt, output=whole[:7], **options) == whole[7:]


def test_logprobs_are_the_same_streamed_from_either_side(llama):
    options = {"top_logprobs": 3, "max_tokens": 6}
    prompt = llama.prompt(37)
    whole = Harness.modules(llama.model_dir)
    tokens = whole.one(prompt, **options)
    recorded = next(iter(whole.logprobs.values()))
    assert [each.token_id for each in recorded] == tokens
    assert [each.top[0].token_id for each in recorded] == tokens  # greedy: the chosen one is the best
    prefill, decode = (Harness.modules(llama.model_dir) for _ in range(2))
    disaggregated(prefill, decode, "s", prompt, **options)
    apart = prefill.logprobs["s"] + decode.logprobs["s"]
    assert [each.token_id for each in apart] == tokens
    for one, other in zip(recorded, apart, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert len(decode.of(msg.Done)) == 1
