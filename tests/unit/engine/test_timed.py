"""The timed executor: its latency model, its tokens, its KV pattern."""

import numpy as np
import pytest

import common.engine.messages as msg
from common.engine.settings import TimedModel
from common.engine.timed_executor import expected_kv
from tests.unit.engine.harness import Harness, disaggregated

PROMPT = list(range(20, 57))


def test_sleeps_by_the_formula():
    model = TimedModel(base_seconds=0.5, seconds_per_prefill_token=0.01, seconds_per_decode=0.1, num_layers=4)
    engine = Harness(timed=model)
    slept: list[float] = []
    engine.executor._sleep = slept.append
    engine.submit("a", PROMPT, max_tokens=3)
    engine.submit("b", PROMPT[:10], max_tokens=3)
    engine.run()
    assert slept == pytest.approx([0.5 + 0.47, 0.5 + 0.2, 0.5 + 0.2])
    slept.clear()
    engine.submit("p", list(range(100, 120)), publish=True, decode=False)
    engine.run()
    assert slept == pytest.approx([(0.5 + 0.2) / 4] * 4)  # layer by layer for a puller


def test_every_form_gives_the_same_tokens():
    whole = Harness().one(PROMPT, max_tokens=20)
    assert len(set(whole)) > 15
    assert Harness(token_budget=7).one(PROMPT, max_tokens=20) == whole
    assert Harness().one(PROMPT, output=whole[:9], max_tokens=20) == whole[9:]
    prefill, decode = Harness(), Harness()
    assert disaggregated(prefill, decode, "s", PROMPT, max_tokens=20) == {0: whole}
    assert Harness().one([21, *PROMPT[1:]], max_tokens=20) != whole


def test_preempted_gives_the_same_tokens():
    engine = Harness(num_blocks=9)
    for number in range(3):
        engine.submit(f"s{number}", [30 + number, *PROMPT[1:30]], max_tokens=30)
    engine.run()
    assert any(row.choice.preemptions for batch in engine.batches for row in batch.rows)
    for number in range(3):
        assert engine.tokens[f"s{number}"][0] == Harness().one([30 + number, *PROMPT[1:30]], max_tokens=30)
    engine.clean()


def test_pattern_of_prompt_and_output():
    engine = Harness(token_budget=7)
    engine.submit("s", PROMPT, max_tokens=40)
    while len(engine.tokens["s"][0]) < 20:
        engine.step()
    choice = engine.core.sequences["s"].choices[0]
    layers, tokens = engine.executor.num_layers, choice.tokens(0, choice.computed)
    assert len(tokens) == 37 + 19
    kv = engine.memory.data.view(np.float32).reshape(layers, 64, 2, 16, 2)[:, choice.blocks]
    rows = kv.transpose(0, 2, 1, 3, 4).reshape(layers, 2, -1, 2)[:, :, : len(tokens)]
    assert (rows == expected_kv(tokens, range(len(tokens)), layers)).all()
    assert engine.of(msg.Started)[0].blocks == choice.blocks[:3]
