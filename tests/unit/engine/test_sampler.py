"""Every sampling parameter by its effect on logits that are written down here."""

import numpy as np
import pytest
import torch

from common.engine.executor import Sampled
from common.engine.sampler import Sampler, choose, log_probability
from common.engine.sequence import Choice, Sequence, State, Timings
from common.errors import InvalidArgument
from common.sampling import SamplingParams

EOS = 2


def choice(output=(), prompt=(), index=0, **params) -> Choice:
    sequence = Sequence(
        seq="s",
        prompt=list(prompt),
        choices=[],
        sampling=SamplingParams(**{"temperature": 0.0, **params}),
        root=b"",
        priority=0,
        arrival=0,
        given=0,
        publish=False,
        leased=False,
        decode=True,
        state=State.RUNNING,
        timings=Timings(0.0),
    )
    sequence.choices = [Choice(sequence, index, list(output))]
    return sequence.choices[0]


def pick(logits, *args, **params) -> int:
    return choose(np.asarray(logits, np.float32), choice(*args, **params), (EOS,))


def drawn(logits, count=300, **params) -> set[int]:
    """Tokens that come up over many positions."""
    values = np.asarray(logits, np.float32)
    return {
        choose(values, choice(output=[0] * position, temperature=1.0, **params), (EOS,)) for position in range(count)
    }


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0]])
    sampled = Sampler((EOS,)).sample(logits, [[choice()], [choice()]])
    assert sampled == [[Sampled(1, None)], [Sampled(0, None)]]
    assert pick([0, 3, 1, 3]) == 1


def test_logit_bias():
    assert pick([0, 3, 1, 2], logit_bias={3: 1.5}) == 3
    assert pick([0, 3, 1, 2], logit_bias={1: -100}) == 3


def test_repetition_penalty_over_prompt_and_output_by_sign():
    assert pick([0, 3, 0, 2], prompt=[1], repetition_penalty=2.0) == 3
    assert pick([0, 3, 0, 2], output=[1], repetition_penalty=2.0) == 3
    assert pick([0, 3, 0, 2], prompt=[1], repetition_penalty=1.4) == 1
    # A negative score gets worse too.
    assert pick([-9, -2, -9, -3], prompt=[1], repetition_penalty=2.0) == 3


@pytest.mark.parametrize("penalty", [1e-6, 1e-38, 1e-44, 1e-60, 5e-324])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.5}])
def test_the_smallest_repetition_penalty_overflows_nothing(penalty, filters):
    """It made all scores infinite, and left no token to a filter."""
    logits = [3.0, 2.0, 0.0, -30.0, 1.0]
    assert pick(logits, prompt=[0, 1, 3], repetition_penalty=penalty) in (0, 1)
    assert drawn(logits, prompt=[1, 3], repetition_penalty=penalty, count=20, **filters) <= {0, 1, 2, 4}


def test_no_token_is_possible():
    for temperature in (0.0, 1.0):
        stuck = choice(min_tokens=1, stop_token_ids=(0, 1, 2, 3), temperature=temperature)
        assert choose(np.zeros(4, np.float32), stuck, (EOS,)) is None


def test_presence_and_frequency_over_output_only():
    assert pick([0, 3, 0, 2], prompt=[1], presence_penalty=2, frequency_penalty=2) == 1
    assert pick([0, 3, 0, 2], output=[1], presence_penalty=1.1) == 3
    assert pick([0, 3, 0, 2], output=[1, 1, 1], presence_penalty=0.9) == 1
    assert pick([0, 3, 0, 2], output=[1], frequency_penalty=0.4) == 1
    assert pick([0, 3, 0, 2], output=[1, 1, 1], frequency_penalty=0.4) == 3
    assert pick([0, 3, 0, 2], output=[3], presence_penalty=-1.1) == 3


def test_penalties_apply_after_the_bias():
    assert pick([0, 0, 0, 2.0], prompt=[1], logit_bias={1: 5}, repetition_penalty=2.0) == 1  # (0 + 5) / 2 > 2
    assert pick([0, 0, 0, 2.6], prompt=[1], logit_bias={1: 5}, repetition_penalty=2.0) == 3


def test_min_tokens_masks_what_would_stop():
    logits = [0, 1, 9, 8, 2]
    stops = {"min_tokens": 2, "stop_token_ids": (3,)}
    assert pick(logits, **stops) == 4
    assert pick(logits, output=[4], **stops) == 4
    assert pick(logits, output=[4, 4], **stops) == 2
    assert pick(logits, ignore_eos=True, **stops) == 2


def test_top_k():
    assert drawn([1.0, 1.1, 1.2, 1.3], top_k=2) == {2, 3}
    assert drawn([1.0, 1.1, 1.2, 1.3], top_k=1) == {3}
    assert drawn([1.0, 1.1, 1.2, 1.3], top_k=4) == {0, 1, 2, 3}
    assert drawn([1.0, 1.1, 1.1, 1.1], top_k=2) == {1, 2, 3}


def test_top_p():
    logits = np.log([0.1, 0.2, 0.3, 0.4])
    assert drawn(logits, top_p=0.39) == {3}
    assert drawn(logits, top_p=0.41) == {2, 3}
    assert drawn(logits, top_p=0.71) == {1, 2, 3}
    assert drawn(logits, top_p=0.91) == {0, 1, 2, 3}
    # Over what top_k left: 0.3 / 0.7 and 0.4 / 0.7.
    assert drawn(logits, top_k=2, top_p=0.5) == {3}
    assert drawn(logits, top_k=2, top_p=0.6) == {2, 3}


def test_min_p():
    logits = np.log([0.1, 0.2, 0.3, 0.4])
    assert drawn(logits, min_p=0.74) == {2, 3}
    assert drawn(logits, min_p=0.24) == {0, 1, 2, 3}
    assert drawn(logits, min_p=1.0) == {3}


def test_frequencies_follow_the_distribution():
    probabilities = np.array([0.1, 0.2, 0.3, 0.4])
    logits = np.log(probabilities).astype(np.float32)
    for temperature in (1.0, 2.0):
        expected = probabilities ** (1 / temperature)
        expected /= expected.sum()
        counts = np.zeros(4)
        for seed in range(20):
            for position in range(200):
                counts[choose(logits, choice([0] * position, seed=seed, temperature=temperature), (EOS,))] += 1
        assert counts / counts.sum() == pytest.approx(expected, abs=0.03)


def test_smallest_temperature_is_greedy():
    assert pick([0, 3, 1, 2.9], temperature=1e-300) == 1


def test_float_noise_does_not_change_a_draw():
    """A cumulative sum would flip for some of these; a maximum flips only on a near tie of scores."""
    generator = np.random.default_rng(1)
    logits = generator.normal(0, 2, 4096).astype(np.float32)
    for seed in range(50):
        noisy = logits + generator.uniform(-1e-5, 1e-5, 4096).astype(np.float32)
        draws = [choose(values, choice(temperature=1.0, seed=seed), (EOS,)) for values in (logits, noisy)]
        assert draws[0] == draws[1]


def test_choices_and_positions_differ_and_repeat():
    logits = np.zeros(1000, np.float32)

    def draw(index, position):
        return choose(logits, choice([0] * position, index=index, temperature=1.0, seed=7), (EOS,))

    drawn_once = {(index, position): draw(index, position) for index in range(3) for position in range(3)}
    assert len(set(drawn_once.values())) == 9
    assert drawn_once == {where: draw(*where) for where in drawn_once}


def test_logprobs_are_of_the_raw_logits():
    logits = torch.tensor([[1.0, 2.0, 3.0, 3.0]])
    reference = torch.log_softmax(logits.double(), -1)[0].tolist()
    target = choice(top_logprobs=3, logit_bias={0: 50}, temperature=0.0)
    sampled = Sampler(()).sample(logits, [[target]])[0][0]
    assert sampled.token_id == 0
    assert sampled.logprob.logprob == pytest.approx(reference[0])
    assert [each.token_id for each in sampled.logprob.top] == [2, 3, 1]
    assert [each.logprob for each in sampled.logprob.top] == pytest.approx([reference[token] for token in (2, 3, 1)])
    assert log_probability(logits[0].numpy(), 1, 0).top == ()


def test_rows_that_are_not_finite_are_told_alone():
    logits = torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [1.0, float("inf")], [3.0, 1.0]])
    sampled = Sampler(()).sample(
        logits, [[choice(), choice(index=1)], [choice(), choice(index=1)], [choice()], [choice()]]
    )
    assert sampled == [[Sampled(1, None)] * 2, [None, None], [None], [Sampled(0, None)]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", 2),
        ("top_p", 0),
        ("top_k", -1),
        ("min_p", 1.5),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("stop_token_ids", (64,)),
        ("logit_bias", {64: 1.0}),
        ("top_logprobs", 21),
    ],
)
def test_c14_out_of_range(field, value):
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(**{field: value}).validate(64)
    assert caught.value.field == field
