"""Log probabilities of the prompt's own tokens, against transformers' logits: past the cache, in chunks, preempted."""

import pytest
import torch

import common.engine.messages as msg
from common.engine.prompt_scores import log_probabilities
from common.engine.settings import TimedModel
from common.sampling import MAX_PROMPT_LOGPROBS
from tests.unit.engine.harness import Harness, Reference, disaggregated

TOP = 5


def scores(engine: Harness, seq: str) -> list:
    """Of the choice that brings them; no other does, and none later."""
    first = [choice for event in engine.of(msg.Tokens) for name, choice in event.items if name == seq]
    first += [choice for event in engine.of(msg.Prefilled, seq) for choice in event.first]
    assert all(choice.prompt_logprobs is None for choice in first[1:])
    return first[0].prompt_logprobs


@torch.inference_mode()
def check(reference: Reference, prompt: list[int], found: list, top: int = TOP) -> None:
    logits = reference.model(torch.tensor([prompt])).logits[0]
    expected = logits.double().log_softmax(dim=-1)
    assert [entry.token_id for entry in found] == prompt[1:]
    for position, entry in enumerate(found):
        row = expected[position]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert [each.logprob for each in entry.top] == pytest.approx(row.topk(top).values.tolist(), abs=1e-4)
        assert abs(entry.rank - 1 - int((row > row[entry.token_id]).sum())) <= 1  # by float noise
        for each in entry.top:
            assert each.logprob == pytest.approx(float(row[each.token_id]), abs=1e-4)


@pytest.mark.parametrize("chunk", [7, 256])
def test_cold_and_cached(reference, chunk):
    engine = Harness.modules(reference.model_dir, token_budget=chunk)
    for length in (1, 2, 16, 37, 89):
        prompt = reference.prompt(length)
        engine.submit(f"plain {length}", prompt)  # leaves its blocks in the cache
        engine.run()
        engine.submit(f"scored {length}", prompt, prompt_logprobs=TOP, choices=[0, 1, 2])
        engine.run()
        assert engine.of(msg.Started)[-1].cached_tokens == 0
        check(reference, prompt, scores(engine, f"scored {length}") or [])
        assert engine.tokens[f"scored {length}"][2] == engine.tokens[f"plain {length}"][0]
        engine.submit(f"again {length}", prompt)
        engine.run()
        assert engine.of(msg.Started)[-1].cached_tokens == (length - 1) // 16 * 16  # what was scored was computed well
    engine.clean()


def test_only_the_tokens_themselves(llama):
    engine = Harness.modules(llama.model_dir)
    prompt = llama.prompt(20)
    engine.one(prompt, prompt_logprobs=0, max_tokens=1)
    check(llama, prompt, scores(engine, "one-0-0"), top=0)


@pytest.mark.parametrize("mirror", [False, True])
def test_disaggregated(llama, mirror):
    """Decode's cached blocks are as good as ever: only prefill computes them anew."""
    prefill, decode = (Harness.modules(llama.model_dir, mirror=mirror, token_budget=16) for _ in range(2))
    prompt = llama.prompt(37)
    for number in range(2):
        tokens = disaggregated(prefill, decode, f"s{number}", prompt, prompt_logprobs=TOP, max_tokens=12)
        assert tokens[0] == llama.tokens(prompt, max_tokens=12)
        check(llama, prompt, scores(prefill, f"s{number}"))
    assert [event.hit_blocks for event in decode.of(msg.Reserved)] == [0, 2]
    prefill.clean()
    decode.clean()


def test_preempted_in_mid_prompt(llama):
    """It begins again, and tells each token once."""
    engine = Harness.modules(llama.model_dir, num_blocks=9, token_budget=3)
    runner, prompt = llama.prompt(16, seed=3), llama.prompt(80)
    engine.submit("first", runner, max_tokens=60, ignore_eos=True)
    engine.step()
    engine.submit("scored", prompt, prompt_logprobs=TOP, max_tokens=2)
    engine.run()
    assert not engine.failed
    rows = [row for batch in engine.batches for row in batch.rows if row.choice.sequence.seq == "scored"]
    begun = [row for row in rows if row.start == 0]
    assert len(begun) == 2, "it was not preempted"
    check(llama, prompt, scores(engine, "scored"))
    engine.clean()


def test_beside_others_in_a_step(llama):
    engine = Harness.modules(llama.model_dir, num_blocks=128)
    prompts = {f"s{number}": llama.prompt(10 + 9 * number) for number in range(5)}
    for number, (seq, prompt) in enumerate(prompts.items()):
        engine.submit(seq, prompt, **({"prompt_logprobs": TOP} if number % 2 else {}))
    engine.run()
    assert max(len(batch.rows) for batch in engine.batches) > 2
    for number, (seq, prompt) in enumerate(prompts.items()):
        if number % 2:
            check(llama, prompt, scores(engine, seq))
        else:
            assert scores(engine, seq) is None


def test_a_prompt_that_is_not_finite_fails_alone(llama):
    engine = Harness.modules(llama.model_dir)
    logits = engine.executor._logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden)
        return found if len(hidden) == 1 else found * torch.nan

    engine.executor._logits = poisoned
    engine.submit("bad", llama.prompt(20), prompt_logprobs=1)
    engine.run()
    engine.executor._logits = logits
    assert "not finite" in engine.failed["bad"].message
    assert engine.one(llama.prompt(20)) == llama.tokens(llama.prompt(20))
    assert engine.of(msg.Started)[-1].cached_tokens == 0  # nothing of it is shared
    engine.clean()


def test_what_is_out_of_range():
    engine = Harness()
    engine.submit("many", range(20, 40), prompt_logprobs=21)
    assert engine.failed["many"].field == "prompt_logprobs"
    assert MAX_PROMPT_LOGPROBS < 21 * 20_000
    engine = Harness(num_blocks=2048, timed=TimedModel(max_context=32_768))
    engine.submit("long", [20] * 20_000, prompt_logprobs=20)
    assert engine.failed["long"].field == "prompt_logprobs"
    assert str(MAX_PROMPT_LOGPROBS) in engine.failed["long"].message


def test_log_probabilities_by_hand():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0], [5.0, 0.0, 0.0, 0.0]])
    first, second = log_probabilities(logits, [1, 0], 2)
    assert (first.token_id, first.rank) == (1, 3)
    assert first.logprob == pytest.approx(float(logits[0].log_softmax(0)[1]))
    assert [each.token_id for each in first.top] == [3, 2]
    assert (second.rank, second.top[0].token_id) == (1, 0)
    assert second.logprob == second.top[0].logprob  # exactly: who compares them learns whether it was the best
