"""Greedy float32 tokens equal transformers' generate, in every form the engine computes them."""

import pytest

import common.engine.messages as msg
from tests.checkpoints import SLIDING_WINDOW
from tests.unit.engine.harness import Harness, disaggregated

# Shorter than a block; whole blocks; a partial one that reaches the sliding window while decoding; beyond it at once.
LENGTHS = (5, 16, 48, 37, 2 * SLIDING_WINDOW + 9)


def harness(reference, chunk: int = 256, **settings) -> Harness:
    return Harness.modules(reference.model_dir, token_budget=chunk, **settings)


@pytest.mark.parametrize("chunk", [7, 256])
def test_alone_cold_and_cached(reference, chunk):
    engine = harness(reference, chunk)
    for length in LENGTHS:
        prompt = reference.prompt(length)
        expected = reference.tokens(prompt, max_tokens=20)
        assert engine.one(prompt, max_tokens=20) == expected
        assert engine.one(prompt, max_tokens=20) == expected
        started = engine.of(msg.Started)
        assert started[-2].cached_tokens == 0
        assert started[-1].cached_tokens == (length - 1) // 16 * 16
    engine.clean()


@pytest.mark.parametrize("budget", [7 + 8, 256])
def test_among_eight_others(reference, budget):
    engine = harness(reference, budget, num_blocks=128)
    prompts = {f"s{number}": reference.prompt(length) for number, length in enumerate((*LENGTHS, 9, 21, 64, 33))}
    for seq, prompt in prompts.items():
        engine.submit(seq, prompt, max_tokens=40)
        engine.step()  # arrivals spread over the steps: decodes and chunks mix
    engine.run()
    assert max(len(batch.rows) for batch in engine.batches) == 9
    for seq, prompt in prompts.items():
        assert engine.tokens[seq][0] == reference.tokens(prompt, max_tokens=40), len(prompt)
    engine.clean()


def test_shared_prefix(reference):
    engine = harness(reference)
    common = reference.prompt(40)
    first, second = common + reference.prompt(11), common + reference.prompt(30)
    assert engine.one(first) == reference.tokens(first)
    assert engine.one(second) == reference.tokens(second)
    assert engine.of(msg.Started)[-1].cached_tokens == 32
    engine.clean()


def test_cached_output_of_an_earlier_request(reference):
    """Decoded blocks are shared too: a follow-up's prompt contains the first answer."""
    engine = harness(reference)
    prompt = reference.prompt(20)
    answer = engine.one(prompt, max_tokens=20)
    follow = prompt + answer + reference.prompt(5)
    assert engine.one(follow) == reference.tokens(follow)
    assert engine.of(msg.Started)[-1].cached_tokens == 32


@pytest.mark.parametrize("length", LENGTHS)
def test_three_choices(reference, length):
    engine = harness(reference, 7)
    prompt = reference.prompt(length)
    engine.submit("n", prompt, choices=[0, 1, 2], max_tokens=20)
    engine.run()
    assert dict(engine.tokens["n"]) == dict.fromkeys(range(3), reference.tokens(prompt, max_tokens=20))
    assert engine.reasons["n"] == dict.fromkeys(range(3), "length")
    computed = sum(row.end - row.start for batch in engine.batches for row in batch.rows[batch.decodes :])
    assert computed == length  # once, not three times
    engine.clean()


def test_repetition_penalty(reference):
    engine = harness(reference, 7)
    prompt = reference.prompt(37)
    expected = reference.tokens(prompt, max_tokens=24, repetition_penalty=1.7)
    assert expected != reference.tokens(prompt, max_tokens=24)
    assert engine.one(prompt, max_tokens=24, repetition_penalty=1.7) == expected


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("chunk", [7, 256])
def test_disaggregated(reference, chunk, mirror):
    prefill, decode = (harness(reference, chunk, mirror=mirror) for _ in range(2))
    for length in LENGTHS:
        prompt = reference.prompt(length)
        expected = reference.tokens(prompt, max_tokens=20)
        for turn in ("cold", "warm"):
            tokens = disaggregated(prefill, decode, f"{length}-{turn}", prompt, choices=[0, 1], max_tokens=20)
            assert tokens == {0: expected, 1: expected}, (length, turn)
        assert decode.of(msg.Reserved)[-1].hit_blocks == (length - 1) // 16
    prefill.clean()
    decode.clean()


@pytest.mark.parametrize("mirror", [False, True])
def test_blocks_computed_for_another_request_are_published(llama, mirror):
    """A published prompt may start from blocks that no puller was ever meant to see."""
    prefill, decode = (harness(llama, mirror=mirror) for _ in range(2))
    prompt = llama.prompt(50)
    prefill.one(prompt)
    assert disaggregated(prefill, decode, "s", prompt)[0] == llama.tokens(prompt)
    assert prefill.of(msg.Started, "s")[0].cached_tokens == 48


def test_resume_with_output(reference):
    """Tokens given out before an attempt failed are part of the KV, not of the new output."""
    prompt = reference.prompt(37)
    expected = reference.tokens(prompt, max_tokens=20)
    for given in (1, 11, 19):
        engine = harness(reference, 7)
        assert engine.one(prompt, output=expected[:given], max_tokens=20) == expected[given:]
        prefill, decode = harness(reference), harness(reference)
        tokens = disaggregated(prefill, decode, "r", prompt, output=expected[:given], max_tokens=20)
        assert tokens[0] == expected[given:]
        decode.clean()


def test_preempted_and_recomputed(reference):
    """A13: a pool for about two of three sequences; whoever is preempted gives the same tokens."""
    engine = harness(reference, num_blocks=9)
    prompts = {f"p{number}": reference.prompt(30, seed=number + 1) for number in range(3)}
    for seq, prompt in prompts.items():
        engine.submit(seq, prompt, max_tokens=30)
    engine.run()
    assert not engine.failed
    for seq, prompt in prompts.items():
        assert engine.tokens[seq][0] == reference.tokens(prompt, max_tokens=30)
    recomputed = [row for batch in engine.batches for row in batch.rows if row.start < 30 < row.end - 1]
    assert recomputed, "nothing was preempted"
    engine.clean()


@pytest.mark.parametrize("length", [16, 37])
def test_preempted_after_a_transfer(llama, length):
    """A13 on decode: pulled KV is recomputed locally."""
    prefill, decode = harness(llama), harness(llama, num_blocks=8)
    prompts = {f"p{number}": llama.prompt(length, seed=number + 1) for number in range(2)}
    for seq, prompt in prompts.items():
        prefill.submit(seq, prompt, publish=True, decode=False, max_tokens=60)
        decode.reserve(seq, prompt, max_tokens=60)
    prefill.run()
    decode.run()
    for seq in prompts:
        blocks = decode.of(msg.Reserved, seq)[0].blocks
        decode.memory.data[:, blocks] = prefill.memory.data[:, prefill.of(msg.Started, seq)[0].blocks]
        decode.send(msg.Commit(seq=seq, first=prefill.of(msg.Prefilled, seq)[0].first))
    decode.run()
    for seq, prompt in prompts.items():
        assert prefill.tokens[seq][0] + decode.tokens[seq][0] == llama.tokens(prompt, max_tokens=60)
    assert any(row.choice.preemptions for batch in decode.batches for row in batch.rows)
    decode.clean()
